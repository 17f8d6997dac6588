"""Points of a sweep: so many requests at a rate or at a concurrency."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from loadtests.bench.client import Result, Server
from loadtests.bench.work import Scale, Work
from loadtests.http import HttpError

_READ = re.compile(rb"^ktserve_expert_read_bytes_total ([0-9.e+-]+)$", re.M)
_ROOF = re.compile(rb"^ktserve_memory_read_bandwidth_bytes_per_second ([0-9.e+-]+)$", re.M)
_PERCENTILES = (50, 90, 99)
_Talk = Callable[[], Awaitable[list[Result]]]


@dataclass(frozen=True)
class Limits:
    """Of a good request: its first token, and 99 of 100 gaps between its pieces of text. Seconds."""

    ttft_s: float
    itl_s: float

    def good(self, result: Result) -> bool:
        late = result.gaps_s and float(np.percentile(result.gaps_s, 99)) > self.itl_s
        return not result.error and result.ttft_s <= self.ttft_s and not late


async def point(
    server: Server, metrics: Server, work: Work, scale: Scale, kind: str, level: float, requests: int, limits: Limits
) -> dict[str, Any]:
    """`kind` is "rate" (Poisson arrivals, requests a second) or "concurrency" (so many open, closed loop).
    `requests`: conversations, where those have several turns."""
    several = math.lcm(len(work.models), len(work.fields) or 1)
    first = (
        random.Random(f"{kind} {level}").randrange(1 << 30) // several * several
    )  # no prompt of another point, which
    bodies = [await work.fitted(server, first + i, scale) for i in range(requests)]  # may be cached
    talks = [partial(work.converse, server, first + i, scale, body) for i, body in enumerate(bodies)]
    before, began = await _counters(metrics), time.perf_counter()
    talked = await (_open(talks, level, work.seed) if kind == "rate" else closed(talks, int(level)))
    results = [result for results in talked for result in results]
    seconds = time.perf_counter() - began
    return {
        "kind": kind,
        "level": level,
        **summary(results, seconds, limits),
        **(await _since(metrics, before, seconds)),
    }


async def _open(talks: Sequence[_Talk], rate: float, seed: int) -> list[list[Result]]:
    rng, began, due = random.Random(f"arrivals {seed}"), time.perf_counter(), 0.0
    tasks = []
    for talk in talks:
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(talk()))
        due += rng.expovariate(rate)
    return await asyncio.gather(*tasks)


async def closed(talks: Sequence[_Talk], streams: int) -> list[list[Result]]:
    """So many talks at a time until none is left."""
    left, results = iter(talks), []

    async def stream() -> None:
        for talk in left:
            results.append(await talk())

    await asyncio.gather(*(stream() for _ in range(streams)))
    return results


def summary(results: Sequence[Result], seconds: float, limits: Limits) -> dict[str, Any]:
    """Times in milliseconds, rates a second; those of failed requests count nowhere."""
    done = [result for result in results if not result.error]
    good = sum(limits.good(result) for result in results)
    found: dict[str, Any] = {
        "requests": len(results),
        "failed": len(results) - len(done),
        "errors": sorted({result.error for result in results if result.error})[:3],
        "seconds": round(seconds, 3),
        "requests_s": round(len(done) / seconds, 3),
        "output_tokens_s": round(sum(result.tokens for result in done) / seconds, 2),
        "input_tokens_s": round(sum(result.prompt_tokens for result in done) / seconds, 2),
        "input_tokens_mean": round(sum(result.prompt_tokens for result in done) / max(1, len(done)), 1),
        "output_tokens_mean": round(sum(result.tokens for result in done) / max(1, len(done)), 1),
        "open_mean": round(sum(result.total_s for result in results) / seconds, 2),
        "goodput_s": round(good / seconds, 3),
        "good_share": round(good / max(1, len(results)), 4),
    }
    kinds = {
        "ttft": [result.ttft_s for result in done],
        "itl": [gap for result in done for gap in result.gaps_s],
        "tpot": [result.tpot_s for result in done if result.tokens > 1],
        "e2e": [result.total_s for result in done],
    }
    for name, values in kinds.items():
        for p in _PERCENTILES:
            found[f"{name}_p{p}_ms"] = round(1000 * float(np.percentile(values, p)), 3) if values else None
    return found


async def _counters(server: Server) -> tuple[float | None, float | None]:
    """Bytes of experts read so far, and the memory's bandwidth, where the server tells them."""
    try:
        text = await server.read("/metrics")
    except (OSError, HttpError):
        return None, None
    read, roof = _READ.search(text), _ROOF.search(text)
    return float(read[1]) if read else None, float(roof[1]) if roof else None


async def _since(server: Server, before: tuple[float | None, float | None], seconds: float) -> dict[str, Any]:
    read, roof = await _counters(server)
    if read is None or before[0] is None or read < before[0]:  # it does not tell, or its engine was restarted
        return {}
    rate = (read - before[0]) / seconds
    return {"expert_gb_s": round(rate / 1e9, 3)} | ({"roof_share": round(rate / roof, 4)} if roof else {})
