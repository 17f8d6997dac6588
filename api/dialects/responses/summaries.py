"""Summaries of conversations in items that clients send back unread."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

_MARK: Final = "ktserve-summary:"
BEGINNING: Final = "Summary of the conversation so far:\n"
REQUEST: Final = (
    "Write a summary of the conversation so far. It takes the place of everything but the user's own messages: whoever "
    "goes on reads those and your summary alone. Say what was asked for, what was decided and why, what has been done, "
    "which files, commands and results matter, and what is to be done next. Write the summary alone."
)
TRIGGER: Final = "compaction_trigger"


def sealed(summary: str) -> str:
    """The content of a `compaction` item. It is no secret: its client has sent what it was made of."""
    return _MARK + base64.b64encode(summary.encode("utf-8", "replace")).decode()


def opened(content: Any) -> str | None:
    """The message that holds the summary; None of what `sealed` has not made."""
    if not isinstance(content, str) or not content.startswith(_MARK):
        return None
    try:
        return BEGINNING + base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return None


def is_trigger(item: Any) -> bool:
    """Whether an item asks for a summary of those before it."""
    return isinstance(item, dict) and item.get("type") == TRIGGER


def kept(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the user said. A summary before this one is in this one."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    return [{"role": "user", "content": text} for text in said if text and not text.startswith(BEGINNING)]
