"""The fields of a chat request that are about tools and reasoning."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from api.bodies.body import Body, no_op, supported
from api.bodies.values import Count
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


class ThinkingObject(Body):
    """Whether there is reasoning, as Anthropic's, DeepSeek's and GLM's clients say it."""

    FIELDS = (
        supported("type", "`disabled` switches reasoning off, others on, if the template can"),
        supported("budget_tokens", "see `thinking_token_budget`"),
        no_op("display", "reasoning is given as it is"),
        no_op("clear_thinking", "the reasoning of earlier answers is what the template keeps of it"),
    )

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: Count | None = None


class ReasoningObject(Body):
    """The same, as OpenRouter's and Responses' clients say it."""

    FIELDS = (
        supported("effort", "see `reasoning_effort`"),
        supported("enabled", "see `enable_thinking`"),
        supported("exclude", "true: reasoning is left out of the answer"),
        supported("max_tokens", "see `thinking_token_budget`"),
        no_op("summary", "reasoning is given as it is"),
        no_op("generate_summary", "reasoning is given as it is"),
    )

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool = False
    max_tokens: Count | None = None


class ReasoningFields(BaseModel):
    """What `thinking` and `reasoning` say holds where the request's own fields say nothing."""

    include_reasoning: bool = True
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Count | None = None
    thinking: ThinkingObject | None = None
    reasoning: ReasoningObject | None = None

    @model_validator(mode="after")
    def _one_will(self) -> ReasoningFields:
        thinking, reasoning = self.thinking or ThinkingObject(), self.reasoning or ReasoningObject()
        self.include_reasoning = self.include_reasoning and not reasoning.exclude
        self.reasoning_effort = self.reasoning_effort or reasoning.effort
        if self.enable_thinking is None:
            self.enable_thinking = reasoning.enabled if thinking.type is None else thinking.type != "disabled"
        if self.thinking_token_budget is None:
            budgets = (thinking.budget_tokens, reasoning.max_tokens)
            self.thinking_token_budget = next((budget for budget in budgets if budget is not None), None)
        if self.enable_thinking and self.reasoning_effort == "none":
            raise bad_request("enable_thinking true and reasoning_effort 'none' exclude each other", "reasoning_effort")
        return self
