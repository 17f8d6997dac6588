"""What everything but the model costs: the server over the null engine.

python -m benchmarks.front.run [--seconds 10] [--out FILE]     # JSON; CPU time by process beside each rate
python -m benchmarks.front.run --checkout DIR                  # the server of another checkout, to compare in turns

The client is on the same machine: where CPUs are few or busy, the CPU time per answer or token of each process says
more than the rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import yaml

from benchmarks import record
from benchmarks.front.client import Tally, closed_loop, post
from loadtests.child import ended_after, served_at
from loadtests.http import Server

_CHECKOUT = Path(__file__).resolve().parents[2]
_ROWS = 256
_STREAM_TOKENS = 128


@dataclass(frozen=True)
class Case:
    """`tokens` of each answer; `tenants` with a key each; `adapters` known, which the requests name in turn. `demo`:
    the demo model in place of the null engine."""

    name: str
    connections: int
    tokens: int
    stream: bool
    rows: int = _ROWS
    tenants: int = 0
    adapters: int = 0
    step_ms: float = 0.0
    demo: bool = False


CASES = (
    Case("short completions", 64, 4, stream=False),
    Case("streamed tokens", 256, _STREAM_TOKENS, stream=True, step_ms=2.0),
    Case("2,000 streams", 2000, _STREAM_TOKENS, stream=True, rows=2048, step_ms=30.0),
    Case("64 tenants", 128, 16, stream=True, tenants=64, step_ms=2.0),
    Case("1,000 adapters", 128, 16, stream=True, adapters=1000, step_ms=2.0),
    Case("demo model, 8 streams", 8, _STREAM_TOKENS, stream=True, rows=32, demo=True),
    Case("demo model, 32 streams", 32, _STREAM_TOKENS, stream=True, rows=32, demo=True),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--checkout", type=Path, default=_CHECKOUT, help="folder whose server is measured")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    args = parser.parse_args(argv)
    found = []
    for case in CASES:
        if args.case is None or case.name in args.case:
            found.append(measure(case, args.seconds, args.checkout))
            print(json.dumps(found[-1]), flush=True)
    if args.out:
        record.write(args.out, {"load_before": psutil.getloadavg()[0], "cases": found})
    return 1 if any(case["refused"] for case in found) else 0


def measure(case: Case, seconds: float, checkout: Path = _CHECKOUT) -> dict[str, float | str]:
    """Memory is unique bytes of api and engine, after the first third and at the end."""
    with serving(case, checkout) as (process, server):
        requests = _requests(server, case)
        closed_loop(server, requests, min(case.connections, 64), 1.0, Tally())  # warm
        third = Tally()
        closed_loop(server, requests, case.connections, seconds / 3, third)
        before, memory, tally = _cpu_s(process), _memory_mib(process), Tally()
        own = time.process_time()
        took = closed_loop(server, requests, case.connections, 2 * seconds / 3, tally)
        own = time.process_time() - own
        after = _cpu_s(process)
        tokens = tally.ended * case.tokens
        result: dict[str, float | str] = {
            "case": case.name,
            "answers_s": round(tally.ended / took, 1),
            "tokens_s": round(tokens / took, 1),
            "refused": tally.refused,
            "first_p50_ms": round(1000 * statistics.median(tally.firsts_s), 1),
            "first_p99_ms": round(1000 * statistics.quantiles(tally.firsts_s, n=100)[-1], 1),
            "cpus_server": round(sum(after.values()) / took - sum(before.values()) / took, 2),
            "cpus_client": round(own / took, 2),
            "memory_mib": round(_memory_mib(process), 1),
            "memory_grew_mib": round(_memory_mib(process) - memory, 1),
        }
        used = {name: total - before[name] for name, total in after.items()} | {"client": own}
        for name, used_s in used.items():
            result[f"{name}_us_answer"] = round(1e6 * used_s / tally.ended, 1)
            result[f"{name}_us_token"] = round(1e6 * used_s / tokens, 2)
        return result


def _requests(server: Server, case: Case) -> list[bytes]:
    body = {
        "prompt": "Count from 1 to 5.", "max_tokens": case.tokens, "ignore_eos": True, "stream": case.stream,
        "temperature": 0,
    }  # fmt: skip
    count = max(1, case.tenants, case.adapters)
    models = [{"model": f"adapter-{i}"} if case.adapters else {} for i in range(count)]
    asking = [replace(server, key=f"key-{i}" if case.tenants else "") for i in range(count)]
    return [post(one, {**body, **model}) for one, model in zip(asking, models, strict=True)]


@contextlib.contextmanager
def serving(case: Case, checkout: Path = _CHECKOUT) -> Iterator[tuple[psutil.Process, Server]]:
    """`ktserve serve` of a checkout, over the null engine or the demo model: its process and where it is."""
    with tempfile.TemporaryDirectory(prefix="ktfront-") as folder:
        log, config = Path(folder) / "log", Path(folder) / "config.yaml"
        settings = {
            "port": "0", "max_num_seqs": case.rows, "max_queue": 4096, "max_adapter_slots": 64,
            "max_connections_per_address": 4096, "max_connections": 4096,
            "adapters": [f"adapter-{i}=/null/{i}" for i in range(case.adapters)],
            "api_key": [f"key-{i}=tenant-{i}" for i in range(case.tenants)],
        }  # fmt: skip
        if not case.demo:
            settings["model"] = f"null:step_ms={case.step_ms},answer={case.tokens}"
        config.write_text(yaml.safe_dump(settings))
        command = [sys.executable, str(checkout / "ktserve" / "__main__.py"), "serve", "--config", str(config)]
        with log.open("wb") as sink, ended_after(command, output=sink) as process:
            yield psutil.Process(process.pid), Server(served_at(process, log))


def _cpu_s(server: psutil.Process) -> dict[str, float]:
    """User and system time so far, by part."""
    found = {"api": _seconds(server), "engine": 0.0, "prepare": 0.0}
    for child in server.children(recursive=True):
        found["engine" if "engine" in child.cmdline() else "prepare"] += _seconds(child)
    return found


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _memory_mib(server: psutil.Process) -> float:
    engine = [child for child in server.children() if "engine" in child.cmdline()]
    return sum(process.memory_full_info().uss for process in (server, *engine)) / 2**20


if __name__ == "__main__":
    sys.exit(main())
