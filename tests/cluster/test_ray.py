"""Three replicas without a model on a Ray cluster of this machine. For `make test-ray`: Ray takes minutes to start."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Iterator

import httpx
import psutil
import pytest

from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import ROOT

if not os.environ.get("KTSERVE_TEST_RAY"):
    pytest.skip("for make test-ray", allow_module_level=True)
ray = pytest.importorskip("ray")

REPLICAS = 3
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    for name in ("READY_CHECK", "HEALTH_CHECK"):  # Serve kills a proxy that a busy machine starts in more than 5 s
        os.environ[f"RAY_SERVE_PROXY_{name}_TIMEOUT_S"] = "300"
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    from ray import serve

    from cluster.app import build

    folder = tmp_path_factory.mktemp("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        config = folder / "config.yaml"
        settings = {"model": "null:step_ms=20,answer=400", "adapters": [f"a{i}=/null/{i}" for i in range(6)]}
        said = {"replicas": REPLICAS, "num_cpus": 0.1, "routing": {"slots": 2, "slack": 2}, "serve": settings}
        config.write_text(json.dumps(said))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"config": str(config)}), name="ktserve")
        address = f"http://127.0.0.1:{port}"
        eventually(lambda: ask(address, "a0").status_code == 200)
        yield address
        serve.shutdown()
    finally:
        ray.shutdown()


def ask(url: str, model: str, tokens: int = 2, prompt: str = "Hi") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def servers() -> list[psutil.Process]:
    """The replicas' own servers."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "serve" in line and any("ktserve-replica-" in word for word in line):
            found.append(process)
    return found


def test_answers_are_those_of_a_server(url: str) -> None:
    models = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert {"a0", "a5"} <= {model["id"] for model in models}
    answer = ask(url, "a1", 3).json()
    assert answer["model"] == "a1" and answer["usage"]["completion_tokens"] == 3
    assert ask(url, "nobody").status_code == 404 and ask(url, "a1", -1).status_code == 400
    body = {"model": "a1", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert stream.headers["content-type"].startswith("text/event-stream") and lines[-1] == "data: [DONE]"
    refused = httpx.post(f"{url}/v1/load_lora_adapter", json={}, timeout=PATIENCE_S)
    assert refused.status_code == 501 and "docs/scale-out.md" in refused.text


def test_an_adapter_stays_on_its_replica(url: str) -> None:
    for adapter in ("a2", "a3", "a4"):
        homes = Counter(ask(url, adapter).headers["x-ktserve-replica"] for _ in range(5))
        assert len(homes) == 1, homes


def test_a_replica_that_dies_loses_its_streams_alone(url: str) -> None:
    body = {"model": "a5", "prompt": "Hi", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as stream:
        lines = stream.iter_lines()
        first = next(line for line in lines if line)
        home = stream.headers["x-ktserve-replica"]
        before = {process.pid for process in servers()}
        assert first.startswith("data: {") and len(before) == REPLICAS
        _of(home).kill()
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: ")), rest[-1]
    eventually(lambda: ask(url, "a5").status_code == 200, "no other replica took its place")
    eventually(lambda: len(servers()) == REPLICAS and {p.pid for p in servers()} != before, "none was started")


def _of(replica: str) -> psutil.Process:
    """The server whose configuration says that it is this replica's."""
    return next(p for p in servers() if f"ktserve-replica-{replica}-" in " ".join(p.cmdline()))
