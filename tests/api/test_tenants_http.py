"""Tenants from a file, over HTTP: what each may see and take, and what a reload changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.tenants.hashes import new_key
from testing import forked
from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import Running, environment, serving

ADAPTERS = [flag for name in ("reverse", "gated", "fail") for flag in ("--adapters", f"{name}=/fake/{name}")]
LIMITED = "requests_per_minute: 3\n    tokens_per_minute: 60\n    max_concurrency: 2"


class Tenants:
    def __init__(self, folder: Path, **fields: str) -> None:
        self.path = folder / "tenants.yaml"
        made = {name: new_key() for name in fields}
        self.keys = {name: key for name, (key, _) in made.items()}
        self.lines = {name: stored.line for name, (_, stored) in made.items()}
        self.write(**fields)

    def write(self, **fields: str) -> None:
        entries = [f"  {name}:\n    keys: [{self.lines[name]}]\n    {text}\n" for name, text in fields.items()]
        self.path.write_text("tenants:\n" + "".join(entries))


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return Tenants(
        tmp_path,
        all="weight: 2",
        law="models: [reverse]\n    default_model: reverse\n    max_context: 64\n    cache_salt: s",
        limited=LIMITED,
        low="priority_ceiling: 3\n    queue_share: 0.5",
    )


@pytest.fixture
def server(model_dir: Path, tmp_path: Path, tenants: Tenants) -> Iterator[Running]:
    flags = ["--tenants", str(tenants.path), "--admin-key", "admin", "--max-queue", "10"]
    with serving(model_dir, tmp_path, *ADAPTERS, *flags, gate=str(tmp_path / "gate")) as running:
        yield running


def ask(server: Running, key: str, model: str = "tiny", **body: Any) -> httpx.Response:
    return server.http.post(
        "/v1/completions",
        json={"model": model, "prompt": "abc", **body},
        headers={"Authorization": f"Bearer {key}"},
    )


def test_what_tenants_see(server: Running, tenants: Tenants) -> None:
    for name, expected in (("all", {"tiny", "reverse", "gated", "fail"}), ("law", {"reverse"})):
        headers = {"X-Api-Key": tenants.keys[name]}
        listed = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"]
        assert {entry["id"] for entry in listed} == expected
        assert all("/" not in entry["root"] for entry in listed), "where things lie is not for tenants"
    for hidden, unknown in (("tiny", "nope"), ("fail", "nope"), ("tiny:fail", "tiny:nope")):
        answers = [ask(server, tenants.keys["law"], model) for model in (hidden, unknown)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].text.replace(hidden, "X") == answers[1].text.replace(unknown, "X")
        got = [
            httpx.get(f"{server.url}/v1/models/{model}", headers={"X-Api-Key": tenants.keys["law"]})
            for model in (hidden, unknown)
        ]
        assert got[0].status_code == got[1].status_code == 404
        assert got[0].text.replace(hidden, "X") == got[1].text.replace(unknown, "X")
    for model in ("reverse", "tiny:reverse"):
        assert ask(server, tenants.keys["law"], model).json()["choices"][0]["text"] == "cba"


def test_what_the_engine_is_given(server: Running, tenants: Tenants) -> None:
    assert ask(server, tenants.keys["law"], "reverse").status_code == 200
    assert ask(server, tenants.keys["low"]).status_code == 200
    law, low = server.received("Submit")
    assert (law["tenant"], law["cache_group"], law["adapter"]) == ("law", "s", "reverse")
    assert (low["tenant"], low["priority"], low["max_waiting"]) == ("low", 3, 5)
    refused = ask(server, tenants.keys["low"], priority=2)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    assert ask(server, tenants.keys["low"], priority=4).status_code == 200
    long = ask(server, tenants.keys["law"], "reverse", prompt="x" * 64)
    assert long.status_code == 400 and "64" in long.text


def test_limits(server: Running, tenants: Tenants, tmp_path: Path) -> None:
    key = tenants.keys["limited"]
    first = ask(server, key, max_tokens=10)
    assert first.headers["x-ratelimit-limit-requests"] == "3" and first.headers["x-ratelimit-limit-tokens"] == "60"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    never = ask(server, key, max_tokens=100)
    assert never.status_code == 400 and never.json()["error"]["param"] == "max_tokens"
    assert ask(server, key, n=3).status_code == 400
    assert ask(server, key).status_code == ask(server, key).status_code == 200
    for _ in range(3):
        refused = ask(server, key)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert float(refused.headers["x-ratelimit-reset-requests"].removesuffix("s")) > 0
    assert ask(server, tenants.keys["all"]).status_code == 200


def test_reload(server: Running, tenants: Tenants) -> None:
    old = dict(tenants.keys)
    broken = [
        "tenants: [\n",
        "",
        "tenants:\n  all:\n    wieght: 1\n",
        f"tenants:\n  all:\n    keys: [{old['all']}]\n",
        "\xff" * 10,
    ]
    for number, text in enumerate(broken, 1):
        tenants.path.write_bytes(text.encode("latin-1"))
        os.kill(server.process.pid, signal.SIGHUP)
        eventually(lambda n=number: server.stderr.count("the tenants stay as they are") == n)
        assert ask(server, old["all"]).status_code == 200
    tenants.path.unlink()
    os.kill(server.process.pid, signal.SIGHUP)
    eventually(lambda: server.stderr.count("the tenants stay as they are") == len(broken) + 1)
    assert "line 3" in server.stderr
    assert ask(server, old["all"]).status_code == 200
    tenants.write(all="weight: 7", limited="weight: 1")
    os.kill(server.process.pid, signal.SIGHUP)
    eventually(lambda: ask(server, old["law"]).status_code == 401)
    assert ask(server, old["limited"], max_tokens=100).status_code == 200
    assert ask(server, old["all"]).status_code == 200
    assert server.received("Submit")[-1]["tenant_weight"] == 7
    assert not any(key in server.stderr for key in old.values())


def test_reload_of_plain_keys(model_dir: Path, tmp_path: Path) -> None:
    """Keys and the admin's come and go with their files; an error leaves them as they were."""
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("first=a\n")
    admin.write_text("old\n")
    flags = ["--api-keys-file", str(keys), "--admin-key-file", str(admin), "--api-key", "fixed=b"]
    with serving(model_dir, tmp_path, *flags, key="first") as server:
        keys.write_text("# nobody\n")
        os.kill(server.process.pid, signal.SIGHUP)
        eventually(lambda: "there is no key in it" in server.stderr)
        assert ask(server, "first").status_code == 200
        keys.write_text("second=a:3\n")
        admin.write_text("new\n")
        os.kill(server.process.pid, signal.SIGHUP)
        eventually(lambda: ask(server, "first").status_code == 401)
        assert ask(server, "fixed").status_code == ask(server, "second").status_code == 200
        assert server.received("Submit")[-1]["tenant_weight"] == 3
        for key, status in (("old", 401), ("new", 200)):
            assert server.http.get("/metrics", headers={"Authorization": f"Bearer {key}"}).status_code == status


