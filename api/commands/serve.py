"""ktserve serve"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

from rich.console import Console

from api.config import ServeConfig
from api.launch import sampling_defaults, start_engine, tokenizer_for, with_demo
from api.server import Server, create_app, listen, url_of
from api.service import Service
from api.tenants import Keys
from engine.config import EngineConfig

log = logging.getLogger("ktserve")
_T = TypeVar("_T")


async def serve(engine: EngineConfig, config: ServeConfig, notes: list[str], console: Console) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises UserError or EngineError if it cannot start."""
    keys = Keys(config.api_key, config.admin_key)
    engine, lines = with_demo(engine)
    tokenizer = tokenizer_for(engine, config)
    defaults, more = sampling_defaults(engine, config)
    _say(console, [*notes, *lines, *more])
    with listen(config.host, config.port) as bound:
        client, ready = await _until_terminated(start_engine(engine, config, console))
        try:
            _say(console, ready.lines)
            service = Service(client, config, keys, tokenizer, defaults)
            _welcome(console, service, bound)
            await Server(create_app(service), service).serve(sockets=[bound])
        finally:
            await client.shutdown()
    return 0


async def _until_terminated(start: Coroutine[Any, Any, _T]) -> _T:
    """While nothing is served yet, SIGTERM gives up at once (and cleans up); later the server drains on it."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(start)
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _say(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _welcome(console: Console, service: Service, bound: socket.socket) -> None:
    """The address, the models, and a line to paste."""
    url, ready, adapters = url_of(bound), service.ready, service.client.adapters
    if missing := sorted(service.keys.named_models - {ready.model_name, *adapters}):
        _say(console, [f"note: --api-key names models that are not loaded: {', '.join(missing)}"])
    key = " -H 'Authorization: Bearer YOUR_KEY'" if service.keys.required else ""
    if service.tokenizer is not None and service.tokenizer.template is not None:
        body: dict[str, object] = {"model": ready.model_name, "messages": [{"role": "user", "content": "Hello!"}]}
        path = "chat/completions"
    else:
        prompt = "Hello" if service.tokenizer is not None else [1, 2, 3]
        body = {"model": ready.model_name, "prompt": prompt, "return_token_ids": service.tokenizer is None}
        path = "completions"
    lines = [f"serving {ready.model_name} (base, {ready.max_model_len} tokens of context)"]
    lines += [f"        {info.name} (adapter: {info.format}, rank {info.rank})" for info in adapters.values()]
    lines += [f"at      {url}/v1", "try     "]
    lines[-1] += f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    warnings = [f"note: adapter {info.name}: {warning}" for info in adapters.values() for warning in info.warnings]
    _say(console, ["", *warnings, *lines, ""])
