"""One tenant floods, the other asks now and then: its p95 latency beside what it has alone, and the flood's rate.

    python -m benchmarks.serving.tenants MODEL [--rounds 3] [--itl-target-ms 2] [-- FLAGS OF serve]

Starts a server for each --itl-target-ms, and one without, in turns. The flood comes from a process of its own, so that
the quiet client's clock does not wait for it. Ends with status 1 if the p95 with some target is more than --bound times
the one alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from ctypes import c_bool, c_long
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api.tenants.hashes import new_key
from benchmarks import record
from benchmarks.client import our_server, p95
from benchmarks.report.serving import tenants
from loadtests.http import Connection, Server

_GREEDY = {"ignore_eos": True, "temperature": 0}


@dataclass
class Row:
    """Seconds of the quiet tenant's requests alone and beside the flood, and the flood's tokens a second."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    flood_tok_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return p95(self.beside_s) / p95(self.alone_s)

    def summary(self) -> dict[str, float]:
        return {
            "alone_p50_s": statistics.median(self.alone_s),
            "alone_p95_s": p95(self.alone_s),
            "beside_p50_s": statistics.median(self.beside_s),
            "beside_p95_s": p95(self.beside_s),
            "ratio": self.ratio,
            "flood_tok_s": statistics.median(self.flood_tok_s),
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--itl-target-ms", type=float, nargs="+", default=[2.0])
    parser.add_argument("--bound", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40, help="of the quiet tenant in a round, alone and beside")
    parser.add_argument("--flood", type=int, default=64, help="open requests of the other one")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="a JSON file of benchmarks/results")
    parser.add_argument("flags", nargs="*", help="of ktserve serve, after --")
    args = parser.parse_intermixed_args(argv)
    targets: list[float | None] = [None, *args.itl_target_ms]
    rows = {target: Row() for target in targets}
    for _ in range(args.rounds):
        for target, row in rows.items():
            _round(args, target, row)
    results = [{"itl_target_ms": target, **row.summary()} for target, row in rows.items()]
    print(tenants(results))
    if args.out:
        record.write(args.out, {"model": args.model.name, "flood": args.flood, "rows": results})
    return 0 if min(row.ratio for target, row in rows.items() if target is not None) <= args.bound else 1


def _round(args: argparse.Namespace, target: float | None, row: Row) -> None:
    (quiet, quiet_hash), (flood, flood_hash) = new_key(), new_key()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.yaml"
        hashes = {"quiet": quiet_hash, "flood": flood_hash}
        file.write_text(json.dumps({"tenants": {name: {"keys": [key.line]} for name, key in hashes.items()}}))
        flags = ["--tenants", str(file), "--max-num-seqs", str(args.flood), *args.flags]
        flags += [] if target is None else ["--itl-target-ms", f"{target:g}"]
        with our_server(args.model, flags) as url:
            asyncio.run(_latencies(url, quiet, args, 1))  # warm
            row.alone_s += asyncio.run(_latencies(url, quiet, args, 2))
            context = multiprocessing.get_context("spawn")
            answered, over = context.Value(c_long), context.Value(c_bool)
            child = context.Process(target=_flood, args=(url, flood, args, answered, over))
            child.start()
            while answered.value < args.flood:  # the batch is full
                if not child.is_alive():
                    raise SystemExit("the flood has failed")
                time.sleep(0.05)
            before, began = answered.value, time.perf_counter()
            row.beside_s += asyncio.run(_latencies(url, quiet, args, 3))
            seconds = time.perf_counter() - began
            row.flood_tok_s.append((answered.value - before) * args.max_tokens / seconds)
            over.value = True
            child.join()


async def _latencies(url: str, key: str, args: argparse.Namespace, turn: int) -> list[float]:
    found = []
    server = Server(url, key)
    async with server.connection() as connection:
        for number in range(args.requests):
            began = time.perf_counter()
            await _ask(server, connection, args, 1_000_000 * turn + number)
            found.append(time.perf_counter() - began)
    return found


async def _ask(server: Server, connection: Connection, args: argparse.Namespace, number: int) -> None:
    prompt = random.Random(number).choices(range(1, 200), k=args.prompt_tokens)  # no two alike
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": args.max_tokens, **_GREEDY}
    data = json.dumps(body).encode()
    answer = await connection.ask(server.head("POST", "/v1/completions", len(data), again=True) + data)
    if answer.status != 200 or not answer.whole:
        raise SystemExit(f"{server.url}: {answer.refusal}")


def _flood(url: str, key: str, args: argparse.Namespace, answered: Any, over: Any) -> None:
    """Keep the requests open until it is over."""
    server = Server(url, key)

    async def keep(number: int) -> None:
        async with server.connection() as connection:
            while not over.value:
                await _ask(server, connection, args, 10_000_000 + number)
                number += args.flood
                answered.value += 1

    async def all_of_them() -> None:
        await asyncio.gather(*(keep(number) for number in range(args.flood)))

    asyncio.run(all_of_them())


if __name__ == "__main__":
    sys.exit(main())
