"""Structured output against free text: tokens a second of the same server, in turns.

    python -m benchmarks.cpu.structured MODEL [--streams 8 32] [--tokens 128] [--rounds 5] [-- FLAGS OF ktserve serve]

Every stream writes exactly so many tokens: free text with ignore_eos, or a list of objects that is longer than that.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.client import Request, burst, our_request, our_server

_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tame": {"type": "boolean"},
    },
    "required": ["name", "age", "tame"],
    "additionalProperties": False,
}


def _structured(prompt: list[int], tokens: int) -> Request:
    path, body = our_request(prompt, tokens, None)
    schema = {"type": "array", "items": _ITEM, "minItems": tokens}
    structured: dict[str, Any] = {**body, "ignore_eos": False, "structured_outputs": {"json": schema}}
    return path, structured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="of ktserve serve, after --")
    args = parser.parse_intermixed_args()  # flags may stand apart from the model
    with our_server(args.model, args.flags) as url:
        for streams in args.streams:
            prompts = [[7 * i + j + 1 for j in range(16)] for i in range(streams)]
            free = [our_request(prompt, args.tokens, None) for prompt in prompts]
            structured = [_structured(prompt, args.tokens) for prompt in prompts]
            rates: dict[str, list[float]] = {"free": [], "structured": []}
            for turn in range(args.rounds + 1):  # the first warms up
                for name, requests in (("free", free), ("structured", structured)):
                    rate = burst(url, requests, args.tokens).summary()["tok_s"]
                    if turn:
                        rates[name].append(rate)
            ratio = statistics.median(s / f for s, f in zip(rates["structured"], rates["free"], strict=True))
            shown = ", ".join(f"{name} {statistics.median(values):.1f} tok/s" for name, values in rates.items())
            print(f"{streams} streams: {shown}, structured / free {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
