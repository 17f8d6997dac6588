"""The CPU benchmark's rows of whole servers: ours and llama-server as processes, timed at the client."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.client import Burst, burst, our_request, our_server, paired
from benchmarks.cpu.engine import prompt
from benchmarks.cpu.state import NUM_ADAPTERS, SHORT, STREAM_CONTEXT, Run
from benchmarks.peers import llamacpp as peer_llamacpp

_IN, _OUT = 128, 64  # tokens of a stream


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
    lengths = [SHORT] * running + [_IN] * arriving
    ours, other = _bursts(run, mix, running + arriving, [None], 2, tokens=tokens, delays=delays, lengths=lengths)
    worst = [[max(b.gaps_of(running)) / statistics.median(b.gaps_of(running)) for b in bs] for bs in (ours, other)]
    late = [[statistics.median(b.ttft_s[running:]) for b in bs] for bs in (ours, other)]
    more = {"late_ttft_s": statistics.median(late[0])}
    more |= {"peer_late_ttft_s": statistics.median(late[1])} if other else {}
    run.record("arrivals", mix, "longest gap / median ITL as prompts arrive", "x", worst[0], worst[1], **more)


def first(run: Run, mix: str) -> None:
    """A request for one adapter into a running load of another's: its first token, and who had ended by then."""
    running, tokens, delay_s = (1, 8, 0.0) if run.quick else (6, 96, 1.5)
    _bursts(run, mix, 2, [0, 1], 1, tokens=2, peer=False)  # adapters into their slots
    who: list[int | None] = [*[0] * running, 1]
    delays, lengths = [0.0] * running + [delay_s], [SHORT] * running + [_IN]
    ours, other = _bursts(run, mix, running + 1, who, 3, tokens=tokens, delays=delays, lengths=lengths)
    late = [[b.ttft_s[running] for b in bursts] for bursts in (ours, other)]
    more: dict[str, Any] = {"running": running, "ended": max(_ended(b, running, delay_s) for b in ours)}
    if other:
        more["peer_ended"] = max(_ended(b, running, delay_s) for b in other)
    run.record("first", mix, "first token of adapter 2 in adapter 1's load", "s", late[0], late[1], **more)


def _ended(seen: Burst, running: int, delay_s: float) -> int:
    """How many of the first `running` streams, sent at 0, had their last token before the next stream its first."""
    first_s = delay_s + seen.ttft_s[running]
    return sum(seen.ttft_s[i] + sum(seen.gaps_s[i]) <= first_s for i in range(running))


def start(run: Run, mix: str) -> None:
    """From nothing to answering: with no packed experts and no page of the file cached, and once more."""
    run.release()
    model = run.model(mix)
    flags = run.flags(mix) if run.peer else None
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory(prefix="packed-", dir=model.parent) as packed:
        ours = ["--device", "cpu", "--cpu-threads", str(run.threads), "--max-num-seqs", "8", "--pack-cache", packed]
        ours += ["--kv-cache-tokens", str(8 * STREAM_CONTEXT)]
        _forget(model)
        seconds["ours"] = [_up_s(our_server(model, ours)) for _ in range(2)]
    if run.peer and flags:
        _forget(model)
        seconds["peer"] = [_up_s(run.peer.server(model, flags, 8, STREAM_CONTEXT, [])) for _ in range(2)]
    for i, what in enumerate(("first start", "second start")):
        run.record("start", mix, what, "s", seconds["ours"][i : i + 1], seconds["peer"][i : i + 1])


def _up_s(server: AbstractContextManager[str]) -> float:
    began = time.monotonic()
    with server:
        return time.monotonic() - began


def _forget(path: Path) -> None:
    """Drop the file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bursts(
    run: Run,
    mix: str,
    streams: int,
    chosen: Sequence[int | None],
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
        run_peer = partial(burst, peer_url, theirs, tokens, delays or ()) if peer and peer_url else None
        first, second = paired(partial(burst, ours_url, mine, tokens, delays or ()), run_peer, i)
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
