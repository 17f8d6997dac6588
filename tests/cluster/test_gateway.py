"""The endpoint over replicas without Ray: over servers of the tests, whatever clients send."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError
from cluster.call import Call, kept_headers
from cluster.front.gateway import application, config_of, error_event
from cluster.front.ingress import ADMISSION, BoundedBodies, bounds_header
from cluster.routing.policy import Affinity, Policy, prefix
from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import Running, serving
from tests.api.conftest import model_dir as model_dir

LIMIT = 4 << 20
ORIGIN = "https://app.example"


class OneReplica:
    """`Replicas` of one server, reached as `cluster.replicas.engine` reaches its own."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)
        self.calls: list[Call] = []
        self.policy = Policy(Affinity())

    async def forward(self, call: Call) -> Response:
        self.calls.append(call)
        assert self.policy.rank({"a": 0, "b": 0}, call.model, prefix(f"{call.key}\0{call.model}", call.prompt))
        headers = [(name, value) for name, value in call.headers if name != "accept-encoding"]
        got = await self._http.request(call.method, call.path, headers=headers, content=call.body)
        return Response(got.content, got.status_code, dict(kept_headers(got.headers.items())))

    async def admit(self, call: Call) -> None:
        got = await self._http.get("/v1/models", headers=list(call.headers))
        if got.status_code != 200:
            raise ApiError(got.status_code, "refused", code=got.json()["error"]["code"])

    async def health(self) -> Response:
        return Response(b'{"status": "ready", "replicas": {"ready": 1}}', media_type="application/json")

    async def metrics(self, call: Call) -> Response:
        return await self.forward(call)


