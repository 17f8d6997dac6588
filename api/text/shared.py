"""How much of a chat's text other chats behind the same system message and tools begin with, too."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from api.text.template import ChatTemplate, TemplateError

# of these one stands for what is said; ASCII first, for a template may write other characters as escapes
_MARKS = (*string.digits, *string.ascii_letters, *map(chr, range(0xE000, 0xF900)))


def shared_length(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], text: str
) -> int:
    """Characters of `text`, which the template has made of `messages`, before what the first other message than a
    system message says. 0 where no user speaks, or the template refuses a chat that ends there."""
    asked = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if asked is None:
        return 0
    said = next(message for message in messages if message["role"] != "system").get("content") or ""
    other = next((mark for mark in _MARKS if mark not in said), "")
    changed = [
        message if message["role"] == "system" else {**message, "content": other} for message in messages[: asked + 1]
    ]
    try:
        elsewhere = template.render(changed, variables=variables, add_generation_prompt=False)
    except TemplateError:
        return 0
    return _common_length(text, elsewhere)


def _common_length(one: str, other: str) -> int:
    """How far two texts are the same: halves are compared, which is faster than characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
