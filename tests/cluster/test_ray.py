"""Three replicas without a model on a Ray cluster of this machine. For `make test-ray`: Ray takes minutes to start."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import yaml

from api.tenants.hashes import new_key
from testing.waiting import PATIENCE_S, eventually
from tests.cluster.on_ray import SERVER, comes, prepare, processes

if not os.environ.get("KTSERVE_TEST_RAY"):
    pytest.skip("for make test-ray", allow_module_level=True)
ray = pytest.importorskip("ray")

REPLICAS = 3
FEW = 6  # requests a minute
pytestmark = pytest.mark.timeout(900)


class App(NamedTuple):
    url: str
    key: str
    few: str  # key of a tenant with a limit
    said: dict[str, Any]

    def ask(self, model: str, tokens: int = 2, prompt: str = "Hi", key: str = "", **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, **more}
        return self.post("/v1/completions", body, key or self.key)

    def post(self, path: str, body: Any, key: str) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE_S, headers=bearer(key))

    def get(self, path: str, key: str = "") -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE_S, headers=bearer(key or self.key))

    def stream(self, model: str) -> AbstractContextManager[httpx.Response]:
        """A long answer."""
        body = {"model": model, "prompt": "Hi", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        return httpx.stream(
            "POST", f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S, headers=bearer(self.key)
        )

    @contextmanager
    def open_everywhere(self, model: str) -> Iterator[None]:
        """Streams that stay open, as many as it takes until each replica has one."""
        homes: set[str] = set()
        with ExitStack() as stack:
            for _ in range(20 * REPLICAS):
                answer = stack.enter_context(self.stream(model))
                assert answer.status_code == 200
                homes.add(answer.headers["x-ktserve-replica"])
                if len(homes) == REPLICAS:
                    break
            assert len(homes) == REPLICAS
            yield


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    port = prepare()
    from ray import serve

    from cluster.app import build

    folder = tmp_path_factory.mktemp("ray")
    (key, hashed), (few, few_hashed) = new_key(), new_key()
    tenants = {"free": {"keys": [hashed.line]}, "few": {"keys": [few_hashed.line], "requests_per_minute": FEW}}
    (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    settings = {
        "model": "null:step_ms=20,answer=400", "adapters": [f"a{i}=/null/{i}" for i in range(6)],
        "tenants": str(folder / "tenants.yaml"), "admin_key": "admin", "allow_any_adapter_path": True,
    }  # fmt: skip
    said = {"replicas": REPLICAS, "num_cpus": 0.1, "routing": {"slots": 2, "slack": 2}, "serve": settings}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        (folder / "config.yaml").write_text(json.dumps(said))
        serve.run(build({"config": str(folder / "config.yaml")}), name="ktserve")
        app = App(f"http://127.0.0.1:{port}", key, few, said)
        comes(lambda: app.ask("a0").status_code == 200)
        yield app
        serve.shutdown()
    finally:
        ray.shutdown()


def servers() -> list[psutil.Process]:
    """The replicas' own servers."""
    return processes(*SERVER)


def test_answers_are_those_of_a_server(app: App) -> None:
    models = app.get("/v1/models").json()["data"]
    assert {"a0", "a5"} <= {model["id"] for model in models}
    answer = app.ask("a1", 3).json()
    assert answer["model"] == "a1" and answer["usage"]["completion_tokens"] == 3
    assert app.ask("nobody").status_code == 404 and app.ask("a1", -2).status_code == 400
    assert app.ask("a1", key="kt-wrong").status_code == 401
    body = {"model": "a1", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True}
    url = f"{app.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S, headers=bearer(app.key)) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert stream.headers["content-type"].startswith("text/event-stream") and lines[-1] == "data: [DONE]"
    refused = app.post("/v1/files", {}, app.key)
    assert refused.status_code == 501 and "docs/scale-out.md" in refused.text


@pytest.mark.parametrize("key", ["", "kt-wrong", "its own"])
def test_a_gigabyte_takes_little_memory_and_stops_no_stream(app: App, key: str) -> None:
    """Chunked. Of the processes that read it: the proxy of Serve and the front."""
    readers = [*processes("ray::", "ProxyActor"), *processes("ray::", ":front")]
    assert len(readers) == 2
    before, most, sent = [each.memory_info().rss for each in readers], [0, 0], 0

    def gigabyte() -> Iterator[bytes]:
        nonlocal sent, most
        while sent < 1 << 30:
            sent += 1 << 20
            most = [max(peak, each.memory_info().rss) for peak, each in zip(most, readers, strict=True)]
            yield b" " * (1 << 20)

    with app.stream("a0") as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line)
        try:
            headers = bearer(app.key if key == "its own" else key) if key else {}
            answer = httpx.post(f"{app.url}/v1/completions", content=gigabyte(), headers=headers, timeout=PATIENCE_S)
            assert answer.status_code == (413 if key == "its own" else 401)
        except (httpx.WriteError, httpx.RemoteProtocolError):
            assert sent < 1 << 30  # it was closed while we still sent
        assert next(line for line in lines if line).startswith("data: {")
    grown = [(peak - was) >> 20 for peak, was in zip(most, before, strict=True)]
    assert max(grown) < 100, f"{grown} MiB"


