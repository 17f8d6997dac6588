"""What clients of OpenAI's Responses send: bodies, what becomes of each field, and the chat that a request becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field

from api.bodies.body import Body, no_op, refused, supported
from api.bodies.fields import GENERATION
from api.bodies.generation import SamplingFields
from api.bodies.parsing import Notes, parse
from api.bodies.structured import StructuredOutputs
from api.bodies.tools import Definitions, Effort
from api.bodies.values import Alternatives, Messages, PositiveCount
from api.dialects.common.content import SchemaFormat, kind_of, response_format, string_in, text_in, unsupported
from api.errors import bad_request, shortened
from api.prepare.job import Job, Prepared
from api.prepare.prompts import Preparer

LOGPROBS: Final = "message.output_text.logprobs"
Included = Literal[  # what OpenAI's responses may include: reasoning is given as it is, and there are no other tools
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "web_search_call.results", "web_search_call.action.sources", "file_search_call.results",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
]  # fmt: skip
_TEXTS = ("input_text", "output_text", "text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
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


def prepare(prompts: Preparer, job: Job, raw: bytes, notes: Notes) -> Prepared:
    """Nothing but the name of the response before, if the job does not have its messages."""
    body = parse(ResponsesRequest, raw, notes)
    if body.previous_response_id is not None and job.history is None:
        return Prepared(b"", previous=body.previous_response_id)
    history = [] if job.history is None else msgspec.json.decode(job.history)
    prepared = prompts.chat_of(chat_of(body, history), job, notes, WORDS)
    messages = msgspec.json.encode([*history, *messages_of(body)])
    head = body.model_dump_json(by_alias=True, exclude=NOT_REPEATED).encode()
    return msgspec.structs.replace(prepared, messages=messages, head=head)


def chat_of(body: ResponsesRequest, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same as a chat request. `history`: the messages of the response before. Raises ApiError naming the place."""
    messages = [*history, *messages_of(body)]
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "stream": body.stream,
        **body.model_dump(include=_SAMPLING | _OURS, by_alias=True, exclude_unset=True),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)] or None,
        "parallel_tool_calls": body.parallel_tool_calls if body.tools else None,
        "tool_choice": _choice(body.tool_choice) if body.tools else None,
        "response_format": response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    return {name: value for name, value in chat.items() if value is not None}


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input's items as messages; calls and reasoning join the assistant's message that they belong to."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(body.input):
        _add_item(messages, item, f"input[{i}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = kind_of(item, where) if "type" in item else "message"
    match kind:
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                allowed = "'user', 'assistant', 'system' or 'developer'"
                raise bad_request(f"{where}.role: {allowed} is expected, got {shortened(role)}", f"{where}.role")
            content = text_in(item.get("content"), f"{where}.content", _TEXTS)
            if role == "assistant":
                last = _assistant(messages)
                last["content"] += content
            else:
                messages.append({"role": role, "content": content})
        case "function_call":
            function = {"name": string_in(item, "name", where), "arguments": string_in(item, "arguments", where)}
            call = {"id": string_in(item, "call_id", where), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = text_in(item.get("output"), f"{where}.output", _TEXTS)
            messages.append({"role": "tool", "tool_call_id": string_in(item, "call_id", where), "content": text})
        case "reasoning":
            last = _assistant(messages)
            text = text_in(item.get("content") or [], f"{where}.content", ("reasoning_text", "text"))
            last["reasoning_content"] = last.get("reasoning_content", "") + text
        case _:
            raise unsupported(where, kind, _ITEMS)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if (kind := kind_of(tool, where)) != "function":
        raise unsupported(f"{where}.type", kind, ("function",))
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if (kind := kind_of(choice, "tool_choice")) != "function":
        raise unsupported("tool_choice.type", kind, ("function",))
    return {"type": "function", "function": {"name": string_in(choice, "name", "tool_choice")}}
