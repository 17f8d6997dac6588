"""ktserve plan, check, adapters inspect, adapters convert, train: a child process does the work, its output is ours."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from api.cli.launch import engine_command, sampling_defaults, text_settings, with_demo
from api.client.process import child_environment
from api.config import ServeConfig
from api.prepare.prompts import tokenizer_of
from engine.config import EngineConfig
from engine.errors import UserError
from ktserve.launcher import die_with_parent, program

_NEEDED = ("torch", "transformers", "peft", "accelerate")
_PUBLISH_KEY = "KTSERVE_PUBLISH_KEY"


def run_child(
    command: str, path: str | None, engine: EngineConfig, serve: ServeConfig, more: Sequence[str] = ()
) -> int:
    """The child's exit status; its output is ours. `more`: arguments of that command alone. Raises UserError if it
    cannot be started or passed a limit of processor time, and of `check` for a tokenizer that cannot be used."""
    if command not in ("inspect", "convert"):
        engine, _ = with_demo(engine)
    if command == "check":  # as `serve` does before it starts the engine
        tokenizer_of(text_settings(engine, serve))
        sampling_defaults(engine, serve)
    payload = msgspec.json.encode(engine).decode()
    argv = [*engine_command(serve), command, *([path] if path is not None else []), "--config-json", payload, *more]
    try:
        status = _status(argv)
    except OSError as error:
        raise UserError(f"cannot start {argv[0]}: {error.strerror}", "engine_command") from None
    if status == 128 + signal.SIGXCPU:
        raise UserError(f"{path}: reading it took more processor time than files of its size may", "path")
    return status


def run_training_plan(config: str, *overrides: str) -> int:
    """The memory plan of a training run; the child's exit status."""
    return _status(program("training-plan", config, *overrides))


def _status(argv: Sequence[str]) -> int:
    """Of a child that does not outlive this process."""
    ends_too = die_with_parent() if sys.platform == "linux" else None
    status = subprocess.run(argv, env=child_environment(), check=False, preexec_fn=ends_too).returncode
    return status if status >= 0 else 128 - status


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
    argv = [*program("training"), config, *overrides]
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
