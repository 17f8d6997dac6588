"""Messages as the templates of a form of calls expect them: nothing that was said, called or answered is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from api.text.calls.history import HISTORIES, in_order
from api.text.messages import normalise

_WORDS = st.text("abc", min_size=1, max_size=4)


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    number = 0
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            messages.append({"role": "system", "content": draw(_WORDS)})
        messages.append({"role": "user", "content": draw(_WORDS)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(st.one_of(st.none(), _WORDS))}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(_WORDS)
        calls = []
        for _ in range(draw(st.integers(0, 3))):
            number += 1
            function = {"name": draw(_WORDS), "arguments": json.dumps({"a": draw(_WORDS)})}
            calls.append({"id": f"call_{number}", "type": "function", "function": function})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": f"of {call['id']}"} for call in calls]
        messages += [answer | ({"tool_calls": calls} if calls else {}), *draw(st.permutations(results))]
    return normalise(messages)


@settings(max_examples=100, deadline=None)
@given(chats(), st.sampled_from(sorted(HISTORIES)))
def test_nothing_is_lost(messages: list[dict[str, Any]], name: str) -> None:
    made = HISTORIES[name](messages)
    for role in ("system", "user", "assistant"):
        given, written = (
            sorted("".join(f"{m.get('thinking', '')}{m.get('reasoning_content', '')}{m['content'] or ''}"
                           for m in each if m["role"] == role).replace("\n", ""))
            for each in (messages, made)
        )  # fmt: skip
        assert given == written
    for each in (messages, made):  # every result stands behind its call
        called: set[str] = set()
        for message in each:
            called |= {call["id"] for call in message.get("tool_calls", ())}
            assert message["role"] != "tool" or message["tool_call_id"] in called
    names = [[call["function"]["name"] for m in each for call in m.get("tool_calls", ())] for each in (messages, made)]
    results = [sorted(m["content"] for m in each if m["role"] == "tool") for each in (messages, made)]
    assert names[0] == names[1] and results[0] == results[1]


@settings(max_examples=60, deadline=None)
@given(chats())
def test_results_stand_in_the_order_of_their_calls(messages: list[dict[str, Any]]) -> None:
    made = in_order(messages)
    assert sorted(map(repr, made)) == sorted(map(repr, messages))
    calls = [call["id"] for message in made for call in message.get("tool_calls", ())]
    assert [message["tool_call_id"] for message in made if message["role"] == "tool"] == calls


@settings(max_examples=60, deadline=None)
@given(chats())
def test_what_templates_rely_on(messages: list[dict[str, Any]]) -> None:
    calls = [call for m in HISTORIES["numbered"](messages) for call in m.get("tool_calls", ())]
    assert [call["id"] for call in calls] == [f"functions.{c['function']['name']}:{i}" for i, c in enumerate(calls)]
    for message in HISTORIES["as_sent"](messages):
        assert all(isinstance(call["function"]["arguments"], str) for call in message.get("tool_calls", ()))
        assert message["content"] != "" or "tool_calls" not in message
    made = HISTORIES["in_channels"](messages)
    assert all(message["role"] != "system" for message in made[1:])
    for call, result in pairwise(made):
        assert len(call.get("tool_calls", ())) <= 1
        assert not (call.get("thinking") and call["content"] and "tool_calls" in call)
        if result["role"] == "tool":
            assert call["tool_calls"][0]["id"] == result["tool_call_id"]


@given(st.lists(st.sampled_from(["ok", "no"]), min_size=1, max_size=4), st.booleans())
def test_equal_results_stand_behind_their_calls(said: list[str], named: bool) -> None:
    """With ids and without."""
    ids: list[dict[str, Any]] = [{"id": f"call_{i}"} if named else {} for i in range(len(said))]
    calls = [{**each, "function": {"name": "f", "arguments": "{}"}} for each in ids]
    results = [
        {"role": "tool", "content": text, **({"tool_call_id": each["id"]} if named else {})}
        for text, each in zip(said, ids, strict=True)
    ]
    messages = normalise([{"role": "assistant", "tool_calls": calls}, *results])
    made = HISTORIES["in_channels"](messages)
    assert [message["role"] for message in made] == ["assistant", "tool"] * len(said)
    assert [message["content"] for message in made[1::2]] == said
    first, *others = HISTORIES["numbered"](messages)
    assert [other["tool_call_id"] for other in others] == [call["id"] for call in first["tool_calls"]]


def test_ids_of_the_models_own_are_kept() -> None:
    call = {"id": "functions.f:7", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "functions.f:7", "content": "x"}
    (first, second) = HISTORIES["numbered"](normalise([{"role": "assistant", "tool_calls": [call]}, result]))
    assert first["tool_calls"][0]["id"] == second["tool_call_id"] == "functions.f:7"
