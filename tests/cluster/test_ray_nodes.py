"""Replicas on nodes of their own, of which one ends. For `make test-ray`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from testing.waiting import PATIENCE_S, eventually
from tests.cluster.on_ray import SERVER, comes, ended, prepare, processes, ready

if not os.environ.get("KTSERVE_TEST_RAY"):
    pytest.skip("for make test-ray", allow_module_level=True)
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)
_ADAPTERS = 24  # each replica is the first choice of some, whatever Ray names them


class Nodes(NamedTuple):
    url: str
    cluster: Any
    workers: list[Any]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """A head without CPUs, two nodes of one each: a replica on either."""
    port = prepare()
    from ray import serve
    from ray.cluster_utils import Cluster

    from cluster.app import build

    args = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=args)
    try:
        workers = [cluster.add_node(num_cpus=1, object_store_memory=100 << 20) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        # else each node has a proxy at this one port of this one machine, and a connection is any of theirs
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        settings = {"model": "null:step_ms=20,answer=400", "adapters": [f"a{i}=/null/{i}" for i in range(_ADAPTERS)]}
        serve.run(build({"replicas": 2, "num_cpus": 1, "serve": settings}), name="ktserve")
        url = f"http://127.0.0.1:{port}"
        comes(lambda: ready(url) == 2)
        names = (f"nobody{i}" for i in count())
        comes(lambda: len({home(url, next(names)) for _ in range(_ADAPTERS)}) == 2, "the router knows one replica")
        yield Nodes(url, cluster, workers)
    finally:
        ray.shutdown()
        cluster.shutdown()


def ask(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "Hi", "max_tokens": 2}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def home(url: str, model: str) -> str:
    """The replica that answers, if only that there is no such model."""
    return ask(url, model).headers["x-ktserve-replica"]


def node_of(process: psutil.Process, workers: list[Any]) -> Any:
    """The one of them whose raylet started the process, or its parent; else None."""
    parents = {parent.pid for parent in process.parents()}
    return next((n for n in workers if n.all_processes["raylet"][0].process.pid in parents), None)


def test_a_node_that_ends_loses_its_streams_alone(nodes: Nodes) -> None:
    homes: dict[str, list[str]] = {}
    for i in range(_ADAPTERS):
        homes.setdefault(home(nodes.url, f"a{i}"), []).append(f"a{i}")
    assert len(homes) == 2, "adapters are spread"
    assert not any(node_of(process, nodes.workers) for process in processes("ray::ServeReplica:ktserve:front"))
    servers = {home: processes("--config", f"ktserve-replica-{home}-")[0] for home in homes}
    on = {home: node_of(server, nodes.workers) for home, server in servers.items()}
    assert set(map(id, on.values())) == set(map(id, nodes.workers)), "one on each node"
    lost, kept = homes

    def stream(adapter: str) -> Any:
        body = {"model": adapter, "prompt": "Hi", "max_tokens": 400, "stream": True, "ignore_eos": True}
        return httpx.stream("POST", f"{nodes.url}/v1/completions", json=body, timeout=PATIENCE_S)

    with stream(homes[lost][0]) as ends, stream(homes[kept][0]) as goes_on:
        lines, others = ends.iter_lines(), goes_on.iter_lines()
        assert all(next(line for line in each if line).startswith("data: {") for each in (lines, others))
        nodes.cluster.remove_node(on[lost], allow_graceful=False)
        rest = [line for line in lines if line]
        assert "error" in json.loads(rest[-1].removeprefix("data: ")), rest[-1]
        assert [line for line in others if line][-1] == "data: [DONE]"
    eventually(lambda: ended(servers[lost]))
    comes(lambda: ask(nodes.url, homes[lost][0]).status_code == 200)
    assert home(nodes.url, homes[lost][0]) == kept
    nodes.cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    comes(lambda: len({p.parent() for p in processes(*SERVER)}) == 2)
