"""Tokens a second of one replica and of several over Ray, none with a model: each bound by the time of its steps.

python -m benchmarks.cluster.rates --replicas 3

Starts a cluster of this machine. It shows what routing and the way through Ray cost, not what machines add. With the
rates come the CPUs that the proxy and the front, which all streams go through, kept busy, and the machine's load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence

import psutil

from benchmarks.client import free_port
from loadtests.bench.client import Server
from loadtests.bench.sweep import Limits, point
from loadtests.bench.work import Scale, Work

_ANSWER = 32  # tokens
_STREAMS = 2  # for each sequence that can run: a replica that has one less than another still has enough


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=250.0, help="of a replica (default: 250)")
    parser.add_argument("--seqs", type=int, default=8, help="sequences that a replica runs at a time (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="answers of each stream (default: 5)")
    args = parser.parse_args(argv)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300"}
    import ray
    from ray import serve

    from cluster.app import build

    ray.init(include_dashboard=False, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = {"model": f"null:step_ms={args.step_ms:g},answer={_ANSWER}", "max_num_seqs": args.seqs}
    rates = []
    try:
        for replicas in (1, args.replicas):
            said = {"replicas": replicas, "num_cpus": 0.1, "routing": {"slack": 1}, "serve": settings}
            serve.run(build(said), name="ktserve")
            used_s, began = _cpu_s(), time.monotonic()
            rates.append(asyncio.run(_rate(f"http://127.0.0.1:{port}", _STREAMS * args.seqs * replicas, args.rounds)))
            wall_s = time.monotonic() - began
            cpus = {name: round((after - used_s[name]) / wall_s, 2) for name, after in _cpu_s().items()}
            load = round(os.getloadavg()[0], 1)
            print(json.dumps({"replicas": replicas, "tokens_s": rates[-1], "cpus": cpus, "load": load}), flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps({"ratio": round(rates[1] / rates[0], 2)}))
    return 0


def _cpu_s() -> dict[str, float]:
    """Seconds of CPU so far."""
    found = {"proxy": 0.0, "front": 0.0}
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        line = " ".join(process.info["cmdline"] or [])
        for name, title in (("proxy", "ray::ProxyActor"), ("front", "ray::ServeReplica:ktserve:front")):
            if line.startswith(title):
                found[name] += process.info["cpu_times"].user + process.info["cpu_times"].system
    return found


async def _rate(url: str, streams: int, rounds: int) -> float:
    """Of so many streams. RuntimeError if a request fails."""
    server = Server(url)
    listed = json.loads(await server.read("/v1/models"))["data"]
    work = Work((listed[0]["id"],), 16, _ANSWER)
    for requests in (streams, streams * rounds):  # the first are to warm up
        found = await point(server, server, work, Scale(0.0, 1.0), "concurrency", streams, requests, Limits(60.0, 60.0))
        if found["failed"]:
            raise RuntimeError(f"{found['failed']} requests failed: {found['errors'][0]}")
    return float(found["output_tokens_s"])


if __name__ == "__main__":
    sys.exit(main())
