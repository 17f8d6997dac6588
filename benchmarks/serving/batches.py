"""Batches beside live traffic, and large ones: latency of live requests alone and beside a batch, in turns; memory of
the server while a file of many lines is uploaded and checked.

    python -m benchmarks.serving.batches MODEL [--rounds 3] [--apart 0 0.3] [--lines 1000000] [-- FLAGS OF serve]

Ends with status 1 if the p95 beside a batch is more than 1.1 times the one alone, or if the memory of ten times as
many lines is more than 64 MiB larger.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import record
from benchmarks.client import our_server, p95
from benchmarks.report.serving import batches, uploads

BOUND = 1.1
SPARE_MIB = 64.0
_OVER = ("completed", "failed", "expired", "cancelled")
_BOUNDARY = "lines"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=40, help="live ones of a turn, one after another")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--apart", type=float, nargs="+", default=[0.0, 0.3], help="seconds between live requests")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--batch-lines", type=int, default=2000, help="of the batch beside live requests")
    parser.add_argument("--lines", type=int, default=1_000_000, help="of the large file; 0: no large file")
    parser.add_argument("--out", type=Path, help="a JSON file of benchmarks/results")
    parser.add_argument("flags", nargs="*", help="of ktserve serve, after --")
    args = parser.parse_intermixed_args(argv)  # flags may stand apart from the model
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--data-dir", folder, *args.flags]
        with our_server(args.model, flags) as url, httpx.Client(base_url=url, timeout=600) as http:
            rows = [_beside(http, args, apart_s) for apart_s in args.apart]
            print(batches(rows), end="\n\n", flush=True)
            large = _large(http, args.lines)
    print(uploads(large))
    if args.out:
        record.write(args.out, {"model": args.model.name, "rows": rows, "uploads": large})
    growth = large[-1]["peak_mib"] - large[0]["peak_mib"] if large else 0.0
    return 0 if growth <= SPARE_MIB and all(row["ratio"] <= BOUND for row in rows) else 1


# ---- latency


def _beside(http: httpx.Client, args: argparse.Namespace, apart_s: float) -> dict[str, Any]:
    alone: list[float] = []
    beside: list[float] = []
    answered = 0
    _latencies(http, args, 0, 0.0)  # warm
    for turn in range(args.rounds):
        alone += _latencies(http, args, 2 * turn + 1, apart_s)
        batch = _start(http, args.batch_lines, args.max_tokens)
        _wait(http, batch, lambda found: bool(_completed(found)))
        before = _completed(_batch(http, batch))
        beside += _latencies(http, args, 2 * turn + 2, apart_s)
        answered += _completed(_batch(http, batch)) - before
        _end(http, batch)
    return {
        "apart_s": apart_s,
        "alone_p50_s": statistics.median(alone),
        "alone_p95_s": p95(alone),
        "beside_p50_s": statistics.median(beside),
        "beside_p95_s": p95(beside),
        "ratio": p95(beside) / p95(alone),
        "lines": answered,
    }


def _latencies(http: httpx.Client, args: argparse.Namespace, turn: int, apart_s: float) -> list[float]:
    found = []
    for number in range(args.requests):
        time.sleep(apart_s)
        body = _body(1_000_000 * (turn + 1) + number, args.max_tokens)
        began = time.perf_counter()
        http.post("/v1/completions", json=body).raise_for_status()
        found.append(time.perf_counter() - began)
    return found


def _body(number: int, max_tokens: int) -> dict[str, Any]:
    prompt = random.Random(number).choices(range(1, 200), k=64)  # no two alike: nothing comes from the prefix cache
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}


# ---- memory


def _large(http: httpx.Client, lines: int) -> list[dict[str, Any]]:
    """The server's memory while a tenth of `lines`, and all of them, are uploaded and checked; nothing for 0."""
    if lines <= 0:
        return []
    server = psutil.Process().children()[0]
    rows = []
    for count in (lines // 10, lines):
        began = time.perf_counter()
        with _Peak(server) as peak:
            batch = _start(http, count, 1)
            _wait(http, batch, lambda found: found["status"] != "validating")
        _end(http, batch)
        rows.append({"lines": count, "seconds": time.perf_counter() - began, "peak_mib": peak.mib})
    return rows


class _Peak:
    """The most memory of a process's own while the context lasts, looked at every tenth of a second."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.mib = 0.0

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.mib = max(self.mib, self._process.memory_full_info().uss / 2**20)
            if self._over.wait(0.1):
                return


# ---- batches


def _start(http: httpx.Client, lines: int, max_tokens: int) -> str:
    """The id of a batch of so many lines; the file is sent as it is made."""
    headers = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
    file = http.post("/v1/files", content=_form(lines, max_tokens), headers=headers)
    file.raise_for_status()
    wanted = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=wanted)
    batch.raise_for_status()
    return str(batch.json()["id"])


def _form(lines: int, max_tokens: int) -> Iterator[bytes]:
    head = "Content-Disposition: form-data; name="
    yield f'--{_BOUNDARY}\r\n{head}"purpose"\r\n\r\nbatch\r\n'.encode()
    yield f'--{_BOUNDARY}\r\n{head}"file"; filename="lines.jsonl"\r\n\r\n'.encode()
    for first in range(0, lines, 1000):
        yield b"".join(_line(number, max_tokens) for number in range(first, min(lines, first + 1000)))
    yield f"\r\n--{_BOUNDARY}--\r\n".encode()


def _line(number: int, max_tokens: int) -> bytes:
    line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": _body(number, max_tokens)}
    return json.dumps(line).encode() + b"\n"


def _batch(http: httpx.Client, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/batches/{batch}").raise_for_status().json()
    return found


def _completed(batch: dict[str, Any]) -> int:
    return int((batch.get("request_counts") or {}).get("completed", 0))


def _wait(http: httpx.Client, batch: str, until: Callable[[dict[str, Any]], bool]) -> None:
    while True:
        found = _batch(http, batch)
        if found["status"] in ("failed", "expired"):
            raise SystemExit(f"the batch has {found['status']}: {found.get('errors')}")
        if until(found) or found["status"] in _OVER:
            return
        time.sleep(0.1)


def _end(http: httpx.Client, batch: str) -> None:
    """Cancel it, and wait until its files are written."""
    http.post(f"/v1/batches/{batch}/cancel")
    _wait(http, batch, lambda found: found["status"] in _OVER)


if __name__ == "__main__":
    sys.exit(main())
