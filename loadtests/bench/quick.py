"""`ktserve bench --quick`: the three rates that `ktserve plan` expects, measured, in a minute or less."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from ktserve.launcher import program
from loadtests.bench.client import Result, Server
from loadtests.bench.sweep import closed
from loadtests.bench.work import Work
from loadtests.child import ended_after, served_at, wait_ready
from loadtests.http import HttpError

_EXPECTED = re.compile(rb'^ktserve_engine_expected_tokens_s\{name="(\w+)"\} ([0-9.e+-]+)$', re.M)
_TOUCHED = re.compile(rb"^ktserve_(experts_touched|expert_layers)_total ([0-9.e+-]+)$", re.M)
_LONGEST_PROMPT = 2048
# Variables with settings of the server that people use: who may ask it, and where.
_OF_OTHERS = frozenset(
    f"KTSERVE_{name}"
    for name in ("HOST", "PORT", "API_KEY", "API_KEYS_FILE", "ADMIN_KEY", "ADMIN_KEY_FILE", "TENANTS", "ROOT_PATH")
)
_LOAD_S = 4 * 3600.0  # of a large model from a slow disk


@dataclass(frozen=True)
class _Point:
    """`key`: of /metrics' expected rates."""

    key: str
    what: str
    open: int
    requests: int
    prompt: int
    answer: int

    @property
    def decodes(self) -> bool:
        return self.answer > 2


_POINTS = (
    _Point("decode_1", "1 sequence", 1, 2, 16, 48),
    _Point("decode_8", "8 sequences", 8, 8, 16, 48),
    _Point("prefill", "a prompt", 1, 2, _LONGEST_PROMPT, 2),
)


@contextlib.contextmanager
def own_server(flags: Sequence[str]) -> Iterator[str]:
    """URL of a `ktserve serve` of its own, by default with the demo model, that measures what may be expected. Raises
    ServerError with what it printed."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_OTHERS}
    with tempfile.TemporaryDirectory(prefix="ktserve-bench-") as folder:
        log = Path(folder) / "log"
        command = program("serve", *flags, "--port", "0", "--measure-bandwidth")
        with log.open("wb") as sink, ended_after(command, env=kept, output=sink) as process:
            url = served_at(process, log)
            wait_ready(process, f"{url}/health", _LOAD_S)
            yield url


async def measure(server: Server, metrics: Server, model: str | None, seed: int) -> list[dict[str, Any]]:
    """A point for each rate: `what`, `key`, `tokens_s`, `expected_tokens_s` (lowest, highest; None where the server
    does not tell), `experts` (distinct ones of a layer in a step, mean; None where it does not tell), prompt and answer
    in tokens. HttpError if a request fails."""
    expected, models = await _expected(metrics), (model or await server.base_model(),)
    room = await _room(server)
    points = []
    for number, point in enumerate(_POINTS):
        prompt = min(point.prompt, room - point.answer - 1)
        work = Work(models, prompt, point.answer, seed=seed)
        scale = await work.measure(server)
        first = 100 * (number + 1)  # no prompt of another point
        bodies = [await work.fitted(server, first + i, scale) for i in range(point.requests)]

        async def ask(body: dict[str, Any], path: str = work.path) -> list[Result]:
            return [await server.stream(path, body)]

        before = await _touched(metrics)
        results = [each[0] for each in await closed([partial(ask, body) for body in bodies], point.open)]
        after = await _touched(metrics)
        if failed := [result.error for result in results if result.error]:
            raise HttpError(failed[0])
        points.append(
            {
                "what": f"{point.what} of {round(statistics.mean(r.prompt_tokens for r in results))} tokens"
                if not point.decodes
                else point.what,
                "key": point.key,
                "tokens_s": round(_rate(point, results), 2),
                "expected_tokens_s": expected.get(point.key),
                "experts": _experts(before, after),
                "input_tokens": prompt,
                "output_tokens": point.answer,
            }
        )
    return points


def table(points: Sequence[dict[str, Any]]) -> Table:
    """What was measured beside what was expected."""
    shown = Table(title="tokens a second, all sequences together")
    for title in ("", "measured", "expected", "experts of a layer"):
        shown.add_column(title, justify="left" if not title else "right")
    for point in points:
        span = point["expected_tokens_s"]
        said = "-" if span is None else " to ".join(map(_number, span))
        experts = "-" if point["experts"] is None else _number(point["experts"])
        shown.add_row(point["what"], _number(point["tokens_s"]), said, experts)
    return shown


def _number(rate: float) -> str:
    return f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"


def _rate(point: _Point, results: Sequence[Result]) -> float:
    """Of decode by the time of a token after the first, of a prompt by the time of its first token."""
    if point.decodes:
        return point.open / statistics.median(result.tpot_s for result in results)
    return statistics.median(result.prompt_tokens / result.ttft_s for result in results)


async def _touched(metrics: Server) -> tuple[float, float] | None:
    """Distinct experts of a layer in a step, and of how many layers, both summed so far."""
    try:
        found = {name: float(value) for name, value in _TOUCHED.findall(await metrics.read("/metrics"))}
    except (OSError, HttpError):
        return None
    return (found[b"experts_touched"], found[b"expert_layers"]) if len(found) == 2 else None


def _experts(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    return round((after[0] - before[0]) / (after[1] - before[1]), 1)


async def _expected(metrics: Server) -> dict[str, list[float]]:
    try:
        text = await metrics.read("/metrics")
    except (OSError, HttpError):
        return {}
    ends = {name.decode(): float(value) for name, value in _EXPECTED.findall(text)}
    keys = (point.key for point in _POINTS)
    return {key: [ends[f"{key}_low"], ends[f"{key}_high"]] for key in keys if f"{key}_low" in ends}


async def _room(server: Server) -> int:
    """Positions of the longest request."""
    listed = json.loads(await server.read("/v1/models"))["data"]
    return min(model.get("max_model_len") or 2 * _LONGEST_PROMPT for model in listed)
