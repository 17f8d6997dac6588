"""Bodies of Anthropic's, OpenAI's Responses and Ollama's endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from api.http.bodies.generation import SamplingFields
from api.http.bodies.structured import Schema, StructuredOutputs
from api.http.bodies.tools import Definitions, Effort
from api.http.bodies.values import (
    INT32,
    INT64,
    MIN_TOP_P,
    Alternatives,
    Body,
    Count,
    Integer,
    Messages,
    Number,
    Penalty,
    PositiveCount,
    Stops,
    StopString,
    Temperature,
)

LOGPROBS: Final = "message.output_text.logprobs"
Included = Literal[  # what OpenAI's responses may include: reasoning is given as it is, and there are no other tools
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "web_search_call.results", "web_search_call.action.sources", "file_search_call.results",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
]  # fmt: skip


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] = "summarized"

    @model_validator(mode="after")
    def _budget_of_enabled(self) -> Thinking:
        if self.budget_tokens is not None and self.type != "enabled":
            raise ValueError(f"budget_tokens belongs to type 'enabled' alone, got type {self.type!r}")
        return self


class SchemaFormat(Body):
    """What the output is to be."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Schema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _one_schema(self) -> SchemaFormat:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError(f"a schema belongs to type 'json_schema' alone, got type {self.type!r}")
        return self


class OutputConfig(Body):
    effort: Effort | None = None
    format: SchemaFormat | None = None


class MessagesRequest(Body):
    """Anthropic's Messages. `max_tokens` may be left out, as for a count of tokens."""

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


class ReasoningConfig(Body):
    effort: Effort | None = None


class TextFormat(SchemaFormat):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None


class ResponsesRequest(SamplingFields):
    """OpenAI's Responses, with the sampling fields of the other endpoints, as vLLM has them."""

    model: str | None = None
    input: str | Messages
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=200)] | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: PositiveCount | None = None
    top_logprobs: Alternatives | None = None
    include: list[Included] = Field(default=[], max_length=16)
    tools: Definitions = Field(default=[])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] = Field(default={}, max_length=16)
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})

    @property
    def logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in self.include


class OllamaOptions(Body):
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=MIN_TOP_P, le=1), Number] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT32), Integer] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), Number] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64), Integer] | None = None
    num_predict: Annotated[int, Field(ge=-2, lt=INT32), Integer] | None = None
    stop: Stops = Field(default=[])
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10), Number] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class _OllamaRequest(Body):
    model: str | None = None
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Effort | None = None
    options: OllamaOptions | None = None


class OllamaChatRequest(_OllamaRequest):
    messages: Messages
    tools: Definitions = Field(default=[])


class OllamaGenerateRequest(_OllamaRequest):
    prompt: Annotated[str, Field(min_length=1)]
    system: str | None = None
    raw: bool = False


class OllamaShowRequest(Body):
    model: str | None = None
