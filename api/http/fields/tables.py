"""The table of each body's fields."""

from __future__ import annotations

from collections.abc import Sequence

from api.http.bodies.dialects import (
    MessagesRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaShowRequest,
    ResponsesRequest,
)
from api.http.bodies.generation import ChatRequest, CompletionRequest, StreamOptions
from api.http.bodies.values import Body
from api.http.fields.dialects import (
    MESSAGES,
    OLLAMA,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OLLAMA_OPTIONS,
    OLLAMA_SHOW,
    RESPONSES,
)
from api.http.fields.field import Field, supported
from api.http.fields.generation import CHAT, COMPLETION, GENERATION, STREAM_OPTIONS

TABLES: dict[str, Sequence[Field]] = {
    "every generating endpoint": GENERATION,
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "stream_options": STREAM_OPTIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/api/chat": (*OLLAMA, *OLLAMA_CHAT),
    "/api/generate": (*OLLAMA, *OLLAMA_GENERATE),
    "options": OLLAMA_OPTIONS,
}


def fields_of(kind: type[Body]) -> dict[str, Field]:
    """The table of a body's fields by name; for a body without one, its model's are all supported."""
    tables = {
        ChatRequest: (*GENERATION, *CHAT),
        CompletionRequest: (*GENERATION, *COMPLETION),
        StreamOptions: STREAM_OPTIONS,
        MessagesRequest: MESSAGES,
        ResponsesRequest: RESPONSES,
        OllamaChatRequest: (*OLLAMA, *OLLAMA_CHAT),
        OllamaGenerateRequest: (*OLLAMA, *OLLAMA_GENERATE),
        OllamaOptions: OLLAMA_OPTIONS,
        OllamaShowRequest: OLLAMA_SHOW,
    }
    table = tables.get(kind)
    if table is None:
        return {name: supported(name, "") for name in kind.model_fields}
    return {field.name: field for field in table}
