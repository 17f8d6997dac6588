"""JSON schemas of what bodies hold that parsing checks by hand: messages, tools and items, for the OpenAPI document.

They say what works in each place. What else may stand there, and what becomes of it, is in docs/agents.md.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

from api.bodies.values import INT32

Shape = dict[str, Any]
_TEXT: Shape = {"type": "string", "minLength": 1, "maxLength": 1000}
_NAME: Shape = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}
_ARGUMENTS: Shape = {"type": "string", "enum": ["{}"], "description": "JSON of an object"}


def _object(required: tuple[str, ...] = (), **properties: Shape) -> Shape:
    return {"type": "object", "required": [*required], "properties": properties}


def _parts(kind: str) -> Shape:
    part = {**_object(("type", "text"), type={"const": kind}, text=_TEXT), "additionalProperties": False}
    return {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "maxItems": 4, "items": part}]}


def _message(role: str, content: Shape, **more: Shape) -> Shape:
    return {
        **_object(("role", "content"), role={"const": role}, content=content, **more),
        "additionalProperties": False,
    }


_PARAMETERS = {
    **_object(type={"const": "object"}, properties={"type": "object", "maxProperties": 0}),
    "required": ["type"],
    "description": "a JSON schema of an object",
}
_FUNCTION = _object(("name",), name=_NAME, description=_TEXT, parameters=_PARAMETERS)
_CALL = _object(
    ("id", "type", "function"),
    id=_NAME,
    type={"const": "function"},
    function=_object(("name", "arguments"), name=_NAME, arguments=_ARGUMENTS),
)


def _list(*kinds: Shape, at_most: int = 8) -> Shape:
    return {"type": "array", "minItems": 1, "maxItems": at_most, "items": {"anyOf": [*kinds]}}


CHAT_MESSAGES = _list(
    _message("system", _parts("text")),
    _message("user", _parts("text")),
    _message("assistant", _parts("text")),
    _message("assistant", _TEXT, tool_calls={"type": "array", "minItems": 1, "maxItems": 2, "items": _CALL}),
    _message("tool", _parts("text"), tool_call_id=_NAME),
)
CHAT_TOOLS: Shape = {
    "type": "array",
    "minItems": 1,
    "maxItems": 1,
    "items": _object(("type", "function"), type={"const": "function"}, function=_FUNCTION),
}
CLAUDE_MESSAGES = _list(_message("user", _parts("text")), _message("assistant", _parts("text")))
CLAUDE_SYSTEM = _parts("text")
CLAUDE_TOOLS: Shape = {
    "type": "array",
    "maxItems": 1,
    "items": _object(("name", "input_schema"), name=_NAME, description=_TEXT, input_schema=_PARAMETERS),
}
INPUT: Shape = {
    "anyOf": [
        _TEXT,
        _list(
            _message("user", _parts("input_text")),
            _message("developer", _parts("input_text")),
            _message("assistant", _parts("output_text")),
            _object(
                ("type", "call_id", "name", "arguments"),
                type={"const": "function_call"},
                call_id=_NAME,
                name=_NAME,
                arguments=_ARGUMENTS,
            ),
            _object(("type", "call_id", "output"), type={"const": "function_call_output"}, call_id=_NAME, output=_TEXT),
        ),
    ]
}
TOOLS: Shape = {
    "type": "array",
    "maxItems": 1,
    "items": _object(
        ("type", "name"), type={"const": "function"}, name=_NAME, description=_TEXT, parameters=_PARAMETERS
    ),
}
OLLAMA_MESSAGES = _list(
    _message("system", _TEXT), _message("user", _TEXT), _message("assistant", _TEXT), _message("tool", _TEXT)
)
PROMPT: Shape = {
    "anyOf": [
        _TEXT,
        {"type": "array", "minItems": 1, "maxItems": 4, "items": _TEXT},
        {"type": "array", "minItems": 1, "maxItems": 64, "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    ]
}

_SCHEMA = {
    **_object(("type",), type={"enum": ["object", "string", "integer", "number", "boolean", "null"]}),
    "additionalProperties": False,
    "description": "a JSON schema; any keywords that a grammar can hold (docs/structured.md)",
}
_EXPRESSION: Shape = {"type": "string", "pattern": "^[a-z]{1,8}$", "description": "a regular expression, any"}
_GRAMMAR: Shape = {
    "type": "string",
    "pattern": '^root ::= "[a-z]{1,8}"$',
    "description": "a grammar in GBNF or Lark, any",
}
_CHOICE: Shape = {"type": "array", "minItems": 1, "maxItems": 4, "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}}
_FORMAT: Shape = {
    "anyOf": [
        {**_object(("type",), type={"enum": ["text", "json_object"]}), "additionalProperties": False},
        {
            **_object(
                ("type", "json_schema"),
                type={"const": "json_schema"},
                json_schema={**_object(("schema",), name=_NAME, schema=_SCHEMA), "additionalProperties": False},
            ),
            "additionalProperties": False,
        },
    ]
}
_SCHEMA_FORMAT: Shape = {
    "anyOf": [
        {**_object(("type",), type={"enum": ["text", "json_object"]}), "additionalProperties": False},
        {**_object(("type", "schema"), type={"const": "json_schema"}, schema=_SCHEMA), "additionalProperties": False},
    ]
}
STRUCTURED: dict[str, Shape] = {
    "response_format": _FORMAT,
    "structured_outputs": {
        "anyOf": [
            {**_object((name,), **{name: shape}), "additionalProperties": False}
            for name, shape in (("json", _SCHEMA), ("regex", _EXPRESSION), ("choice", _CHOICE), ("grammar", _GRAMMAR))
        ]
    },
}
_IDS: Shape = {"type": "array", "minItems": 1, "maxItems": 64, "items": {"$ref": "#/components/schemas/TokenId"}}
SAMPLING: dict[str, Shape] = {
    "temperature": {"type": "number", "minimum": 0.01, "maximum": 2, "description": "or 0: greedy"},
    "min_tokens": {"type": "integer", "minimum": 0, "maximum": 16, "description": "or up to what the output may have"},
    "truncate_prompt_tokens": {
        "type": "integer",
        "minimum": 1,
        "maximum": INT32 - 1,
        "description": "or -1: what fits",
    },
    "stop_token_ids": _IDS,
    "allowed_token_ids": _IDS,
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,2}$"},
        "maxProperties": 8,
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
}
IDS = _IDS
OTHER_NAMES: dict[str, Shape] = {
    "guided_json": _SCHEMA,
    "guided_regex": _EXPRESSION,
    "guided_choice": _CHOICE,
    "guided_grammar": _GRAMMAR,
    "json_schema": _SCHEMA,
    "regex": _EXPRESSION,
    "ebnf": _GRAMMAR,
    "grammar": _GRAMMAR,
    "functions": {"type": "array", "minItems": 1, "maxItems": 1, "items": _FUNCTION},
    "function_call": {"enum": ["auto", "none"], "description": 'or {"name": ...}, one of `functions`'},
}
# Of each a request has one at most.
_FORMS = ("response_format", *STRUCTURED, *(name for name in OTHER_NAMES if not name.startswith("function")))
EXCLUSIVE: tuple[tuple[str, str], ...] = (
    *combinations(dict.fromkeys(_FORMS), 2),
    *product(("tools", "tool_choice"), ("functions", "function_call")),
)
STREAM: Shape = {"const": True, "description": "or false, as without"}
LOGPROBS: Shape = {"const": True, "description": "or false, as without"}
_NAMED = _object(("name",), name=_NAME)
CHAT_CHOICE: Shape = {
    "anyOf": [
        {"enum": ["auto", "none", "required"]},
        {**_object(("type", "function"), type={"const": "function"}, function=_NAMED), "description": "one of `tools`"},
    ]
}
CLAUDE_CHOICE = {
    **_object(("type",), type={"enum": ["auto", "none"]}),
    "description": "or `any`, or `tool` with `name`",
}
CLAUDE_FORMAT = _SCHEMA_FORMAT
CLAUDE_OUTPUT = _object(effort={"enum": ["low", "medium", "high", "max"]}, format=_SCHEMA_FORMAT)
CLAUDE_THINKING: Shape = {
    "anyOf": [
        _object(
            ("type",), type={"const": "enabled"}, budget_tokens={"type": "integer", "minimum": 1, "maximum": 2**20}
        ),
        {**_object(("type",), type={"enum": ["adaptive", "disabled"]}), "additionalProperties": False},
    ]
}
PREVIOUS: Shape = {"type": "null", "description": "or the id of a stored response"}
CHOICE: Shape = {"enum": ["auto", "none", "required"], "description": "or a tool, or `allowed_tools`"}
