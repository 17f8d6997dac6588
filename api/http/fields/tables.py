"""The table of each body's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple, get_args

from api.http.bodies import dialects as d
from api.http.bodies.generation import ChatRequest, CompletionRequest, StreamOptions
from api.http.bodies.values import Body
from api.http.fields import dialects as of
from api.http.fields.field import Field, supported
from api.http.fields.generation import CHAT, COMPLETION, GENERATION, STREAM_OPTIONS


class Table(NamedTuple):
    """`name`: as docs/api.md marks it. `kind`: a body, or a part of one."""

    name: str
    kind: type[Body]
    fields: Sequence[Field]


TABLES = (
    Table("every generating endpoint", ChatRequest, GENERATION),
    Table("/v1/chat/completions", ChatRequest, CHAT),
    Table("/v1/completions", CompletionRequest, COMPLETION),
    Table("stream_options", StreamOptions, STREAM_OPTIONS),
    Table("/v1/responses", d.ResponsesRequest, of.RESPONSES),
    Table("reasoning", d.ReasoningConfig, of.REASONING),
    Table("text", d.TextConfig, of.TEXT),
    Table("text.format", d.TextFormat, of.TEXT_FORMAT),
    Table("/v1/messages", d.MessagesRequest, of.MESSAGES),
    Table("thinking", d.Thinking, of.THINKING),
    Table("output_config", d.OutputConfig, of.OUTPUT_CONFIG),
    Table("output_config.format", d.SchemaFormat, of.FORMAT),
    Table("/api/chat", d.OllamaChatRequest, (*of.OLLAMA, *of.OLLAMA_CHAT)),
    Table("/api/generate", d.OllamaGenerateRequest, (*of.OLLAMA, *of.OLLAMA_GENERATE)),
    Table("options", d.OllamaOptions, of.OLLAMA_OPTIONS),
    Table("/api/show", d.OllamaShowRequest, of.OLLAMA_SHOW),
)


@cache
def fields_of(kind: type[Body]) -> Mapping[str, Field]:
    """The table of a body's fields by name; for a body without one, its model's are all supported."""
    shared = GENERATION if kind is CompletionRequest else ()
    found = [*shared, *(field for table in TABLES if table.kind is kind for field in table.fields)]
    return {field.name: field for field in found} or {name: supported(name, "") for name in names_of(kind)}


@cache
def names_of(kind: type[Body]) -> frozenset[str]:
    """The fields of a body's model, as clients write them."""
    return frozenset(info.alias or name for name, info in kind.model_fields.items())


@cache
def parts_of(kind: type[Body]) -> Mapping[str, type[Body]]:
    """The fields that have fields of their own."""
    annotations = {info.alias or name: info.annotation for name, info in kind.model_fields.items()}
    candidates = [(name, part) for name, kinds in annotations.items() for part in (*get_args(kinds), kinds)]
    return {name: part for name, part in candidates if isinstance(part, type) and issubclass(part, Body)}
