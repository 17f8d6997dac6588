"""The table of fields says what becomes of each; here every one of its lines is tried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.http.bodies.dialects import (
    MessagesRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    ResponsesRequest,
)
from api.http.bodies.generation import ChatRequest, CompletionRequest, StreamOptions
from api.http.bodies.values import Body
from api.http.fields.field import Field, Status
from api.http.fields.parsing import Notes, parse
from api.http.fields.reference import PAGE, updated
from api.http.fields.tables import fields_of
from tests.api.conftest import Running, serving

MESSAGES = [{"role": "user", "content": "hello world"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"role": "user", "content": '<tool_call>{"name": "now"}</tool_call>' * 2}]
THOUGHT = [{"role": "user", "content": "<think>Hm.</think>Yes."}]
LEAST: dict[type[Body], dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "hello world"},
}
OTHERS = (StreamOptions, MessagesRequest, ResponsesRequest, OllamaChatRequest, OllamaGenerateRequest, OllamaOptions)
PATHS = {ChatRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions"}

# A value of each supported field that changes what the engine is sent or what the client gets; `with` what it needs.
CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": "reverse"},
    "max_tokens": {"max_tokens": 3},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "min_tokens": {"min_tokens": 2},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.5},
    "seed": {"seed": 3},
    "stop": {"stop": "wor"},
    "stop_token_ids": {"stop_token_ids": [87]},
    "include_stop_str_in_output": {"stop": "wor", "include_stop_str_in_output": True},
    "n": {"n": 2},
    "best_of": {"best_of": 2},
    "presence_penalty": {"presence_penalty": 1},
    "frequency_penalty": {"frequency_penalty": 1},
    "repetition_penalty": {"repetition_penalty": 2},
    "logit_bias": {"logit_bias": {"5": 1}},
    "bad_words": {"bad_words": ["x"]},
    "allowed_token_ids": {"allowed_token_ids": [5]},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 9},
    "skip_special_tokens": {"stop_token_ids": [2], "include_stop_str_in_output": True, "skip_special_tokens": False},
    "return_token_ids": {"return_token_ids": True},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "add_special_tokens": {"add_special_tokens": False},
    "cache_salt": {"cache_salt": "a"},
    "request_id": {"request_id": "mine"},
    "priority": {"priority": 3},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"choice": ["a", "b"]}},
    "guided_json": {"guided_json": {"type": "integer"}},
    "guided_regex": {"guided_regex": "a+"},
    "guided_choice": {"guided_choice": ["a", "b"]},
    "guided_grammar": {"guided_grammar": 'root ::= "a"'},
    "regex": {"regex": "a+"},
    "ebnf": {"ebnf": 'root ::= "a"'},
    "grammar": {"grammar": 'root ::= "a"'},
    "json_schema": {"json_schema": '{"type": "integer"}'},
    "messages": {"messages": [{"role": "user", "content": "x"}]},
    "prompt": {"prompt": "x"},
    "echo": {"echo": True},
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {"continue_final_message": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"greeting": "ho"}},
    "tools": {"tools": TOOLS},
    "tool_choice": {"tools": TOOLS, "tool_choice": "none"},
    "parallel_tool_calls": {"messages": CALLS, "model": "say", "tools": TOOLS, "parallel_tool_calls": False},
    "functions": {"functions": [TOOLS[0]["function"]]},
    "function_call": {"functions": [TOOLS[0]["function"]], "function_call": "none"},
    "include_reasoning": {"messages": THOUGHT, "model": "say", "include_reasoning": False},
    "reasoning_effort": {"reasoning_effort": "none"},
    "enable_thinking": {"enable_thinking": False},
    "thinking_token_budget": {"thinking_token_budget": 5},
    "include_usage": {"stream": True, "stream_options": {"include_usage": True}},
    "continuous_usage_stats": {"stream": True, "stream_options": {"continuous_usage_stats": True}},
}  # fmt: skip
OF_CHAT = {
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "return_tokens_as_token_ids": {"logprobs": True, "return_tokens_as_token_ids": True},
}
OF_COMPLETIONS = {
    "logprobs": {"logprobs": 2},
    "return_tokens_as_token_ids": {"logprobs": 0, "return_tokens_as_token_ids": True},
}


def lines(*statuses: Status) -> list[Any]:
    return [
        pytest.param(kind, field, id=f"{kind.__name__}-{field.name}")
        for kind in LEAST
        for field in fields_of(kind).values()
        if field.status in statuses
    ]


def body(kind: type[Body], **fields: Any) -> bytes:
    return json.dumps({**LEAST[kind], **fields}).encode()


@pytest.mark.parametrize("kind", [*LEAST, *OTHERS])
def test_the_supported_fields_are_the_models(kind: type[Body]) -> None:
    table = fields_of(kind)
    assert {name for name, field in table.items() if field.status is Status.SUPPORTED} == set(kind.model_fields)
    assert {field.of for field in table.values()} - {None} <= set(kind.model_fields)
    assert all(field.note for field in table.values())


def test_the_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == updated(page), "run python -m api.http.fields.reference"
    assert page.count("| supported |") > 40


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
    pieces = answer.text.split("\n\n") if fields.get("stream") else [answer.text]
    shown = []
    for piece in pieces:
        text = piece.removeprefix("data: ")
        parsed = json.loads(text) if text.startswith("{") else {}
        parsed.pop("created", None)
        shown.append(parsed)
    return sent[before:], json.dumps(shown)


@pytest.mark.parametrize(("kind", "field"), lines(Status.SUPPORTED))
def test_supported_fields_change_something(plain: Running, kind: type[Body], field: Field) -> None:
    changes = {**CHANGES, **(OF_CHAT if kind is ChatRequest else OF_COMPLETIONS)}[field.name]
    without = {name: value for name, value in changes.items() if name != field.name}
    if field.name in LEAST[kind]:
        without[field.name] = LEAST[kind][field.name]
    assert outcome(plain, kind, **changes) != outcome(plain, kind, **without)


@pytest.mark.parametrize("name", list(StreamOptions.model_fields))
@pytest.mark.parametrize("kind", list(LEAST))
def test_options_of_streams_change_something(plain: Running, kind: type[Body], name: str) -> None:
    assert outcome(plain, kind, **CHANGES[name]) != outcome(plain, kind, stream=True)


@pytest.mark.parametrize(("kind", "field"), lines(Status.SUPPORTED))
def test_supported_fields_are_checked(kind: type[Body], field: Field) -> None:
    for wrong in ({"a": {"b": 1}}, [[{}]]):
        if field.name in ("chat_template_kwargs", "guided_json", "json_schema") and isinstance(wrong, dict):
            continue
        with pytest.raises(ApiError) as caught:
            parse(kind, body(kind, **{field.name: wrong}))
        assert (caught.value.param or "").split(".")[0] == field.name or field.name in caught.value.message


@pytest.mark.parametrize(("kind", "field"), lines(Status.ALIAS))
def test_aliases_are_the_field(kind: type[Body], field: Field) -> None:
    name = field.of or ""
    extra = {"logprobs": True} if kind is ChatRequest and name == "top_logprobs" else {}
    value = True if name == "include_stop_str_in_output" else 2
    assert parse(kind, body(kind, **extra, **{field.name: value})) == parse(kind, body(kind, **extra, **{name: value}))
    with pytest.raises(ApiError, match="differ"):
        parse(kind, body(kind, **extra, **{field.name: value, name: value is not True}))


@pytest.mark.parametrize(("kind", "field"), lines(Status.NO_OP))
def test_no_ops_are_taken_and_noted(kind: type[Body], field: Field) -> None:
    for value in field.values or ("x", 1, {"a": "b"}, False):
        notes = Notes("reject")
        assert parse(kind, body(kind, **{field.name: value}), notes) == parse(kind, body(kind))
        assert notes.unused == [field.name]
    if field.values:
        with pytest.raises(ApiError) as caught:
            parse(kind, body(kind, **{field.name: "another"}))
        assert caught.value.param == field.name


@pytest.mark.parametrize(("kind", "field"), lines(Status.REFUSED))
def test_refused_fields_are_named(kind: type[Body], field: Field) -> None:
    for value in ("another", 17, [{"a": 1}], {"b": []}):
        with pytest.raises(ApiError) as caught:
            parse(kind, body(kind, **{field.name: value}), Notes("ignore"))
        assert (caught.value.status, caught.value.param) == (400, field.name)
        assert field.note in caught.value.message
    for value in field.values:
        assert parse(kind, body(kind, **{field.name: value})) == parse(kind, body(kind))


@given(st.text(min_size=1, max_size=300), st.sampled_from(["ignore", "warn"]), st.sampled_from(list(LEAST)))
def test_unknown_fields(name: str, policy: str, kind: type[Body]) -> None:
    if name in fields_of(kind):
        return
    notes = Notes(policy)
    assert parse(kind, body(kind, **{name: 1}), notes) == parse(kind, body(kind))
    assert notes.unknown == ([name[:100]] if policy == "warn" else [])
    with pytest.raises(ApiError) as caught:
        parse(kind, body(kind, **{name: 1}))
    assert caught.value.code == "unknown_field"


@given(st.integers(0, 100), st.booleans())
def test_numbers_as_others_write_them(number: int, text: bool) -> None:
    written: Any = f"{number}.0" if text else float(number)
    assert parse(ChatRequest, body(ChatRequest, top_k=written)).top_k == number
    tenth = number / 100
    assert parse(ChatRequest, body(ChatRequest, top_p=str(max(tenth, 0.01)))).top_p == max(tenth, 0.01)
    for wrong in (number + 0.5, f"{number}x", "", "0x1", "nan", "1e999", True, "٣"):
        with pytest.raises(ApiError) as caught:
            parse(ChatRequest, body(ChatRequest, top_k=wrong))
        assert caught.value.param == "top_k"


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
    assert plain.http.get("/docs").status_code == 404


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
