"""Tokens a second through the server beside those of the same engine alone, in turns.

    python -m benchmarks.serving.share MODEL [--streams 8 32] [--rounds 5] [-- FLAGS OF serve]

Both load the model, so that memory for two is needed; the one that is not asked sleeps. Counted is from the last
stream's first token to the first stream's last one; the client runs on this machine as well. Ends with status 1 if
the server keeps less than 95%.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.client import burst, our_request, our_server
from benchmarks.gpu.served import Served, steady_tok_s
from benchmarks.settings import served_config

BOUND = 0.95


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("flags", nargs="*", help="of ktserve serve, after --")
    args = parser.parse_intermixed_args(argv)  # flags may stand apart from the model
    flags = ["--skip-tokenizer", *args.flags]
    good = True
    print("| streams | server tok/s | engine tok/s | share |\n|---|---|---|---|")
    with our_server(args.model, flags) as url:
        engine = Served(served_config(args.model, flags))
        for streams in args.streams:
            rates: list[tuple[float, float]] = []
            for _ in range(args.rounds + 1):
                requests = [our_request(engine.prompt(args.prompt), args.output, None) for _ in range(streams)]
                served = steady_tok_s(burst(url, requests, args.output))
                rates.append((served, engine.burst(streams, args.prompt, args.output)))
            del rates[0]  # the first of each warms up
            share = statistics.median(served / alone for served, alone in rates)
            good &= share >= BOUND
            http, alone = (statistics.median(side) for side in zip(*rates, strict=True))
            print(f"| {streams} | {http:.1f} | {alone:.1f} | {share:.1%} |", flush=True)
        engine.core.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
