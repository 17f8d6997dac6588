"""What a server holds: memory, descriptors, threads, blocks, slots, and its greedy answers."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict, dataclass

import psutil

from loadtests.http import Server

QUESTIONS = ("What is 7 + 8?", "Name a colour.", "Count from 1 to 5.")
_GAUGE = re.compile(rb"^ktserve_engine_(\w+) ([0-9.e+-]+)$", re.M)


@dataclass(frozen=True)
class Held:
    """Of the api and the engine process: MiB of memory (unique to each), open files, threads; of the engine: requests
    that run or wait, KV blocks and adapter slots in use. `metrics_kib`: of `/metrics`."""

    api_mib: float
    engine_mib: float
    files: int
    threads: int
    running: float
    waiting: float
    blocks_used: float
    slots_used: float
    metrics_kib: float

    def rows(self) -> dict[str, float]:
        return asdict(self)


def engine_of(server: psutil.Process) -> psutil.Process | None:
    """The engine's process, if there is one now."""
    try:
        children = server.children()
        return next((child for child in children if "--heartbeat" in child.cmdline()), None)
    except psutil.Error:
        return None


async def held(server: psutil.Process, target: Server) -> Held:
    """`target` with the admin key. Raises RuntimeError if there is no engine."""
    engine = engine_of(server)
    if engine is None:
        raise RuntimeError("the server has no engine")
    return held_of(server, engine, (await target.get("/metrics")).body)


def held_of(server: psutil.Process, engine: psutil.Process, metrics: bytes) -> Held:
    """`metrics`: the body of `/metrics`."""
    gauges = {name.decode(): float(value) for name, value in _GAUGE.findall(metrics)}
    tree = [server, *server.children(recursive=True)]
    return Held(
        api_mib=server.memory_full_info().uss / 2**20,
        engine_mib=engine.memory_full_info().uss / 2**20,
        files=sum(process.num_fds() for process in tree),
        threads=sum(process.num_threads() for process in tree),
        running=gauges["running"],
        waiting=gauges["waiting"],
        blocks_used=gauges["blocks_used"],
        slots_used=gauges["slots_used"],
        metrics_kib=len(metrics) / 1024,
    )


async def answers(target: Server, models: list[str]) -> dict[str, str]:
    """What each model says to each question, greedy."""
    found = {}
    for model in models:
        for question in QUESTIONS:
            body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
            answer = await target.post("/v1/chat/completions", {**body, "max_tokens": 24})
            found[f"{model}: {question}"] = answer.json()["choices"][0]["message"]["content"]
    return found


async def ready(target: Server, within_s: float) -> bool:
    """Wait until the server says that it serves."""
    deadline = asyncio.get_running_loop().time() + within_s
    while asyncio.get_running_loop().time() < deadline:
        try:
            if (await target.get("/health")).status == 200:
                return True
        except OSError:
            pass
        await asyncio.sleep(0.2)
    return False
