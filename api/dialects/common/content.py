"""What the requests of other forms share: text out of lists of parts, with errors that name the place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from api.bodies.body import Body, no_op, supported
from api.bodies.parsing import Notes
from api.bodies.structured import Schema
from api.errors import UnreadableError, shortened
from api.text.kinds import Content, Fate, Kinds, unread
from api.text.messages import json_of, passed_over, unsupported


class SchemaFormat(Body):
    """What the output is to be."""

    FIELDS = (
        supported("type", "`json_schema`; `json_object`: any object; `text`: anything"),
        supported("schema", "what the output follows"),
        no_op("name", "the schema says all"),
        no_op("description", "the schema says all"),
        no_op("strict", "a schema always holds"),
    )

    type: Literal["text", "json_object", "json_schema"]
    schema_: Schema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _one_schema(self) -> SchemaFormat:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError(f"a schema belongs to type 'json_schema' alone, got type {self.type!r}")
        return self


def text_in(content: Any, where: str, kinds: Kinds, notes: Notes, *, newly: bool = False) -> str:
    """A text, or the joined texts of parts, each as the table `kinds` has it. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json_of(content, where, notes, newly=newly)
    text = Content()
    for i, part in enumerate(content):
        with passed_over(notes, newly=newly):
            add_part(text, part, f"{where}[{i}]", kinds, notes, newly=newly)
    return str(text)


def add_part(text: Content, part: Any, where: str, kinds: Kinds, notes: Notes, *, newly: bool = False) -> None:
    """One part, of those that have a text or none, or a text. Raises ApiError."""
    if isinstance(part, str):
        text.text(part)
        return
    kind = kind_of(part, where)
    match kinds.fate(kind, newly=newly):
        case Fate.READ:
            text.text(string_in(part, "refusal" if kind == "refusal" else "text", where))
        case Fate.LINE:
            notes.made_a_line(where, kind)
            text.line(unread(kind, name_of(part)))
        case Fate.LEFT_OUT:
            notes.left_out(where, kind)
        case Fate.REFUSED:
            raise unsupported(where, kind)


def name_of(part: Mapping[str, Any]) -> str:
    """What a document or a file is called, if it says."""
    return next((value for key in ("title", "filename") if isinstance(value := part.get(key), str)), "")


def kind_of(part: Any, where: str) -> str:
    """Raises UnreadableError."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise UnreadableError(f'{where}: an object with a "type" is expected, got {shortened(part)}', where)
    return str(part["type"])


def string_in(part: dict[str, Any], key: str, where: str) -> str:
    """Raises UnreadableError."""
    if not isinstance(part.get(key), str):
        raise UnreadableError(f"{where}.{key}: a text is expected", f"{where}.{key}")
    return str(part[key])


def response_format(wanted: SchemaFormat | None) -> dict[str, Any] | None:
    """What a chat request calls it."""
    if wanted is None or wanted.type == "text":
        return None
    schema = {"json_schema": {"schema": wanted.schema_}} if wanted.type == "json_schema" else {}
    return {"type": wanted.type, **schema}


def continuation(messages: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Fields of a chat whose last message, if it is a text of the assistant's, is the beginning of the answer."""
    last = messages[-1]
    begun = last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls")
    return {"add_generation_prompt": False, "continue_final_message": True} if begun else {}