class ReadsAhead:
    """As Serve's proxy does: all of a body, as fast as it comes, whoever reads it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages: asyncio.Queue[Message] = asyncio.Queue()

        async def read() -> None:
            while (message := await receive())["type"] != "http.disconnect":
                self.num_bytes += len(message["body"])
                messages.put_nowait(message)
            messages.put_nowait(message)

        reading = asyncio.ensure_future(read())
        try:
            await self._app(scope, messages.get, send)
        finally:
            reading.cancel()


class Gateway:
    def __init__(self, url: str, replica: OneReplica, proxy: ReadsAhead) -> None:
        self.url, self.replica, self.proxy = url, replica, proxy
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S, headers={"Authorization": "Bearer k"})


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        model_dir, tmp_path_factory.mktemp("s"), "--adapters", "say=/x", "--api-key", "k=a", key="k"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def front(server: Running) -> Iterator[Gateway]:
    config = config_of({"max-body-bytes": LIMIT, "cors_origins": [ORIGIN], "root_path": "/llm", "model": "x"})
    replica = OneReplica(server.url)
    proxy = ReadsAhead(application(replica, config))
    listening = uvicorn.Server(uvicorn.Config(BoundedBodies(proxy), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=listening.run)
    thread.start()
    try:
        eventually(lambda: listening.started)
        port = listening.servers[0].sockets[0].getsockname()[1]
        yield Gateway(f"http://127.0.0.1:{port}", replica, proxy)
    finally:
        listening.should_exit = True
        thread.join(PATIENCE_S)


def plain(answer: httpx.Response) -> Any:
    said = answer.json() if answer.headers.get("content-type") == "application/json" else answer.text
    return {k: v for k, v in said.items() if k not in ("id", "created")} if isinstance(said, dict) else said


CHAT = {"model": "say", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
CALLS: list[tuple[str, str, Any]] = [
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/say", None),
    ("GET", "/v1/models/no/such", None),
    ("GET", "/version", None),
    ("GET", "/", None),
    ("GET", "/page/app.js", None),
    ("GET", "/api/tags", None),
    ("GET", "/nowhere", None),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/completions", {"model": "say", "prompt": 1}),
    ("POST", "/v1/messages/count_tokens", CHAT),
    ("POST", "/api/show", {"model": "say"}),
    ("POST", "/tokenize", {"model": "say", "prompt": "hello"}),
]


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_it_speaks_what_one_server_speaks(front: Gateway, server: Running, method: str, path: str, body: Any) -> None:
    theirs, ours = (http.request(method, path, json=body) for http in (server.http, front.http))
    assert (ours.status_code, plain(ours)) == (theirs.status_code, plain(theirs))
    below = front.http.request(method, f"/llm{path}", json=body)
    assert (below.status_code, plain(below)) == (theirs.status_code, plain(theirs))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", CHAT),
        ("/v1/responses", {"model": "say", "input": "hello"}),
        ("/api/chat", CHAT | {"stream": False}),
        ("/api/generate", {"model": "say", "prompt": "hello", "stream": False}),
    ],
)
def test_the_other_forms_are_answered(front: Gateway, path: str, body: Any) -> None:
    answer = front.http.post(path, json=body, headers={"x-request-id": "mine"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "mine" == dict(front.replica.calls[-1].headers)["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/files", {}),
        ("GET", "/v1/files/file-1/content", None),
        ("POST", "/v1/batches", {}),
        ("GET", "/v1/live", None),
        ("GET", "/v1/plan", None),
        ("GET", "/v1/responses/resp_1", None),
        ("DELETE", "/v1/responses/resp_1", None),
        ("POST", "/v1/responses", {"model": "say", "input": "a", "previous_response_id": "resp_1"}),
    ],
)
def test_what_one_server_keeps_is_a_named_501(front: Gateway, method: str, path: str, body: Any) -> None:
    answer = front.http.request(method, path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 501 and error["code"] == "not_over_replicas"
    assert "docs/scale-out.md" in error["message"] and error.keys() == {"message", "type", "param", "code"}


def test_pages_of_other_origins(front: Gateway) -> None:
    asked = front.http.options(
        "/v1/chat/completions", headers={"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    )
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == ORIGIN
    for path, status in (("/v1/chat/completions", 200), ("/v1/files", 501)):
        answer = front.http.post(path, json=CHAT, headers={"Origin": ORIGIN})
        assert answer.status_code == status
        assert answer.headers.get_list("access-control-allow-origin") == [ORIGIN]


LARGE = LIMIT - 100
HOSTILE: dict[str, bytes] = {
    "half a character": b'{"model": "\\ud800", "prompt": "a"}',
    "half a character in the prompt": b'{"model": "say", "prompt": "\\ud800"}',
    "no UTF-8": b'{"model": "\xff", "prompt": "a"}',
    "open brackets": b"[" * LARGE,
    "open braces": b'{"a":' * (LARGE // 5),
    "nested": b'{"model":"say","messages":' + b"[" * (LARGE // 2 - 20) + b"]" * (LARGE // 2 - 20) + b"}",
    "nested model": b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many": b'{"model":"say","messages":[' + b"{}," * (LARGE // 3 - 20) + b"{}]}",
    "names": b'{"' + b"x" * (LARGE - 20) + b'": 1}',
    "spaces": b" " * LARGE + b"{}",
    "digits": b'{"model":' + b"9" * (LARGE - 20) + b"}",
}
LOADS = ("names", "spaces", "half a character in the prompt")  # to Ollama, requests to load the model


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused_in_form(front: Gateway, name: str) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/v1/load_lora_adapter"):
        answer = front.http.post(path, content=HOSTILE[name], headers={"Content-Type": "application/json"})
        if path == "/api/chat" and name in LOADS:
            assert answer.status_code == 200 and answer.json()["done_reason"] == "load"
            continue
        assert 400 <= answer.status_code < 500, (path, answer.text)
        assert answer.json()["error"]
    assert front.http.post("/v1/chat/completions", json=CHAT).status_code == 200


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_as_a_model(name: bytes) -> None:
    """And as a whole body: neither the call nor the policy fails."""
    bodies = [b'{"model": "' + name + b'", "messages": "' + name + b'"}', name, b"{" + name]
    bodies.append(json.dumps({"model": name.decode("utf-8", "surrogateescape")}).encode())
    for body in bodies:
        call = Call.of("POST", "/v1/completions", [], body)
        assert Policy(Affinity()).rank({"a": 1, "b": 0}, call.model, prefix(f"\0{call.model}", call.prompt * 300))


KEYS = {"no key": {}, "a wrong key": {"Authorization": "Bearer x"}, "a key": {"Authorization": "Bearer k"}}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/chat"])
def test_an_endless_body_is_refused_before_it_is_read(front: Gateway, path: str, told: bool, key: str) -> None:
    """Its length told or not: no replica is passed anything, and a proxy that reads ahead sees none of it."""
    before, sent = (len(front.replica.calls), front.proxy.num_bytes), 0
    length = 1 << 30

    def endless() -> Iterator[bytes]:
        nonlocal sent
        chunk = random.Random(0).randbytes(1 << 16)
        while sent < length:
            sent += len(chunk)
            yield chunk

    headers = {"Content-Type": "application/json", "Origin": ORIGIN, **KEYS[key]}
    headers |= {"Content-Length": str(length)} if told else {}
    try:
        answer = httpx.post(f"{front.url}{path}", content=endless(), headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == (413 if key == "a key" else 401) and answer.json()["error"]
        assert answer.headers.get_list("access-control-allow-origin") == [ORIGIN]
        assert answer.headers["x-request-id"] and ADMISSION not in answer.headers
    except httpx.WriteError:
        pass  # it was closed while we still sent
    assert sent < 1 << 28 and (len(front.replica.calls), front.proxy.num_bytes) == before


@pytest.mark.parametrize("key", KEYS)
def test_a_body_of_47_mib_is_refused_in_the_form_of_its_path(front: Gateway, key: str) -> None:
    """Its sender has read the refusal when the body has been sent."""
    for path in ("/v1/messages", "/v1/chat/completions", "/v1/files"):
        answer = httpx.post(f"{front.url}{path}", content=b" " * (47 << 20), headers=KEYS[key], timeout=PATIENCE_S)
        expected = 501 if path == "/v1/files" else 413 if key == "a key" else 401
        assert answer.status_code == expected, answer.text
        assert ("type" in answer.json()) == (path == "/v1/messages")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_with_a_key_is_answered(front: Gateway, chunked: bool) -> None:
    body = json.dumps(CHAT | {"user": "x" * (1 << 17)}).encode()
    parts = (body[at : at + 1000] for at in range(0, len(body), 1000))
    answer = front.http.post("/v1/chat/completions", content=parts if chunked else body)
    assert answer.status_code == 200, answer.text


def test_applications_of_others_get_their_bodies() -> None:
    """They answer the question with something of their own, and are not asked by a method that changes anything."""
    seen: list[tuple[str, int]] = []

    async def theirs(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["method"], len(await Request(scope, receive).body())))
        await Response("theirs")(scope, receive, send)

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(BoundedBodies(theirs)), base_url="http://x") as http:
            return await http.post("/", content=b"x" * (1 << 20))

    assert asyncio.run(run()).text == "theirs" and seen == [("OPTIONS", 0), ("POST", 1 << 20)]


def test_large_bodies_that_are_held_are_bounded_together() -> None:
    """The front does not answer: all that it has got counts."""
    reached, answer_now = 0, asyncio.Event()

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal reached
        if scope["method"] == "OPTIONS":
            return await Response(headers={ADMISSION: bounds_header(1 << 17, 60)})(scope, receive, send)
        await Request(scope, receive).body()
        reached += 1
        await answer_now.wait()
        await Response()(scope, receive, send)

    async def run() -> list[int]:
        transport = httpx.ASGITransport(BoundedBodies(front))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            asked = [asyncio.ensure_future(http.post("/", content=b"x" * (1 << 17))) for _ in range(20)]
            while sum(each.done() for each in asked) + reached < len(asked):
                await asyncio.sleep(0.01)
            answer_now.set()
            first = [(await each).status_code for each in asked]
            return [*first, (await http.post("/", content=b"x" * (1 << 17))).status_code]

    statuses = asyncio.run(run())
    assert statuses.count(200) == 17 and statuses.count(503) == 4 and statuses[-1] == 200


def test_a_large_body_without_a_key_stops_nobody() -> None:
    """No object is made of what decides nothing: one scan, next to no memory."""
    body = b'{"messages":[' + b'{"role":"user","content":"a"},' * (16 << 15) + b"{}]}"
    tracemalloc.start()
    try:
        call = Call.of("POST", "/v1/chat/completions", [], body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(call.prompt) == 1 << 16 and peak < 1 << 20 < len(body)


@pytest.mark.parametrize(
    ("path", "kind", "beginning"),
    [
        ("/v1/completions", "text/event-stream; charset=utf-8", b'data: {"error":'),
        ("/v1/messages", "text/event-stream", b"event: error\ndata: {"),
        ("/api/chat", "application/x-ndjson", b'{"error":'),
    ],
)
def test_a_stream_that_is_lost_ends_in_its_form(path: str, kind: str, beginning: bytes) -> None:
    last = error_event(ApiError(503, "gone"), path, kind)
    assert last is not None and last.startswith(beginning) and last.endswith(b"\n")
    assert error_event(ApiError(503, "gone"), path, "application/json") is None


def test_faults_of_the_endpoint_are_in_form() -> None:
    class Broken(OneReplica):
        async def forward(self, call: Call) -> Response:
            raise RecursionError

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(application(Broken("http://x"), config_of({})), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            return await http.get("/v1/models")

    answer = asyncio.run(run())
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
