"""ktserve serve"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
import resource
import signal
import socket
import time
from collections.abc import Coroutine
from os.path import isdir
from typing import Any

from rich.console import Console

from api.batches.runner import Runner
from api.batches.service import Batches
from api.cli.launch import sampling_defaults, start_engine, text_settings
from api.cli.say import say
from api.cli.systemd import keep_alive, notify
from api.client.client import EngineClient
from api.config import ServeConfig
from api.dialects.tinker.saved import Saved
from api.endpoints.application import create_app
from api.http.middleware import RequestNotes
from api.http.server import (
    Server,
    check_origins,
    check_reach,
    check_root_path,
    connections_of,
    is_loopback,
    listen,
    repeated,
    url_of,
)
from api.http.service import Service
from api.prepare.job import TextSettings
from api.prepare.pool import PromptPool
from api.prepare.prompts import tokenizer_of
from api.tenants.keys import keys_of
from api.tenants.reload import Reload
from api.tenants.usage import UsageLog
from api.text.tokenizer import Tokenizer
from api.tracing import Tracing
from api.tuning.records import JobRecord
from api.tuning.runner import JobRunner
from api.tuning.service import Tuning
from engine.config import EngineConfig
from engine.errors import UserError
from engine.messages import Ready

log = logging.getLogger("ktserve")
_MIN_DESCRIPTORS = 256
_YOUNG = 20_000  # objects until the collector looks at them: a frame of many tokens alone makes a thousand
_MIN_ADDRESS_SPACE = 2 << 30  # what the engine maps before it loads a weight


async def serve(
    client: EngineClient,
    engine: EngineConfig,
    config: ServeConfig,
    notes: list[str],
    lines: list[str],
    console: Console,
) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status. Raises UserError or EngineError if it cannot start.
    `lines`: of the model and where it is from.

    The port is open before the model loads: until then, and while the engine is restarted, answers are 503.
    """
    keys = keys_of(config)
    config = dataclasses.replace(config, api_key=[], admin_key=None)  # digests are kept, keys are not
    _check_limits()
    check_origins(config)
    check_root_path(config)
    connections = connections_of(config)
    notes = [
        *notes,
        *(f"note: --adapter-root {root}: no such folder" for root in config.adapter_root if not isdir(root)),
    ]
    with listen(config.host, config.port) as bound:
        check_reach(bound, config, keys=keys.required)
        text = text_settings(engine, config)
        tokenizer = tokenizer_of(text)
        if engine.fine_tuning:
            _check_fine_tuning(config, tokenizer)
        defaults, more = sampling_defaults(engine, config)
        say(console, [*notes, *lines, *more])
        client.vocabulary = None if tokenizer is None else tokenizer.vocabulary()
        prompts = PromptPool(text)
        service = Service(client, config, keys, tokenizer, prompts, defaults)
        if config.otlp_endpoint is not None:
            service.tracing = Tracing(config.otlp_endpoint)
        if config.usage_log is not None:
            service.usage = UsageLog(config.usage_log)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, Reload(service))
        app = create_app(service)
        server = Server(app, service, connections, on_loopback=is_loopback(bound))
        if config.data_dir is not None:
            service.batches = await Batches.open(config, config.data_dir)
            if engine.fine_tuning:
                service.tuning = await Tuning.open(service.batches)
                await Saved(service.tuning).sweep()
        serving = asyncio.create_task(server.serve(sockets=repeated(bound)))
        warming = asyncio.create_task(prompts.warm())
        try:
            await prompts.start()
            ready = await _started(start_engine(client, console), serving)
            if ready is None:
                return 128 + server.ended_by
            await asyncio.wait({warming, serving}, return_when=asyncio.FIRST_COMPLETED)
            gc.collect()
            gc.freeze()  # a full collection need not look again at all that has been loaded
            gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
            _welcome(console, service, bound)
            notify("READY=1")
            alive = asyncio.create_task(keep_alive())
            if service.batches is not None:
                in_flight = config.batch_concurrency or engine.max_num_seqs
                runner = Runner(
                    RequestNotes(app), service.batches, client, lambda name: service.keys.named(name), in_flight
                )
                service.answering = asyncio.create_task(runner.run())
            if service.tuning is not None:
                service.training = asyncio.create_task(_jobs(service, text, engine.training_tokens).run())
            try:
                return await _served(service, serving)
            finally:
                alive.cancel()
        finally:
            warming.cancel()
            notify("STOPPING=1")
            server.should_exit = True
            await asyncio.wait({serving})
            await service.stop_answering()
            await client.shutdown()
            await prompts.close()
            if service.tuning is not None:
                service.tuning.close()
            if service.batches is not None:
                service.batches.close()
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)
            if service.usage is not None:
                await asyncio.to_thread(service.usage.close)


