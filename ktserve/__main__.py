"""Start one of our programs, wherever it is typed.

    ktserve ...                                      the command line (the installed script calls `main`)
    python PATH/ktserve/__main__.py engine ...       the engine process, started by the api
    python PATH/ktserve/__main__.py prompts ...      the process that renders and tokenises, started by the api
    python PATH/ktserve/__main__.py training-plan .. a training run's memory plan, for `ktserve plan --train`
    python PATH/ktserve/__main__.py training ...     a training run, started by `ktserve train`
    python PATH/ktserve/__main__.py tuning-data JSON a fine-tuning file made into samples, started by the api
    python PATH/ktserve/__main__.py adapter-readers  the server that forks reader processes, started by the engine
    ktserve bench ...                                a benchmark of a running server
    ktserve ray deploy CONFIG.yaml                   replicas over a Ray cluster
    python -m ktserve loadtests ...                  the load test

Python searches the working directory or the script's folder first, then PYTHONPATH, then what is installed: a user's
folder named `engine`, `api` or `rules` would be imported instead of ours. Here the first of them is not searched, and
our packages are found beside this file alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[1])
_PACKAGES = frozenset(
    {"api", "cluster", "demo", "engine", "ktserve", "loadtests", "native", "rules", "scheduler", "training"}
)


class OurPackages:
    """Finds our packages in `_ROOT` and leaves every other module to the finders behind it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_ROOT]) if name in _PACKAGES else None


def main() -> int:
    """Run the program that `sys.argv` names; returns its exit status, 130 after Ctrl-C, while it is imported too."""
    try:
        return _run()
    except KeyboardInterrupt:
        return 130


def _tuner(*of: Any) -> Any:
    """What trains beside serving, in the engine process: the engine itself imports nothing of it."""
    from training.service.tuner import make_tuner

    return make_tuner(*of)


def _run() -> int:
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P
        del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"  # for interpreters that this one starts, from Python 3.11 on
    sys.path.insert(0, _ROOT)  # processes that are forked or spawned from this one search its path without the finder
    sys.meta_path.insert(0, OurPackages)
    program, arguments = sys.argv[1:2], sys.argv[2:]
    if program == ["engine"]:
        from engine.main import main as engine

        return engine(arguments, _tuner)
    if program == ["prompts"]:
        from api.dialects.forms import FORMS
        from api.prepare.process import main as prompts

        prompts(arguments, FORMS)
    if program == ["training-plan"]:
        from training.plan import main as training_plan

        return training_plan(arguments)
    if program == ["training"]:
        from training.main import main as training

        return training(arguments)
    if program == ["tuning-data"]:
        from training.service.data import main as tuning_data

        return tuning_data(arguments)
    if program == ["adapter-readers"]:
        from engine.lora.reader_process import main as adapter_readers

        adapter_readers()
    if program == ["ray"]:
        from cluster.main import main as ray

        return ray(arguments)
    if program == ["bench"]:
        from loadtests.bench.main import main as bench

        return bench(arguments)
    if program == ["loadtests"]:
        if find_spec("locust") is None:
            print("error: the load test runs on locust: pip install 'ktserve[loadtests]'", file=sys.stderr)
            return 1
        from loadtests.run import main as loadtests

        return loadtests(arguments)
    from api.cli.main import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
