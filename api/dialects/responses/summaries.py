"""Summaries of conversations in items that clients send back unread."""

from __future__ import annotations

import base64
from typing import Any, Final

_MARK: Final = "ktserve-summary:"
BEGINNING: Final = "Summary of the conversation so far:\n"


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
