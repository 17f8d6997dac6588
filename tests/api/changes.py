"""What the walks over the tables of fields send: the least of each body, and a change of each field."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from api.bodies.body import Body, Status, fields_of
from api.bodies.generation import ChatRequest, CompletionRequest, SamplingFields, StreamOptions
from api.bodies.tools import ReasoningObject, ThinkingObject
from api.dialects.anthropic.requests import MessagesRequest, OutputConfig, Thinking
from api.dialects.common.content import SchemaFormat
from api.dialects.ollama.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaPullRequest,
    OllamaShowRequest,
)
from api.dialects.responses.requests import ReasoningConfig, ResponsesRequest, TextConfig, TextFormat

MESSAGES = [{"role": "user", "content": "hello world"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"role": "user", "content": '<tool_call>{"name": "now"}</tool_call>' * 2}]
THOUGHT = [{"role": "user", "content": "<think>Hm.</think>Yes."}]
LEAST: dict[type[Body], dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "hello world"},
    MessagesRequest: {"messages": MESSAGES},
    ResponsesRequest: {"input": "hello world"},
    OllamaChatRequest: {"messages": MESSAGES},
    OllamaGenerateRequest: {"prompt": "hello world"},
}
LEAST_PARTS: dict[type[Body], dict[str, Any]] = {
    Thinking: {"type": "enabled"},
    SchemaFormat: {"type": "text"},
    TextFormat: {"type": "text"},
    **{kind: {} for kind in (OutputConfig, ReasoningConfig, TextConfig, StreamOptions, OllamaOptions)},
    **{kind: {} for kind in (ThinkingObject, ReasoningObject)},
    OllamaShowRequest: {},
    OllamaPullRequest: {},
}
KINDS = {**LEAST, **LEAST_PARTS}
PATHS = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    MessagesRequest: "/v1/messages",
    ResponsesRequest: "/v1/responses",
    OllamaChatRequest: "/api/chat",
    OllamaGenerateRequest: "/api/generate",
}

# A value of each supported field that changes what the engine is sent or what the client gets; with what it needs.
OPENAI: dict[str, dict[str, Any]] = {
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
    "truncation_side": {"truncate_prompt_tokens": 2, "truncation_side": "right"},
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
    "thinking": {"thinking": {"type": "disabled"}},
    "reasoning": {"reasoning": {"effort": "none"}},
}  # fmt: skip
_OF_CHAT = {
    "echo": {"messages": [*MESSAGES, {"role": "assistant", "content": "Well"}], "echo": True},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "return_tokens_as_token_ids": {"logprobs": True, "return_tokens_as_token_ids": True},
}
_OF_COMPLETIONS = {
    "logprobs": {"logprobs": 2},
    "return_tokens_as_token_ids": {"logprobs": 0, "return_tokens_as_token_ids": True},
}

_FUNCTION = {"type": "object", "properties": {}}
_SCHEMA = {"type": "json_schema", "schema": {"type": "integer"}}
_THEIR_TOOLS = {"tools": [{"name": "now", "input_schema": _FUNCTION}]}
_RESPONSES_TOOLS = {"tools": [{"type": "function", "name": "now", "parameters": _FUNCTION}]}
_MESSAGES = {
    **{name: OPENAI[name] for name in ("model", "messages", "max_tokens", "stream", "temperature", "top_p", "top_k")},
    "system": {"system": "Be kind."},
    "stop_sequences": {"stop_sequences": ["wor"]},
    "tools": _THEIR_TOOLS,
    "tool_choice": {**_THEIR_TOOLS, "tool_choice": {"type": "none"}},
    "thinking": {"thinking": {"type": "disabled"}},
    "output_config": {"output_config": {"format": _SCHEMA}},
    "output_format": {"output_format": _SCHEMA},
}
_RESPONSES = {
    **{name: OPENAI[name] for name in ("model", "stream", "structured_outputs", "chat_template_kwargs")},
    **{name: OPENAI[name] for name in SamplingFields.model_fields},
    "top_logprobs": {"top_logprobs": 2},
    "include": {"include": ["message.output_text.logprobs"]},
    "input": {"input": "x"},
    "instructions": {"instructions": "Be kind."},
    "previous_response_id": {"previous_response_id": "resp_same"},
    "store": {"store": False},
    "max_output_tokens": {"max_output_tokens": 3},
    "tools": _RESPONSES_TOOLS,
    "tool_choice": {**_RESPONSES_TOOLS, "tool_choice": "none"},
    "parallel_tool_calls": {**_RESPONSES_TOOLS, "parallel_tool_calls": False},
    "text": {"text": {"format": _SCHEMA}},
    "reasoning": {"reasoning": {"effort": "none"}},
    "metadata": {"metadata": {"a": "b"}},
}
_OLLAMA = {
    "model": OPENAI["model"],
    "stream": {"stream": False},
    "format": {"format": "json"},
    "think": {"think": False},
    "options": {"options": {"num_predict": 3}},
}
CHANGES: dict[type[Body], dict[str, dict[str, Any]]] = {
    ChatRequest: {**OPENAI, **_OF_CHAT},
    CompletionRequest: {**OPENAI, **_OF_COMPLETIONS},
    MessagesRequest: _MESSAGES,
    ResponsesRequest: _RESPONSES,
    OllamaChatRequest: {**_OLLAMA, "messages": OPENAI["messages"], "tools": {"tools": TOOLS}},
    OllamaGenerateRequest: {
        **_OLLAMA,
        "prompt": {"prompt": "x"},
        "system": {"system": "Be kind."},
        "raw": {"raw": True},
    },
}

# Of a part's field: the body, and the part without and with the change.
_Part = tuple[type[Body], str, dict[str, Any], dict[str, Any]]


def _format(kind: type[Body], name: str) -> dict[str, _Part]:
    """Of a form of output that stands in a field's `format`."""

    def one(before: dict[str, Any], after: dict[str, Any]) -> _Part:
        return kind, name, {"format": before}, {"format": after}

    other = {**_SCHEMA, "schema": {"type": "boolean"}}
    return {"type": one({"type": "text"}, {"type": "json_object"}), "schema": one(_SCHEMA, other)}


