"""ktserve train: the run is a process of its own, whose output is ours."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from api.client.process import child_environment
from engine.errors import UserError
from ktserve.launcher import program

TRAINING_COMMAND = program("training")
_NEEDED = ("torch", "transformers", "peft", "accelerate")
_PUBLISH_KEY = "KTSERVE_PUBLISH_KEY"


def train(
    config: str,
    overrides: Sequence[str],
    *,
    resume: str | None = None,
    publish: str | None = None,
    admin_key: str | None = None,
    admin_key_file: str | None = None,
) -> int:
    """The run's exit status. Ctrl-C and SIGTERM reach it: it saves and ends. UserError for packages that are missing
    and settings of this command that contradict one another."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"training needs {', '.join(missing)}: pip install 'ktserve[train]'", "train")
    key = _key(publish, admin_key, admin_key_file)
    argv = [*TRAINING_COMMAND, config, *overrides]
    argv += [] if resume is None else [f"--resume={resume}"]
    argv += [] if publish is None else [f"--publish={publish}"]
    child = subprocess.Popen(argv, env=child_environment() | ({} if key is None else {_PUBLISH_KEY: key}))
    # A terminal's Ctrl-C goes to both processes; a signal to this one alone is passed on.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    status = child.wait()
    return status if status >= 0 else 128 - status


def _key(publish: str | None, key: str | None, file: str | None) -> str | None:
    if publish is None and (key or file):
        raise UserError("--admin-key without --publish: there is no server to give it to", "admin_key")
    if key and file:
        raise UserError("--admin-key and --admin-key-file: one or the other", "admin_key")
    if file is None:
        return key or os.environ.get("KTSERVE_ADMIN_KEY")
    try:
        return Path(os.path.expanduser(file)).read_text().strip()
    except OSError as error:
        raise UserError(f"--admin-key-file {file}: {error.strerror}", "admin_key_file") from None
