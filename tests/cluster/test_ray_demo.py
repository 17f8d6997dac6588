"""The demo model and its adapters over Ray, while replicas and the router are killed. For `make test-ray`."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from demo.paths import demo_adapters
from testing.waiting import PATIENCE_S, eventually
from tests.cluster.on_ray import SERVER, comes, ended, prepare, processes, ready

if not os.environ.get("KTSERVE_TEST_RAY"):
    pytest.skip("for make test-ray", allow_module_level=True)
ray = pytest.importorskip("ray")

REPLICAS = 2
QUESTION = [{"role": "user", "content": "What is 7 + 8?"}]
_VICTIMS = {
    "a replica's server": SERVER,
    "a replica": ("ray::", ":engines"),
    "the router": ("ray::", ":front"),
}
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = prepare()
    from ray import serve

    from cluster.app import build

    settings = {"max_num_seqs": 4, "kv_cache_tokens": 4096, "max_adapter_slots": 2, "cors_origins": ["https://a.b"]}
    said = {"replicas": REPLICAS, "num_cpus": 0.1, "serve": settings}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(said), name="ktserve")
        at = f"http://127.0.0.1:{port}"
        comes(lambda: ready(at) == REPLICAS)
        yield at
        serve.shutdown()
    finally:
        ray.shutdown()


def post(url: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=PATIENCE_S)


def answers(url: str) -> dict[str, str]:
    """Greedy ones of each model."""
    found = {}
    for model in ("demo", *demo_adapters()):
        body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
        answer = post(url, "/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        found[model] = answer.json()["choices"][0]["message"]["content"]
    return found


def test_each_adapter_answers_in_every_form(url: str) -> None:
    said = answers(url)
    assert len(set(said.values())) > 1 and said == answers(url)
    for model, text in said.items():
        chat = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
        assert post(url, "/v1/messages", chat).json()["content"][0]["text"] == text
        responses = {"model": model, "input": QUESTION, "max_output_tokens": 24, "temperature": 0}
        output = post(url, "/v1/responses", responses).json()["output"]
        assert output[-1]["content"][0]["text"] == text
        options = {"temperature": 0, "num_predict": 24}
        ollama = post(url, "/api/chat", {**chat, "stream": False, "options": options}).json()
        assert ollama["message"]["content"] == text
        assert post(url, "/v1/messages/count_tokens", chat).json()["input_tokens"] > 0
        assert httpx.get(f"{url}/v1/models/{model}", timeout=PATIENCE_S).json()["id"] == model
    page = httpx.get(url, timeout=PATIENCE_S)
    assert page.status_code == 200 and page.headers["content-security-policy"]


def test_hostile_bodies_hang_nobody(url: str) -> None:
    kind = {"Content-Type": "application/json", "Origin": "https://a.b"}
    nested = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for body in (b'{"model": "\\ud800", "prompt": "a"}', b'{"model": "\xed\xa0\x80"}', b"[" * 10_000_000, nested):
        answer = httpx.post(f"{url}/v1/chat/completions", content=body, headers=kind, timeout=PATIENCE_S)
        assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
        assert answer.headers["access-control-allow-origin"] == "https://a.b"
    large = (b"x" * (1 << 20) for _ in range(40))
    answer = httpx.post(f"{url}/v1/chat/completions", content=large, headers=kind, timeout=PATIENCE_S)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert post(url, "/v1/batches", {}).json()["error"]["code"] == "not_over_replicas"


def test_replicas_report_where_adapters_are(url: str) -> None:
    answers(url)

    def slots() -> set[str]:
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
        found = re.findall(r'ktserve_adapter_resident\{replica="\w+",model_name="(\w+)",place="(\w+)"\} 1', metrics)
        return {adapter for adapter, place in found if place == "slot"}

    eventually(lambda: slots() and slots() <= demo_adapters().keys())


@pytest.mark.parametrize("victim", _VICTIMS)
def test_a_kill_under_load(url: str, victim: str) -> None:
    """Every request ends; afterwards all is as before."""
    before, ends, over = answers(url), Counter[str](), threading.Event()

    def ask(model: str) -> None:
        while not over.is_set():
            body = {"model": model, "messages": QUESTION, "max_tokens": 8, "stream": True}
            try:
                with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as stream:
                    lines = [line for line in stream.iter_lines() if line]
                whole = stream.status_code == 200 and lines[-1] == "data: [DONE]"
                ends["200" if whole else f"{stream.status_code} ended early"] += 1
                if stream.status_code == 200 and not whole:
                    assert "error" in json.loads(lines[-1].removeprefix("data: "))
            except httpx.TransportError as error:
                ends[type(error).__name__] += 1

    killed = processes(*_VICTIMS[victim])[0]
    gone = [killed, *killed.children(recursive=True)]

    def back() -> bool:
        servers = processes(*SERVER)
        return len(servers) == REPLICAS and ready(url) == REPLICAS and all(map(ended, gone))

    threads = [threading.Thread(target=ask, args=(model,)) for model in before]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: ends["200"] >= len(threads))
        killed.kill()
        comes(back, "what was killed was not replaced")
        well = ends["200"]
        comes(lambda: ends["200"] >= well + 2 * len(threads), "nothing is answered after the kill")
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a request never ended"
    assert answers(url) == before, dict(ends)
