"""ktserve and llama-server on one GGUF file in turn, through `ktserve bench`.

python -m benchmarks.peers.serving MODEL.gguf --llama BINARIES --threads 8 --out FOLDER \\
    --adapter lora-8L-0 --adapter lora-8L-1

Each load runs against both, the order changing from one to the next. For a machine that does nothing else: the client
shares it. JSON of each run, a page for each load and one table of all (table.md) are in the folder. An adapter is
FOLDER/ for us and FOLDER.gguf beside it for llama-server, as benchmarks/models/make.py writes them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.client import our_server
from benchmarks.peers.llamacpp import Flags, Peer
from loadtests.bench.main import main as bench
from loadtests.bench.report import page

STREAMS = (1, 8, 16, 32)
SERVERS = ("ktserve", "llama-server")
_SPARE = 64  # positions for what a tokenizer makes of made-up words, a turn


@dataclass(frozen=True)
class Load:
    """Tokens of a prompt, of which `prefix` are the same in all, and of an answer."""

    prompt: int
    answer: int
    prefix: int = 0
    turns: int = 1
    adapters: int = 0

    @property
    def context(self) -> int:
        return self.prefix + self.turns * (self.prompt - self.prefix + self.answer + _SPARE)

    def flags(self, ours: bool) -> list[str]:
        """Of `ktserve bench`. Each server has its own way to name an adapter in a request."""
        flags = ["--input-tokens", self.prompt, "--output-tokens", self.answer, "--prefix-tokens", self.prefix]
        flags += ["--turns", self.turns]
        if self.adapters and ours:
            flags += ["--models", ",".join(f"a{i}" for i in range(self.adapters))]
        for chosen in range(0 if ours else self.adapters):
            scales = [{"id": i, "scale": float(i == chosen)} for i in range(self.adapters)]
            flags += ["--fields", json.dumps({"lora": scales})]
        return [str(flag) for flag in flags]


LOADS = {
    "decode-heavy": Load(64, 256),
    "prefill-heavy": Load(1024, 16),
    "multi-turn": Load(576, 64, prefix=512, turns=4),
    **{f"adapters-{n}": Load(64, 128, adapters=n) for n in (1, 2, 4, 8)},
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's binaries")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--load", action="append", choices=LOADS, help="default: all that --adapter is enough for")
    parser.add_argument("--adapter", type=Path, action="append", default=[], metavar="FOLDER", help="may be repeated")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    for name in args.load or ():
        if LOADS[name].adapters > len(args.adapter):
            parser.error(f"--load {name}: {LOADS[name].adapters} times --adapter, {len(args.adapter)} are given")
    for folder in args.adapter:
        if not folder.is_dir() or not _gguf(folder).is_file():
            parser.error(f"--adapter {folder}: {folder}/ and {_gguf(folder)} must be there")
    chosen = args.load or [name for name, load in LOADS.items() if load.adapters <= len(args.adapter)]
    args.out.mkdir(parents=True, exist_ok=True)
    status, rows = 0, []
    for number, name in enumerate(chosen):
        for who in SERVERS if number % 2 == 0 else reversed(SERVERS):
            status |= _measure(args, who, name)
        runs = {who: json.loads(_file(args.out, who, name).read_text()) for who in SERVERS}
        (args.out / f"{name}.html").write_text(page(runs), encoding="utf-8")
        rows += _rows(name, *(runs[who] for who in SERVERS))
        (args.out / "table.md").write_text("\n".join([*_HEAD, *rows, ""]), encoding="utf-8")
    return status


def _measure(args: argparse.Namespace, who: str, name: str) -> int:
    load, ours = LOADS[name], who == SERVERS[0]
    most, adapters = max(map(int, args.streams.split(","))), args.adapter[: LOADS[name].adapters]
    if ours:
        flags = ["--cpu-threads", str(args.threads), "--max-num-seqs", str(most), "--measure-bandwidth"]
        flags += ["--max-adapter-slots", str(len(adapters))] if adapters else []
        for i, folder in enumerate(adapters):
            flags += ["--adapters", f"a{i}={folder.resolve()}"]
        server = our_server(args.model, [*flags, "--kv-cache-tokens", str(most * load.context)])
    else:
        loras = [_gguf(folder) for folder in adapters]
        peer = Peer(args.llama)
        server = peer.server(args.model, Flags(args.threads), most, load.context, loras, cache=load.prefix > 0)
    with server as url:
        file = str(_file(args.out, who, name))
        return bench([url, "--concurrency", args.streams, *load.flags(ours), "--name", who, "--json", file])


_HEAD = [
    "| load | streams | ktserve tok/s | llama-server tok/s | ratio | TTFT P50, ms | ITL P99, ms |",
    "|---|---|---|---|---|---|---|",
]


def _rows(name: str, ours: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """A line for each number of streams; times are ours / theirs."""
    lines = []
    for mine, theirs in zip(ours["points"], other["points"], strict=True):
        speeds = mine["output_tokens_s"], theirs["output_tokens_s"]
        ratio = f"{speeds[0] / speeds[1]:.2f}" if speeds[1] else "-"
        times = [f"{mine[key]} / {theirs[key]}" for key in ("ttft_p50_ms", "itl_p99_ms")]
        lines.append(f"| {name} | {mine['level']:g} | {speeds[0]} | {speeds[1]} | {ratio} | {' | '.join(times)} |")
    return lines


def _gguf(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.gguf"


def _file(folder: Path, who: str, name: str) -> Path:
    return folder / f"{name}-{who}.json"


if __name__ == "__main__":
    sys.exit(main())
