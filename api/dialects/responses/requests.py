"""What clients of OpenAI's Responses send: bodies, what becomes of each field, and the chat that a request becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from pydantic import Field

from api.bodies import shapes
from api.bodies.body import Body, no_op, refused, supported
from api.bodies.fields import GENERATION
from api.bodies.generation import SamplingFields
from api.bodies.parsing import Notes, parse
from api.bodies.structured import StructuredOutputs
from api.bodies.tools import Definitions, Effort
from api.bodies.values import Alternatives, Messages, PositiveCount
from api.dialects.common.content import SchemaFormat, kind_of, response_format, string_in
from api.dialects.responses.items import Items
from api.dialects.responses.offers import Offered, offered_of
from api.dialects.responses.summaries import REQUEST, is_trigger, kept
from api.errors import bad_request
from api.prepare.job import Job, Prepared
from api.prepare.prompts import TOKEN_BYTES, Preparer
from api.text.kinds import CHOICES, Fate
from api.text.messages import unsupported

LOGPROBS: Final = "message.output_text.logprobs"
Included = Literal[  # what OpenAI's responses may include: reasoning is given as it is, and there are no other tools
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "web_search_call.results", "web_search_call.action.sources", "file_search_call.results",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
]  # fmt: skip
WORDS = {  # of a chat's fields
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
_SAMPLING = set(SamplingFields.model_fields)
_OURS = {"structured_outputs", "chat_template_kwargs"}
NOT_REPEATED = {"input", "stream", "model", "include", *_OURS, *(_SAMPLING - {"temperature", "top_p"})}


_SUMMARY_PART = 4  # of the context: a summary is no longer


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

    SHAPES = {  # noqa: RUF012
        **shapes.SAMPLING,
        "structured_outputs": shapes.STRUCTURED["structured_outputs"],
        "input": shapes.INPUT,
        "previous_response_id": shapes.PREVIOUS,
        "tools": shapes.TOOLS,
        "tool_choice": shapes.CHOICE,
    }

    FIELDS = (
        supported("model", "as everywhere"),
        supported("input", "a text, or items of every kind (docs/agents.md)"),
        supported("instructions", "the first message, of this response alone"),
        supported("previous_response_id", "its messages come before the input; it must have been stored"),
        supported("store", "kept for `previous_response_id` and `GET`, as long as the bounded store has room"),
        supported("stream", "events with sequence numbers"),
        supported("max_output_tokens", "default: the rest of the context"),
        supported("top_logprobs", "that many alternatives for each token of the output's text"),
        supported("include", "`message.output_text.logprobs`: log-probabilities; reasoning is given as it is"),
        supported(
            "tools", "functions, tools of free text, and namespaces of both; others are left out (docs/agents.md)"
        ),
        supported("tool_choice", "`auto`, `none`, `required`, a tool, or `allowed_tools`"),
        supported("parallel_tool_calls", "false: one call at most"),
        supported("structured_outputs", "vLLM's: see above; not with `text.format`"),
        supported("chat_template_kwargs", "variables for the template"),
        *(field for field in GENERATION if field.name in SamplingFields.model_fields),
        supported("text", "its fields are below"),
        supported("reasoning", "its fields are below"),
        supported("metadata", "comes back with the response"),
        no_op("user", "tenants are identified by their keys"),
        no_op("service_tier", "there is one tier"),
        no_op("safety_identifier", "tenants are identified by their keys"),
        no_op("prompt_cache_key", "the prefix cache finds equal prompts by itself"),
        no_op("prompt_cache_retention", "the prefix cache keeps what fits, least recently used first out"),
        no_op("prompt_cache_options", "the prefix cache finds equal prompts by itself"),
        no_op("stream_options", "nothing is padded"),
        no_op("context_management", "the input is taken as it is"),
        no_op("client_metadata", "a client's own record"),
        refused("moderation", "there is no moderation"),
        refused("image", "the model writes text only"),
        no_op("truncation", "an input that does not fit is a 400", "disabled"),
        refused("background", "a response is made while its client waits", False),
        refused("conversation", "use `previous_response_id`"),
        refused("prompt", "there are no stored prompts"),
        no_op("max_tool_calls", "a client calls its tools itself"),
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


def prepare(prompts: Preparer, job: Job, raw: bytes, notes: Notes) -> Prepared:
    """Nothing but the name of the response before, if the job does not have its messages."""
    body = parse(ResponsesRequest, raw, notes)
    if body.previous_response_id is not None and job.history is None:
        return Prepared(b"", previous=body.previous_response_id)
    history = [] if job.history is None else msgspec.json.decode(job.history)
    head = body.model_dump_json(by_alias=True, exclude=NOT_REPEATED).encode()
    if body.input and is_trigger(body.input[-1]):
        before = body.model_copy(update={"input": body.input[:-1]})
        return msgspec.structs.replace(summary_of(prompts, job, before, history, notes), head=head)
    chat, messages, names = chat_of(body, history, notes)
    return msgspec.structs.replace(
        prompts.chat_of(chat, job, notes, WORDS), messages=msgspec.json.encode(messages), head=head, names=names
    )


def summary_of(
    prompts: Preparer, job: Job, body: ResponsesRequest, history: Sequence[dict[str, Any]], notes: Notes
) -> Prepared:
    """The request for a summary of the conversation. `messages` of the result: what stays of it beside the summary."""
    if not body.input and not history:
        raise bad_request("input: there is nothing to compact", "input")
    # What the conversation ends with is no news to be answered: an image in it becomes a line.
    asked = {"input": [*body.input, {"role": "user", "content": REQUEST}], "tools": [], "tool_choice": "none"}
    any_text = dict.fromkeys(("text", "structured_outputs", "top_logprobs", "max_output_tokens"))
    chat, messages, _ = chat_of(body.model_copy(update={**asked, **any_text, "include": []}), history, notes)
    prepared = prompts.chat_of(chat, job, notes, WORDS)
    left = job.max_model_len - len(prepared.prompts[0]) // TOKEN_BYTES
    most = min(left, max(1, job.max_model_len // _SUMMARY_PART))
    options = {**msgspec.json.decode(prepared.options), "max_tokens": most}
    return msgspec.structs.replace(
        prepared,
        options=msgspec.json.encode(options),
        messages=msgspec.json.encode(kept(messages[:-1])),
        is_summary=True,
    )


class Translated(NamedTuple):
    """A request as a chat request. `messages`: those of the conversation, which a following response goes on with.
    `names`: of tools in namespaces (api/dialects/responses/offers.py)."""

    chat: dict[str, Any]
    messages: list[dict[str, Any]]
    names: dict[str, tuple[str, str]]


def chat_of(body: ResponsesRequest, history: Sequence[dict[str, Any]], notes: Notes) -> Translated:
    """`history`: the messages of the response before. Raises ApiError naming the place."""
    items = Items(body.input, notes)
    offered = offered_of(body.tools, items.tools, notes)
    messages = [*history, *items.messages]
    if not messages:
        raise bad_request("input: nothing of it is left for the model", "input")
    first = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    tools = offered.tools
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": [*first, *messages],
        "max_tokens": body.max_output_tokens,
        "stream": body.stream,
        **body.model_dump(include=_SAMPLING | _OURS, by_alias=True, exclude_unset=True),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "tools": tools or None,
        "parallel_tool_calls": body.parallel_tool_calls if tools else None,
        "tool_choice": _choice(body.tool_choice, offered, notes) if tools or body.tools else None,
        "response_format": response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    given = {name: value for name, value in chat.items() if value is not None}
    return Translated(given, messages, offered.names)


def _choice(choice: str | dict[str, Any], offered: Offered, notes: Notes) -> Any:
    kind = choice if isinstance(choice, str) else kind_of(choice, "tool_choice")
    fate = CHOICES.fate(kind, newly=True)
    if fate is not Fate.READ:
        raise unsupported("tool_choice" if isinstance(choice, str) else "tool_choice.type", kind, CHOICES.names_read)
    if isinstance(choice, str):
        if choice == "required" and not offered.tools:
            notes.remark("tool_choice", "no tool is left to call")
            return None
        return choice
    if kind == "allowed_tools":
        among = choice.get("tools")
        if not isinstance(among, list):
            raise bad_request("tool_choice.tools: a list of tools is expected", "tool_choice.tools")
        tools = [tool for each in among if (tool := offered.choice(each)) is not None]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    if (named := offered.choice(choice)) is not None:
        return named
    return {"type": "function", "function": {"name": string_in(choice, "name", "tool_choice")}}
