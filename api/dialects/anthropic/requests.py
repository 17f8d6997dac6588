"""What Anthropic's clients send: bodies, what becomes of each field, and the chat that a request becomes."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from api.bodies.body import Body, no_op, refused, supported
from api.bodies.parsing import Notes, parse
from api.bodies.tools import Definitions, Effort
from api.bodies.values import INT32, MIN_TOP_P, Count, Integer, Messages, Number, PositiveCount, StopString, Temperature
from api.dialects.common.content import (
    SchemaFormat,
    continuation,
    kind_of,
    response_format,
    string_in,
    text_in,
    unsupported,
)
from api.errors import bad_request, shortened
from api.prepare.job import Job, Prepared
from api.prepare.prompts import Preparer

_PARTS = ("text", "tool_use", "tool_result", "thinking")
WORDS = {  # of a chat's fields
    "enable_thinking": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}


class Thinking(Body):
    FIELDS = (
        supported("type", "`enabled` and `adaptive` switch reasoning on, `disabled` off, if the template can"),
        supported("budget_tokens", "with `enabled`: after so many tokens of reasoning its end is forced"),
        supported("display", "`omitted`: reasoning is left out of the answer; it is never summarized"),
    )

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] = "summarized"

    @model_validator(mode="after")
    def _budget_of_enabled(self) -> Thinking:
        if self.budget_tokens is not None and self.type != "enabled":
            raise ValueError(f"budget_tokens belongs to type 'enabled' alone, got type {self.type!r}")
        return self


class OutputConfig(Body):
    FIELDS = (
        supported("effort", "see `reasoning_effort`; `thinking` decides whether there is reasoning"),
        supported("format", "its fields are below"),
    )

    effort: Effort | None = None
    format: SchemaFormat | None = None


class MessagesRequest(Body):
    """Anthropic's Messages. `max_tokens` may be left out, as for a count of tokens."""

    FIELDS = (
        supported("model", "as everywhere"),
        supported(
            "messages",
            "text, thinking, `tool_use` and `tool_result` blocks; the answer goes on with an assistant's text at the "
            "end",
        ),
        supported("max_tokens", "default: the rest of the context"),
        supported("system", "a text or text blocks"),
        supported("stop_sequences", "see `stop`"),
        supported("stream", "Anthropic's events"),
        supported("temperature", "0: greedy"),
        supported("top_p", "1: off"),
        supported("top_k", "0 or -1: off"),
        supported("tools", "a client's own"),
        supported("tool_choice", "`auto`, `any`, `tool` or `none`"),
        supported("thinking", "its fields are below"),
        supported("output_config", "its fields are below"),
        supported("output_format", "the older place of `output_config.format`"),
        no_op("metadata", "tenants are told by their keys"),
        no_op("service_tier", "there is one tier"),
        no_op("cache_control", "the prefix cache finds equal prompts by itself"),
        no_op("context_management", "the client's messages are taken as they are"),
        no_op("diagnostics", "nothing is kept with an answer"),
        no_op("inference_geo", "there is one place"),
        no_op("speed", "there is one speed"),
        no_op("user_profile_id", "tenants are told by their keys"),
        no_op("workspace_id", "tenants are told by their keys"),
        refused("mcp_servers", "only a client's own tools are called", []),
        refused("container", "nothing is run here"),
    )

    model: str | None = None
    messages: Messages
    max_tokens: PositiveCount | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[StopString] = Field(default=[], max_length=16)
    stream: bool = False
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=MIN_TOP_P, le=1), Number] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT32), Integer] | None = None
    tools: Definitions = Field(default=[])
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None


def prepare(prompts: Preparer, job: Job, raw: bytes, notes: Notes) -> Prepared:
    return prompts.chat_of(chat_of(parse(MessagesRequest, raw, notes)), job, notes, WORDS)


def chat_of(body: MessagesRequest) -> dict[str, Any]:
    """The same as a chat request. Raises ApiError that names the place."""
    messages = [] if body.system is None else [{"role": "system", "content": text_in(body.system, "system")}]
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)] or None,
        **_choice(body),
        **continuation(messages),
    }
    if (thinking := body.thinking) is not None:
        chat["enable_thinking"] = thinking.type != "disabled"
        chat["include_reasoning"] = thinking.display != "omitted"
        chat["thinking_token_budget"] = thinking.budget_tokens
    config = body.output_config or OutputConfig()
    chat["reasoning_effort"] = config.effort
    chat["response_format"] = response_format(_one_format(body, config))
    return {name: value for name, value in chat.items() if value is not None}


def _one_format(body: MessagesRequest, config: OutputConfig) -> SchemaFormat | None:
    if body.output_format is not None and config.format is not None:
        raise bad_request("output_format and output_config.format are one field; send one of them", "output_format")
    return config.format or body.output_format


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One of theirs may hold several of ours: each result of a tool is a message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role: 'user' or 'assistant' is expected, got {shortened(role)}", f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad_request(f"{where}.content: a text or a list of blocks is expected", f"{where}.content")
    texts: list[str] = []
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for i, part in enumerate(content):
        place = f"{where}.content[{i}]"
        match kind_of(part, place):
            case "text":
                texts.append(string_in(part, "text", place))
            case "thinking":
                reasoning.append(string_in(part, "thinking", place))
            case "redacted_thinking":
                continue  # what another server hid
            case "tool_use":
                calls.append(_call(part, place))
            case "tool_result":
                result = part.get("content", "")
                text = text_in("" if result is None else result, f"{place}.content")
                results.append({"role": "tool", "tool_call_id": string_in(part, "tool_use_id", place), "content": text})
            case kind:
                raise unsupported(place, kind, _PARTS)
    own: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if reasoning:
        own["reasoning_content"] = "".join(reasoning)
    return [*results, *([own] if texts or calls or reasoning or not results else [])]


def _call(part: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = json.dumps(part.get("input", {}), ensure_ascii=False)
    function = {"name": string_in(part, "name", where), "arguments": arguments}
    return {"id": string_in(part, "id", where), "type": "function", "function": function}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    if kind != "custom":
        raise unsupported(f"{where}.type", kind, ("custom",))
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(body: MessagesRequest) -> dict[str, Any]:
    if body.tool_choice is None:
        return {}
    kind = kind_of(body.tool_choice, "tool_choice")
    parallel = {"parallel_tool_calls": False} if body.tool_choice.get("disable_parallel_tool_use") is True else {}
    if kind == "tool":
        named = {"type": "function", "function": {"name": string_in(body.tool_choice, "name", "tool_choice")}}
        return {"tool_choice": named, **parallel}
    choices = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in choices:
        raise unsupported("tool_choice.type", kind, (*choices, "tool"))
    return {"tool_choice": choices[kind], **parallel}
