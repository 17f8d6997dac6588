"""The first token of a long prompt: computed, found in memory, and read from disk by a server started afterwards.

python -m benchmarks.serving.kv_disk MODEL --folder EMPTY_FOLDER [--tokens 8176] [--kv-cache-dtype int8]
Each is one request of one token over HTTP; the disk's files are read from the page cache, then from the disk.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.client import our_server

_FIRST = 1000  # token ids from there on


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.kv_disk", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8176, help="models of 8192 take so many")
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args(argv)
    flags = ["--kv-disk", "64GiB", "--kv-disk-dir", str(args.folder), "--skip-tokenizer"]
    flags += ["--kv-cache-dtype", args.kv_cache_dtype, "--kv-cache-tokens", str(args.tokens + 256)]
    rows = []
    with our_server(args.model, flags) as url:
        _ask(url, 64, 5)  # what the first request alone costs
        rows.append(("computed", *_ask(url, args.tokens)))
        rows.append(("in memory", *_ask(url, args.tokens)))
        while _metric(url, "engine_disk_unsaved_blocks"):
            time.sleep(0.1)
    for where in ("page cache", "disk"):
        if where == "disk":
            _drop(args.folder)
        with our_server(args.model, flags) as url:
            _ask(url, 64, 5)
            before = _metric(url, "kv_disk_read_bytes_total")
            rows.append((f"after a restart, from the {where}", *_ask(url, args.tokens)))
            read = _metric(url, "kv_disk_read_bytes_total") - before
    print(f"{args.tokens} tokens, {read / args.tokens:.0f} bytes each on disk")
    print("| prompt | first token, s | tokens found | GB/s |\n|---|---|---|---|")
    for name, seconds, found in rows:
        rate = f"{read / seconds / 1e9:.2f}" if name.startswith("after") else ""
        print(f"| {name} | {seconds:.3f} | {found} | {rate} |")
    return 0


def _ask(url: str, tokens: int, first: int = _FIRST) -> tuple[float, int]:
    """Seconds, and tokens that were not computed."""
    body = {"prompt": [first + i * 7 % 5000 for i in range(tokens)], "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=3600)
    if response.is_error:
        raise RuntimeError(response.text)
    answer = response.json()
    return time.perf_counter() - began, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def _metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
    found = re.search(rf"^ktserve_{name} (\S+)$", text, re.M)
    if found is None:
        raise RuntimeError(f"the server has no metric {name}")
    return float(found[1])


def _drop(folder: Path) -> None:
    """The files from the page cache."""
    for path in folder.glob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
