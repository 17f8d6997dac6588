"""Servers as child processes, and concurrent token streams against them, timed at the client."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.child import ServerError, ended_after, wait_ready
from loadtests.http import Server

Request = tuple[str, dict[str, Any]]  # path, JSON body
_START_S = 300.0


class StreamError(Exception):
    """A server did not start, or answered something else than the tokens asked for."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def child(command: Sequence[str], health: str) -> Iterator[None]:
    """A server that answers at `health`; ended afterwards. StreamError brings the end of what it wrote."""
    with tempfile.TemporaryFile() as log, ended_after(command, output=log, patience_s=30) as process:
        try:
            wait_ready(process, health, _START_S)
        except ServerError as error:
            log.seek(0)
            raise StreamError(f"{error}: {log.read().decode(errors='replace').strip()[-500:]}") from None
        yield


@contextmanager
def our_server(model: Path, flags: Sequence[str]) -> Iterator[str]:
    """URL of a `ktserve serve` that knows the base as "base"."""
    port = free_port()
    command = [sys.executable, "-m", "api.cli.main", "serve", str(model), "--served-model-name", "base"]
    command += ["--port", str(port), "--log-level", "warning", *flags]
    with child(command, f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}"


def our_request(prompt: list[int], tokens: int, adapter: str | None) -> Request:
    """A greedy streamed request of exactly `tokens` tokens."""
    body = {"model": adapter or "base", "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    return "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True}


@dataclass
class Burst:
    """What the client saw; seconds."""

    tokens: int
    wall_s: float
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[list[float]] = field(default_factory=list)  # by stream

    def gaps_of(self, streams: int) -> list[float]:
        """Of the first so many streams."""
        return [gap for gaps in self.gaps_s[:streams] for gap in gaps]

    def summary(self) -> dict[str, float]:
        gaps = self.gaps_of(len(self.gaps_s))
        itl = statistics.median(gaps)
        return {
            "tok_s": self.tokens / self.wall_s,
            "ttft_s": statistics.median(self.ttft_s),
            "itl_ms": itl * 1000,
            "max_gap_per_itl": max(gaps) / itl,
        }


def burst(url: str, requests: Sequence[Request], tokens: int, delays_s: Sequence[float] = ()) -> Burst:
    """All requests at once, or each after its delay. StreamError unless each brings `tokens` tokens.

    A token's time is that of the event that brings it; a server may hold back bytes that are not yet a character, so
    an event can carry more than one token or none.
    """

    async def run() -> Burst:
        began = time.perf_counter()
        waits = list(delays_s) or [0.0] * len(requests)
        streams = await asyncio.gather(
            *(_stream(url, request, wait) for request, wait in zip(requests, waits, strict=True))
        )
        out = Burst(0, time.perf_counter() - began)
        for sent, times, count in streams:
            if count != tokens:
                raise StreamError(f"{url}: {count} tokens instead of {tokens}")
            out.tokens += count
            out.ttft_s.append(times[0] - sent)
            out.gaps_s.append([b - a for a, b in itertools.pairwise(times)])
        return out

    return asyncio.run(run())


async def _stream(url: str, request: Request, wait_s: float) -> tuple[float, list[float], int]:
    """When it was sent, when tokens came, how many."""
    await asyncio.sleep(wait_s)
    path, body = request
    answer = await Server(url).post(path, body)
    if answer.status != 200 or not answer.whole:
        raise StreamError(f"{url}{path}: {answer.refusal}")
    times: list[float] = []
    count = 0
    for when, data in answer.events():
        if data != "[DONE]":
            new, count = _count(json.loads(data), count)
            times += [when] if new else []
    return answer.asked_s, times, count


def _count(event: dict[str, Any], count: int) -> tuple[int, int]:
    """New tokens of an event, and all so far: ours carry ids, llama-server's a running or final number."""
    if "error" in event:
        raise StreamError(str(event["error"]))
    if "choices" in event:
        ids = [i for choice in event["choices"] for i in choice.get("token_ids") or []]
        return len(ids), count + len(ids)
    total = int(event.get("tokens_predicted", count + 1))
    return (0 if event.get("stop") else total - count), max(total, count)


def paired(run_ours: Callable[[], Burst], run_peer: Callable[[], Burst] | None, index: int) -> list[Burst | None]:
    """Ours and the peer's, the order changing from one repetition to the next."""
    if run_peer is None:
        return [run_ours(), None]
    if index % 2:
        theirs = run_peer()
        return [run_ours(), theirs]
    return [run_ours(), run_peer()]


def p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
