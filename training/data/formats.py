"""Rows of alpaca, sharegpt and OpenAI form become conversations, or preferences between two answers. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.errors import ApiError
from api.text.calls.definitions import Tool, tool_use
from api.text.messages import normalise
from training.data.files import Row
from training.data.info import Source
from training.data.turns import joined

Message = dict[str, Any]
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_ROLES = {"user": "user", "assistant": "assistant", "tool": "tool"}  # sharegpt's data has them beside its own
_SHAREGPT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclass(frozen=True)
class Conversation:
    """`messages` in the form that chat templates expect; `trained`: for each, whether its text is learnt."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    tools: tuple[Tool, ...]
    row: Row


@dataclass(frozen=True)
class Preference:
    """Two answers to `messages`: each one or more messages, beginning and ending with the assistant's."""

    messages: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[Tool, ...]
    row: Row


def conversation(row: Row, source: Source) -> Conversation:
    """DataError naming the row if it is none."""
    messages, tools = _prompt(row, source, answered=True)
    checked, trained = _checked(messages, row)
    if not checked:
        raise row.error("the conversation is empty")
    if checked[-1]["role"] != "assistant":
        raise row.error(f"the last message is {checked[-1]['role']!r}: the assistant's answer is missing")
    if not any(trained):
        raise row.error("no message of the assistant's has a weight other than 0")
    for message, counts in zip(checked, trained, strict=True):
        if counts and not message["content"] and not message.get("tool_calls"):
            raise row.error("an answer is empty")
    return Conversation(checked, trained, _tools(tools, row), row)


def preference(row: Row, source: Source) -> Preference:
    """DataError naming the row if it is none."""
    messages, tools = _prompt(row, source, answered=False)
    answers = []
    for name in ("chosen", "rejected"):
        value = _column(row, source, name, name)
        if value is None:
            raise row.error(f"column {source.columns.get(name, name)!r} is missing")
        answers.append(_answer(value, row, source, name))
    chosen, rejected = answers
    if not messages:  # whole conversations, of which the beginning is common
        common = 0
        while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
            common += 1
        messages, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    prompt, _ = _checked(messages, row)
    first, _ = _checked(chosen, row)
    second, _ = _checked(rejected, row)
    if not prompt:
        raise row.error("the prompt before the two answers is empty")
    for name, answer in (("chosen", first), ("rejected", second)):
        if not answer or answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
            raise row.error(f"{name} is not an answer of the assistant's")
        if not answer[-1]["content"] and not answer[-1].get("tool_calls"):
            raise row.error(f"{name} is empty")
    if first == second:
        raise row.error("chosen and rejected are the same")
    return Preference(prompt, first, second, _tools(tools, row), row)


def format_of(row: Row, source: Source) -> str:
    """The form of a data set that does not say: by the columns of a row."""
    if source.formatting is not None:
        return source.formatting
    named: Sequence[tuple[str, str]] = (
        ("messages", "openai"), ("conversations", "sharegpt"), ("instruction", "alpaca"), ("prompt", "alpaca"),
        ("chosen", "openai"),
    )  # fmt: skip
    for column, form in named:
        if column in row.data:
            return "openai" if isinstance(row.data[column], list) and column == "prompt" else form
    columns = ", ".join(map(repr, list(row.data)[:8]))
    raise row.error(
        f"columns {columns} are of no known form: messages (OpenAI), conversations (sharegpt) or instruction (alpaca) "
        "is expected; dataset_info.json can name others"
    )


def _column(row: Row, source: Source, name: str, default: str | None) -> Any:
    """A column's value; None where it is not there, unless dataset_info.json says that it is."""
    given = source.columns.get(name)
    if given is not None and given not in row.data:
        raise row.error(f"column {given!r} ({name}) is missing")
    key = given or default
    return None if key is None else row.data.get(key)


def _check_plain(value: Any, where: str, row: Row) -> None:
    """DataError for what a chat template cannot write as JSON, bytes and times of parquet for instance. Without
    recursion: values may be nested deeply."""
    left = [(where, value)]
    while left:
        place, each = left.pop()
        if isinstance(each, dict):
            left += [(f"{place}.{key}", inner) for key, inner in each.items()]
        elif isinstance(each, list):
            left += [(f"{place}[{i}]", inner) for i, inner in enumerate(each)]
        elif not (each is None or isinstance(each, str | int | float)):
            kind = type(each).__name__
            raise row.error(f"{place} is of the type {kind}; allowed are texts, numbers, lists and objects")


def _prompt(row: Row, source: Source, *, answered: bool) -> tuple[list[Message], Any]:
    """The messages of a row, without the two answers of a preference, and its tools as they are written."""
    form = format_of(row, source)
    tools = _column(row, source, "tools", "tools")
    if form == "alpaca":
        return _alpaca(row, source, answered), tools
    key = "conversations" if form == "sharegpt" else "messages"
    default = "prompt" if not answered and form == "openai" and "messages" not in row.data else key
    value = _column(row, source, "messages", default)
    if value is None and not answered and form == "openai":
        value = []
    if not isinstance(value, list):
        raise row.error(f"column {source.columns.get('messages', default)!r}: a list of messages is expected")
    system = _text(row, _column(row, source, "system", "system"), "system")
    messages = [_message(item, row, source, form, f"message {i}") for i, item in enumerate(value, 1)]
    if system and not (messages and messages[0].get("role") == "system"):
        messages = [{"role": "system", "content": system}, *messages]
    return messages, tools


