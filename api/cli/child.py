"""ktserve plan, check, adapters inspect, adapters convert: the engine does the work in a child process."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

import msgspec

from api.client.launch import engine_command, sampling_defaults, text_settings, with_demo
from api.client.process import child_environment
from api.config import ServeConfig
from api.prepare.prompts import tokenizer_of
from engine.config import EngineConfig
from engine.errors import UserError
from ktserve.launcher import program


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
        status = subprocess.run(argv, env=child_environment(), check=False).returncode
    except OSError as error:
        raise UserError(f"cannot start {argv[0]}: {error.strerror}", "engine_command") from None
    if status == -signal.SIGXCPU:
        raise UserError(f"{path}: reading it took more processor time than files of its size may", "path")
    return status if status >= 0 else 128 - status


def run_training_plan(config: str, *overrides: str) -> int:
    """The memory plan of a training run; the child's exit status."""
    status = subprocess.run(program("training-plan", config, *overrides), env=child_environment(), check=False)
    return status.returncode if status.returncode >= 0 else 128 - status.returncode
