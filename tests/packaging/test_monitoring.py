"""Prometheus and the dashboard against a server with the demo model: everything that is asked for is there."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from api.tenants.hashes import new_key
from testing.waiting import PATIENCE_S, eventually
from tests.api.test_proxies import free_port
from tests.e2e.conftest import Server, serving

ROOT = Path(__file__).parents[2]
ADMIN_KEY = "the-admin-key"
# What the panels stand for a time window; anything else with a $ would be sent to Prometheus as it is.
INTERVALS = {"$__rate_interval": "1m"}


def queries() -> list[str]:
    """Of all panels."""
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    for name, value in INTERVALS.items():
        found = [query.replace(name, value) for query in found]
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Everything that the dashboard shows has happened: answers by an adapter, a refusal for a limit."""
    folder = tmp_path_factory.mktemp("monitored")
    key, hashed = new_key()
    tenants = {"tenants": {"few": {"keys": [hashed.line], "requests_per_minute": 2}}}
    (folder / "tenants.yaml").write_text(yaml.safe_dump(tenants))
    flags = ["--admin-key", ADMIN_KEY, "--tenants", str(folder / "tenants.yaml"), "--pack-cache", "off"]
    flags += ["--kv-disk", "64MiB", "--kv-disk-dir", str(folder / "kv"), "--measure-bandwidth"]
    with serving(folder, *flags) as running:
        body = {"model": "pirate", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
        headers = {"Authorization": f"Bearer {key}"}
        codes = [running.http.post("/v1/chat/completions", json=body, headers=headers).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        yield running


def test_a_scrape_has_every_metric_of_the_dashboard(server: Server) -> None:
    def missing() -> set[str]:
        scrape = server.http.get("/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).text
        return asked - set(re.findall(r"^(\w+)", scrape, re.MULTILINE))

    asked = {name for query in queries() for name in re.findall(r"ktserve_\w+", query)}
    assert len(asked) > 30
    eventually(lambda: not missing(), f"not in /metrics: {missing()}")


def test_queries_hold_no_variable_that_prometheus_would_get() -> None:
    assert not [query for query in queries() if "$" in query]


@pytest.fixture
def prometheus(server: Server, tmp_path: Path) -> Iterator[httpx.Client]:
    """With the file of deploy/, of which the target and the key's place are this test's."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    (tmp_path / "admin-key").write_text(f"{ADMIN_KEY}\n")
    text = (ROOT / "deploy" / "prometheus.yml").read_text()
    replaced = {
        "/run/secrets/admin-key": str(tmp_path / "admin-key"),
        "ktserve:8000": server.url.removeprefix("http://"),
        "scrape_interval: 5s": "scrape_interval: 1s",
    }
    for ours, its in replaced.items():
        assert ours in text
        text = text.replace(ours, its)
    (tmp_path / "prometheus.yml").write_text(text)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)

    def ready() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        with contextlib.suppress(httpx.TransportError):
            return client.get("/-/ready").status_code == 200
        return False

    try:
        with httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_S) as client:
            eventually(ready, "Prometheus did not start")
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_prometheus_reads_the_server_and_answers_every_panel(prometheus: httpx.Client) -> None:
    def asked(query: str) -> list[Any]:
        answer = prometheus.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        return list(answer["data"]["result"])

    def unanswered() -> list[str]:
        return [query for query in queries() if not asked(query)]

    def is_up() -> bool:
        targets = prometheus.get("/api/v1/targets").json()["data"]["activeTargets"]
        return [target["health"] for target in targets] == ["up"]

    eventually(is_up, "the target is not up")
    eventually(lambda: not unanswered(), "panels without data")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_knows_every_line(tmp_path: Path) -> None:
    (tmp_path / "admin-key").touch()
    text = (ROOT / "deploy" / "prometheus.yml").read_text().replace("/run/secrets", str(tmp_path))
    (tmp_path / "prometheus.yml").write_text(text)
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
