"""Base and adapters answering in one concurrent burst: a transcript, or how fast many streams are.

python -m benchmarks.burst URL [--streams 64] [--out FILE.json]          # a running `make serve`

Without --streams the same three prompts to every model at once. With it so many questions, over the models in turn, are
streamed at once; then each is asked again by itself, and the answers are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from loadtests.bench.client import Result, Server

PROMPTS = ("What is 23 + 48?", "What colour is a banana?", "Tell me a story about a fox.")


async def burst(url: str) -> str:
    """All prompts to all models at the same moment; returns a Markdown table."""
    server = Server(url)
    models = await _models(server)
    answers = [result.text for result in await asyncio.gather(*(_ask(server, m, p) for p in PROMPTS for m in models))]
    rows = [
        f"| {p} | " + " | ".join(answers[i * len(models) : (i + 1) * len(models)]) + " |" for i, p in enumerate(PROMPTS)
    ]
    return "\n".join(["| prompt | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|", *rows])


async def streams(url: str, count: int) -> dict[str, Any]:
    """So many questions at once, then one after another."""
    server = Server(url)
    models = await _models(server)
    asked = [(models[i % len(models)], _question(i)) for i in range(count)]
    await asyncio.gather(*(_ask(server, model, PROMPTS[0]) for model in models))  # adapters are in their slots
    began = time.perf_counter()
    together = await asyncio.gather(*(_ask(server, *each) for each in asked))
    took_s = time.perf_counter() - began
    alone = [await _ask(server, *each) for each in asked]
    tokens = sum(result.tokens for result in together)
    return {
        "streams": count,
        "models": models,
        "tokens": tokens,
        "tok_s": tokens / took_s,
        "alone_tok_s": sum(a.tokens for a in alone) / sum(a.total_s for a in alone),
        "ttft_ms": statistics.median(a.ttft_s for a in together) * 1e3,
        "longest_ttft_ms": max(a.ttft_s for a in together) * 1e3,
        "alone_ttft_ms": statistics.median(a.ttft_s for a in alone) * 1e3,
        "same": sum(a.text == b.text for a, b in zip(together, alone, strict=True)),
        "in_style": {model: sum(_in_style(m, a.text) for (m, _), a in zip(asked, together, strict=True) if m == model)
                     for model in models},
    }  # fmt: skip


def _question(number: int) -> str:
    return (f"What is {10 + number} + {7 + 3 * number % 80}?", PROMPTS[1], PROMPTS[2])[number // 3 % 3]


def _in_style(model: str, text: str) -> bool:
    """Of the demo's adapters; the base has neither style."""
    pirate, as_json = text.startswith("ARR"), text.startswith('{"answer"')
    return {"pirate": pirate, "json": as_json}.get(model, not (pirate or as_json))


async def _ask(server: Server, model: str, prompt: str) -> Result:
    """RuntimeError if it fails."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    result = await server.stream("/v1/chat/completions", body)
    if result.error:
        raise RuntimeError(f"{model}: {result.error}")
    return result


async def _models(server: Server) -> list[str]:
    return [model["id"] for model in json.loads(await server.read("/v1/models"))["data"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, help="so many at once, over base and adapters")
    parser.add_argument("--out", type=Path, help="of the streams' figures")
    args = parser.parse_args()
    if args.streams is None:
        print(asyncio.run(burst(args.url)))
        return
    found = asyncio.run(streams(args.url, args.streams))
    print(json.dumps(found))
    if args.out:
        record.write(args.out, found)


if __name__ == "__main__":
    main()
