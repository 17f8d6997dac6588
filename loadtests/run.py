"""Run the scenario without a browser and print a table: `python -m ktserve loadtests --users 8 --duration 60`.

Without --host a server is started (and ended) on a free port; what follows `--` goes to `ktserve serve`.
"""

from __future__ import annotations

from locust.env import Environment  # isort: skip  # patches the standard library: before all others

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence

import gevent
from rich.console import Console
from rich.table import Table

from ktserve.launcher import program
from loadtests.scenario import Chat, LoadError, list_models

_START_S = 600.0
_PERCENTILES = (0.5, 0.95, 0.99)
_SHOWN_ERRORS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if an answer failed or none came."""
    parser = argparse.ArgumentParser(prog="ktserve loadtests", description=__doc__)
    parser.add_argument("--host", help="URL of a server that runs, e.g. http://127.0.0.1:8000")
    parser.add_argument("--users", type=int, default=8, help="chats at the same time (default: 8)")
    parser.add_argument("--duration", type=float, default=60, help="seconds (default: 60)")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer (default: 64)")
    parser.add_argument("--api-key", help="key to send")
    parser.add_argument("serve", nargs="*", help="flags for the server that is started, after --")
    args = parser.parse_args(argv)
    if args.users < 1 or args.duration <= 0 or args.max_tokens < 1:
        parser.error("--users, --duration and --max-tokens must be above 0")
    os.environ["LOAD_MAX_TOKENS"] = str(args.max_tokens)
    if args.api_key:
        os.environ["LOAD_API_KEY"] = args.api_key
    with contextlib.ExitStack() as stack:
        try:
            host = (args.host or stack.enter_context(_server(args.serve))).rstrip("/")
            list_models(host)
        except (ServerError, LoadError, OSError) as error:
            print(f"error: {args.host or 'server'}: {error}", file=sys.stderr)
            return 1
        environment = _run(host, args.users, args.duration)
    return report(environment, args.users, args.duration)


def _run(host: str, users: int, duration_s: float) -> Environment:
    environment = Environment(user_classes=[Chat], host=host)
    runner = environment.create_local_runner()
    runner.start(users, spawn_rate=users)
    gevent.sleep(duration_s)
    runner.quit()
    return environment


def report(environment: Environment, users: int, duration_s: float) -> int:
    """Print the table; times are in milliseconds. Exit status as in `main`."""
    stats = environment.stats
    table = Table(title=f"{users} chats at the same time for {duration_s:g} s; milliseconds")
    for column in ("", "model", "count", "failed", "p50", "p95", "p99", "max"):
        table.add_column(column, justify="left" if column in ("", "model") else "right")
    tokens = 0
    for entry in sorted(stats.entries.values(), key=lambda entry: (entry.method, entry.name)):
        times = [f"{entry.get_response_time_percentile(share):.0f}" for share in _PERCENTILES]
        times.append(f"{entry.max_response_time:.0f}")
        table.add_row(entry.method, entry.name, str(entry.num_requests), str(entry.num_failures), *times)
        if entry.method == "chat":
            tokens += entry.total_content_length
    console = Console(width=max(100, Console().width))
    console.print(table)
    console.print(f"{tokens / duration_s:.1f} tokens/s of finished answers", highlight=False)
    for failure in list(stats.errors.values())[:_SHOWN_ERRORS]:
        console.print(f"failed {failure.occurrences}x: {failure.name}: {failure.error}", markup=False, highlight=False)
    answers = [entry for entry in stats.entries.values() if entry.method == "chat"]
    good = sum(entry.num_requests - entry.num_failures for entry in answers)
    return 0 if good and not any(entry.num_failures for entry in answers) else 1


class ServerError(Exception):
    """The server could not be started."""


@contextlib.contextmanager
def _server(flags: Sequence[str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    host = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(program("serve", *flags, "--port", str(port)))
    try:
        _wait(process, host)
        yield host
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], host: str) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{host}/health", timeout=5):  # 200: it is ready
            return
        time.sleep(0.2)
    raise ServerError(f"the server was not ready after {_START_S:g} s")


if __name__ == "__main__":
    sys.exit(main())
