"""Messages of one turn put together, and orders of roles that no chat has refused. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.data.files import Row

Message = dict[str, Any]


def joined(
    messages: Sequence[Message], trained: Sequence[bool], row: Row
) -> tuple[tuple[Message, ...], tuple[bool, ...]]:
    """What the assistant says before its calls, and all calls behind one another, as the one message that a model
    writes. `trained`: of each message. DataError for an order of roles that cannot be, and for a turn of which a part
    alone is learnt."""
    turns: list[Message] = []
    learnt: list[bool] = []
    for number, (message, counts) in enumerate(zip(messages, trained, strict=True), 1):
        before = turns[-1] if turns else None
        if before is not None and before["role"] == message["role"] == "assistant":
            if message["content"] or not message.get("tool_calls"):
                raise row.error(
                    f"message {number} is the assistant's behind the assistant's: between two answers there is a "
                    "user's or a tool's message; only a call follows what the assistant says in the same turn"
                )
            if counts != learnt[-1]:
                raise row.error(f"messages {number - 1} and {number} are one turn, but have two weights")
            calls = [*before.get("tool_calls", []), *message["tool_calls"]]
            turns[-1] = {**before, "tool_calls": calls}
            continue
        if message["role"] == "tool" and not _calls_before(turns):
            said = "nothing" if before is None else f"the {before['role']}'s"
            raise row.error(f"message {number} is a tool's behind {said}: the assistant's call is missing before it")
        turns.append(message)
        learnt.append(counts)
    return tuple(turns), tuple(learnt)


def _calls_before(turns: Sequence[Message]) -> bool:
    """Whether tools may answer now."""
    last = next((turn for turn in reversed(turns) if turn["role"] != "tool"), None)
    return last is not None and last["role"] == "assistant" and bool(last.get("tool_calls"))
