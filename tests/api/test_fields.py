"""The table of fields says what becomes of each; here each of its lines is read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.bodies.body import Body, Field, Status, fields_of, names_of
from api.bodies.generation import ChatRequest
from api.bodies.parsing import Notes, parse
from api.dialects.ollama.requests import OllamaChatRequest
from api.dialects.reference import PAGES, updated
from api.dialects.responses.requests import ResponsesRequest
from api.errors import ApiError
from tests.api.changes import KINDS, LEAST, body, lines

ALIASED = {  # fields with aliases that are no numbers
    **dict.fromkeys(("model", "request_id", "cache_salt"), str),
    **dict.fromkeys(("include_stop_str_in_output", "return_token_ids"), bool),
}


ANYTHING = {"chat_template_kwargs", "guided_json", "json_schema", "tool_choice", "format", "schema"}  # any object


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
