"""The page as it is served: its files, their headers, and the data of its live view."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.endpoints.page import STATIC
from testing.waiting import eventually
from tests.api.conftest import Running, serving

FILES = sorted(path.name for path in STATIC.iterdir())
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def paths() -> list[tuple[str, str]]:
    return [("/", "index.html"), *((f"/page/{name}", name) for name in FILES)]


@pytest.mark.parametrize("path,name", paths())
def test_every_file_is_served_with_its_type_and_policy(server: Running, path: str, name: str) -> None:
    answer = httpx.get(server.url + path)
    assert answer.status_code == 200 and answer.content == (STATIC / name).read_bytes()
    assert answer.headers["content-type"].split(";")[0] == TYPES[Path(name).suffix]
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path,name", paths())
def test_head_and_caching(server: Running, path: str, name: str) -> None:
    head, whole = httpx.head(server.url + path), httpx.get(server.url + path)
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-length"] == str(len(whole.content))
    assert head.headers["etag"] == whole.headers["etag"] and head.headers["cache-control"] == "no-cache"
    same = httpx.get(server.url + path, headers={"If-None-Match": whole.headers["etag"]})
    assert same.status_code == 304 and same.content == b""
    assert "content-security-policy" in same.headers
    other = httpx.get(server.url + path, headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


@given(
    name=st.text(max_size=40)
    | st.sampled_from(["../app.js", "..%2fapp.js", "%00", ".", "..", "//etc/passwd", "a" * 5000])
)
def test_nothing_else_is_served(server: Running, name: str) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in name.encode("utf-8", "replace"))
    answer = httpx.get(f"{server.url}/page/{quoted}")
    assert name in FILES or answer.status_code == 404
    assert httpx.post(f"{server.url}/page/app.js").status_code == 405


class References(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [given[name] or "" for name in ("src", "href") if name in given]
        self.inline += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


def test_the_page_stands_on_its_own_files() -> None:
    """No inline script or style, no address of anywhere else, and every file is used."""
    found = References()
    found.feed((STATIC / "index.html").read_text())
    assert found.inline == []
    local = {link.removeprefix("page/") for link in found.links if not link.startswith("#")}
    imports = {name for path in STATIC.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert local | imports | {"index.html"} == set(FILES)
    for path in STATIC.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", path.read_text()), path


def test_live_shows_what_runs(server: Running) -> None:
    body = {"model": "gated", "messages": [{"role": "user", "content": "hello world"}], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert stream.status_code == 200

        def rows() -> list[dict[str, Any]]:
            answer = server.http.get("/v1/live")
            assert answer.headers["cache-control"] == "no-store"
            return [row for row in answer.json()["live"]["rows"] if row["adapter"] == "gated"]

        eventually(rows, "the running request is not among the rows")
        (row,) = rows()
        assert row["tenant"] == "default" and row["prompt_tokens"] > 0
        assert server.http.get("/v1/live").json()["live"]["expert_choices"]["0"][2] == 1


def test_plan_shows_each_devices_memory(server: Running) -> None:
    seen = server.http.get("/v1/plan").json()
    (device,) = seen["memory"]
    assert device["device"] == "CPU" and device["free_bytes"] < device["limit_bytes"]
    assert [item["kind"] for item in device["items"]] == ["experts", "kv_cache"] and "note: fake" in seen["lines"]


def test_with_keys_the_page_is_open_and_what_it_watches_is_the_admins(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path, "--api-key", "one=a", "--admin-key", "admin") as running:
        assert httpx.get(running.url).status_code == 200
        assert httpx.get(f"{running.url}/page/app.js").status_code == 200
        for path in ("/v1/live", "/v1/plan"):

            def status(path: str = path, **headers: str) -> int:
                return httpx.get(running.url + path, headers=headers).status_code

            assert status() == 401 and status(Authorization="Bearer one") == 401
            assert status(Authorization="Bearer admin") == 200
