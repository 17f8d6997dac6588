"""The engine's process, before what else a server is made of: it imports and loads for longer than all of that takes.
So this imports little."""

from __future__ import annotations

import shlex
import signal
import tempfile
from types import FrameType

from rich.console import Console

from api.client.client import EngineClient
from api.client.process import ENGINE_COMMAND
from api.config import ServeConfig
from engine.config import EngineConfig
from engine.errors import UserError
from engine.null import is_null, null_settings


async def serve(engine: EngineConfig, config: ServeConfig, notes: list[str], console: Console) -> int:
    """Start the engine's process, then be the server in front of it, as `api.cli.serve.serve` says."""
    engine, lines = with_demo(engine)
    client = make_client(engine, config)
    signal.signal(signal.SIGTERM, _end)  # until the server listens to signals itself
    try:
        await client.begin()
        from api.cli.serve import serve as serve_with

        return await serve_with(client, engine, config, notes, lines, console)
    finally:
        await client.shutdown(0)


def _end(sent: int, _: FrameType | None) -> None:
    raise SystemExit(128 + sent)


def with_demo(config: EngineConfig) -> tuple[EngineConfig, list[str]]:
    """Without a model, the demo in the repository and its adapters are served; the lines say so. The null engine speaks
    the demo's vocabulary if no other is named."""
    from demo.paths import demo_adapters, demo_model

    if is_null(config.model):
        null_settings(config.model)
        config.gguf = config.gguf or str(demo_model())
    if config.model:
        return config, []

    try:
        config.model = str(demo_model())
        adapters = [f"{name}={path}" for name, path in demo_adapters().items()]
    except FileNotFoundError as error:
        raise UserError(f"no --model was given, and the demo model cannot be served: {error}", "model") from None
    config.served_model_name = config.served_model_name or "demo"
    config.adapters = [*adapters, *config.adapters]
    return config, [f"no --model: serving the demo model, {config.model}"]


def engine_command(serve: ServeConfig) -> tuple[str, ...]:
    """What starts the engine process: --engine-command in words, or our own. Raises UserError."""
    if serve.engine_command is None:
        return ENGINE_COMMAND
    try:
        command = tuple(shlex.split(serve.engine_command))
    except ValueError as error:
        raise UserError(f"--engine-command: {error}", "engine_command") from None
    if not command:
        raise UserError("--engine-command is empty", "engine_command")
    return command


def make_client(engine: EngineConfig, serve: ServeConfig) -> EngineClient:
    """A client whose engine has not been started. Raises UserError."""
    try:
        return EngineClient(
            engine,
            command=engine_command(serve),
            max_restarts=serve.max_restarts,
            hang_s=serve.engine_hang_s or None,
        )
    except OSError as error:
        raise UserError(f"the temporary folder {tempfile.gettempdir()}: {error.strerror}; set TMPDIR") from None
