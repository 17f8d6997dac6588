"""What replicas share, without Ray: the catalogue of adapters, metrics on one page, parts of limits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from api.tenants.hashes import new_key
from cluster.call import Call
from cluster.replicas.adapters import LOAD, UNLOAD, Adapters
from cluster.replicas.directory import Catalogue, Directory, Report
from cluster.replicas.metrics import merged
from cluster.replicas.shares import divided, write_share


class Handle:
    """A deployment's, of an object in this process."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: getattr(self.target, name)(*args))


class FakeServer:
    """One that knows adapters by name, each with the path it was loaded from; `missing` are not on its disk."""

    def __init__(self, *missing: str) -> None:
        self.adapters: dict[str, str] = {}
        self.missing, self.calls = missing, 0

    async def fetch(self, call: Call) -> tuple[int, bytes]:
        self.calls += 1
        assert call.headers == (("x", "y"),), "with the key of whoever made the change"
        body = json.loads(call.body)
        name = body["lora_name"]
        if call.path == UNLOAD:
            return (200, b"{}") if self.adapters.pop(name, None) else (404, b"no such adapter")
        if body["lora_path"] in self.missing:
            return 400, b"no such folder"
        if name in self.adapters and not body.get("replace"):
            return 400, b"known"
        self.adapters[name] = body["lora_path"]
        return 200, b"{}"


def call(path: str, catalogue: int = 0, model: str = "", **body: Any) -> Call:
    return Call("POST", path, (("x", "y"),), json.dumps(body).encode(), model=model, catalogue=catalogue)


def load(name: str, path: str, **more: Any) -> Call:
    return call(LOAD, lora_name=name, lora_path=path, **more)


def test_a_change_at_one_replica_is_made_at_the_others_when_they_are_asked() -> None:
    async def run() -> None:
        directory = Handle(Directory())
        servers = [FakeServer(), FakeServer("/b"), FakeServer()]
        one, two, three = (Adapters(directory, server.fetch) for server in servers)
        assert await one.answer(load("law", "/a")) == (200, b"{}")
        assert await one.answer(load("law", "/c")) == (400, b"known") and await directory.number.remote() == 1
        assert await two.answer(call("/v1/completions")) is None and not servers[1].adapters, "it is to see nothing"
        assert await two.answer(call("/v1/completions", 1)) is None
        assert servers[1].adapters == {"law": "/a"} and servers[0].calls == 2

        assert (await one.answer(load("law", "/b", replace=True)))[0] == 200  # type: ignore[index]
        status, said = await two.answer(call("/v1/completions", 2, "law"))  # type: ignore[misc]
        assert status == 503 and b"no such folder" in said, "not the version before"
        assert await two.answer(call("/v1/completions", 2, "base")) is None
        servers[1].missing = ()
        assert await two.answer(call("/v1/completions", 2, "law")) is None and servers[1].adapters == {"law": "/b"}

        assert (await two.answer(call(UNLOAD, lora_name="law")))[0] == 200  # type: ignore[index]
        assert await one.answer(call("/v1/completions", 3)) is None and not servers[0].adapters
        assert await three.answer(call("/v1/completions", 3)) is None and not servers[2].adapters
        assert (await one.answer(call(UNLOAD, lora_name="law")))[0] == 404  # type: ignore[index]

    asyncio.run(run())


def test_a_directory_that_restarts_learns_what_replicas_know() -> None:
    async def run() -> None:
        handle = Handle(Directory())
        server, other = FakeServer(), FakeServer()
        one, two = Adapters(handle, server.fetch), Adapters(handle, other.fetch)
        await one.answer(load("law", "/a"))
        await one.answer(load("med", "/b"))
        handle.target = Directory()
        await two.tell()
        assert await handle.number.remote() == 0, "it knows nothing itself"
        await one.tell()
        assert await handle.number.remote() == 2
        handle.target = Directory()
        await one.answer(load("tax", "/c"))
        assert await handle.number.remote() == 3
        await two.answer(call("/v1/completions", 3))
        assert other.adapters == server.adapters == {"law": "/a", "med": "/b", "tax": "/c"}
        assert await Directory().catalogue(Catalogue()) == Catalogue()

    asyncio.run(run())


def test_reports_of_replicas_that_ended_are_forgotten() -> None:
    async def run() -> None:
        now = 0.0
        directory = Directory(lambda: now)
        assert await directory.report("b", Report("ready", "x 1")) == 1
        assert await directory.report("a", Report("loading", "")) == 2
        assert list(await directory.reports()) == ["a", "b"]
        await directory.leave("a")
        await directory.leave("a")
        assert list(await directory.reports()) == ["b"]
        now = 31.0
        assert await directory.report("c", Report("ready", "")) == 1

    asyncio.run(run())


def test_metrics_of_all_on_one_page() -> None:
    page = """# HELP up Whether
# TYPE up gauge
up 1
# HELP wait_seconds Time
# TYPE wait_seconds histogram
wait_seconds_bucket{le="0.5",model="a b{}"} 3
wait_seconds_bucket{le="+Inf"} 4
wait_seconds_count{} 4
"""
    found = merged({"one": page, "two": page.replace("up 1", "up 0"), "off": ""})
    lines = found.splitlines()
    assert lines[:4] == ["# HELP up Whether", "# TYPE up gauge", 'up{replica="one"} 1', 'up{replica="two"} 0']
    assert 'wait_seconds_bucket{replica="one",le="0.5",model="a b{}"} 3' in lines
    assert 'wait_seconds_count{replica="two"} 4' in lines
    assert len(lines) == 4 + 8 and len([line for line in lines if line.startswith("#")]) == 4
    families = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families(found)
    assert {sample.labels["replica"] for family in families for sample in family.samples} == {"one", "two"}


def test_limits_are_divided_and_nothing_else(tmp_path: Path) -> None:
    entry = {
        "keys": [new_key()[1].line], "weight": 2, "requests_per_minute": 10, "tokens_per_minute": 7,
        "max_concurrency": 2, "max_context": 100,
    }  # fmt: skip
    text = yaml.safe_dump({"tenants": {"a": entry, "b": {"keys": [], "tokens_per_minute": True}}})
    found = yaml.safe_load(divided(text, 3))["tenants"]
    assert found["a"] == {**entry, "requests_per_minute": 3, "tokens_per_minute": 2, "max_concurrency": 1}
    assert found["b"]["tokens_per_minute"] is True, "the server refuses it"
    source, into = tmp_path / "a.yaml", tmp_path / "b.yaml"
    for wrong in ("tenants: [", "[]", "tenants: 7", "tenants: {a: 7}"):  # whatever is wrong, the server says it
        source.write_text(wrong)
        write_share(source, into, 2)
        assert into.read_text()
    source.write_text(text)
    write_share(source, into, 0)
    assert yaml.safe_load(into.read_text()) == yaml.safe_load(text)
