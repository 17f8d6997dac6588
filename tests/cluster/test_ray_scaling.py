"""A replica that is added because first tokens come late, on a Ray cluster of this machine. For `make test-ray`."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import pytest

from cluster.call import Call
from testing.waiting import PATIENCE_S
from tests.cluster.on_ray import comes, prepare, ready

if not os.environ.get("KTSERVE_TEST_RAY"):
    pytest.skip("for make test-ray", allow_module_level=True)
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)

SCALING = {
    "min_replicas": 1, "max_replicas": 2, "ttft_target_s": 0.25, "target_ongoing_requests": 1000,
    "upscale_delay_s": 0, "look_back_period_s": 15, "metrics_interval_s": 1,
}  # fmt: skip


def test_a_replica_comes_when_first_tokens_are_late() -> None:
    port = prepare()
    from ray import serve

    from cluster.app import build

    one = {"model": "null:step_ms=50,answer=4", "max_num_seqs": 1}
    with pytest.raises(ValueError, match=r"autoscaling has max_replica: there is ttft_target_s, min_replicas"):
        build({"autoscaling": {"max_replica": 2}, "serve": one})
    application = build({"num_cpus": 0.1, "autoscaling": SCALING, "serve": one})
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    enough = Event()
    try:
        url = f"http://127.0.0.1:{port}"
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(application, name="ktserve")

        def ask_on() -> None:
            body = {"model": "null", "prompt": "Hi", "max_tokens": 4}
            while not enough.is_set():
                httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()

        comes(lambda: ready(url) == 1)
        with ThreadPoolExecutor(8) as pool:  # eight at a replica that answers one at a time: far from 1000 open
            asking = [pool.submit(ask_on) for _ in range(8)]
            try:
                comes(lambda: ready(url) == 2 or any(each.done() for each in asking))
            finally:
                enough.set()
            for each in asking:
                each.result()
        serve.shutdown()
    finally:
        ray.shutdown()


def test_a_replica_whose_metrics_are_closed_to_it_says_so() -> None:
    from cluster.replicas.engine import Engine
    from cluster.scaling.first_tokens import FirstTokens

    class Closed(Engine):
        def __init__(self) -> None:
            self._first_tokens, self._admin_key = FirstTokens(), ""

        async def _fetch(self, call: Call) -> tuple[int, bytes]:
            return 401, b""

    with pytest.raises(ValueError, match=r"ttft_target_s: .* answer 401; with API keys, set admin_key"):
        asyncio.run(Closed().record_autoscaling_stats())
