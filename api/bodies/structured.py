"""What an output is to be, in the words of OpenAI, vLLM, SGLang and llama.cpp: at most one of them in a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from api.errors import bad_request
from engine.grammar.compile import MAX_TEXT
from engine.messages import GrammarSpec

_MAX_CHOICES = 10_000
_ANY_OBJECT = {"type": "object"}


def _schema(value: Any) -> Any:
    """A schema is an object or a boolean, or the JSON text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value[: MAX_TEXT + 1])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise ValueError("a JSON schema is expected: an object, or its text")
    return value


Schema = Annotated[dict[str, Any] | bool, BeforeValidator(_schema, json_schema_input_type=dict[str, Any] | bool | str)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=_MAX_CHOICES)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class JsonSchemaFormat(_Part):
    """`strict` changes nothing: what the schema says always holds."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Schema | None = Field(default=None, alias="schema")


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Schema | None = Field(default=None, alias="schema", description="llama.cpp's, of a json_object")

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise bad_request(
                'response_format.json_schema: type \'json_schema\' needs it: {"name": ..., "schema": {...}}',
                "response_format.json_schema",
            )
        if self.type != "json_schema" and self.json_schema is not None:
            raise bad_request(
                f"response_format.json_schema is only allowed with type 'json_schema', the type is {self.type!r}",
                "response_format.json_schema",
            )
        if self.schema_ is not None and self.type != "json_object":
            raise bad_request("response_format.schema is only allowed with type 'json_object'", "response_format")
        return self


class StructuredOutputs(_Part):
    """vLLM's."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None


class StructuredOutput(_Part):
    """The fields of a request."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    grammar: Annotated[str, Field(max_length=MAX_TEXT)] | None = None  # llama.cpp's clients send "" for none
    json_schema: Schema | None = None


def grammar_of(body: StructuredOutput) -> GrammarSpec | None:
    """What the body asks for, None: nothing. Raises ApiError if that is two things."""
    specs = list(_specs(body))
    if len(specs) > 1:
        one, other = specs[0].field, specs[1].field
        raise bad_request(f"{one} and {other}: an output can follow one of them only", other)
    return specs[0] if specs else None


def _specs(body: StructuredOutput) -> Iterator[GrammarSpec]:
    form, vllm = body.response_format, body.structured_outputs or StructuredOutputs()
    if form is not None and form.type == "json_object":
        yield _json(_ANY_OBJECT if form.schema_ is None else form.schema_, "response_format.schema")
    if form is not None and form.json_schema is not None:
        schema = form.json_schema.schema_
        yield _json(_ANY_OBJECT if schema is None else schema, "response_format.json_schema.schema")
    if vllm.json_object:
        yield _json(_ANY_OBJECT, "structured_outputs.json_object")
    for name, value in (
        ("structured_outputs.json", vllm.json_),
        ("guided_json", body.guided_json),
        ("json_schema", body.json_schema),
    ):
        if value is not None:
            yield _json(value, name)
    for name, regex in (
        ("structured_outputs.regex", vllm.regex),
        ("guided_regex", body.guided_regex),
        ("regex", body.regex),
    ):
        if regex is not None:
            yield GrammarSpec("regex", regex, field=name)
    for name, choices in (("structured_outputs.choice", vllm.choice), ("guided_choice", body.guided_choice)):
        if choices is not None:
            yield GrammarSpec("choice", json.dumps(choices, ensure_ascii=False), field=name)
    for name, grammar in (
        ("structured_outputs.grammar", vllm.grammar),
        ("guided_grammar", body.guided_grammar),
        ("ebnf", body.ebnf),
        ("grammar", body.grammar),
    ):
        if grammar:
            yield GrammarSpec("gbnf", grammar, field=name)


def _json(schema: dict[str, Any] | bool, field: str) -> GrammarSpec:
    try:
        return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False), field=field)
    except (TypeError, RecursionError):  # a number that is none of JSON's usual ones, or too many levels
        raise bad_request(f"{field}: a number in it is too long, or it is nested too deep", field) from None
