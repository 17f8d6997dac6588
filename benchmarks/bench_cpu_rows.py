"""The rows of the CPU benchmark, each a function of a run and a model's type."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import peer_llamacpp
from benchmarks.bench_cpu_client import Burst, burst, our_request, paired
from benchmarks.bench_cpu_engine import prompt
from benchmarks.bench_cpu_run import NUM_ADAPTERS, Run
from benchmarks.make_model import Shape

_SHORT = 16  # prompt tokens where only decode is measured
_IN, _OUT = 128, 64  # of the server rows


def decode(run: Run, mix: str) -> None:
    """One sequence, step by step."""
    engine, tokens = run.engine(mix), 8 if run.quick else 64
    peer = None
    if run.peer:
        peer, flags = run.peer, run.flags(mix)
    theirs = None if peer is None else lambda: peer.bench(run.model(mix), flags, [], tokens)[f"tg{tokens}"]
    ours, other = run.alternate(5, lambda: 1 / engine.decode(1, tokens, _SHORT), theirs)
    share = run.read_share(mix, engine.decode_bytes(1, 8, _SHORT), 1 / statistics.median(ours))
    run.record("decode", mix, "decode, 1 sequence", "tok/s", ours, other, **share, operations=_step_operations(run, 1))


def prefill(run: Run, mix: str) -> None:
    """Prompts of 512 and 2048 tokens, one at a time, into an idle engine."""
    engine, lengths = run.engine(mix), [32, 64] if run.quick else [512, 2048]
    lengths = [n for n in lengths if n < run.shape.context]
    peak = "bf16" if mix == "BF16" else "int8"
    engine.prefill(lengths[0])
    ours: dict[int, list[float]] = {n: [] for n in lengths}
    other: dict[int, list[float]] = {n: [] for n in lengths}
    flags = run.flags(mix) if run.peer else None
    for _ in run.repeats(3):
        for n in lengths:
            ours[n].append(n / engine.prefill(n))
        if run.peer and flags:
            speeds = run.peer.bench(run.model(mix), flags, lengths, 0)
            for n in lengths:
                other[n].append(speeds[f"pp{n}"])
    for n in lengths:
        rate = statistics.median(ours[n]) * operations_per_token(run.shape, n)
        more = {"gop_s": rate / 1e9, "of_peak": rate / run.roofs[mix].of(peak), "peak_of": peak}
        run.record("prefill", mix, f"prefill {n}", "tok/s", ours[n], other[n], **more)


def operations_per_token(shape: Shape, length: int) -> float:
    """Multiplications and additions of a prompt's token, attention to half of the prompt included."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * q + 2 * kv)
    experts = shape.top_k * 3 * shape.hidden * shape.intermediate + shape.experts * shape.hidden
    return shape.layers * (2 * (attention + experts) + 4 * q * length / 2)


def _step_operations(run: Run, rows: int) -> float:
    """Of a decode step behind short prompts, the output projection included."""
    shape = run.shape
    return rows * (operations_per_token(shape, 2 * _SHORT) + 2.0 * shape.hidden * shape.vocabulary)


def batch(run: Run, mix: str) -> None:
    """8, 16 and 32 sequences that decode together."""
    engine, tokens = run.engine(mix), 4 if run.quick else 24
    counts = [2] if run.quick else [8, 16, 32]
    ours: dict[int, list[float]] = {n: [] for n in counts}
    other: dict[int, list[float]] = {n: [] for n in counts}
    flags = run.flags(mix) if run.peer else None
    for _ in run.repeats(3):
        for n in counts:
            ours[n].append(n / engine.decode(n, tokens, _SHORT))
        if run.peer and flags:
            for n, speed in run.peer.batched(run.model(mix), flags, _SHORT, tokens, counts).items():
                other[n].append(speed)
    for n in counts:
        step_s = n / statistics.median(ours[n])
        share = run.read_share(mix, engine.decode_bytes(n, 4, _SHORT), step_s)
        share |= {"step_ms": step_s * 1e3, "operations": _step_operations(run, n)}
        run.record("batch", mix, f"decode, {n} sequences", "tok/s", ours[n], other[n], **share)
        if n == counts[0]:
            run.itl_target_ms[mix] = max(5.0, 2.2e3 * step_s)  # of the server rows: a gap of less than three steps


def python(run: Run, mix: str) -> None:
    """The share of a decode step outside native calls."""
    engine = run.engine(mix)
    for rows in (1, 8):
        seen = engine.shares(rows, 8 if run.quick else 48, _SHORT)
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
            steps[held] = engine.decode(rows, tokens, _SHORT)
        ratios.append(100 * steps[False] / steps[True])
        loaded.append(rows / steps[True])
    engine.hold(names, False)
    more: dict[str, Any] = {"pairs": len(ratios), "tok_s": statistics.median(loaded)}
    spread = statistics.quantiles(ratios, n=4) if len(ratios) > 3 else [min(ratios), 0.0, max(ratios)]
    more |= {"quartile_low": spread[0], "quartile_high": spread[2]}
    run.record("idle", mix, "base only, 4 adapters loaded / LoRA off", "%", ratios, [], **more)


def server(run: Run, mix: str) -> None:
    """8 and 16 streams at once, all prompts at the same moment."""
    for streams in (2,) if run.quick else (8, 16):
        ours, other = _bursts(run, mix, streams, [None], 3)
        _record(run, "server", mix, f"server, {streams} streams", ours, other)


