"""What Ollama's clients send: bodies, what becomes of each field, and the chat or completion that they become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from api.bodies import shapes
from api.bodies.body import Body, alias, no_op, refused, supported
from api.bodies.generation import CompletionRequest
from api.bodies.parsing import Notes, parse, parse_object
from api.bodies.tools import Definitions, Effort
from api.bodies.values import INT32, INT64, AnyMessages, Integer, Number, Penalty, Stops, Temperature, TopP
from api.dialects.common.content import continuation
from api.errors import UnreadableError, bad_request
from api.prepare.job import Job, Prepared
from api.prepare.prompts import Preparer
from api.text.kinds import Content, unread
from api.text.messages import newest_request, objects_of, passed_over

WORDS = {  # of a chat's fields
    "enable_thinking": "think",
    "reasoning_effort": "think",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
}
_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


class OllamaOptions(Body):
    FIELDS = (
        supported("temperature", "0: greedy"),
        supported("top_p", "1: off"),
        supported("top_k", "0 or -1: off"),
        supported("min_p", "0: off"),
        supported("seed", "see above"),
        supported("num_predict", "most tokens of output; below 0: what fits"),
        supported("stop", "a text or a list"),
        supported("repeat_penalty", "see `repetition_penalty`"),
        supported("repeat_last_n", "0: there are no penalties; others: penalties look at all tokens"),
        supported("presence_penalty", "see above"),
        supported("frequency_penalty", "see above"),
        no_op("num_ctx", "the context is the server's"),
        no_op("num_batch", "batches are the server's"),
        no_op("num_gpu", "placement is the server's"),
        no_op("num_thread", "threads are the server's"),
        no_op("main_gpu", "placement is the server's"),
        no_op("use_mmap", "memory is the server's"),
        no_op("numa", "memory is the server's"),
        no_op("num_keep", "the context is not shifted"),
        no_op("low_vram", "memory is the server's"),
        no_op("f16_kv", "memory is the server's"),
        no_op("use_mlock", "memory is the server's"),
        no_op("logits_all", "there is no such answer"),
        no_op("vocab_only", "there is no such answer", False),
        no_op("embedding_only", "there is no such answer", False),
        no_op("mirostat_tau", "there is no such sampler to set"),
        no_op("mirostat_eta", "there is no such sampler to set"),
        no_op("mirostat", "Ollama's own engine has no such sampler either"),
        no_op("typical_p", "Ollama's own engine has no such filter either"),
        no_op("tfs_z", "Ollama's own engine has no such filter either"),
        refused("penalize_newline", "penalties look at all tokens", True),
    )

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT32), Integer] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), Number] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64), Integer] | None = None
    num_predict: Annotated[int, Field(ge=-2, lt=INT32), Integer] | None = None
    stop: Stops = Field(default=[])
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10), Number] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=INT32), Integer] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


_COMMON = (
    supported("model", "as everywhere; `:latest` at its end is left out"),
    supported("stream", "true unless given: a line of JSON each"),
    supported("format", '`"json"` or a JSON schema'),
    supported("think", "true or false: see `enable_thinking`; a text: see `reasoning_effort`"),
    supported("options", "its fields are below"),
    no_op("keep_alive", "the model stays"),
    refused("logprobs", "/v1/chat/completions gives log-probabilities", False),
    refused("top_logprobs", "/v1/chat/completions gives log-probabilities", 0),
)


_LINES = "application/x-ndjson"


class _OllamaRequest(Body):
    STREAM = _LINES

    model: str | None = None
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Effort | None = None
    options: OllamaOptions | None = None


class OllamaChatRequest(_OllamaRequest):
    SHAPES = {"messages": shapes.OLLAMA_MESSAGES, "tools": shapes.CHAT_TOOLS}  # noqa: RUF012
    FIELDS = (
        *_COMMON,
        supported("messages", "the answer goes on with an assistant's text at the end; none: the model is loaded"),
        supported("tools", "functions"),
    )

    messages: AnyMessages = Field(default=[])
    tools: Definitions = Field(default=[])


class OllamaGenerateRequest(_OllamaRequest):
    FIELDS = (
        *_COMMON,
        supported("prompt", "a user's message, or the whole prompt if `raw`; none: the model is loaded"),
        supported("system", "the first message"),
        supported("raw", "no chat template"),
        refused("images", "the model reads text only", []),
        refused("width", "the model writes text only"),
        refused("height", "the model writes text only"),
        refused("steps", "the model writes text only"),
        refused("suffix", "the model does not fill in the middle", ""),
        refused("template", "the server's template is used (`--chat-template`)", ""),
        refused("context", "send the messages to /api/chat", []),
    )

    prompt: str = ""
    system: str | None = None
    raw: bool = False


class OllamaShowRequest(Body):
    FIELDS = (
        supported("model", "as everywhere"),
        alias("name", "model"),
        no_op("verbose", "there is no more to show"),
    )

    model: str | None = None


class OllamaPullRequest(Body):
    STREAM = _LINES
    FIELDS = (
        supported("model", "one that is served; others are not fetched"),
        supported("stream", "true unless given: a line of JSON each"),
        alias("name", "model"),
        no_op("insecure", "nothing is fetched"),
    )

    model: str | None = None
    stream: bool = True


def prepare_chat(prompts: Preparer, job: Job, raw: bytes, notes: Notes) -> Prepared:
    """Without messages there is no prompt: the client asks for the model to be loaded."""
    body = parse(OllamaChatRequest, raw, notes)
    if not body.messages:
        return _nothing_asked(body)
    return prompts.chat_of(chat_of(body, notes), job, notes, WORDS)


def prepare_generate(prompts: Preparer, job: Job, raw: bytes, notes: Notes) -> Prepared:
    body = parse(OllamaGenerateRequest, raw, notes)
    if not body.prompt:
        return _nothing_asked(body)
    if not body.raw:
        return prompts.chat_of(chat_of(body, notes), job, notes, WORDS)
    prepared = prompts.completion(parse_object(CompletionRequest, completion_of(body, notes)), job)
    return msgspec.structs.replace(prepared, is_raw=True)


def _nothing_asked(body: OllamaChatRequest | OllamaGenerateRequest) -> Prepared:
    return Prepared(msgspec.json.encode({"model": body.model, "stream": body.stream}))


def chat_of(body: OllamaChatRequest | OllamaGenerateRequest, notes: Notes) -> dict[str, Any]:
    """The same as a chat request. Raises ApiError that names the place."""
    chat = {"model": body.model, "stream": body.stream, **_options(body.options, notes)}
    if isinstance(body.think, str):
        chat["reasoning_effort"] = body.think
    elif body.think is not None:
        chat["enable_thinking"] = body.think
    if body.format == "json":
        chat["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    if isinstance(body, OllamaGenerateRequest):
        system = [{"role": "system", "content": body.system}] if body.system else []
        chat["messages"] = [*system, {"role": "user", "content": body.prompt}]
    else:
        chat["messages"] = _messages(body.messages, notes)
        chat |= continuation(chat["messages"])
        if body.tools:
            chat["tools"] = body.tools
    return chat


def completion_of(body: OllamaGenerateRequest, notes: Notes) -> dict[str, Any]:
    """Of a raw prompt; without `num_predict` the output has the rest of the context, up to a bound."""
    if body.system or body.think is not None or body.format not in (None, ""):
        raise bad_request("raw: no system, think or format goes with it", "raw")
    return {"model": body.model, "stream": body.stream, "prompt": body.prompt, **_options(body.options, notes)}


def _options(options: OllamaOptions | None, notes: Notes) -> dict[str, Any]:
    given = {} if options is None else options.model_dump(exclude_unset=True)
    last = given.pop("repeat_last_n", None)
    if last == 0:
        given |= {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    elif last is not None and last > 0:
        notes.remark("options.repeat_last_n", "penalties look at all tokens")
    if given.get("num_predict", 0) < 0:  # as much as fits
        del given["num_predict"]
    return {_OPTIONS.get(name, name): value for name, value in given.items() if value is not None}


def _messages(messages: Sequence[Any], notes: Notes) -> list[dict[str, Any]]:
    """Their calls have no ids: a result belongs to the first call of its tool that has none."""
    result, open_calls, count = [], list[tuple[str, str]](), 0
    given = objects_of(messages, "messages", notes)
    newest = newest_request([message.get("role") for _, message in given])
    for at, (i, message) in enumerate(given):
        where = f"messages[{i}]"
        own = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
        if own.get("content") is None:
            own["content"] = ""
        if message.get("images"):
            if at == newest:
                raise bad_request(f"{where}.images: the model reads text only", f"{where}.images", "unsupported_field")
            notes.made_a_line(where, "images")
            own["content"] = _with_line(message.get("content"), unread("images"))
        if message.get("thinking"):
            own["reasoning_content"] = message["thinking"]
        if isinstance(calls := message.get("tool_calls"), list):
            own["tool_calls"] = []
            for call in calls:
                with passed_over(notes, newly=False):
                    name, arguments = _called(call, f"{where}.tool_calls")
                    count += 1
                    open_calls.append((name, f"call_{count}"))
                    if not isinstance(arguments, str):
                        arguments = json.dumps(arguments, ensure_ascii=False)
                    function = {"name": name, "arguments": arguments}
                    own["tool_calls"].append({"id": f"call_{count}", "type": "function", "function": function})
        if message.get("role") == "tool":
            asked = message.get("tool_name")
            found = next((each for each in open_calls if asked in (None, each[0])), None)
            if found is not None:
                open_calls.remove(found)
                own["tool_call_id"] = found[1]
        result.append(own)
    return result


def _with_line(content: Any, line: str) -> Any:
    text = Content()
    text.text(content if isinstance(content, str) else "")
    text.line(line)
    return str(text)


def _called(call: Any, where: str) -> tuple[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnreadableError(f'{where}: {{"function": {{"name", "arguments"}}}} is expected', where)
    return function["name"], function.get("arguments", {})
