"""The rows of the CPU benchmark, each a function of a run and a model's type."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.cpu.engine import BenchEngine
from benchmarks.cpu.kt import kt
from benchmarks.cpu.servers import adapters, arrivals, first, server, start
from benchmarks.cpu.state import SHORT, Run
from benchmarks.models.shapes import Shape


def decode(run: Run, mix: str) -> None:
    """One sequence, step by step."""
    engine, tokens = run.engine(mix), 8 if run.quick else 64
    peer = None
    if run.peer:
        peer, flags = run.peer, run.flags(mix)
    theirs = None if peer is None else lambda: peer.bench(run.model(mix), flags, [], tokens)[f"tg{tokens}"]
    engine.decode(1, 8, SHORT)  # the first steps of an engine take longer
    brought: list[float] = []
    ours, other = run.alternate(5, lambda: _decode(engine, 1, tokens, brought), theirs)
    read = _read(engine.decode_bytes(1, 8, SHORT), 1 / statistics.median(ours), brought)
    run.record("decode", mix, "decode, 1 sequence", "tok/s", ours, other, **read, operations=_step_operations(run, 1))


def _decode(engine: BenchEngine, rows: int, tokens: int, brought: list[float]) -> float:
    """Tokens a second; adds to `brought` as `decode_and_read`."""
    step_s, seen = engine.decode_and_read(rows, tokens, SHORT)
    brought += seen
    return rows / step_s


def _read(step_bytes: float, step_s: float, brought: list[float]) -> dict[str, float]:
    """`read_mb`: what reading alone brings in the time of a step."""
    read_mb = statistics.median(brought) / 1e6
    return {"step_mb": step_bytes / 1e6, "gb_s": step_bytes / step_s / 1e9, "read_mb": read_mb}


def prefill(run: Run, mix: str) -> None:
    """Prompts of 512 and 2048 tokens, one at a time, into an idle engine."""
    lengths = [32, 64] if run.quick else [512, 2048]
    _prefill(run, mix, lengths, lengths, 3)


def long(run: Run, mix: str) -> None:
    """The same with 8192 and 32768 tokens, once; the peer with 8192."""
    lengths = [96, 128] if run.quick else [8192, 32768]
    _prefill(run, mix, lengths, lengths[:1], 1)


def _prefill(run: Run, mix: str, lengths: list[int], peer_lengths: list[int], wanted: int) -> None:
    engine = run.engine(mix)
    lengths = [n for n in lengths if n < run.shape.context]
    peak = "bf16" if mix == "BF16" else "int8"
    engine.prefill(min(512, lengths[0]))
    ours: dict[int, list[float]] = {n: [] for n in lengths}
    other: dict[int, list[float]] = {n: [] for n in lengths}
    flags = run.flags(mix) if run.peer else None
    for _ in run.repeats(wanted):
        for n in lengths:
            ours[n].append(n / engine.prefill(n))
        if run.peer and flags:
            asked = [n for n in peer_lengths if n in lengths]
            speeds = run.peer.bench(run.model(mix), flags, asked, 0)
            for n in asked:
                other[n].append(speeds[f"pp{n}"])
    for n in lengths:
        rate = statistics.median(ours[n]) * operations_per_token(run.shape, n)
        more: dict[str, Any] = {"gop_s": rate / 1e9, "peak_of": peak}
        more["attention"] = attention_per_token(run.shape, n) / operations_per_token(run.shape, n)
        run.record("prefill", mix, f"prefill {n}", "tok/s", ours[n], other[n], **more)


def operations_per_token(shape: Shape, length: int) -> float:
    """Multiplications and additions of a prompt's token, attention to half of the prompt included."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = shape.hidden * (2 * q + 2 * kv)
    experts = shape.top_k * 3 * shape.hidden * shape.intermediate + shape.experts * shape.hidden
    return shape.layers * 2 * (projections + experts) + attention_per_token(shape, length)


def attention_per_token(shape: Shape, length: int) -> float:
    return shape.layers * 4 * shape.heads * shape.head_dim * length / 2


