"""Models of several families through the whole engine, beside llama.cpp on the same file: decode of 1 and 8 sequences,
prompts of 512 and 8192 tokens.

    python -m benchmarks.cpu.families --models DIR [--llama BINARIES] [--shapes deepseek-v2-lite ...]
                                      [--types Q8_0 Q4_K_M] [--prompts 512 8192] [--out FILE]

Shapes of `benchmarks.models.shapes` with few layers and random weights (gpt-oss: MXFP4 and Q8_0, whatever --types says)
are written to DIR, one at a time, and removed behind their lines. tok/s, medians of repetitions in turn; the peer with
flash attention, and with repacked weights or without, whichever is faster at decode of one. `of read`: bytes of a step,
as the file stores them, a second, over the read bandwidth measured just before; `outside`: the share of a step that is
not in native calls, whose time does not grow with the layers. llama.cpp takes DeepSeek-V2-Lite for what it is by its 27
layers: its `is_lite` has to be true for files with fewer, too. The variable KTSERVE_ISA chooses an older instruction
set for ours.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.cpu.engine import BenchEngine
from benchmarks.cpu.state import SHORT, describe_machine, versions
from benchmarks.kernels.probe import measure_peaks
from benchmarks.models.make import model_path, write_model
from benchmarks.models.shapes import SHAPES, Shape
from benchmarks.peers.llamacpp import Flags, Peer, PeerError
from native import _native

LAYERS = {"qwen3-30b-a3b": 8, "qwen3.5-35b-a3b": 8, "gpt-oss-20b": 8, "mixtral-8x7b": 2}
FEW_LAYERS = 4  # of the others
LONG = 4096  # tokens of a prompt that is computed in one turn of the first two only
TOKENS = 32  # decode steps of a repetition
HEAD = ("shape", "type", "what", "tok/s", "llama.cpp", "ratio", "of read", "outside")


@dataclass(frozen=True)
class Row:
    """tok/s; None where there is no peer, or where memory is not what bounds it."""

    shape: str
    layers: int
    type: str
    what: str
    ours: float
    peer: float | None
    of_read: float | None
    outside: float | None  # share of a step that is not in native calls

    def line(self) -> str:
        beside = ["", ""] if self.peer is None else [f"{self.peer:.1f}", f"{self.ours / self.peer:.2f}x"]
        shares = ["" if share is None else f"{share:.0%}" for share in (self.of_read, self.outside)]
        return f"| {' | '.join([self.shape, self.type, self.what, f'{self.ours:.1f}', *beside, *shares])} |"


def measure(
    path: Path, name: str, shape: Shape, type: str, peer: Peer | None, threads: int, prompts: Sequence[int], turns: int
) -> list[Row]:
    flags = _working_flags(peer, path, threads) if peer else None
    ours: dict[str, list[float]] = defaultdict(list)
    theirs: dict[str, list[float]] = defaultdict(list)
    engine = BenchEngine(path, shape, type, threads, pack_cache="off")
    try:
        engine.pool.begin_step()
        peaks = measure_peaks(engine.pool, _native.choose_isa(""))
        engine.pool.end_step()
        step_bytes = {n: engine.decode_bytes(n, 4, SHORT) for n in (1, 8)}
        outside = {n: engine.shares(n, TOKENS, SHORT)["python_share"] for n in step_bytes}
        engine.prefill(min(prompts))
        for turn in range(turns):
            asked = [n for n in prompts if n < LONG or turn < 2]
            for n in step_bytes:
                ours[f"decode {n}"].append(n / engine.decode(n, TOKENS, SHORT))
            for n in asked:
                ours[f"prefill {n}"].append(n / engine.prefill(n))
            if peer and flags:
                for what, speed in peer.bench(path, flags, asked, TOKENS).items():
                    theirs["decode 1" if what.startswith("tg") else f"prefill {what[2:]}"].append(speed)
                theirs["decode 8"].append(peer.batched(path, flags, SHORT, TOKENS, [8], warm=True)[8])
    finally:
        engine.close()
    rows = []
    for what, speeds in ours.items():
        speed, kind, n = statistics.median(speeds), what.split()[0], int(what.split()[1])
        share = step_bytes[n] * speed / n / peaks.bytes_per_s if kind == "decode" else None
        beside = statistics.median(theirs[what]) if theirs[what] else None
        other = outside[n] if kind == "decode" else None
        rows.append(Row(name, shape.layers, type, what, speed, beside, share, other))
    return rows


def _working_flags(peer: Peer, path: Path, threads: int) -> Flags:
    """The faster ones at decode of one; with repacked weights some models end the peer. PeerError: with both."""
    tried: dict[Flags, float] = {}
    for flags in (Flags(threads), Flags(threads, repack=False)):
        try:
            peer.batched(path, flags, SHORT, 4, [8])
            tried[flags] = peer.bench(path, flags, [SHORT], TOKENS)[f"tg{TOKENS}"]
        except PeerError as failed:
            print(f"{path.name}, {flags}: {failed}", flush=True)
    if not tried:
        raise PeerError("neither with repacked weights nor without")
    return max(tried, key=tried.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--llama", type=Path, help="folder with llama-bench and llama-batched-bench")
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=[name for name in SHAPES if "qwen3-" not in name]
    )
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_K_M"])
    parser.add_argument("--layers", type=int, help="of every shape, instead of 2 to 8")
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 8192])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    peer = Peer(args.llama) if args.llama else None
    data: dict[str, Any] = {"machine": describe_machine(args.threads), "versions": versions(peer)}
    data |= {"isa": _native.choose_isa(""), "rows": []}
    args.models.mkdir(parents=True, exist_ok=True)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for name in args.shapes:
        shape = replace(SHAPES[name], layers=args.layers or LAYERS.get(name, FEW_LAYERS))
        for type in ["MXFP4"] if shape.family == "gpt-oss" else args.types:
            path = model_path(args.models, shape.layers, type, shape.family)
            write_model(path, shape, type)
            try:
                rows = measure(path, name, shape, type, peer, args.threads, args.prompts, args.turns)
            except PeerError as failed:
                print(f"{name}, {type}: measured without llama.cpp: {failed}", flush=True)
                rows = measure(path, name, shape, type, None, args.threads, args.prompts, args.turns)
            finally:
                path.unlink()
            data["rows"] += [asdict(row) for row in rows]
            print("\n".join(row.line() for row in rows), flush=True)
            if args.out:
                record.write(args.out, data)


if __name__ == "__main__":
    main()
