"""Every packed format through the whole engine, beside llama.cpp on the same file: bytes, decode, prefill and error.

    python -m benchmarks.cpu.formats --models DIR [--llama BINARIES] [--types Q2_K IQ4_XS] [--layers 4] [--out FILE]
    python -m benchmarks.cpu.formats --models DIR --shape gpt-oss-20b --types MXFP4 --layers 8

Models of Qwen3-30B-A3B's shape, or another, whose matrices all have one type (gpt-oss beside MXFP4: Q8_0) are
written to DIR, one at a time, and removed behind their line (a 4-bit one of 4 layers has 1.4 GB). Decode is one
sequence, prefill 512 tokens; medians of repetitions in turn, the peer with flash attention, and with repacked weights
or without, whichever is faster at decode. `of read`: bytes of a step, as the file stores them, over what reading alone
brings in its time, measured between steps. The error is that of `benchmarks.kernels.formats`: of products, ours beside
llama.cpp's rounding of activations. The variable KTSERVE_ISA chooses an older instruction set for ours.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.cpu.engine import BenchEngine
from benchmarks.cpu.state import SHORT, describe_machine, versions
from benchmarks.kernels.formats import GGUF, errors, weight
from benchmarks.models.make import model_path, write_model
from benchmarks.models.shapes import SHAPES, Shape
from benchmarks.peers.llamacpp import Flags, Peer, PeerError
from benchmarks.report.beside import FORMATS_HEAD
from native import _native

PROMPT = 512
HEAD = ("type", *FORMATS_HEAD)


@dataclass(frozen=True)
class Row:
    """tok/s; None where there is no peer."""

    type: str
    bits: float  # a weight, packed
    decode: float
    of_read: float
    prefill: float
    error: float
    peer_decode: float | None
    peer_prefill: float | None
    peer_error: float | None
    peer_flags: str | None

    def line(self) -> str:
        def beside(ours: float, theirs: float | None) -> list[str]:
            return [f"{ours:.1f}", *(["", ""] if theirs is None else [f"{theirs:.1f}", f"{ours / theirs:.2f}x"])]

        cells = [self.type, f"{self.bits:.2f}", *beside(self.decode, self.peer_decode), f"{self.of_read:.0%}"]
        cells += beside(self.prefill, self.peer_prefill)
        cells += [f"{self.error:.1e}", "" if self.peer_error is None else f"{self.peer_error:.1e}"]
        return f"| {' | '.join(cells)} |"


def measure(path: Path, shape: Shape, type: str, peer: Peer | None, threads: int, tokens: int, repeats: int) -> Row:
    """`tokens`: decode steps of a repetition."""
    flags, speeds = _best_flags(peer, path, threads, tokens) if peer else (None, [])
    engine = BenchEngine(path, shape, type, threads, pack_cache="off")
    try:
        isa = _native.choose_isa("")
        w = weight(type, engine.pool, 0)
        error, peer_error = errors(w, isa)
        step_bytes = engine.decode_bytes(1, 4, SHORT)
        engine.prefill(PROMPT)
        decode, prefill, brought = [], [], list[float]()
        for i in range(repeats):
            step_s, read = engine.decode_and_read(1, tokens, SHORT)
            decode.append(1 / step_s)
            brought += read
            prefill.append(PROMPT / engine.prefill(PROMPT))
            if peer and flags and i:  # the first is that of the choice of flags
                speeds.append(peer.bench(path, flags, [PROMPT], tokens))
    finally:
        engine.close()
    tok_s = statistics.median(decode)
    return Row(
        type,
        8 * w.copies[0].nbytes / w.values.size,
        tok_s,
        step_bytes / statistics.median(brought),
        statistics.median(prefill),
        error,
        statistics.median(s[f"tg{tokens}"] for s in speeds) if speeds else None,
        statistics.median(s[f"pp{PROMPT}"] for s in speeds) if speeds else None,
        peer_error,
        str(flags) if flags else None,
    )


def _best_flags(peer: Peer, path: Path, threads: int, tokens: int) -> tuple[Flags, list[dict[str, float]]]:
    """And what they reached."""
    tries = {
        flags: peer.bench(path, flags, [PROMPT], tokens) for flags in (Flags(threads), Flags(threads, repack=False))
    }
    best = max(tries, key=lambda flags: tries[flags][f"tg{tokens}"])
    return best, [tries[best]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--llama", type=Path, help="folder with llama-bench")
    parser.add_argument("--types", nargs="+", choices=GGUF, default=list(GGUF))
    parser.add_argument("--shape", choices=SHAPES, default=next(iter(SHAPES)))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shape, peer = replace(SHAPES[args.shape], layers=args.layers), Peer(args.llama) if args.llama else None
    data: dict[str, Any] = {"machine": describe_machine(args.threads), "versions": versions(peer)}
    data |= {"shape": args.shape, "layers": args.layers, "isa": _native.choose_isa(""), "rows": []}
    args.models.mkdir(parents=True, exist_ok=True)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for type in args.types:
        path = model_path(args.models, args.layers, type, shape.family)
        write_model(path, shape, type)
        try:
            row = measure(path, shape, type, peer, args.threads, args.tokens, args.repeats)
        except PeerError as failed:
            print(f"{type}: measured without llama.cpp: {failed}", flush=True)
            row = measure(path, shape, type, None, args.threads, args.tokens, args.repeats)
        finally:
            path.unlink()
        data["rows"].append(asdict(row))
        print(row.line(), flush=True)
        if args.out:
            record.write(args.out, data)


if __name__ == "__main__":
    main()
