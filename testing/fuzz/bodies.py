"""Bodies for every endpoint that takes one: good but for some fields or bytes, any JSON at all, and good ones that ask
for grammars and tools which are odd, huge or wrong."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from api.bodies.generation import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from api.dialects.anthropic.requests import MessagesRequest
from api.dialects.ollama.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from api.dialects.responses.compaction import CompactRequest
from api.dialects.responses.requests import ResponsesRequest
from api.endpoints.batches import BatchRequest
from api.endpoints.fine_tuning import JobRequest
from api.endpoints.models import LoadAdapterRequest, UnloadAdapterRequest
from testing.fuzz import tuning
from testing.fuzz.mutate import mutated

_Good = dict[str, Any]
_MESSAGES = [{"role": "user", "content": "hello"}]
_LIMIT = {"num_predict": 3}  # tokens, in Ollama's words
_MESSAGE = {"model": "demo", "messages": _MESSAGES, "max_tokens": 3}
_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
_FILE = "/v1/files"
_PART = b'--b\r\nContent-Disposition: form-data; name="'
_FORM = (
    _PART + b'purpose"\r\n\r\nbatch\r\n' + _PART + b'file"; filename="a.jsonl"\r\n\r\n'
    + json.dumps(_LINE).encode() + b"\n\r\n--b--\r\n"
)  # fmt: skip
_ENDPOINTS: dict[str, tuple[_Good, type[BaseModel]]] = {
    "/v1/chat/completions": (_MESSAGE, ChatRequest),
    "/v1/completions": ({"model": "demo", "prompt": "a", "max_tokens": 3}, CompletionRequest),
    "/v1/messages": (_MESSAGE, MessagesRequest),
    "/v1/messages/count_tokens": (_MESSAGE, MessagesRequest),
    "/v1/responses": ({"model": "demo", "input": "hello", "max_output_tokens": 3}, ResponsesRequest),
    "/v1/responses/input_tokens": ({"model": "demo", "input": "hello"}, ResponsesRequest),
    "/v1/responses/compact": ({"model": "demo", "input": "hello"}, CompactRequest),
    "/api/chat": ({"model": "demo", "messages": _MESSAGES, "options": _LIMIT}, OllamaChatRequest),
    "/api/generate": ({"model": "demo", "prompt": "hello", "options": _LIMIT}, OllamaGenerateRequest),
    "/api/show": ({"model": "demo"}, OllamaShowRequest),
    "/api/pull": ({"model": "demo"}, OllamaPullRequest),
    "/apply-template": (_MESSAGE, ChatRequest),
    "/tokenize": ({"model": "demo", "prompt": "a"}, TokenizeRequest),
    "/detokenize": ({"model": "demo", "tokens": [1, 2]}, DetokenizeRequest),
    "/v1/load_lora_adapter": ({"lora_name": "x", "lora_path": "/nowhere"}, LoadAdapterRequest),
    "/v1/unload_lora_adapter": ({"lora_name": "x"}, UnloadAdapterRequest),
    "/v1/batches": (
        {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
        BatchRequest,
    ),
    "/v1/fine_tuning/jobs": ({"model": "demo", "training_file": "file-1"}, JobRequest),
}
PATHS = (*_ENDPOINTS, *tuning.ENDPOINTS, tuning.BATCH, _FILE)
_CONTENT_TYPES = {_FILE: "multipart/form-data; boundary=b", tuning.BATCH: "application/x-protobuf"}


def body_kind(path: str) -> type[BaseModel] | None:
    """What a JSON body for the path is read into, where that is one of ours."""
    return _ENDPOINTS[path][1] if path in _ENDPOINTS else None


def content_type(path: str) -> str:
    return _CONTENT_TYPES.get(path, "application/json")


def bodies(path: str, ids: dict[str, str]) -> st.SearchStrategy[bytes]:
    """For one of `PATHS`. `ids`: of a tuning run that is open (`testing.fuzz.tuning`)."""
    if path == _FILE:
        return _damaged(_FORM)
    if path == tuning.BATCH:
        return tuning.batches(ids) | tuning.batches(ids).flatmap(_damaged)
    if path in tuning.ENDPOINTS:
        template, fields = tuning.ENDPOINTS[path]
        good, numbers = tuning.named(template, ids), tuning.numbers(path)
    else:
        good, numbers = _ENDPOINTS[path][0], st.just({})
        fields = tuple(_ENDPOINTS[path][1].model_fields)
    names = st.sampled_from(sorted(fields)) | st.text(max_size=6)
    edited = st.dictionaries(names, _VALUES, min_size=1, max_size=4)
    constrained = _CONSTRAINED.get(path, edited)
    none: st.SearchStrategy[_Good] = st.just({})
    changes = edited | constrained | none
    whole = st.builds(lambda order, changed: json.dumps({**good, **order, **changed}).encode(), numbers, changes)
    return whole | whole | _damaged(json.dumps(good).encode()) | _VALUES.map(lambda value: json.dumps(value).encode())


def _damaged(good: bytes) -> st.SearchStrategy[bytes]:
    def damage(number: int) -> bytes:
        return mutated({"body": good}, [{"body": b'{"a": [1e5, -2]}'}], Random(number)).get("body", b"")

    return st.integers(0, 1 << 40).map(damage)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        [2**63, 2**64, -1, 0, 1e-320, 1e308, "", "<|im_end|>", "demo", "user", "assistant", "\x00", "\ud800"]
    )
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "1", ""]) | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)

# ---- grammars and tools

_KEYWORDS = st.dictionaries(
    st.sampled_from(
        ["minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "multipleOf", "pattern", "format",
         "required", "additionalProperties", "propertyNames", "not", "if", "$defs", "description"]
    ),
    _SCALARS,
    max_size=2,
)  # fmt: skip
_LEAVES = st.sampled_from(
    [
        *(True, False, {}, {"type": "string"}, {"type": "integer"}, {"type": ["null", "boolean"]}, {"const": [1]}),
        *({"enum": ["a", 1, None]}, {"enum": []}, {"$ref": "#"}, {"$ref": "#/$defs/none"}, {"$ref": "http://x/y"}),
        *({"type": "string", "pattern": "(a|a)*b"}, {"type": "string", "pattern": "(x{1,999}){1,999}"}),
        *({"type": "string", "maxLength": 10**9}, {"type": "array", "minItems": 10**6}, {"type": "novel"}),
    ]
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda properties, more: {"type": "object", "properties": properties, "required": [*properties], **more},
            st.dictionaries(st.text(max_size=5), inner, max_size=4),
            _KEYWORDS,
        ),
        st.builds(lambda items, more: {"type": "array", "items": items, "maxItems": 3, **more}, inner, _KEYWORDS),
        st.builds(lambda key, of: {key: of}, st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, max_size=3)),
    ),
    max_leaves=8,
)
_GRAMMARS = st.sampled_from(
    [
        *(
            'root ::= "a" | "b"',
            "root ::= root",
            'root ::= "a" root root',
            "",
            "root ::=",
            "start: /a+/",
            "start: start",
        ),
        *(
            "root ::= [a-z]{1,100000}",
            "root ::= nowhere",
            "start: /(a?){900}a{900}/",
            "(" * 5000,
            'x ::= "' + "y" * 9999,
        ),
    ]
)
_PATTERNS = st.sampled_from(["[0-9]{3}", "(a|a)*b", "(a?){900}a{900}", "(", "\\d+\\", "(?=a)b", "x" * 9999, "", "\x00"])
_NAMES = st.sampled_from(["f", "f", "weather", "", "a b", "x" * 100, "\ud800", 3, None])
_CHOICES = st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}, {}, "novel"])
_THOUGHTS = st.sampled_from([None, True, False, "low", "none"])


def _tools(wrap: Any) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.builds(wrap, _NAMES, _SCHEMAS), min_size=1, max_size=3)


_OPENAI_TOOLS = _tools(
    lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
)
_WORDS_OF_OTHERS = (
    st.fixed_dictionaries({"structured_outputs": st.fixed_dictionaries({"json": _SCHEMAS})})
    | st.fixed_dictionaries({"structured_outputs": st.fixed_dictionaries({"grammar": _GRAMMARS})})
    | st.fixed_dictionaries({"guided_regex": _PATTERNS})
    | st.fixed_dictionaries({"guided_choice": st.lists(st.text(max_size=5), max_size=4)})
    | st.fixed_dictionaries({"guided_grammar": _GRAMMARS, "temperature": st.just(1.5)})
    | st.fixed_dictionaries({"json_schema": _SCHEMAS, "ebnf": _GRAMMARS})
)
_CONSTRAINED: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "/v1/chat/completions": st.one_of(
        st.fixed_dictionaries({"tools": _OPENAI_TOOLS, "tool_choice": _CHOICES}),
        st.builds(
            lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            _SCHEMAS,
        ),
        _WORDS_OF_OTHERS,
    ),
    "/v1/completions": _WORDS_OF_OTHERS,
    "/v1/messages": st.one_of(
        st.fixed_dictionaries(
            {
                "tools": _tools(lambda name, schema: {"name": name, "input_schema": schema}),
                "tool_choice": st.sampled_from([{"type": "any"}, {"type": "tool", "name": "f"}, {"type": "novel"}]),
            }
        ),
        st.builds(lambda schema: {"output_format": {"type": "json_schema", "schema": schema}}, _SCHEMAS),
    ),
    "/v1/responses": st.one_of(
        st.fixed_dictionaries(
            {
                "tools": _tools(lambda name, schema: {"type": "function", "name": name, "parameters": schema}),
                "tool_choice": st.sampled_from(["auto", "required", {"type": "function", "name": "f"}, {}]),
            }
        ),
        st.builds(
            lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}, _SCHEMAS
        ),
    ),
    "/api/chat": st.fixed_dictionaries({"format": _SCHEMAS, "think": _THOUGHTS})
    | st.fixed_dictionaries({"tools": _OPENAI_TOOLS}),
    "/api/generate": st.fixed_dictionaries({"format": _SCHEMAS, "think": _THOUGHTS}),
}
