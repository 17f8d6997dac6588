"""The fields of a chat request that are about tools and reasoning."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from api.errors import bad_request
from api.text.calls.definitions import MAX_TOOLS, Offer, ToolUse, tool_use

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Definitions = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)]


class ToolFields(BaseModel):
    """`functions` and `function_call` are the older form of `tools` and `tool_choice`."""

    tools: Definitions = []
    tool_choice: Annotated[Any, Field(json_schema_extra={"type": ["string", "object"]})] = None
    parallel_tool_calls: bool = True
    functions: Definitions = []
    function_call: Annotated[Any, Field(json_schema_extra={"type": ["string", "object"]})] = None

    @cached_property
    def offer(self) -> Offer:
        """Raises ApiError 400."""
        return tool_use(
            self.tools, self.functions, self.tool_choice, self.function_call, parallel=self.parallel_tool_calls
        )

    @property
    def use(self) -> ToolUse | None:
        return self.offer.use

    @model_validator(mode="after")
    def _sound(self) -> ToolFields:
        _ = self.offer
        return self


class ReasoningFields(BaseModel):
    include_reasoning: bool = True
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _one_will(self) -> ReasoningFields:
        if self.enable_thinking and self.reasoning_effort == "none":
            raise bad_request("enable_thinking true and reasoning_effort 'none' exclude each other", "reasoning_effort")
        return self
