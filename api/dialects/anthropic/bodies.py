"""What Anthropic's clients send, and what becomes of each field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from api.bodies.body import Body, no_op, refused, supported
from api.bodies.tools import Definitions, Effort
from api.bodies.values import INT32, MIN_TOP_P, Count, Integer, Messages, Number, PositiveCount, StopString, Temperature
from api.dialects.common.content import SchemaFormat


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
