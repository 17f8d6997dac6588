"""The server under a prefix of a proxy, which may leave the prefix in paths or take it out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.cli.main import main
from api.config import ServeConfig
from api.http.middleware import with_headers
from api.http.server import check_root_path
from engine.errors import UserError
from tests.api.conftest import Running, serving
from tests.api.test_page_http import STATIC, References

ROOT = "/apps/llm"


@pytest.fixture(scope="module")
def below(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        model_dir, tmp_path_factory.mktemp("root"), "--root-path", ROOT, "--api-key", "k=a", key="k"
    ) as server:
        yield server


def answer(server: Running, method: str, path: str, **what: Any) -> tuple[int, Any]:
    got = server.http.request(method, path, **what)
    said = got.json() if got.headers["content-type"] == "application/json" else got.text
    for name in ("id", "created", "created_at"):
        if isinstance(said, dict):
            said.pop(name, None)
    return got.status_code, said


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/health", {}),
    ("GET", "/v1/models", {}),
    ("GET", "/v1/models/tiny", {}),
    ("GET", "/v1/models/nope", {}),
    ("GET", "/openapi.json", {}),
    ("GET", "/", {}),
    ("GET", "/page/app.js", {}),
    ("GET", "/api/tags", {}),
    ("POST", "/v1/completions", {"json": {"prompt": "abc"}}),
    ("POST", "/v1/messages", {"json": {"max_tokens": 0, "messages": []}}),  # an error in this form
    ("POST", "/api/chat", {"json": {"messages": 1}}),
    ("GET", "/nowhere", {}),
]


@pytest.mark.parametrize(("method", "path", "what"), CALLS)
def test_with_and_without_the_prefix(below: Running, method: str, path: str, what: dict[str, Any]) -> None:
    assert answer(below, method, path, **what) == answer(below, method, ROOT + path, **what)


def test_only_the_prefix_is_taken_off(below: Running) -> None:
    for path in (f"{ROOT}er/health", f"{ROOT}{ROOT}/health", "/apps/health", "/llm/health"):
        assert below.http.get(path).status_code == 404
    assert below.http.get("/openapi.json").json()["servers"] == [{"url": ROOT}]


def test_every_link_of_the_page_stays_below_the_prefix(below: Running) -> None:
    """Also where the page is asked for without the slash at its end."""
    seen = httpx.get(below.url + ROOT, follow_redirects=True)
    assert seen.status_code == 200 and str(seen.url) == f"{below.url}{ROOT}/"
    found = References()
    found.feed(seen.text)
    links = [link for link in found.links if not link.startswith("#")]
    assert len(links) > 3
    for link in links:
        url = urljoin(str(seen.url), link)
        assert url.startswith(f"{below.url}{ROOT}/") and httpx.get(url).status_code == 200
    for path in STATIC.glob("*.js"):
        assert not any(f"{quote}/" in path.read_text() for quote in ('("', "('", '= "/v', "fetch(`")), path


@given(st.text(max_size=12) | st.from_regex(r"/?([a-z.~_-]+/?)*", fullmatch=True))
def test_a_root_path_is_a_prefix_of_paths_or_refused(root_path: str) -> None:
    try:
        check_root_path(ServeConfig(root_path=root_path))
    except UserError as error:
        assert root_path and "--root-path" in str(error)
        return
    assert root_path == "" or (root_path.startswith("/") and not root_path.endswith("/"))
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])

    scope = {"type": "http", "method": "GET", "path": f"{root_path}/health", "headers": [], "query_string": b""}
    asyncio.run(with_headers(app, ServeConfig(root_path=root_path))(scope, None, None))  # type: ignore[arg-type]
    assert seen == ["/health"]


def test_a_wrong_one_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/model", "--root-path", "llm/"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: --root-path llm/: write it as /llm, without a slash at its end"