def _step_operations(run: Run, rows: int) -> float:
    """Of a decode step behind short prompts, the output projection included."""
    shape = run.shape
    return rows * (operations_per_token(shape, 2 * SHORT) + 2.0 * shape.hidden * shape.vocabulary)


def batch(run: Run, mix: str) -> None:
    """8, 16 and 32 sequences that decode together."""
    engine, tokens = run.engine(mix), 4 if run.quick else 24
    counts = [2] if run.quick else [8, 16, 32]
    ours: dict[int, list[float]] = {n: [] for n in counts}
    other: dict[int, list[float]] = {n: [] for n in counts}
    brought: dict[int, list[float]] = {n: [] for n in counts}
    flags = run.flags(mix) if run.peer else None
    for _ in run.repeats(3):
        for n in counts:
            ours[n].append(_decode(engine, n, tokens, brought[n]))
        if run.peer and flags:
            for n, speed in run.peer.batched(run.model(mix), flags, SHORT, tokens, counts).items():
                other[n].append(speed)
    for n in counts:
        step_s = n / statistics.median(ours[n])
        seen = _read(engine.decode_bytes(n, 4, SHORT), step_s, brought[n])
        seen |= {"step_ms": step_s * 1e3, "operations": _step_operations(run, n)}
        run.record("batch", mix, f"decode, {n} sequences", "tok/s", ours[n], other[n], **seen)
        if n == counts[0]:
            run.itl_target_ms[mix] = max(5.0, 2.2e3 * step_s)  # of the server rows: a gap of less than three steps


def python(run: Run, mix: str) -> None:
    """The share of a decode step outside native calls."""
    engine = run.engine(mix)
    for rows in (1, 8):
        seen = engine.shares(rows, 8 if run.quick else 48, SHORT)
        what = f"Python in a step, {rows} row{'s' if rows > 1 else ''}"
        run.record("python", mix, what, "%", [100 * seen["python_share"]], [], **seen)


def idle(run: Run, mix: str) -> None:
    """Traffic for the base alone with four adapters in their slots, against none loaded: pairs, alternating."""
    engine, names = run.engine(mix), run.adapter_names
    engine.load(run.adapter_flags())
    rows, tokens = 8, 4 if run.quick else 12
    ratios, loaded = [], []
    for i in range(2 if run.quick else 15):
        steps: dict[bool, float] = {}
        for held in (True, False) if i % 2 else (False, True):
            engine.hold(names, held)
            steps[held] = engine.decode(rows, tokens, SHORT)
        ratios.append(100 * steps[False] / steps[True])
        loaded.append(rows / steps[True])
    engine.hold(names, False)
    more: dict[str, Any] = {"pairs": len(ratios), "tok_s": statistics.median(loaded)}
    spread = statistics.quantiles(ratios, n=4) if len(ratios) > 3 else [min(ratios), 0.0, max(ratios)]
    more |= {"quartile_low": spread[0], "quartile_high": spread[2]}
    run.record("idle", mix, "base only, 4 adapters loaded / LoRA off", "%", ratios, [], **more)


ROWS: dict[str, tuple[Callable[[Run, str], None], float, tuple[str, ...]]] = {
    # the function, its seconds at 8 layers on two cores, the types it is for by default
    "decode": (decode, 70, ("Q8_0", "Q4_K_M", "BF16")),
    "prefill": (prefill, 80, ("Q8_0", "Q4_K_M", "BF16")),
    "long": (long, 600, ("Q8_0", "Q4_K_M")),
    "batch": (batch, 120, ("Q8_0", "Q4_K_M")),
    "python": (python, 8, ("Q8_0", "Q4_K_M")),
    "idle": (idle, 45, ("Q8_0", "Q4_K_M")),
    "server": (server, 130, ("Q8_0", "Q4_K_M")),
    "adapters": (adapters, 80, ("Q8_0", "Q4_K_M")),
    "arrivals": (arrivals, 30, ("Q8_0", "Q4_K_M")),
    "first": (first, 60, ("Q8_0",)),
    "start": (start, 60, ("Q8_0",)),
    "kt": (kt, 150, ("Q8_0", "Q4_K_M", "BF16")),
}