def test_long_answers_are_spread_evenly(app: App) -> None:
    def spread() -> list[int]:
        homes: Counter[str] = Counter()
        with ExitStack() as stack:
            for _ in range(3 * REPLICAS):
                answer = stack.enter_context(app.stream("null"))
                assert answer.status_code == 200
                homes[answer.headers["x-ktserve-replica"]] += 1
                time.sleep(0.2)  # Serve forgets how many are open
        return list(homes.values())

    eventually(lambda: spread() == [3] * REPLICAS, "what other tests left open is counted too")


def test_an_adapter_stays_on_its_replica(app: App) -> None:
    for adapter in ("a2", "a3", "a4"):
        homes = Counter(app.ask(adapter).headers["x-ktserve-replica"] for _ in range(5))
        assert len(homes) == 1, homes


def test_an_adapter_loaded_once_is_at_each_replica_that_is_asked(app: App) -> None:
    def change(what: str, key: str = "admin", **more: Any) -> httpx.Response:
        return app.post(f"/v1/{what}_lora_adapter", {"lora_name": "late", **more}, key)

    assert app.ask("late").status_code == 404
    assert change("load", "nobody", lora_path="/null/late").status_code == 401
    assert app.ask("late").status_code == 404
    loaded = change("load", lora_path="/null/late")
    assert loaded.status_code == 200 and loaded.json()["id"] == "late"
    with app.open_everywhere("late"):
        pass
    assert change("load", lora_path="/null/other").status_code >= 400, "it is known, wherever the call goes"
    assert change("load", lora_path="/null/other", replace=True).status_code == 200
    with app.open_everywhere("late"):
        assert change("unload").status_code == 200
        assert {app.ask("late", prompt=f"{i}").status_code for i in range(2 * REPLICAS)} == {404}
    assert change("unload").status_code == 404


def test_health_and_metrics_are_those_of_all(app: App) -> None:
    comes(lambda: app.get("/health").json() == {"status": "ready", "replicas": {"ready": REPLICAS}})
    assert app.get("/metrics").status_code in (401, 403), "tenants are named in it"

    def replicas() -> set[str]:
        page = app.get("/metrics", "admin").text
        return set(re.findall(r'ktserve_engine_\w+\{replica="(\w+)"', page))

    eventually(lambda: len(replicas()) == REPLICAS)


def test_a_limit_holds_over_all_replicas(app: App) -> None:
    def shares() -> list[int]:
        found = []
        for server in servers():
            config = next(Path(word) for word in server.cmdline() if word.endswith("config.yaml"))
            tenants = yaml.safe_load(config.with_name("tenants.yaml").read_text())["tenants"]
            found.append(tenants["few"]["requests_per_minute"])
        return found

    eventually(lambda: shares() == [FEW // REPLICAS] * REPLICAS)
    answers = [app.ask("a1", 1, key=app.few) for _ in range(3 * FEW)]
    passed = [answer for answer in answers if answer.status_code == 200]
    took_s = sum(answer.elapsed.total_seconds() for answer in answers)
    assert FEW <= len(passed) <= FEW + 1 + FEW * took_s / 60
    assert len({answer.headers["x-ktserve-replica"] for answer in passed}) == REPLICAS
    assert {answer.status_code for answer in answers} == {200, 429} and answers[-1].headers["retry-after"]


def test_a_replica_that_dies_loses_its_streams_alone(app: App) -> None:
    body = {"model": "a5", "prompt": "Hi", "max_tokens": 400, "stream": True, "ignore_eos": True}
    url = f"{app.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S, headers=bearer(app.key)) as stream:
        lines = stream.iter_lines()
        first = next(line for line in lines if line)
        home = stream.headers["x-ktserve-replica"]
        before = {process.pid for process in servers()}
        assert first.startswith("data: {") and len(before) == REPLICAS
        _of(home).kill()
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: ")), rest[-1]
    comes(lambda: app.ask("a5").status_code == 200, "no other replica took its place")
    comes(lambda: len(servers()) == REPLICAS and {p.pid for p in servers()} != before, "none was started")


def test_an_update_goes_from_replica_to_replica(app: App) -> None:
    """A stream that runs ends as it was to, requests meanwhile are answered, then all answers are the new ones."""
    from ray import serve

    from cluster.app import build

    body = {"model": "a0", "prompt": "Hi", "max_tokens": 300, "stream": True, "ignore_eos": True}
    url = f"{app.url}/v1/completions"
    update = build({**app.said, "serve": app.said["serve"] | {"model": "null:step_ms=20,answer=3"}})
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", url, json=body, timeout=PATIENCE_S, headers=bearer(app.key)) as stream,
    ):
        lines = stream.iter_lines()
        next(line for line in lines if line)
        updated = pool.submit(serve.run, update, name="ktserve")
        meanwhile = [app.ask("a1", 5).status_code for _ in range(10)]
        rest = [line for line in lines if line]
        updated.result()
    assert rest[-1] == "data: [DONE]" and set(meanwhile) == {200}

    def new() -> bool:
        return {len(app.ask("a1", 9, prompt=f"{i}").json()["choices"][0]["text"].split()) for i in range(6)} == {3}

    eventually(new)


def _of(replica: str) -> psutil.Process:
    """The server whose configuration says that it is this replica's."""
    return processes("--config", f"ktserve-replica-{replica}-")[0]
