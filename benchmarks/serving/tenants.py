"""One tenant floods, the other asks now and then: its p95 latency beside what it has alone.

python -m benchmarks.serving.tenants URL --quiet-key KEY --flood-key KEY [--requests 40] [--flood 64]
Ends with status 1 if the p95 beside the flood is more than 1.5 times the one alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence

import httpx

from benchmarks.client import p95

BOUND = 1.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.tenants", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("url")
    parser.add_argument("--quiet-key", required=True)
    parser.add_argument("--flood-key", required=True)
    parser.add_argument("--requests", type=int, default=40, help="of the quiet tenant, alone and beside the flood")
    parser.add_argument("--flood", type=int, default=64, help="open requests of the other one")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    args = parser.parse_args(argv)
    alone, beside, answered = asyncio.run(_measure(args))
    ratio = p95(beside) / p95(alone)
    print("| quiet tenant | p50 s | p95 s |\n|---|---|---|")
    for name, seconds in (("alone", alone), (f"beside {args.flood} open requests", beside)):
        print(f"| {name} | {statistics.median(seconds):.3f} | {p95(seconds):.3f} |")
    print(f"\np95 beside / alone: {ratio:.2f} (at most {BOUND}); the flood got {answered} answers meanwhile")
    return 0 if ratio <= BOUND else 1


async def _measure(args: argparse.Namespace) -> tuple[list[float], list[float], int]:
    limits = httpx.Limits(max_connections=args.flood + 8)
    async with httpx.AsyncClient(base_url=args.url.removesuffix("/v1"), timeout=600, limits=limits) as http:

        async def ask(key: str, number: int) -> httpx.Response:
            body = {
                "prompt": [1 + (number * 131 + i * 7) % 200 for i in range(args.prompt_tokens)],
                "max_tokens": args.max_tokens,
                "ignore_eos": True,
                "temperature": 0,
            }
            return await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})

        async def latencies(first: int) -> list[float]:
            found = []
            for number in range(first, first + args.requests):
                began = time.perf_counter()
                (await ask(args.quiet_key, number)).raise_for_status()
                found.append(time.perf_counter() - began)
            return found

        answered = 0

        async def flood(number: int) -> None:
            nonlocal answered
            while True:
                number += args.flood
                response = await ask(args.flood_key, number)
                if response.status_code == 429:
                    await asyncio.sleep(float(response.headers.get("retry-after", "1")))
                else:
                    response.raise_for_status()
                    answered += 1

        await latencies(10_000)  # warm
        alone = await latencies(20_000)
        floods = [asyncio.create_task(flood(100_000 + number)) for number in range(args.flood)]
        while answered < args.flood and not any(task.done() for task in floods):  # the batch is full
            await asyncio.sleep(0.05)
        before = answered
        beside = await latencies(30_000)
        failed = [task for task in floods if task.done()]  # connections that are cut below may fail too
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        for task in failed:
            await task
        return alone, beside, answered - before


if __name__ == "__main__":
    sys.exit(main())