def adapters(run: Run, mix: str) -> None:
    """8 streams on four adapters, two each, against 8 on the base, in turn."""
    streams = 2 if run.quick else 8
    _bursts(run, mix, NUM_ADAPTERS, list(range(NUM_ADAPTERS)), 1, tokens=2, peer=False)  # adapters into their slots
    base: list[Burst] = []
    ours: list[Burst] = []
    peer_base: list[Burst] = []
    other: list[Burst] = []
    for _ in run.repeats(4):
        for into, theirs, chosen in ((base, peer_base, [None]), (ours, other, list(range(NUM_ADAPTERS)))):
            pair = _bursts(run, mix, streams, chosen, 1)
            into += pair[0]
            theirs += pair[1]
    kept = _kept(base, ours)
    more: dict[str, Any] = {"kept": statistics.median(kept), "all_kept": kept}
    if other:
        more["peer_kept"] = statistics.median(_kept(peer_base, other))
    _record(run, "adapters", mix, f"server, {streams} streams on {NUM_ADAPTERS} adapters", ours, other, **more)


def arrivals(run: Run, mix: str) -> None:
    """The longest gap in 6 running streams while 4 prompts arrive one after another."""
    running, arriving, tokens = (1, 1, 8) if run.quick else (6, 4, 80)
    delays = [0.0] * running + [1.5 + 0.4 * i for i in range(arriving)]
    lengths = [_SHORT] * running + [_IN] * arriving
    ours, other = _bursts(run, mix, running + arriving, [None], 2, tokens=tokens, delays=delays, lengths=lengths)
    worst = [[max(b.gaps_of(running)) / statistics.median(b.gaps_of(running)) for b in bs] for bs in (ours, other)]
    late = [[statistics.median(b.ttft_s[running:]) for b in bs] for bs in (ours, other)]
    more = {"late_ttft_s": statistics.median(late[0])}
    more |= {"peer_late_ttft_s": statistics.median(late[1])} if other else {}
    run.record("arrivals", mix, "longest gap / median ITL as prompts arrive", "x", worst[0], worst[1], **more)


def _bursts(
    run: Run,
    mix: str,
    streams: int,
    chosen: list[int] | list[None],
    wanted: int,
    *,
    tokens: int = 0,
    delays: list[float] | None = None,
    lengths: list[int] | None = None,
    peer: bool = True,
) -> tuple[list[Burst], list[Burst]]:
    """Bursts of ours and the peer's in turn; stream i is for adapter chosen[i % ...], None being the base."""
    ours_url, peer_url = run.servers(mix)
    tokens = tokens or (8 if run.quick else _OUT)
    ours: list[Burst] = []
    other: list[Burst] = []
    for i in run.repeats(wanted):
        prompts = [prompt(run.shape, (lengths or [_IN] * streams)[s], 1000 * (i + 1) + s) for s in range(streams)]
        who = [chosen[s % len(chosen)] for s in range(streams)]
        mine = [
            our_request(p, tokens, None if w is None else run.adapter_names[w])
            for p, w in zip(prompts, who, strict=True)
        ]
        theirs = [peer_llamacpp.request(p, tokens, w, NUM_ADAPTERS) for p, w in zip(prompts, who, strict=True)]
        run_peer = (lambda url=peer_url, q=theirs: burst(url, q, tokens, delays or ())) if peer and peer_url else None
        first, second = paired(lambda q=mine: burst(ours_url, q, tokens, delays or ()), run_peer, i)
        ours += [first] if first else []
        other += [second] if second else []
    return ours, other


def _kept(base: list[Burst], with_adapters: list[Burst]) -> list[float]:
    """Throughput with adapters over that without, pair by pair."""
    return [a.summary()["tok_s"] / b.summary()["tok_s"] for b, a in zip(base, with_adapters, strict=True)]


def _record(run: Run, row: str, mix: str, what: str, ours: list[Burst], other: list[Burst], **more: Any) -> None:
    def median(bursts: list[Burst], key: str) -> float:
        return statistics.median(b.summary()[key] for b in bursts)

    for key in ("ttft_s", "itl_ms", "max_gap_per_itl"):
        more[key] = median(ours, key)
        if other:
            more[f"peer_{key}"] = median(other, key)
    speeds = [[b.summary()["tok_s"] for b in bursts] for bursts in (ours, other)]
    run.record(row, mix, what, "tok/s", speeds[0], speeds[1], **more)


ROWS: dict[str, tuple[Callable[[Run, str], None], float, tuple[str, ...]]] = {
    # the function, its seconds at 8 layers on two cores, the types it is for by default
    "decode": (decode, 25, ("Q8_0", "Q4_K_M", "BF16")),
    "prefill": (prefill, 80, ("Q8_0", "Q4_K_M", "BF16")),
    "batch": (batch, 80, ("Q8_0", "Q4_K_M")),
    "python": (python, 8, ("Q8_0", "Q4_K_M")),
    "idle": (idle, 45, ("Q8_0", "Q4_K_M")),
    "server": (server, 130, ("Q8_0", "Q4_K_M")),
    "adapters": (adapters, 80, ("Q8_0", "Q4_K_M")),
    "arrivals": (arrivals, 30, ("Q8_0", "Q4_K_M")),
}