def test_concurrency(server: Running, tenants: Tenants, tmp_path: Path) -> None:
    """A stream holds its place until it ends, also if its client has gone."""
    headers = {"Authorization": f"Bearer {tenants.keys['limited']}"}
    tenants.write(limited="max_concurrency: 1")
    os.kill(server.process.pid, signal.SIGHUP)
    eventually(lambda: "tenants: 1 keys" in server.stderr)
    body = {"model": "gated", "prompt": "abc", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        lines = stream.iter_lines()  # kept: without it the connection is closed
        assert next(lines)
        refused = ask(server, tenants.keys["limited"])
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    eventually(lambda: ask(server, tenants.keys["limited"]).status_code == 200)
    for _ in range(3):  # whatever way a request ends
        assert ask(server, tenants.keys["limited"], "fail", prompt="abcdef").status_code == 500
        assert ask(server, tenants.keys["limited"]).status_code == 200


def test_without_keys_only_this_machine_is_served(model_dir: Path, tmp_path: Path) -> None:
    argv = ["serve", str(model_dir), "--port", "0", "--host", "0.0.0.0"]
    done = forked.run("api.cli.main", argv, environment(), timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stderr.startswith("error: --host 0.0.0.0: other machines can reach it")
    with serving(model_dir, tmp_path, "--host", "0.0.0.0", "--open") as server:
        assert "there are no keys: everybody who can reach it" in server.stderr
    with serving(model_dir, tmp_path, "--host", "0.0.0.0", "--api-key", "k"):
        pass


def test_adapter_folders(model_dir: Path, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "a", outside, tmp_path / "root-not"):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root / "a")
    flags = ["--admin-key", "admin", "--adapter-root", str(root)]

    def load(server: Running, path: object, url: str = "/v1/load_lora_adapter", **body: Any) -> httpx.Response:
        return server.http.post(url, json={"lora_name": "x", "lora_path": str(path), **body})

    with serving(model_dir, tmp_path, *flags, key="admin") as server:
        for path in (outside, root / "link", f"{root}/../outside", "/", "root/a", f"{root}/a\0", tmp_path / "root-not"):
            refused = load(server, path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "path_not_allowed"), path
        assert load(server, root / "inner").json()["path"] == str(root / "a")
        assert load(server, root / "a").status_code == 409
        again = load(server, root / "a", "/load_lora_adapter", load_inplace=True)
        assert again.json() == {"success": True, "error_message": "", "loaded_adapters": {"x": str(root / "a")}}
        listed = server.http.get("/lora-adapters").json()
        assert listed == [{"id": 0, "path": str(root / "a"), "scale": 0.0, "name": "x"}]
        assert server.http.post("/lora-adapters", json=[{"id": 0, "scale": 0}]).json() == listed
        for body in ([{"id": 0, "scale": 1}], [{"id": 1, "scale": 0}], {"id": 0}, [3], [{"id": -1, "scale": 0}]):
            assert server.http.post("/lora-adapters", json=body).status_code == 400
        assert server.http.post("/unload_lora_adapter", json={"lora_name": "x"}).json()["loaded_adapters"] == {}
        for path in ("/load_lora_adapter", "/unload_lora_adapter", "/lora-adapters"):
            assert httpx.post(server.url + path, json={}).status_code == 401
    with serving(model_dir, tmp_path, "--admin-key", "admin", key="admin") as server:
        assert load(server, root / "a").json()["error"]["code"] == "no_adapter_root"
