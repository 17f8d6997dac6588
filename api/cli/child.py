"""ktserve plan, check, doctor, adapters inspect, convert and merge: a child process works, its output is ours."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from api.cli.early import engine_command, with_demo
from api.cli.launch import sampling_defaults, text_settings
from api.client.process import ENGINE_COMMAND, child_environment
from api.config import ServeConfig
from api.prepare.prompts import tokenizer_of
from engine.config import EngineConfig
from engine.errors import UserError
from ktserve.launcher import die_with_parent, program


def run_child(
    command: str, path: str | None, engine: EngineConfig, serve: ServeConfig, more: Sequence[str] = ()
) -> int:
    """The child's exit status; its output is ours. `more`: arguments of that command alone. Raises UserError if it
    cannot be started or passed a limit of processor time, and of `check` for a tokenizer that cannot be used."""
    if command not in ("inspect", "convert", "merge", "doctor"):
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


def read_families(paths: Sequence[str]) -> list[tuple[str | None, str]]:
    """For each model the family that serves it, or None and why none does."""
    argv = [*ENGINE_COMMAND, "families", *paths]
    done = subprocess.run(argv, env=child_environment(), check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(done.stdout, type=list[tuple[str | None, str]])


def measured_rates(model: str, folder: Path) -> Path:
    """The file of `ktserve bench --quick` of a model ("": the demo), or of why it failed, in `folder`."""
    file = folder / "rates.json"
    argv = program("bench", "--quick", "--json", str(file), *(["--", model] if model else []))
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error: " in line] or done.stderr.splitlines()
        why = said[-1] if said else f"it ended with status {done.returncode}"
        file.write_text(json.dumps({"error": why}), encoding="utf-8")
    return file


def run_training_plan(config: str, *overrides: str) -> int:
    """The memory plan of a training run; the child's exit status."""
    return _status(program("training-plan", config, *overrides))


def _status(argv: Sequence[str]) -> int:
    """Of a child that does not outlive this process."""
    ends_too = die_with_parent() if sys.platform == "linux" else None
    status = subprocess.run(argv, env=child_environment(), check=False, preexec_fn=ends_too).returncode
    return status if status >= 0 else 128 - status
