"""The table of fields says what becomes of each; here every one of its lines is tried."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.bodies.body import Body, Field, Status, fields_of, names_of
from api.bodies.generation import ChatRequest, CompletionRequest
from api.bodies.parsing import Notes, parse
from api.dialects.anthropic.requests import MessagesRequest
from api.dialects.ollama.requests import OllamaChatRequest
from api.dialects.reference import PAGES, updated
from api.dialects.responses.requests import ResponsesRequest
from api.errors import ApiError
from tests.api.changes import CHANGES, KINDS, LEAST, PARTS, PATHS, THOUGHT, body
from tests.api.conftest import Running, serving

# what differs between equal answers
NEWS = ("created", "created_at", "total_duration", "eval_duration", "prompt_eval_duration")
ALIASED = {  # fields with aliases that are no numbers
    **dict.fromkeys(("model", "request_id", "cache_salt"), str),
    **dict.fromkeys(("include_stop_str_in_output", "return_token_ids"), bool),
}
ANYTHING = {"chat_template_kwargs", "guided_json", "json_schema", "tool_choice", "format", "schema"}  # any object


def lines(*statuses: Status, kinds: Iterable[type[Body]] = KINDS) -> list[Any]:
    return [
        pytest.param(kind, field, id=f"{kind.__name__}-{field.name}")
        for kind in kinds
        for field in fields_of(kind).values()
        if field.status in statuses
    ]


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_supported_fields_are_the_models(kind: type[Body]) -> None:
    table = fields_of(kind)
    assert {name for name, field in table.items() if field.status is Status.SUPPORTED} == names_of(kind)
    assert {field.of for field in table.values()} - {None} <= names_of(kind)
    assert all(field.note for field in table.values())


@pytest.mark.parametrize("value", [{"?": 1}, [[]], "?", 1.5, True], ids=str)
@pytest.mark.parametrize("kind", list(LEAST))
def test_messages_about_values_of_another_type_name_field_and_value(kind: type[Body], value: Any) -> None:
    refused = 0
    for name in names_of(kind):
        try:
            parse(kind, body(kind, **{name: value}))
        except ApiError as error:
            refused += 1
            param = error.param or ""
            assert name in error.message and param.split(".")[0].split("[")[0] == name
            assert "[" not in param.replace("[0]", "") and not {"str", "bool", "dict"} & set(param.split(".")[1:])
            assert not any(word in error.message for word in ("dictionary", "instance of", "after validation"))
            if "input should be" in error.message:
                assert f"got {value!r}" in error.message or param != name
    assert refused > 2


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ResponsesRequest, {"input": []}, "input: value should have at least 1 item, not 0"),
        (ResponsesRequest, {"input": 5}, "input: input should be a valid string or a valid list, got 5"),
        (OllamaChatRequest, {"format": 5}, "format: input should be '' or 'json' or an object, got 5"),
        (
            ResponsesRequest,
            {"include": ["x"]},
            "include.0: input should be 'message.output_text.logprobs', .*, got 'x'",
        ),
        (ChatRequest, {"logit_bias": {"5": 300}}, "logit_bias.5: input should be less than or equal to 100, got 300"),
        (ChatRequest, {"response_format": {}}, "response_format.type: field required"),
    ],
)
def test_messages_about_fields_that_take_several_types(kind: type[Body], fields: Any, message: str) -> None:
    with pytest.raises(ApiError, match=f"^{message}$") as caught:
        parse(kind, body(kind, **fields))
    assert caught.value.param == message.partition(":")[0]


@pytest.mark.parametrize("kind", list(LEAST))
def test_lists_may_be_as_long_as_the_page_says(kind: type[Body]) -> None:
    for name, schema in kind.model_json_schema()["properties"].items():
        for form in schema.get("anyOf", [schema]):
            items = form.get("items", {})
            item = items.get("enum", [{"string": "a", "integer": 1}.get(items.get("type"))])[0]
            if item is not None and name not in ("prompt", "tokens"):  # how many those may be is said elsewhere
                most = form.get("maxItems", 2000)
                parse(kind, body(kind, **{name: [item] * most}))
                with pytest.raises(ApiError, match=name):
                    parse(kind, body(kind, **{name: [item] * (most + 1) if "maxItems" in form else [[]]}))


def test_the_page_is_current() -> None:
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        assert page == updated(page), "run python -m api.dialects.reference"
    assert PAGES[0].read_text(encoding="utf-8").count("| supported |") > 40


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


@pytest.mark.parametrize(("kind", "field"), lines(Status.SUPPORTED))
def test_supported_fields_are_checked(kind: type[Body], field: Field) -> None:
    for wrong in ({"a": {"b": 1}}, [[{}]]):
        if field.name in ANYTHING and isinstance(wrong, dict):
            continue
        with pytest.raises(ApiError) as caught:
            parse(kind, body(kind, **{field.name: wrong}))
        assert (caught.value.param or "").split(".")[0] == field.name or field.name in caught.value.message


@pytest.mark.parametrize(("kind", "field"), lines(Status.ALIAS))
def test_aliases_are_the_field(kind: type[Body], field: Field) -> None:
    name = field.of or ""
    extra = {"logprobs": True} if kind is ChatRequest and name == "top_logprobs" else {}
    value = {str: "x", bool: True}.get(ALIASED.get(name, int), 2)
    other = "y" if value == "x" else value is not True
    assert parse(kind, body(kind, **extra, **{field.name: value})) == parse(kind, body(kind, **extra, **{name: value}))
    with pytest.raises(ApiError, match="differ"):
        parse(kind, body(kind, **extra, **{field.name: value, name: other}))


@pytest.mark.parametrize(("kind", "field"), lines(Status.NO_OP))
def test_no_ops_are_taken_and_noted(kind: type[Body], field: Field) -> None:
    for value in field.values or ("x", 1, {"a": "b"}, False, ["y"]):
        notes = Notes("reject")
        assert parse(kind, body(kind, **{field.name: value}), notes) == parse(kind, body(kind))
        assert notes.unused == [field.name]
    for value in ["another"] if field.values else []:
        with pytest.raises(ApiError) as caught:
            parse(kind, body(kind, **{field.name: value}))
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


def test_parts_of_bodies_follow_their_tables() -> None:
    def wrong(**fields: Any) -> str | None:
        with pytest.raises(ApiError) as caught:
            parse(ResponsesRequest, body(ResponsesRequest, **fields))
        return caught.value.param

    assert wrong(reasoning={"colour": 1}) == "reasoning.colour"
    assert wrong(text={"format": {"type": "text", "colour": 1}}) == "text.format.colour"
    assert wrong(text={"format": {"type": "xml"}}) == "text.format.type"
    notes = Notes("warn")
    parse(ResponsesRequest, body(ResponsesRequest, reasoning={"summary": "auto", "colour": 1}), notes)
    assert (notes.unused, notes.unknown) == (["reasoning.summary"], ["reasoning.colour"])


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