def _options(**changes: Any) -> dict[str, _Part]:
    return {name: (OllamaChatRequest, "options", {}, {name: value}) for name, value in changes.items()}


def _format_notes(**changes: Any) -> dict[str, _Part]:
    return {
        name: (ResponsesRequest, "text", {"format": _SCHEMA}, {"format": {**_SCHEMA, name: value}})
        for name, value in changes.items()
    }


_THINKING = {"type": "enabled"}
_PENALTY = {"repeat_penalty": 2.0}
PARTS: dict[type[Body], dict[str, _Part]] = {
    Thinking: {
        "type": (MessagesRequest, "thinking", _THINKING, {"type": "disabled"}),
        "budget_tokens": (MessagesRequest, "thinking", _THINKING, {**_THINKING, "budget_tokens": 5}),
        "display": (MessagesRequest, "thinking", _THINKING, {**_THINKING, "display": "omitted"}),
    },
    ThinkingObject: {
        "type": (ChatRequest, "thinking", {}, {"type": "disabled"}),
        "budget_tokens": (ChatRequest, "thinking", {}, {"budget_tokens": 5}),
    },
    ReasoningObject: {
        "effort": (ChatRequest, "reasoning", {}, {"effort": "none"}),
        "enabled": (ChatRequest, "reasoning", {}, {"enabled": False}),
        "exclude": (ChatRequest, "reasoning", {}, {"exclude": True}),
        "max_tokens": (ChatRequest, "reasoning", {}, {"max_tokens": 5}),
    },
    OutputConfig: {
        "effort": (MessagesRequest, "output_config", {}, {"effort": "none"}),
        "format": (MessagesRequest, "output_config", {}, {"format": _SCHEMA}),
    },
    SchemaFormat: _format(MessagesRequest, "output_config"),
    ReasoningConfig: {"effort": (ResponsesRequest, "reasoning", {}, {"effort": "none"})},
    TextConfig: {"format": (ResponsesRequest, "text", {}, {"format": _SCHEMA})},
    TextFormat: {
        **_format(ResponsesRequest, "text"),
        **_format_notes(name="a", description="b", strict=True),
    },
    StreamOptions: {
        "include_usage": (ChatRequest, "stream_options", {}, {"include_usage": True}),
        "continuous_usage_stats": (
            ChatRequest,
            "stream_options",
            {"include_usage": True},
            {"include_usage": True, "continuous_usage_stats": True},
        ),
    },
    OllamaOptions: {
        **_options(
            temperature=0.5, top_p=0.5, top_k=3, min_p=0.5, seed=3, num_predict=3, stop="wor", repeat_penalty=2.0,
            presence_penalty=1, frequency_penalty=1,
        ),
        "repeat_last_n": (OllamaChatRequest, "options", _PENALTY, {**_PENALTY, "repeat_last_n": 0}),
    },
}  # fmt: skip


def body(kind: type[Body], **fields: Any) -> bytes:
    return json.dumps({**KINDS[kind], **fields}).encode()


def lines(*statuses: Status, kinds: Iterable[type[Body]] = KINDS) -> list[Any]:
    """The fields of some statuses, as a parametrisation."""
    return [
        pytest.param(kind, field, id=f"{kind.__name__}-{field.name}")
        for kind in kinds
        for field in fields_of(kind).values()
        if field.status in statuses
    ]
