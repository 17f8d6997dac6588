"""What clients of llama-server, vLLM, SGLang and Ollama look for, and how they write nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testing.models.tiny import save_hf, tiny_model
from testing.waiting import PATIENCE_S
from tests.api.conftest import TEMPLATE, Running, serving

USER = [{"role": "user", "content": "hello world"}]
CHAT = {"model": "tiny", "messages": USER}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT),
        ("/completions", {"prompt": "ab"}),
        ("/responses", {"input": "ab"}),
        ("/messages", {**CHAT, "max_tokens": 3}),
        ("/messages/count_tokens", CHAT),
        ("/models", None),
        ("/models/tiny", None),
        *((path, None) for path in ("/v1/health", "/healthz", "/health_generate", "/docs", "/props", "/slots")),
        *((path, {"prompt": "ab"}) for path in ("/v1/tokenize", "/tokenize")),
        ("/v1/detokenize", {"tokens": [5]}),
        ("/apply-template", CHAT),
    ],
)
def test_paths_of_others(server: Running, path: str, body: dict[str, Any] | None) -> None:
    answer = server.http.get(path) if body is None else server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if body is not None:
        plain = server.http.post(path, content=json.dumps(body), headers={"Content-Type": "text/plain"})
        assert plain.status_code == 200, plain.text


def test_errors_have_the_form_of_the_path(server: Running) -> None:
    assert server.http.post("/messages", json={}).json()["type"] == "error"
    assert server.http.get("/model").status_code == 404


NOTHING = {
    "max_tokens": [-1, None],
    "n_predict": [-1],
    "max_completion_tokens": [-1],
    "stop": ["", [], [""], None],
    "model": ["", None],
    "repeat_last_n": [64, -1, 0],
    "tool_choice": ["none", {"type": "none"}, {"type": "none", "function": {"name": ""}}, None],
    "tools": [[], None],
    "web_search_options": [{}],
}


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(each) for name, each in NOTHING.items()}))
def test_nothing_is_nothing_however_it_is_written(server: Running, fields: dict[str, Any]) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": USER, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "user\nhello world\nassistant\n"
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_the_most_likely_token_alone(server: Running) -> None:
    server.http.post("/v1/chat/completions", json={**CHAT, "top_p": 0})
    assert 0 < server.received("Submit")[-1]["sampling"]["top_p"] <= 1e-6


def test_what_ended_an_answer(server: Running) -> None:
    def ended(**fields: Any) -> Any:
        whole = server.http.post("/v1/chat/completions", json={**CHAT, **fields}).json()["choices"][0]
        stream = server.http.post("/v1/chat/completions", json={**CHAT, **fields, "stream": True}).text
        last = json.loads(stream.split("data: ")[-2])["choices"][0]
        text = server.http.post("/v1/completions", json={"prompt": "hello world", "max_tokens": 20, **fields}).json()
        assert whole["matched_stop"] == last["matched_stop"] == text["choices"][0]["matched_stop"]
        return whole["matched_stop"]

    assert ended(stop="wor") == "wor"
    assert isinstance(ended(), int)
    assert ended(max_tokens=2) is None


def test_llama_servers_tokens(server: Running) -> None:
    given_ = server.http.post("/tokenize", json={"content": "hello wörld", "with_pieces": True}).json()["tokens"]
    assert "hello" in {each["piece"] for each in given_ if isinstance(each["piece"], str)}
    ids = server.http.post("/tokenize", json={"content": "hello wörld"}).json()["tokens"]
    assert ids == [each["id"] for each in given_]
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["content"] == "hello wörld"
    assert server.http.post("/tokenize", json={"content": "a", "prompt": "a"}).status_code == 400
    assert server.http.post("/apply-template", json=CHAT).json()["prompt"].endswith("<|im_start|>assistant\n")
    props, slots = server.http.get("/props").json(), server.http.get("/slots").json()
    assert props["chat_template"] == TEMPLATE and props["total_slots"] == len(slots)
    assert server.http.post("/props", json={}).status_code == server.http.post("/slots/0", json={}).status_code == 501


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_pages_of_this_machine(server: Running, host: str) -> None:
    for origin, allowed in ((f"http://{host}:3000", True), (f"http://{host}.evil.com", False), ("http://x", False)):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = server.http.options("/v1/chat/completions", headers=asked)
        assert (answer.status_code == 200) is allowed
        assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


def test_pages_of_other_machines(model_dir: Path, tmp_path: Path) -> None:
    """A server that other machines reach answers no page of its own accord."""
    with serving(model_dir, tmp_path, "--host", "0.0.0.0", "--open") as running:
        asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
        answer = running.http.options("/v1/chat/completions", headers=asked)
        assert "access-control-allow-origin" not in answer.headers


# ---- Ollama


@pytest.fixture(scope="module")
def llama(server: Running) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=PATIENCE_S)


def test_ollamas_durations_add_up(llama: ollama.Client) -> None:
    for answer in (llama.chat("tiny", USER, options={"repeat_last_n": 64}), llama.generate("tiny", "x")):
        parts = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
        assert answer.total_duration == sum(part or 0 for part in parts)
        assert (answer.prompt_eval_duration or 0) > 0


def test_ollamas_way_to_load(llama: ollama.Client) -> None:
    assert llama.generate("tiny").done_reason == "load"
    assert llama.chat("tiny").done_reason == "load"
    assert [part.done for part in llama.chat("tiny", stream=True)] == [True]
    assert llama.pull("tiny").status == "success"
    assert [step.status for step in llama.pull("tiny:latest", stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        llama.pull("other")


def test_ollamas_version_is_one_that_clients_want(server: Running) -> None:
    version = tuple(map(int, server.http.get("/api/version").json()["version"].split(".")))
    assert version >= (0, 6, 4)


def test_what_ollama_has_and_this_has_not(llama: ollama.Client) -> None:
    for call in (
        lambda: llama.embed("tiny", "x"),
        lambda: llama.embeddings("tiny", "x"),
        lambda: llama.delete("tiny"),
        lambda: llama.copy("tiny", "other"),
        lambda: llama.push("tiny"),
        lambda: llama.create("other", from_="tiny"),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == 501 and caught.value.error


def test_history_of_ollama(server: Running) -> None:
    shown = {"role": "user", "content": "x", "images": ["aGk="]}
    later = [{"role": "tool", "content": "orphan"}, {"role": "assistant", "content": "ok"}, USER[0]]
    body = {"model": "tiny", "stream": False, "messages": [shown, *later]}
    answer = server.http.post("/api/chat", json=body)
    assert answer.status_code == 200 and "images" in answer.headers["warnings"], answer.text
    assert server.http.post("/api/chat", json={**body, "messages": [*later, shown]}).status_code == 400


# ---- a model that has files, and several templates


@pytest.fixture(scope="module")
def whole(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("whole")
    model = folder / "tiny"
    save_hf(tiny_model(), model)
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    with_tools = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}<tool_call>" + TEMPLATE
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": with_tools}]
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    (model / "tokenizer.json").write_text((model_dir / "tokenizer.json").read_text())
    with serving(model, folder) as running:
        yield running


def test_ollama_shows_the_model(whole: Running) -> None:
    client = ollama.Client(host=whole.url, timeout=PATIENCE_S)
    shown = client.show("tiny")
    info = shown.modelinfo or {}
    family = info["general.architecture"]
    assert family and info[f"{family}.context_length"] > 0 and info["general.parameter_count"] > 0
    assert shown.details and shown.details.family == family and shown.details.parameter_size
    for model in (*client.list().models, *client.ps().models):
        assert model.size and len(model.digest or "") == 64


def test_the_template_of_chats_with_tools(whole: Running) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    prompt = whole.http.post("/apply-template", json={**CHAT, "tools": [tool]}).json()["prompt"]
    assert prompt.startswith("now;<tool_call>")
    for without in ({}, {"tools": [tool], "tool_choice": "none"}):
        assert whole.http.post("/apply-template", json={**CHAT, **without}).json()["prompt"].startswith("<|im_start|>")
