"""No body stops the api: beside any of them /health is answered, and memory comes back."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import TEMPLATE, Running, serving
from tests.api.hostile import HOSTILE, chat, message

LIMIT = 16 * 2**20
HEALTH_S = 0.1


def text(prompt: str, more: str = "") -> bytes:
    return f'{{"model":"tiny","max_tokens":1{more},"prompt":{prompt}}}'.encode()


def repeated(item: str, size: int) -> str:
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ASKED = '{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"a"}]'
FIELDS = ["stop", "logit_bias", "temperature", "top_k", "user", "tools", "chat_template_kwargs", "response_format"]
PLACES = [  # every endpoint that takes a body; what is large stands for @
    (CHAT, '{"model":"tiny","max_tokens":1,"messages":@}'),
    (CHAT, '{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":@}]}'),
    *((CHAT, f'{ASKED},"{field}":@}}') for field in FIELDS),
    (COMPLETION, '{"model":"tiny","max_tokens":1,"prompt":@}'),
    ("/tokenize", '{"model":"tiny","prompt":@}'),
    ("/tokenize", '{"model":"tiny","messages":@}'),
    ("/detokenize", '{"model":"tiny","tokens":@}'),
    *(("/v1/messages", f'{ASKED},"{field}":@}}') for field in ("system", "tools", "metadata", "stop_sequences")),
    ("/v1/messages", '{"max_tokens":1,"messages":@}'),
    ("/v1/messages/count_tokens", '{"messages":[{"role":"user","content":@}]}'),
    ("/v1/responses", '{"max_output_tokens":1,"store":false,"input":@}'),
    ("/v1/responses", '{"max_output_tokens":1,"input":[{"role":"user","content":@}]}'),
    *(("/v1/responses", f'{{"max_output_tokens":1,"input":"a","{name}":@}}') for name in ("instructions", "metadata")),
    ("/v1/responses/input_tokens", '{"input":[{"role":"user","content":@}]}'),
    ("/v1/responses/input_tokens", '{"input":"a","tools":@}'),
    ("/v1/responses/compact", '{"input":[{"role":"user","content":@}]}'),
    ("/api/chat", '{"options":{"num_predict":1},"messages":[{"role":"user","content":@}]}'),
    ("/api/chat", '{"messages":[{"role":"user","content":"a"}],"options":@}'),
    ("/api/generate", '{"options":{"num_predict":1},"prompt":@}'),
    ("/api/generate", '{"prompt":"a","options":{"num_predict":1},"format":@}'),
    ("/api/show", '{"model":@}'),
    ("/api/pull", '{"model":@}'),
    ("/apply-template", '{"messages":[{"role":"user","content":@}]}'),
    ("/tokenize", '{"with_pieces":true,"content":@}'),
    ("/v1/batches", '{"endpoint":"/v1/completions","completion_window":"24h","input_file_id":@}'),
    ("/v1/files", '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n@\r\n--b--'),
    ("/v1/files", '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n@\r\n--b--'),
    ("/v1/fine_tuning/jobs", '{"model":"tiny","training_file":"file-1","metadata":@}'),
    ("/v1/load_lora_adapter", '{"lora_name":"x","lora_path":@}'),
    ("/v1/unload_lora_adapter", '{"lora_name":@}'),
    ("/load_lora_adapter", '{"lora_path":"/nowhere","lora_name":@}'),
    ("/unload_lora_adapter", '{"lora_name":@}'),
    ("/lora-adapters", "@"),
]  # fmt: skip
PATHS = list(dict.fromkeys(path for path, _ in PLACES))


# Every way that JSON has to be large: a value of about `size` bytes.
VALUES: dict[str, Callable[[int, str], str]] = {
    "ints": lambda size, unit: repeated("1", size),
    "strings": lambda size, unit: repeated('"a"', size),
    "lists": lambda size, unit: repeated("[]", size),
    "dicts": lambda size, unit: repeated("{}", size),
    "messages": lambda size, unit: repeated('{"role":"user","content":"a"}', size),
    "nested": lambda size, unit: nested(size // 2),
    "nested a little": lambda size, unit: repeated(nested(500), size),
    "text": lambda size, unit: '"' + unit * (size // len(unit.encode())) + '"',
    "digits": lambda size, unit: "1" * size,
    "distinct": lambda size, unit: "[" + ",".join(map(str, range(size // 8))) + "]",
    "fields": lambda size, unit: "{" + ",".join(f'"f{i}":1' for i in range(size // 12)) + "}",
    "a field": lambda size, unit: f'{{"{"k" * size}":1}}',
    "no JSON": lambda size, unit: "}" * size,
}


def generated(size: int, seed: int, count: int) -> Iterator[tuple[str, str, bytes]]:
    """(name, path, body) of about `size` bytes: for every endpoint, `count` of the places in its body that may be
    large, each filled in one way. The endpoints together have them all."""
    draw = random.Random(seed)
    units = ["a", " ", "\\n", "\\u0000", "é", "👋", "|", "<|im_end|>", "a ", "\\\\", "1", "e\\u0301"]
    found: list[str] = []
    for path in PATHS:
        places = [body for where, body in PLACES if where == path]
        for _ in range(count):
            found = found or draw.sample(sorted(VALUES), k=len(VALUES))
            name, body = found.pop(), draw.choice(places)
            yield f"{body}: {name}", path, body.replace("@", VALUES[name](size, draw.choice(units))).encode()
    yield "a field's name", COMPLETION, text('"a"', f',"{"k" * size}":1')
    yield "many fields", COMPLETION, text('"a"', "," + ",".join(f'"f{i}":1' for i in range(size // 12)))
    yield "a message's field", CHAT, chat(f'[{{"role":"user","{"k" * size}":1}}]')
    yield "a role", CHAT, chat(f'[{{"role":"{"r" * size}","content":"a"}}]')


class Poller(threading.Thread):
    """Asks /health without pause, and keeps how long each answer took and whether it was 200."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._ended = threading.Event()
        self.took_s: list[float] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self._ended.is_set():
                began = time.monotonic()
                answer = client.get("/health")
                self.took_s.append(time.monotonic() - began)
                if answer.status_code != 200:
                    self.wrong.append(answer.text)
                time.sleep(0.01)

    def __enter__(self) -> Poller:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self.join()


