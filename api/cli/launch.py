"""From settings to a running engine with its tokenizer: what `serve` and `chat` share."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from api.bodies.generation import ChatOptions
from api.bodies.parsing import readable
from api.cli.say import say
from api.client.client import EngineClient
from api.config import ServeConfig
from api.prepare.job import TextSettings
from engine.config import EngineConfig
from engine.errors import UserError
from engine.files.json_file import read_json
from engine.files.regular import elsewhere
from engine.messages import ATTENTION_STAGE, Loading, Planned, Ready
from engine.null import is_null

_SLOW_S = 3.0  # a stage that stands still so long is explained
_SLOW = {ATTENTION_STAGE: "kernels that are not in flashinfer's cache are compiled, a few minutes at the first start"}
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def text_settings(engine: EngineConfig, serve: ServeConfig) -> TextSettings:
    """Where the tokenizer is. Raises UserError if there is no such place."""
    model = gguf = None
    for name in ("tokenizer", "chat_template") if serve.skip_tokenizer else ():
        if getattr(serve, name):
            raise UserError(f"--{name.replace('_', '-')} with --skip-tokenizer: one or the other", name)
    if not serve.skip_tokenizer and serve.tokenizer:
        model = str(existing(serve.tokenizer, "tokenizer"))
    elif not serve.skip_tokenizer:
        gguf = str(existing(engine.gguf, "gguf")) if engine.gguf else None
        if is_null(engine.model):
            model, gguf = gguf, None
        else:
            model = str(existing(engine.model, "model"))
    return TextSettings(
        model,
        gguf,
        serve.chat_template,
        trust_control_tokens=serve.trust_control_tokens,
        unknown_fields=serve.unknown_fields,
        tool_format=serve.tool_format,
        reasoning_format=serve.reasoning_format,
        cpu_limit_s=serve.prompt_cpu_limit_s,
    )


def existing(path: str, field: str) -> Path:
    if not os.path.exists(path):
        found = elsewhere(path) if field == "model" else ""
        raise UserError(f"--{field} {path[:200]}: no such file or folder{found}", field)
    return Path(path)


def sampling_defaults(engine: EngineConfig, serve: ServeConfig) -> tuple[dict[str, Any], list[str]]:
    """The sampling settings that the model's author recommends (generation_config.json), and a line about them."""
    if serve.generation_config == "none" or (serve.generation_config == "auto" and is_null(engine.model)):
        return {}, []
    if serve.generation_config == "auto":
        model = Path(engine.model)
        path = (model if model.is_dir() else model.parent) / "generation_config.json"
        if not os.path.isfile(path):  # False for a folder that may not be looked into: the engine refuses that
            return {}, []
    else:
        path = existing(serve.generation_config, "generation-config")
        path = path / "generation_config.json" if path.is_dir() else path
    content = read_json(path)
    defaults = {name: content[name] for name in _DEFAULTS if content.get(name) is not None}
    if content.get("do_sample") is False:
        defaults = {"temperature": 0.0, **{k: v for k, v in defaults.items() if k == "repetition_penalty"}}
    try:
        ChatOptions.model_validate({"model": "", **defaults})
    except ValidationError as error:
        raise UserError(f"{path}: {readable(error, content)}", "generation_config") from None
    if not defaults:
        return {}, []
    shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return defaults, [f"sampling defaults from {path.name}: {shown} (--generation-config none: off)"]


class LoadingBar:
    """Progress on stderr while the model loads: a bar on a terminal, elsewhere a line for each step of a stage."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._explain: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoadingBar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._wait_on(None)
        self._progress.stop()

    def update(self, loading: Loading) -> None:
        self._wait_on(None if loading.done else _SLOW.get(loading.stage))
        if loading.stage not in self._tasks:
            self._tasks[loading.stage] = self._progress.add_task(loading.stage, total=loading.total)
        if loading.done:
            self._say(f"{loading.stage}: {loading.done} of {loading.total}")
        else:
            self._say(f"{loading.stage} ...")
        self._progress.update(self._tasks[loading.stage], completed=loading.done, total=loading.total)

    def _wait_on(self, why: str | None) -> None:
        """Say why the stage takes so long if nothing comes after it meanwhile; None: it goes on."""
        if self._explain is not None:
            self._explain.cancel()
        self._explain = None
        if why is not None:
            self._explain = asyncio.get_running_loop().call_later(_SLOW_S, say, self._console, [why])

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, style="dim")


async def start_engine(client: EngineClient, console: Console) -> Ready:
    """Start the engine, with its plan and its progress on the console. Raises UserError or EngineError; the caller
    shuts down."""
    planned: list[str] = []

    def show(plan: Planned) -> None:
        planned.extend(plan.lines)
        say(console, plan.lines)

    if client.planned is not None:  # it came between `begin` and now
        show(client.planned)
    with LoadingBar(console) as bar:
        client.on_planned, client.on_loading = show, bar.update
        try:
            ready = await client.start()
        finally:
            client.on_planned = client.on_loading = None
    say(console, ready.lines[len(planned) :])
    return ready
