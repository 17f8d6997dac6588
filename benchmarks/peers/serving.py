"""ktserve and llama-server on one GGUF file in turn, through `ktserve bench`.

python -m benchmarks.peers.serving MODEL.gguf --llama BINARIES --threads 8 --out FOLDER

Each load runs against both, the order changing from one to the next. For a machine that does nothing else: the client
shares it. JSON of each run and one page a load are in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cpu.client import our_server
from benchmarks.peers.llamacpp import Flags, Peer
from loadtests.bench.main import main as bench
from loadtests.bench.report import page

STREAMS = (1, 8, 16, 32)
LOADS = {"decode-heavy": (64, 256), "prefill-heavy": (1024, 16)}  # tokens in, tokens out
_SPARE = 64  # positions for what a tokenizer makes of made-up words


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's binaries")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--load", action="append", choices=LOADS, help="default: all")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    status = 0
    for number, name in enumerate(args.load or LOADS):
        for who in ("ktserve", "llama-server") if number % 2 == 0 else ("llama-server", "ktserve"):
            status |= _measure(args, who, name)
        runs = {who: json.loads(_file(args.out, who, name).read_text()) for who in ("ktserve", "llama-server")}
        (args.out / f"{name}.html").write_text(page(runs), encoding="utf-8")
    return status


def _measure(args: argparse.Namespace, who: str, name: str) -> int:
    prompt, answer = LOADS[name]
    most = max(map(int, args.streams.split(",")))
    context = prompt + answer + _SPARE
    if who == "ktserve":
        flags = ["--cpu-threads", str(args.threads), "--max-num-seqs", str(most), "--measure-bandwidth"]
        server = our_server(args.model, [*flags, "--kv-cache-tokens", str(most * context)])
    else:
        server = Peer(args.llama).server(args.model, Flags(args.threads), most, context, [])
    with server as url:
        lengths = ["--input-tokens", str(prompt), "--output-tokens", str(answer)]
        file = str(_file(args.out, who, name))
        return bench([url, "--concurrency", args.streams, *lengths, "--name", who, "--json", file])


def _file(folder: Path, who: str, name: str) -> Path:
    return folder / f"{name}-{who}.json"


if __name__ == "__main__":
    sys.exit(main())