@contextlib.contextmanager
def nobody_waits(server: Running, place: Path) -> Iterator[None]:
    """Whatever is asked inside: /health is answered within 0.1 s as a rule (a busy machine: as when nothing else is
    asked), and no callback of the event loop computes longer than that."""
    with Poller(server.url) as idle:
        eventually(lambda: len(idle.took_s) >= 30)
    place.write_text("0 nothing")
    with Poller(server.url) as poller:
        yield
        eventually(lambda: poller.took_s)
    longest, _, callback = place.read_text().partition(" ")
    place.unlink()
    assert not poller.wrong and not idle.wrong
    assert float(longest) < HEALTH_S, callback
    assert statistics.median(poller.took_s) < max(HEALTH_S, 10 * statistics.median(idle.took_s))


def memory(server: Running) -> int:
    """Bytes of the api and of what prepares prompts; pages they share count once."""
    own, total = psutil.Process(server.process.pid), 0
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a child that had a large body has just ended
            if "--address" not in process.cmdline():  # not the engine
                total += process.memory_full_info().pss
    return total


def ask(server: Running, path: str, body: bytes) -> httpx.Response:
    kind = "multipart/form-data; boundary=b" if path == "/v1/files" else "application/json"
    return server.http.post(path, content=body, headers={"Content-Type": kind})