def _check_fine_tuning(config: ServeConfig, tokenizer: Tokenizer | None) -> None:
    """Raises UserError for settings with which there is nothing to train on."""
    if config.data_dir is None:
        raise UserError("--fine-tuning needs --data-dir: files and jobs are kept there", "data_dir")
    if tokenizer is None or tokenizer.template is None:
        raise UserError("--fine-tuning needs a tokenizer with a chat template: give --chat-template", "chat_template")


def _jobs(service: Service, text: TextSettings, micro_batch: int) -> JobRunner:
    """What trains the fine-tuning jobs of a server that has them."""
    assert service.tuning is not None

    def trained(job: JobRecord, tokens: int) -> None:
        if service.usage is not None and tokens:
            line = {"time": time.time(), "fine_tuning_job": job.id, "tenant": job.tenant, "model": job.model}
            service.usage.write({**line, "trained_tokens": tokens})

    longest = min(micro_batch, service.ready.max_model_len)
    return JobRunner(service.tuning, service.client, text, service.keys_named, longest, trained)


async def _started(start: Coroutine[Any, Any, Ready], serving: asyncio.Task[None]) -> Ready | None:
    """What `start` returns, or None if a signal ended the server before."""
    starting = asyncio.create_task(start)
    await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.wait({starting})
    return None


async def _served(service: Service, serving: asyncio.Task[None]) -> int:
    """Wait until the server has ended, or the engine is not restarted any more."""
    gave_up = asyncio.create_task(service.client.gave_up.wait())
    await asyncio.wait({serving, gave_up}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        gave_up.cancel()
        serving.result()
        return 0
    log.error("the engine has ended %d times in a row (--max-restarts): giving up", service.client.backoff.deaths)
    return 1


def _check_limits() -> None:
    """As many connections as the machine allows. Raises UserError for limits under which nothing can be served."""
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < _MIN_ADDRESS_SPACE:
        raise UserError(f"this process may map {space >> 20} MiB; at least 2048 MiB are needed (ulimit -v)")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _MIN_DESCRIPTORS:
        raise UserError(f"this process may open {hard} files; at least {_MIN_DESCRIPTORS} are needed (ulimit -n)")
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _welcome(console: Console, service: Service, bound: socket.socket) -> None:
    """The address, the models, and a line to paste."""
    url, ready, adapters = url_of(bound), service.ready, service.client.adapters
    if missing := sorted(service.keys.named_models - {ready.model_name, *adapters}):
        say(console, [f"note: keys name models that are not loaded: {', '.join(missing)}"])
    if service.tokenizer is not None and service.tokenizer.vocab_size > ready.vocab_size:
        words = f"the tokenizer has {service.tokenizer.vocab_size} tokens, the model {ready.vocab_size}"
        say(console, [f"note: {words}: prompts with one of the others are refused; is it another model's?"])
    if not service.keys.required:
        reach = "everybody who can reach it" if service.config.open else "everybody on this machine"
        say(console, [f"note: there are no keys: {reach} may use the server (docs/tenants.md)"])
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
    say(console, ["", *warnings, *lines, ""])
