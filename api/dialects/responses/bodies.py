"""What clients of OpenAI's Responses send, and what becomes of each field."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from api.bodies.body import Body, no_op, refused, supported
from api.bodies.fields import GENERATION
from api.bodies.generation import SamplingFields
from api.bodies.structured import StructuredOutputs
from api.bodies.tools import Definitions, Effort
from api.bodies.values import Alternatives, Messages, PositiveCount
from api.dialects.common.content import SchemaFormat

LOGPROBS: Final = "message.output_text.logprobs"
Included = Literal[  # what OpenAI's responses may include: reasoning is given as it is, and there are no other tools
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "web_search_call.results", "web_search_call.action.sources", "file_search_call.results",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
]  # fmt: skip


class ReasoningConfig(Body):
    FIELDS = (
        supported("effort", "see `reasoning_effort`"),
        no_op("summary", "reasoning is given as it is"),
        no_op("generate_summary", "reasoning is given as it is"),
        no_op("context", "the reasoning of earlier answers is what the template keeps of it"),
        no_op("mode", "there is one"),
    )

    effort: Effort | None = None


class TextFormat(SchemaFormat):
    FIELDS = (
        supported("type", "`json_schema`; `json_object`: any object; `text`: anything"),
        supported("schema", "what the output follows"),
        supported("name", "comes back with the response"),
        supported("description", "comes back with the response"),
        supported("strict", "comes back with the response; a schema always holds"),
    )

    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    FIELDS = (
        supported("format", "its fields are below"),
        no_op("verbosity", "no template has such a control"),
    )

    format: TextFormat | None = None


class ResponsesRequest(SamplingFields):
    """OpenAI's Responses, with the sampling fields of the other endpoints, as vLLM has them."""

    FIELDS = (
        supported("model", "as everywhere"),
        supported("input", "a text, or items: messages, calls of functions, their outputs, reasoning"),
        supported("instructions", "the first message, of this response alone"),
        supported("previous_response_id", "its messages come before the input; it must have been stored"),
        supported("store", "kept for `previous_response_id` and `GET`, as long as the bounded store has room"),
        supported("stream", "events with sequence numbers"),
        supported("max_output_tokens", "default: the rest of the context"),
        supported("top_logprobs", "that many alternatives for each token of the output's text"),
        supported("include", "`message.output_text.logprobs`: log-probabilities; reasoning is given as it is"),
        supported("tools", "functions"),
        supported("tool_choice", "`auto`, `none`, `required` or a function"),
        supported("parallel_tool_calls", "false: one call at most"),
        supported("structured_outputs", "vLLM's: see above; not with `text.format`"),
        supported("chat_template_kwargs", "variables for the template"),
        *(field for field in GENERATION if field.name in SamplingFields.model_fields),
        supported("text", "its fields are below"),
        supported("reasoning", "its fields are below"),
        supported("metadata", "comes back with the response"),
        no_op("user", "tenants are told by their keys"),
        no_op("service_tier", "there is one tier"),
        no_op("safety_identifier", "tenants are told by their keys"),
        no_op("prompt_cache_key", "the prefix cache finds equal prompts by itself"),
        no_op("prompt_cache_retention", "the prefix cache keeps what fits, least recently used first out"),
        no_op("prompt_cache_options", "the prefix cache finds equal prompts by itself"),
        no_op("stream_options", "nothing is padded"),
        refused("context_management", "an input that does not fit is a 400", []),
        refused("moderation", "there is no moderation"),
        refused("image", "the model writes text only"),
        refused("truncation", "an input that does not fit is a 400", "disabled"),
        refused("background", "a response is made while its client waits", False),
        refused("conversation", "use `previous_response_id`"),
        refused("prompt", "there are no stored prompts"),
        refused("max_tool_calls", "a client calls its tools itself"),
    )

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
