"""Every field of the table that is supported changes something in a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api.bodies.body import Body, Field, Status
from api.bodies.generation import ChatRequest, CompletionRequest
from api.dialects.anthropic.requests import MessagesRequest
from api.dialects.ollama.requests import OllamaChatRequest
from api.dialects.responses.requests import ResponsesRequest
from tests.api.changes import CHANGES, LEAST, PARTS, PATHS, THOUGHT, body, lines
from tests.api.conftest import Running, serving

# what differs between equal answers
NEWS = ("created", "created_at", "total_duration", "eval_duration", "prompt_eval_duration")


@pytest.fixture(scope="module")
def plain(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Its template and tokenizer heed what the tests change."""
    folder = tmp_path_factory.mktemp("fields")
    model = folder / "tiny"
    model.mkdir()
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    thinking = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    config["chat_template"] = "{{ greeting or '' }}" + config["chat_template"] + thinking
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    for name in ("<think>", "</think>"):
        index = len(tokenizer["model"]["vocab"]) + sum(one["id"] > 2 for one in tokenizer["added_tokens"])
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": index, "content": name})
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = ["--adapters", "reverse=/fake/reverse", "--adapters", "say=/fake/say"]
    with serving(model, folder, *flags) as running:
        yield running


def outcome(server: Running, kind: type[Body], **fields: Any) -> tuple[list[dict[str, Any]], str]:
    """What the engine was sent, and the answer without what is new in each."""
    before = len(server.received("Submit"))
    answer = server.http.post(PATHS[kind], content=body(kind, **fields), headers={"x-request-id": "same"})
    assert answer.status_code == 200, answer.text
    sent = [
        {k: v for k, v in line.items() if k not in ("request_id", "t", "pid")} for line in server.received("Submit")
    ]
    shown = []
    for line in answer.text.splitlines():
        text = line.removeprefix("data: ")
        parsed = json.loads(text) if text.startswith("{") else {}
        for each in (parsed, parsed.get("response", {})):
            if isinstance(each, dict):
                for name in NEWS:
                    each.pop(name, None)
        shown.append(parsed)
    return sent[before:], json.dumps(shown)


@pytest.mark.parametrize(("kind", "field"), lines(Status.SUPPORTED, kinds=LEAST))
def test_supported_fields_change_something(plain: Running, kind: type[Body], field: Field) -> None:
    if field.name == "previous_response_id":
        outcome(plain, kind)  # keeps one of that name
    changes = CHANGES[kind][field.name]
    without = {name: value for name, value in changes.items() if name != field.name}
    if field.name in LEAST[kind]:
        without[field.name] = LEAST[kind][field.name]
    assert outcome(plain, kind, **changes) != outcome(plain, kind, **without)


@pytest.mark.parametrize(("kind", "field"), lines(Status.SUPPORTED, kinds=PARTS))
def test_supported_fields_of_parts_change_something(plain: Running, kind: type[Body], field: Field) -> None:
    whole, name, before, after = PARTS[kind][field.name]
    beside: dict[str, Any] = {"stream": True} if name == "stream_options" else {}
    if field.name in ("display", "exclude"):
        beside = {"messages": THOUGHT, "model": "say"}
    assert outcome(plain, whole, **beside, **{name: after}) != outcome(plain, whole, **beside, **{name: before})


def test_unknown_fields_of_messages(plain: Running) -> None:
    part = {"type": "text", "text": "x", "cache_control": {}}
    messages = [{"role": "user", "content": [part], "colour": 1}, {"role": "user", "content": "y", "colour": 2}]
    answer = plain.http.post(PATHS[ChatRequest], content=body(ChatRequest, messages=messages))
    assert answer.status_code == 200
    for name in ("messages[].colour", "messages[].content[].cache_control"):
        assert answer.headers["warnings"].count(f"unknown field '{name}' is ignored") == 1


def test_grammars_begin_behind_reasoning(plain: Running) -> None:
    """Which may come first with this template, unless it is switched off or the answer has begun."""

    def sent(**fields: Any) -> dict[str, Any]:
        (submit,), _ = outcome(plain, ChatRequest, guided_regex="a+", **fields)
        return {name: submit["grammar"].get(name) is not None for name in ("after", "opens")}

    behind, at_once = {"after": True, "opens": True}, {"after": False, "opens": False}
    assert sent() == sent(enable_thinking=True) == sent(reasoning_effort="low") == behind
    for off in ({"enable_thinking": False}, {"reasoning_effort": "none"}, {"continue_final_message": True}):
        assert sent(**off) == at_once
    assert sent(chat_template_kwargs={"enable_thinking": False}) == at_once
    (submit,), _ = outcome(plain, ChatRequest, guided_regex="a+", thinking_token_budget=4)
    assert submit["sampling"]["thinking"]["closing"][-1] == submit["sampling"]["thinking"]["end"]
    (submit,), _ = outcome(plain, ChatRequest, thinking_token_budget=4)
    assert submit["sampling"]["thinking"]["closing"][-1] != submit["sampling"]["thinking"]["end"]


