"""The first token of a conversation's second turn, of a model whose layers keep states and of one with attention alone.

    python -m benchmarks.cpu.second_turn --models DIR [--llama BINARIES] [--layers 8] [--prompt 4096] [--out FILE]

Both have Qwen3.5-35B-A3B's layers with random weights; of the second all are attention. They are written to DIR, one at
a time, and removed again. ms, medians of conversations: a prompt, an answer of 64 tokens, and a question of `--more`
tokens behind it. llama.cpp is llama-server, which times itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.client import StreamError
from benchmarks.cpu.engine import BenchEngine, prompt
from benchmarks.cpu.state import describe_machine, versions
from benchmarks.models.make import model_path, write_model
from benchmarks.models.shapes import SHAPES, Shape
from benchmarks.peers.llamacpp import Peer, completed
from native import _native

ANSWER = 64
STATES = SHAPES["qwen3.5-35b-a3b"]
KINDS = {"states": STATES, "attention": replace(STATES, described=(*STATES.described, ("full_attention_interval", 1)))}


def ours(path: Path, shape: Shape, type: str, args: argparse.Namespace) -> tuple[float, float]:
    """Medians of both turns, in ms."""
    engine = BenchEngine(path, shape, type, args.threads, pack_cache="off", prefix_caching=True)
    try:
        engine.second_turn(args.prompt // 4, ANSWER, args.more)
        turns = [engine.second_turn(args.prompt, ANSWER, args.more) for _ in range(args.turns)]
    finally:
        engine.close()
    return _medians(turns)


def theirs(peer: Peer, path: Path, shape: Shape, args: argparse.Namespace) -> tuple[float, float]:
    """With repacked weights, if those do not end it."""
    flags = ["-t", str(args.threads)]
    try:
        return _played(peer, path, shape, args, flags)
    except (StreamError, OSError) as error:
        print(f"llama-server with repacked weights: {str(error)[:200]}", flush=True)
        return _played(peer, path, shape, args, [*flags, "--no-repack"])


def _played(peer: Peer, path: Path, shape: Shape, args: argparse.Namespace, flags: list[str]) -> tuple[float, float]:
    turns = []
    with peer.cache_server(path, 1, args.prompt * 2, flags) as url:
        for number in range(args.turns):
            said = prompt(shape, args.prompt, number)
            first = completed(url, said, ANSWER)
            second = completed(url, said + first.tokens + prompt(shape, args.more, number + 1), 1)
            turns.append((first.prompt_ms / 1e3, second.prompt_ms / 1e3))
    return _medians(turns)


def _medians(turns: list[tuple[float, float]]) -> tuple[float, float]:
    first, second = (statistics.median(times) * 1e3 for times in zip(*turns, strict=True))
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--llama", type=Path, help="folder with llama-server")
    parser.add_argument("--type", default="Q8_0")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--more", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    peer = Peer(args.llama) if args.llama else None
    data: dict[str, Any] = {"machine": describe_machine(args.threads), "isa": _native.choose_isa("")}
    data |= {"versions": versions(peer), "type": args.type, "layers": args.layers, "rows": []}
    args.models.mkdir(parents=True, exist_ok=True)
    print("| layers | by | first turn, ms | second turn, ms |\n|---|---|---|---|", flush=True)
    for name, kind in KINDS.items():
        shape = replace(kind, layers=args.layers)
        path = model_path(args.models, shape.layers, args.type, f"{shape.family}-{name}")
        write_model(path, shape, args.type)
        found = {"ktserve": partial(ours, path, shape, args.type, args)}
        if peer is not None:
            found["llama.cpp"] = partial(theirs, peer, path, shape, args)
        try:
            for who, measure in found.items():
                first, second = measure()
                data["rows"].append({"layers": name, "by": who, "first_ms": first, "second_ms": second})
                print(f"| {name} | {who} | {first:.1f} | {second:.1f} |", flush=True)
        finally:
            path.unlink()
        if args.out is not None:
            record.write(args.out, data)


if __name__ == "__main__":
    main()
