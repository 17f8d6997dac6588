"""What Anthropic's clients send: bodies, what becomes of each field, and the chat that a request becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from api.bodies import shapes
from api.bodies.body import Body, no_op, supported
from api.bodies.parsing import Notes, parse
from api.bodies.tools import Definitions, Effort
from api.bodies.values import INT32, Count, Integer, Messages, PositiveCount, StopString, Temperature, TopP
from api.dialects.anthropic.blocks import Offers, messages_of, system_of
from api.dialects.common.content import SchemaFormat, continuation, kind_of, response_format, string_in
from api.errors import UnreadableError, bad_request, shortened
from api.prepare.job import Job, Prepared
from api.prepare.prompts import Preparer
from api.text.calls.definitions import MAX_TOOLS, check_tool
from api.text.kinds import ANTHROPIC_CHOICES, ANTHROPIC_TOOLS, Fate
from api.text.messages import passed_over, unsupported

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

    SHAPES = {  # noqa: RUF012
        "messages": shapes.CLAUDE_MESSAGES,
        "system": shapes.CLAUDE_SYSTEM,
        "tools": shapes.CLAUDE_TOOLS,
        "tool_choice": shapes.CLAUDE_CHOICE,
        "output_format": shapes.CLAUDE_FORMAT,
        "output_config": shapes.CLAUDE_OUTPUT,
        "thinking": shapes.CLAUDE_THINKING,
        "temperature": shapes.SAMPLING["temperature"],
    }

    FIELDS = (
        supported("model", "as everywhere"),
        supported(
            "messages",
            "blocks of every kind (docs/agents.md); the answer goes on with an assistant's text at the end",
        ),
        supported("max_tokens", "default: the rest of the context"),
        supported("system", "a text or text blocks; a line that begins `x-anthropic-billing-header:` is dropped"),
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
        no_op("metadata", "tenants are identified by their keys"),
        no_op("service_tier", "there is one tier"),
        no_op("cache_control", "the prefix cache finds equal prompts by itself"),
        no_op("context_management", "the client's messages are taken as they are"),
        no_op("diagnostics", "nothing is kept with an answer"),
        no_op("inference_geo", "there is one place"),
        no_op("speed", "there is one speed"),
        no_op("user_profile_id", "tenants are identified by their keys"),
        no_op("workspace_id", "tenants are identified by their keys"),
        no_op("mcp_servers", "only a client's own tools are called"),
        no_op("container", "nothing is run here"),
    )

    model: str | None = None
    messages: Messages
    max_tokens: PositiveCount | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[StopString] = Field(default=[], max_length=16)
    stream: bool = False
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT32), Integer] | None = None
    tools: Definitions = Field(default=[])
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None


def prepare(prompts: Preparer, job: Job, raw: bytes, notes: Notes) -> Prepared:
    return prompts.chat_of(chat_of(parse(MessagesRequest, raw, notes), notes), job, notes, WORDS)


def chat_of(body: MessagesRequest, notes: Notes) -> dict[str, Any]:
    """The same as a chat request. Raises ApiError that names the place."""
    system = system_of(body.system, notes)
    offers = Offers([_tool(tool, f"tools[{i}]", notes) for i, tool in enumerate(body.tools)])
    messages = [*system, *messages_of(body.messages, offers, notes)]
    offered = [tool for tool in offers.declared if tool is not None]
    for tool in offers.added:
        with passed_over(notes, newly=False):
            offered += _found(tool, len(offered), notes)
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "tools": offered or None,
        **_choice(body, offered, notes),
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


def _tool(tool: dict[str, Any], where: str, notes: Notes) -> dict[str, Any] | None:
    """None: it is left out."""
    kind = "custom" if tool.get("type") is None else tool["type"]
    if not isinstance(kind, str):
        raise bad_request(f"{where}.type: a text is expected, got {shortened(kind)}", f"{where}.type")
    if ANTHROPIC_TOOLS.fate(kind) is not Fate.READ:
        notes.left_out(where, kind)
        return None
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _found(tool: dict[str, Any], count: int, notes: Notes) -> list[dict[str, Any]]:
    """A tool that a message defines, beside `count` others. Raises UnreadableError."""
    if not isinstance(tool.get("type"), str | None):
        raise UnreadableError(f"messages: a tool of type {shortened(tool['type'])}", "messages")
    if (made := _tool(tool, "messages", notes)) is None:
        return []
    check_tool(made, "messages")
    if count >= MAX_TOOLS:
        notes.remark("messages", f"a tool is left out: there are {MAX_TOOLS}")
        return []
    return [made]


def _choice(body: MessagesRequest, offered: Sequence[dict[str, Any]], notes: Notes) -> dict[str, Any]:
    if body.tool_choice is None:
        return {}
    kind = kind_of(body.tool_choice, "tool_choice")
    if ANTHROPIC_CHOICES.fate(kind) is not Fate.READ:
        raise unsupported("tool_choice.type", kind, ANTHROPIC_CHOICES.names_read)
    parallel = {"parallel_tool_calls": False} if body.tool_choice.get("disable_parallel_tool_use") is True else {}
    if kind == "tool":
        named = {"type": "function", "function": {"name": string_in(body.tool_choice, "name", "tool_choice")}}
        return {"tool_choice": named, **parallel}
    if kind == "any" and body.tools and not offered:
        notes.remark("tool_choice", "no tool is left to call")
        return {}
    return {"tool_choice": {"any": "required"}.get(kind, kind), **parallel}
