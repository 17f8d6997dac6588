"""Structured output of the demo model over HTTP, with OpenAI's own client."""

from __future__ import annotations

import itertools
import json
import re
import threading
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.conftest import Server

ASK = [{"role": "user", "content": "Describe the cat."}]


class Place(BaseModel, extra="forbid"):
    city: Literal["Ulm", "Bonn", "Graz"]
    rooms: list[Annotated[int, Field(ge=0, le=99)]] = Field(max_length=3)


class Animal(BaseModel, extra="forbid"):
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)
    tame: bool
    home: Place | None


def ask(server: Server, **extra: Any) -> str:
    """The first answer of a few seeds that comes to its end: a form without a longest text may be cut at max_tokens."""
    settings = {"temperature": 1.0, "max_tokens": 300, **extra}
    known = {k: settings.pop(k) for k in ("response_format", "stream", "n", "logprobs", "stop") if k in settings}
    direct = {k: settings.pop(k) for k in ("temperature", "max_tokens")}
    for seed in range(5, 15):
        answer = server.client.chat.completions.create(  # type: ignore[call-overload]
            model="demo", messages=ASK, seed=seed, **direct, **known, extra_body=settings
        )
        if answer.choices[0].finish_reason == "stop":
            return answer.choices[0].message.content
    raise AssertionError(f"no answer of ten came to its end: {answer.choices[0]}")


def test_what_a_schema_forces_is_written_in_the_models_own_tokens(demo: Server) -> None:
    """In others the model has not learnt to go on."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    schema |= {"required": ["name", "age"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}

    def answer(name: str, age: int, **extra: Any) -> Any:
        message = {"role": "user", "content": f"{name} is {age}. Give me name and age as JSON."}
        body = {"return_token_ids": True}
        return demo.client.chat.completions.create(  # type: ignore[call-overload]
            model="demo", messages=[message], temperature=0, extra_body=body, **extra
        ).choices[0]

    for name, age in (("Tom", 7), ("Anna", 41), ("Mia", 88)):
        free, forced = answer(name, age), answer(name, age, response_format=form)
        assert json.loads(forced.message.content) == {"name": name, "age": age}
        assert forced.token_ids == free.token_ids


@pytest.mark.parametrize("temperature", [0, 0.8, 1.5])
def test_openai_parses_a_pydantic_model(demo: Server, temperature: float) -> None:
    answer = demo.client.chat.completions.parse(
        model="demo", messages=ASK, response_format=Animal, temperature=temperature, seed=3, max_tokens=400, n=3
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Animal)


def test_streamed_and_whole_are_the_same(demo: Server) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "animal", "strict": True, "schema": Animal.model_json_schema()},
    }
    whole = ask(demo, response_format=form)
    stream = demo.client.chat.completions.create(
        model="demo", messages=ASK, response_format=form, temperature=1.0, seed=5, max_tokens=300, stream=True
    )  # type: ignore[call-overload]
    assert "".join(event.choices[0].delta.content or "" for event in stream) == whole
    Animal.model_validate_json(whole)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}, "stop": ["nothing like this"]}, None),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, "[0-9]{3}-[a-z]{2}"),
        ({"guided_regex": r"\d\d/\w+ é"}, r"[0-9]{2}/\w+ é"),
        ({"structured_outputs": {"choice": ["red", "green\n", 'a "quoted" \\ one']}}, None),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"regex": "(ab){1,3}"}, "(ab){1,3}"),
        ({"ebnf": 'root ::= word (" " word)*\nword ::= "cat" | "dog"'}, "(cat|dog)( (cat|dog))*"),
        ({"grammar": 'root ::= [a-c]+ "." # a comment'}, r"[a-c]+\."),
        ({"guided_grammar": 'start: "x" | "y" start'}, "y*x"),
        ({"guided_json": json.dumps({"enum": ["x", 1, None]})}, '"x"|1|null'),
        ({"json_schema": {"type": "integer", "minimum": 1, "maximum": 9}}, "[1-9]"),
    ],
)
def test_words_of_other_servers(demo: Server, fields: dict[str, Any], form: str | None) -> None:
    text = ask(demo, **fields)
    if form is not None:
        assert re.fullmatch(form, text), text
    elif "response_format" in fields:
        assert isinstance(json.loads(text), dict)
    else:
        assert text in ("red", "green\n", 'a "quoted" \\ one')


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"guided_json": {"properties": {"a": {"type": "strin"}}}}, "guided_json", "#/properties/a: Invalid type"),
        ({"guided_json": {"$defs": {"d": {"not": {}}}, "$ref": "#/$defs/d"}}, "guided_json", "#/$defs/d"),
        ({"guided_json": {"items": {"uniqueItems": True}}}, "guided_json", '#/items: Unimplemented keys: ["uniqueIt'),
        ({"guided_json": {"x-guidance": {"lenient": True}, "contains": {}}}, "guided_json", "contains"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": 3}, "guided_json", "schema"),
        ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "one of them"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "one of them"),
        ({"grammar": "root ::= missing"}, "grammar", "missing"),
        ({"grammar": 'start: <no_such_token> "a"'}, "grammar", "no_such_token"),
        ({"ebnf": "root ::= " + "(" * 5000}, "ebnf", ""),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "exclude"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not permitted"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_json": {"anyOf": [{"properties": {"a/b~": {"format": "nope"}}}]}}, "guided_json",
         "#/anyOf/0/properties/a~1b~0: Unknown format"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(demo: Server, fields: dict[str, Any], param: str, part: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(demo, **fields)
    assert caught.value.param == param, caught.value.message
    assert part in caught.value.message


DOUBLED = list(itertools.pairwise(["root", *"abcdefghijklmnopqrst"]))
EXPLODING: list[dict[str, Any]] = [
    {"guided_regex": "(a?){5000}a{5000}"},
    {"guided_regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
    {"guided_regex": "[ab]*a[ab]{200}"},
    {"guided_regex": "(.*a){20}.{2000}"},
    {"guided_json": {"properties": {f"p{i}": {} for i in range(3000)}}},
    {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(8)]}},
    {"guided_json": {"enum": [f"value {i}" for i in range(20_000)]}},
    {"guided_json": json.loads('{"items":' * 200 + "{}" + "}" * 200)},
    {"ebnf": "\n".join(f"{a} ::= {b} {b}" for a, b in DOUBLED) + '\nt ::= "x"?'},
]  # fmt: skip


def test_what_explodes_ends_and_hurts_nobody(demo: Server) -> None:
    alone = demo.ask("How old is the cat?")
    ends: list[int] = []

    def send(fields: dict[str, Any]) -> None:
        body = {"model": "demo", "messages": ASK, "max_tokens": 60, "temperature": 1.0, **fields}
        ends.append(demo.http.post("/v1/chat/completions", json=body).status_code)

    threads = [threading.Thread(target=send, args=(fields,)) for fields in EXPLODING]
    for thread in threads:
        thread.start()
    beside = [demo.ask("How old is the cat?") for _ in range(3)]
    for thread in threads:
        thread.join()
    assert beside == [alone] * 3
    assert len(ends) == len(EXPLODING) and set(ends) <= {200, 400}
    assert demo.http.get("/health").json()["restarts"] == 0
