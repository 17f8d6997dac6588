"""`ktserve bench URL`: throughput, latency and goodput of a running OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ktserve.arguments import OneLineParser
from loadtests.bench import quick
from loadtests.bench.client import Server
from loadtests.bench.report import compared, label, page, table
from loadtests.bench.sweep import Limits, point
from loadtests.bench.work import Work
from loadtests.child import ServerError
from loadtests.http import HttpError
from loadtests.report.document import machine

_EXAMPLES = """\
examples:
  ktserve bench --quick                       the demo model's rates, on a server of its own
  ktserve bench --quick -- MODEL --quantise int8       any model's; behind -- stands what `ktserve serve` takes
  ktserve bench --quick http://127.0.0.1:8000          of a server that runs
  ktserve bench http://127.0.0.1:8000 --concurrency 1,8,16,32 --json ours.json
  ktserve bench http://127.0.0.1:8000 --rate 0.5,1,2,4 --ttft-limit-ms 2000 --itl-limit-ms 200 --plot ours.html
  ktserve bench http://127.0.0.1:8000 --models base,law,med --prefix-tokens 512 --input-tokens 640
  ktserve bench http://127.0.0.1:8000 --turns 4 --prefix-tokens 512 --input-tokens 576 --chat
  ktserve bench --compare ours.json theirs.json --plot both.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if a request failed, 2 for what makes no sense."""
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    args.serve = words[at + 1 :]
    console = Console(width=max(120, Console().width))
    try:
        if args.compare:
            return _compare(args.compare, args.plot, console)
        if args.quick:
            return _quick(args, console)
        if args.serve:
            raise ValueError("flags after -- are of the server that --quick starts")
        work, levels = _checked(args)
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    try:
        run = asyncio.run(_run(args, work, levels, console))
    except (HttpError, OSError) as error:
        print(f"error: {args.url}: {error}", file=sys.stderr)
        return 1
    console.print(
        table(run["points"], f"{args.url}: {args.input_tokens} tokens in, {args.output_tokens} out; times in ms")
    )
    for failed in (found for found in run["points"] if found["failed"]):
        console.print(
            f"{label(failed)}: {failed['failed']} failed: {failed['errors'][0]}", markup=False, highlight=False
        )
    if args.json:
        args.json.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        args.plot.write_text(page({run["name"]: run}), encoding="utf-8")
    return 1 if any(found["failed"] for found in run["points"]) else 0


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="ktserve bench",
        description="Measure a running OpenAI-compatible server: ktserve, vLLM, SGLang, llama-server, ...",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", nargs="?", help="e.g. http://127.0.0.1:8000")
    add(
        "--quick",
        action="store_true",
        help="one and eight sequences and a prompt, beside what is expected here",
    )
    add("--concurrency", help="open requests, several with commas (default: 1,8,16,32 unless --rate)")
    add("--rate", help="requests a second with Poisson arrivals, several with commas")
    add(
        "--requests",
        type=int,
        help="of a point, conversations with --turns (default: 4 for each open one and at least 16, or 60 at a rate)",
    )
    add("--input-tokens", type=int, default=128)
    add("--output-tokens", type=int, default=64)
    add("--prefix-tokens", type=int, default=0, help="of the input, the same in all prompts")
    add("--spread", type=float, default=0.0, help="by which lengths vary, 0 to 1: a share of them (default: 0)")
    add("--models", help="asked in turn (default: the first that /v1/models lists)")
    add(
        "--turns",
        type=int,
        default=1,
        help="of a conversation: each prompt is all that was said, and more (default: 1)",
    )
    add("--fields", action="append", default=[], metavar="JSON", help="added to requests; several are taken in turn")
    add("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    add("--respect-eos", action="store_true", help="for servers that do not know ignore_eos; answers may be shorter")
    add("--ttft-limit-ms", type=float, default=5000.0, help="of a good request (default: 5000)")
    add("--itl-limit-ms", type=float, default=250.0, help="of 99 of 100 gaps of a good request (default: 250)")
    add("--api-key", default="", help="key to send")
    add("--admin-key", default="", help="for /metrics, where that takes another key")
    add("--seed", type=int, default=0)
    add("--name", help="in plots and files (default: the URL)")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--plot", type=Path, metavar="FILE", help="write an HTML page with plots")
    add("--compare", type=Path, nargs=2, metavar="FILE", help="two files of --json instead of a server")
    return parser


def _checked(args: argparse.Namespace) -> tuple[Work, list[tuple[str, float]]]:
    if not args.url:
        raise ValueError("a URL, or --compare, is needed")
    for name in ("input_tokens", "output_tokens", "ttft_limit_ms", "itl_limit_ms"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    if not 0 <= args.prefix_tokens < args.input_tokens:
        raise ValueError(f"--prefix-tokens {args.prefix_tokens}: 0 to --input-tokens - 1 ({args.input_tokens - 1})")
    if not 0 <= args.spread <= 1:
        raise ValueError(f"--spread {args.spread}: 0 to 1")
    if args.requests is not None and args.requests < 1:
        raise ValueError(f"--requests {args.requests}: at least 1")
    if args.turns < 1:
        raise ValueError(f"--turns {args.turns}: at least 1")
    fields = tuple(json.loads(text) for text in args.fields)
    if not all(isinstance(each, dict) for each in fields):
        raise ValueError("--fields: each must be a JSON object")
    open_requests = args.concurrency or ("" if args.rate else "1,8,16,32")
    levels = [("concurrency", float(int(part))) for part in open_requests.split(",") if part]
    levels += [("rate", float(part)) for part in (args.rate or "").split(",") if part]
    if not all(0 < level < float("inf") for _, level in levels):
        raise ValueError("--concurrency and --rate: all must be above 0")
    models = tuple(name for name in (args.models or "").split(",") if name)
    work = Work(
        models, args.input_tokens, args.output_tokens, args.prefix_tokens, args.spread, args.seed, args.chat,
        not args.respect_eos, args.turns, fields,
    )  # fmt: skip
    return work, levels


async def _run(
    args: argparse.Namespace, work: Work, levels: Sequence[tuple[str, float]], console: Console
) -> dict[str, Any]:
    server = Server(args.url, args.api_key)
    metrics = Server(args.url, args.admin_key or args.api_key)
    if not work.models:
        work = replace(work, models=(await server.base_model(),))
    scale = await work.measure(server)
    limits = Limits(args.ttft_limit_ms / 1000, args.itl_limit_ms / 1000)
    load, points = os.getloadavg()[0], []
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for kind, level in levels:
        requests = args.requests or (60 if kind == "rate" else max(16, 4 * int(level)))
        found = await point(server, metrics, work, scale, kind, level, requests, limits)
        points.append(found)
        console.print(
            f"{label(found)}: {found['output_tokens_s']} tok/s, TTFT p50 {found['ttft_p50_ms']} ms", highlight=False
        )
    return {
        "name": args.name or args.url, "url": args.url, "when": when, "machine": machine(), "load_before": load,
        "work": asdict(work),
        "ttft_limit_ms": args.ttft_limit_ms, "itl_limit_ms": args.itl_limit_ms, "points": points,
    }  # fmt: skip


def _quick(args: argparse.Namespace, console: Console) -> int:
    """Raises ValueError for flags that it does not take."""
    ways = ("concurrency", "rate", "requests", "fields", "plot", "chat", "respect_eos")
    if given := [name for name in ways if getattr(args, name)]:
        raise ValueError(f"--quick takes no --{given[0].replace('_', '-')}: leave one of them out")
    if args.url and args.serve:
        raise ValueError("flags after -- are of a server that is started; a URL names one that runs")
    if args.models and "," in args.models:
        raise ValueError(f"--models {args.models}: --quick asks one")

    def measured(url: str) -> list[dict[str, Any]]:
        server, metrics = Server(url, args.api_key), Server(url, args.admin_key or args.api_key)
        return asyncio.run(quick.measure(server, metrics, args.models, args.seed))

    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        if args.url:
            points = measured(args.url)
        else:
            print("starting a server ...", file=sys.stderr)
            with quick.own_server(args.serve) as url:
                points = measured(url)
    except (HttpError, ServerError, OSError) as error:
        print(f"error: {args.url or 'the server that was started'}: {error}", file=sys.stderr)
        return 1
    console.print(quick.table(points))
    if any(point["expected_tokens_s"] is None for point in points):
        console.print("-: nothing is recorded for the format, or `ktserve serve` runs without --measure-bandwidth")
    if args.json:
        found = {"name": args.name or args.url or "quick", "when": when, "machine": machine(), "quick": points}
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _compare(files: Sequence[Path], plot: Path | None, console: Console) -> int:
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in files)
    console.print(compared(first, second))
    if plot:
        names = (first["name"], second["name"]) if first["name"] != second["name"] else tuple(map(str, files))
        plot.write_text(page(dict(zip(names, (first, second), strict=True))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