@pytest.fixture(scope="module")
def timings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of `tests.api.timed`."""
    return tmp_path_factory.mktemp("timings") / "longest"


@pytest.fixture(scope="module")
def attacked(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, timings: Path) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("attacked")
    flags = ["--prompt-cpu-limit-s", "4", "--data-dir", str(folder / "data"), "--admin-key", "admin"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIMED", str(timings))
        with serving(
            model_dir, folder, *flags, "--allow-any-adapter-path", key="admin", program="tests.api.timed"
        ) as running:
            yield running


def settled(server: Running) -> None:
    for _ in range(3):
        assert ask(server, "/v1/completions", text('"ab"')).status_code == 200
        assert ask(server, "/v1/completions", text('"' + "a" * 100_000 + '"')).status_code == 400


def check(server: Running, timings: Path, bodies: Iterator[tuple[str, str, bytes]]) -> set[int]:
    """The statuses that there were."""
    settled(server)
    before, seen = memory(server), set()
    with nobody_waits(server, timings):
        for name, path, body in bodies:
            response = ask(server, path, body[:LIMIT])
            assert response.status_code in (200, 400, 404, 413), (name, response.text[:300])
            assert response.status_code == 200 or len(response.text) < 1500, name
            seen.add(response.status_code)
    settled(server)
    assert memory(server) < before + 3.5 * LIMIT
    assert ask(server, CHAT, chat(message('"ab"'))).status_code == 200
    return seen


def test_every_endpoint_is_among_them(attacked: Running) -> None:
    document = attacked.http.get("/openapi.json").json()
    without_body = {path for path in document["paths"] if path.endswith(("/cancel", "/pause", "/resume"))}
    assert set(PATHS) == {path for path, found in document["paths"].items() if "post" in found} - without_body


def test_no_large_body_stops_the_api(attacked: Running, timings: Path) -> None:
    assert check(attacked, timings, generated(LIMIT - 300, seed=0, count=1)) >= {400, 413}


@pytest.mark.parametrize("seed", range(3))
def test_no_body_of_another_size_does(attacked: Running, timings: Path, seed: int) -> None:
    """Around the sizes at which the way through the api changes."""
    size = random.Random(seed).choice([2**10, 2**15, 2**16 - 300, 2**16, 2**20])
    check(attacked, timings, generated(size, seed, count=4))


def test_many_answers_with_many_stops(attacked: Running, timings: Path) -> None:
    stops = json.dumps([chr(97 + i) * 1000 for i in range(16)])
    prompts = json.dumps([[5] * 2000] * 128)
    with nobody_waits(attacked, timings):
        assert ask(attacked, "/v1/completions", text(prompts, f',"stop":{stops}')).status_code == 200


def test_a_template_is_cut_off(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that request's 400; others are served meanwhile."""
    switch = "".join("{% elif messages[0].content == '" + name + "' %}" + source for name, source in HOSTILE.items())
    path = tmp_path / "template.jinja"
    path.write_text("{% if false %}" + switch + "{% else %}" + TEMPLATE + "{% endif %}")
    flags = ("--chat-template", str(path), "--prompt-cpu-limit-s", "1")
    monkeypatch.setenv("TIMED", str(tmp_path / "longest"))
    with serving(model_dir, tmp_path, *flags, program="tests.api.timed") as server:
        with nobody_waits(server, tmp_path / "longest"):
            for name in HOSTILE:
                answer = ask(server, "/v1/chat/completions", chat(message(json.dumps(name))))
                assert answer.status_code == 400, (name, answer.text)
                assert len(answer.json()["error"]["message"]) < 1000
                assert ask(server, "/v1/chat/completions", chat(message('"ab"'))).status_code == 200, name
        assert "Traceback" not in server.stderr


def test_work_for_a_client_that_has_gone_ends(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(
        "{% if messages[0].content == 'loops' %}" + HOSTILE["loops"] + "{% else %}" + TEMPLATE + "{% endif %}"
    )
    with serving(model_dir, tmp_path, "--chat-template", str(path), "--prompt-cpu-limit-s", "1000") as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/chat/completions", content=chat(message('"loops"')), timeout=1)
        assert ask(server, "/v1/chat/completions", chat(message('"ab"'))).status_code == 200
        assert "Traceback" not in server.stderr


def test_the_preparing_process_dies_and_comes_back(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path) as server:
        body = chat(message('"ab"'))
        assert ask(server, "/v1/chat/completions", body).status_code == 200
        for process in psutil.Process(server.process.pid).children(recursive=True):
            if "prompts" in process.cmdline():
                process.kill()
        deadline = time.monotonic() + 30
        while ask(server, "/v1/chat/completions", body).status_code != 200:
            assert time.monotonic() < deadline
        assert server.stop() == 0