def test_errors_and_notes_are_in_the_words_of_the_form(plain: Running) -> None:
    """Of what the chat's own checks say."""
    schema = {"type": "json_schema", "schema": {"properties": {"a": {"type": "strin"}}}}
    long = [{"role": "user", "content": "x" * 3000}]
    for kind, fields, part in (
        (MessagesRequest, {"output_config": {"format": schema}}, "output_config.format.schema: #/properties/a"),
        (ResponsesRequest, {"text": {"format": schema}}, "text.format.schema: #/properties/a"),
        (ResponsesRequest, {"input": long}, "your input resulted in"),
        (OllamaChatRequest, {"format": schema["schema"]}, "format: #/properties/a"),
        (OllamaChatRequest, {"options": {"num_predict": 0}}, "options.num_predict: "),
    ):
        answer = plain.http.post(PATHS[kind], content=body(kind, **fields))
        assert answer.status_code == 400 and part in answer.text, answer.text


def test_unknown_fields_are_noted_and_logged_once(plain: Running) -> None:
    for _ in range(3):
        answer = plain.http.post(
            PATHS[ChatRequest], content=body(ChatRequest, colour="red", **{"gr\u00f6\u00dfe\n": 1}, user="me")
        )
        assert answer.status_code == 200
        assert answer.headers["warnings"] == (
            "unknown field 'colour' is ignored; unknown field 'gr\\xf6\\xdfe\\n' is ignored; 'user' has no effect"
        )
    assert plain.stderr.count("'colour'") == 1


def test_request_ids_come_back(plain: Running) -> None:
    def ask(header: dict[str, str], **fields: Any) -> tuple[str, str]:
        answer = plain.http.post(PATHS[ChatRequest], content=body(ChatRequest, **fields), headers=header)
        return answer.headers["x-request-id"], answer.json()["id"]

    assert ask({"x-request-id": "abc"}) == ("abc", "chatcmpl-abc")
    assert ask({"x-request-id": "abc"}, request_id="body") == ("body", "chatcmpl-body")
    made, answer_id = ask({"x-request-id": "a b"})
    assert len(made) == 32 and answer_id == f"chatcmpl-{made}"
    for path in ("/health", "/nowhere", "/v1/models"):
        assert httpx.get(plain.url + path, headers={"x-request-id": "z"}).headers["x-request-id"] == "z"


def test_a_stop_string_can_stay(plain: Running) -> None:
    asked = {"prompt": "hello world", "add_special_tokens": False, "include_stop_str_in_output": True}

    def text(**fields: Any) -> str:
        (choice,) = plain.http.post("/v1/completions", json={**asked, **fields}).json()["choices"]
        assert choice["finish_reason"] == "stop"
        return str(choice["text"])

    assert text(stop=["o w"]) == "hello w"  # " wo" is one token
    assert text(skip_special_tokens=False) == "hello world<|endoftext|>"
    assert text() == "hello world"


def test_heads_and_methods(plain: Running) -> None:
    answer = plain.http.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")
    assert plain.http.head("/v1/chat/completions").status_code == 405
    for path, allowed in (("/v1/chat/completions", "POST"), ("/health", "GET, HEAD")):
        answer = plain.http.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert plain.http.get("/v1/models/").json() == plain.http.get("/v1/models").json()
    assert plain.http.get("/nowhere").status_code == 404


def test_who_wants_a_websocket_is_told_to_go_on_without(plain: Running) -> None:
    """Codex tries one first where its vendor's provider has this address; at a 405 it tries again for seconds."""
    answer = plain.http.get("/v1/responses", headers={"Connection": "Upgrade", "Upgrade": "websocket"})
    assert answer.status_code == 426 and "only HTTP" in answer.json()["error"]["message"]
    assert plain.http.get("/v1/responses").status_code == 405


def test_what_does_not_fit_is_told_as_openai_does(plain: Running) -> None:
    for kind, fields in (
        (ChatRequest, {"messages": [{"role": "user", "content": "x" * 3000}]}),
        (ChatRequest, {"max_tokens": 2048}),
        (CompletionRequest, {"prompt": [5] * 2048}),
        (CompletionRequest, {"max_tokens": 2048}),
    ):
        error = plain.http.post(PATHS[kind], content=body(kind, **fields)).json()["error"]
        assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, ")
        assert error["code"] == "context_length_exceeded"
    kept = plain.http.post("/v1/completions", json={"prompt": "x" * 3000, "truncate_prompt_tokens": -1}).json()
    assert kept["usage"]["prompt_tokens"] == 2047


def test_keys_may_come_in_a_header_of_their_own(model_dir: Any, tmp_path: Any) -> None:
    flags = ["--api-key", "k1", "--cors-origins", "https://one.example", "--unknown-fields", "reject"]
    with serving(model_dir, tmp_path, *flags, key="wrong") as server:
        assert httpx.get(f"{server.url}/v1/models", headers={"X-Api-Key": "k1"}).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", headers={"X-Api-Key": "k2"}).status_code == 401
        origin = {"Origin": "https://one.example", "Access-Control-Request-Method": "POST"}
        path = f"{server.url}/v1/chat/completions"
        assert httpx.options(path, headers=origin).headers["access-control-allow-origin"] == "https://one.example"
        other = httpx.options(path, headers={**origin, "Origin": "https://two.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = httpx.post(path, content=body(ChatRequest, temprature=1), headers={"X-Api-Key": "k1"})
        assert refused.status_code == 400 and "did you mean 'temperature'" in refused.json()["error"]["message"]
