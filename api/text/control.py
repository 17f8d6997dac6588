"""Text is text: what a client writes never becomes a control token, whatever the template does with it.

Every control token of a vocabulary (`<|im_start|>`, `<|im_end|>`, ...) holds one of a few characters; for ChatML it is
`|`. In a client's strings these are replaced by stand-ins before the template is rendered. A control token in the
rendered text was therefore written by the template; the text between two of them gets its characters back and is
encoded with control tokens disabled.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True)
class Rendered:
    """A template's text. `stand_ins`: stand-in -> character; empty if no client's string had to be changed. `opening`:
    of the answer, with which the text ends; None: it was not asked for, or the template changes more than the end.
    `shared`: characters of the text that chats behind the same system message and tools begin with; 0: not known.
    `part_ends`: positions in the text where parts of the last message end, rising."""

    text: str
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    opening: str | None = None
    shared: int = 0
    part_ends: Sequence[int] = ()

    def restored(self, text: str | None = None) -> str:
        """The text (or a part of it) as the client and the template wrote it. `tojson` may have escaped a stand-in."""
        text = self.text if text is None else text
        for stand_in, char in self.stand_ins.items():
            text = text.replace(stand_in, char).replace(_escaped(stand_in), char)
        return text


def guarding_characters(tokens: Sequence[str], avoid: str) -> str:
    """A small set of characters such that every token holds one. Punctuation is preferred, then what is rare in
    `avoid`: the strings a template compares its input with, once the tokens themselves are left out."""
    for token in tokens:
        avoid = avoid.replace(token, "")
    chosen, left = "", [set(token) for token in tokens if token]
    while left:
        counts = Counter(char for token in left for char in token)
        best = max(counts, key=lambda c: (not c.isalnum() and not c.isspace(), counts[c], -avoid.count(c), -ord(c)))
        chosen += best
        left = [token for token in left if best not in token]
    return chosen


def hide(values: Any, characters: str) -> tuple[Any, dict[str, str]]:
    """`values` (strings in lists and dicts) with stand-ins for `characters`, and stand-in -> character."""
    strings = list(_strings(values))
    present = [char for char in characters if any(char in string for string in strings)]
    stand_ins: dict[str, str] = {}
    while len(stand_ins) < len(present):
        candidate = chr(secrets.choice(_PRIVATE_USE))
        forms = (candidate, _escaped(candidate))
        if candidate not in stand_ins and not any(form in string for form in forms for string in strings):
            stand_ins[candidate] = present[len(stand_ins)]
    if not stand_ins:
        return values, {}
    return _replaced(values, str.maketrans({char: stand_in for stand_in, char in stand_ins.items()})), stand_ins


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _replaced(value: Any, table: dict[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_replaced(key, table): _replaced(item, table) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, table) for item in value]
    return value