def _alpaca(row: Row, source: Source, answered: bool) -> list[Message]:
    default = dict(_ALPACA)
    if "instruction" not in row.data and "prompt" in row.data:  # prompt and completion, or prompt and two answers
        default = {"prompt": "prompt", "query": "input", "response": "completion"}
    text = {name: _text(row, _column(row, source, name, default[name]), name) for name in ("prompt", "query")}
    question = "\n".join(part for part in text.values() if part)
    if not question:
        raise row.error(f"column {source.columns.get('prompt', default['prompt'])!r} is missing or empty")
    messages: list[Message] = []
    if system := _text(row, _column(row, source, "system", "system"), "system"):
        messages.append({"role": "system", "content": system})
    history = _column(row, source, "history", "history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise row.error("history: a list of pairs of texts is expected, question and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": question})
    if answered:
        response = _column(row, source, "response", default["response"])
        if response is None:
            raise row.error(f"column {source.columns.get('response', default['response'])!r} is missing")
        messages.append({"role": "assistant", "content": _text(row, response, "response")})
    return messages


def _message(item: Any, row: Row, source: Source, form: str, where: str) -> Message:
    if not isinstance(item, dict):
        raise row.error(f"{where}: an object is expected")
    for key in ("tool_calls", "function_call"):
        _check_plain(item.get(key), f"{where}: {key}", row)
    bare = form == "sharegpt" and _SHAREGPT_TAGS["role_tag"] not in item and "role" in item
    if (form == "openai" or bare) and not source.tags:
        return {key: value for key, value in item.items() if value is not None}
    openai = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    openai |= {"observation_tag": "tool", "function_tag": "function", "system_tag": "system"}
    tags = {**(openai if form == "openai" else _SHAREGPT_TAGS), **source.tags}
    role, content = item.get(tags["role_tag"]), item.get(tags["content_tag"])
    calls = item.get("tool_calls")
    if calls is not None and role == tags["assistant_tag"]:
        return {"role": "assistant", "content": content, "tool_calls": calls}
    if not isinstance(content, str):
        raise row.error(f"{where}: {tags['content_tag']!r} is missing, or no text")
    if role == tags["function_tag"]:
        return {"role": "assistant", "content": "", "tool_calls": _calls(content, row, where)}
    roles = {tags["user_tag"]: "user", tags["assistant_tag"]: "assistant", tags["observation_tag"]: "tool"}
    roles[tags["system_tag"]] = "system"
    if not source.tags:
        roles = {**roles, **_ROLES}
    if not isinstance(role, str) or role not in roles:
        allowed = ", ".join([*roles, tags["function_tag"]])
        raise row.error(f"{where}: {tags['role_tag']!r} is {str(role)[:80]!r}; allowed is {allowed}")
    return {"role": roles[role], "content": content}


def _calls(text: str, row: Row, where: str) -> list[dict[str, Any]]:
    """sharegpt writes calls as JSON text: one object, or a list of them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise row.error(f'{where}: a call is JSON text: {{"name": ..., "arguments": ...}}')
    return [{"type": "function", "function": {**call, "arguments": call.get("arguments", {})}} for call in calls]


def _answer(value: Any, row: Row, source: Source, name: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    items = value if isinstance(value, list) else [value]
    form = format_of(row, source)
    return [_message(item, row, source, form, name) for item in items]


def _checked(messages: Sequence[Message], row: Row) -> tuple[tuple[Message, ...], tuple[bool, ...]]:
    """As a request's messages are checked by the server, and which are learnt: the assistant's, but for a weight of
    0."""
    weights = []
    bare = []
    for i, message in enumerate(messages):
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise row.error(f"messages[{i}].weight is {weight!r}; allowed is 0 or 1")
        weights.append(bool(weight) and message.get("role") == "assistant")
        bare.append({key: item for key, item in message.items() if key != "weight"})
    return joined(_told(lambda: normalise(bare), row), weights, row)


def _tools(value: Any, row: Row) -> tuple[Tool, ...]:
    """A list of definitions, or JSON text of one (sharegpt). Bare functions are wrapped as OpenAI has them."""
    if value in (None, "", []):
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise row.error("tools: not JSON") from None
    if not isinstance(value, list):
        raise row.error("tools: a list of definitions is expected")
    _check_plain(value, "tools", row)
    wrapped = [
        {"type": "function", "function": tool} if isinstance(tool, Mapping) and "function" not in tool else tool
        for tool in value
    ]
    offer = _told(lambda: tool_use(wrapped, [], None, None, parallel=True), row)
    if offer.remarks:
        raise row.error(": ".join(offer.remarks[0]))
    return () if offer.use is None else offer.use.tools


def _told(check: Callable[[], Any], row: Row) -> Any:
    """The server's own checks, whose errors say nothing of files."""
    try:
        return check()
    except ApiError as error:
        raise row.error(error.message) from None


def _text(row: Row, value: Any, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise row.error(f"{name}: a text is expected")
    return value
