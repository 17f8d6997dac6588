"""Messages of a chat as the templates of a form of calls expect them, where that is not as OpenAI's servers have them.

Each takes messages as `api.text.messages.normalise` makes them: arguments of calls are objects, no content is "".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from api.text.calls.marked_call import NUMBERED_ID
from api.text.kinds import FREE_TEXT

Message = dict[str, Any]


def in_order(messages: Sequence[Message]) -> list[Message]:
    """Results in the order of their calls: most templates write no ids, and models tell results by their order."""
    made: list[Message] = []
    for results, run in groupby(messages, key=lambda message: bool(message["role"] == "tool")):
        together = list(run)
        if results and made:
            place = {call["id"]: i for i, call in enumerate(made[-1].get("tool_calls", ())) if "id" in call}
            if all(result.get("tool_call_id") in place for result in together):
                together.sort(key=lambda result: place[result["tool_call_id"]])
        made += together
    return made


def as_sent(messages: Sequence[Message]) -> list[Message]:
    """Arguments as their JSON text, and null for no content beside calls: DeepSeek's templates join these texts."""
    return [
        {**message, "content": message["content"] or None, "tool_calls": [*map(_with_text, message["tool_calls"])]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def with_objects(messages: Sequence[Message]) -> list[Message] | None:
    """Every call's arguments as an object: a text that is none stands in one. None where nothing changes."""
    made = [
        {**message, "tool_calls": [*map(_with_object, message["tool_calls"])]} if message.get("tool_calls") else message
        for message in messages
    ]
    return None if made == list(messages) else made


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else {FREE_TEXT: arguments}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def numbered(messages: Sequence[Message]) -> list[Message]:
    """Calls have ids `functions.NAME:NUMBER`, counted through the chat: Kimi's templates write no name but that."""
    made: list[Message] = []
    count, known = 0, dict[str, str]()  # ids by those that the client has sent
    unnamed: list[str] = []  # of calls without one, for the results that follow
    for message in messages:
        new = dict(message)
        if calls := message.get("tool_calls"):
            new["tool_calls"], unnamed = [], []
            for call in calls:
                sent = call.get("id", "")
                call_id = sent if NUMBERED_ID.fullmatch(sent) else f"functions.{call['function']['name']}:{count}"
                if sent:
                    known[sent] = call_id
                else:
                    unnamed.append(call_id)
                new["tool_calls"].append({**call, "id": call_id})
                count += 1
        if message["role"] == "tool":
            sent = message.get("tool_call_id", "")
            new["tool_call_id"] = known.get(sent, sent) if sent or not unnamed else unnamed.pop(0)
        made.append(new)
    return made


def in_channels(messages: Sequence[Message]) -> list[Message]:
    """One call a message, its result behind it; reasoning as `thinking`, and what was said beside a call joined to it;
    one system message, the first: harmony's template shows no more of a message or of other system messages."""
    system = [message["content"] for message in messages if message["role"] == "system" and message["content"]]
    made: list[Message] = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    turns = [message for message in messages if message["role"] != "system"]
    at = 0
    while at < len(turns):
        message = {key: value for key, value in turns[at].items() if key != "reasoning_content"}
        thinking = turns[at].get("reasoning_content")
        at += 1
        calls = message.get("tool_calls")
        if not calls:
            made.append({**message, **({"thinking": thinking} if thinking else {})})
            continue
        end = next((i for i in range(at, len(turns)) if turns[i]["role"] != "tool"), len(turns))
        said = "\n\n".join(filter(None, [thinking, message["content"]]))
        made += _one_by_one({**message, "content": ""}, said, turns[at:end])
        at = end
    return made


def _one_by_one(message: Message, thinking: str, results: Iterable[Message]) -> list[Message]:
    """A message for each call, its results behind it; those that name no call stand behind the last one."""
    made: list[Message] = []
    left, last = list(results), len(message["tool_calls"]) - 1
    for i, call in enumerate(message["tool_calls"]):
        made.append({**message, "tool_calls": [call], **({"thinking": thinking} if thinking and not i else {})})
        if i == last:
            made += left
        elif "id" in call:
            made += [each for each in left if each.get("tool_call_id") == call["id"]]
            left = [each for each in left if each.get("tool_call_id") != call["id"]]
        else:
            made += left[:1]
            left = left[1:]
    return made


HISTORIES: dict[str, Callable[[Sequence[Message]], list[Message]]] = {
    "plain": list,
    "as_sent": as_sent,
    "numbered": numbered,
    "in_channels": in_channels,
}
