"""Texts in grammars for calls: markers that are tokens of their own are written by their ids, all else as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

TokenOf = Callable[[str], int | None]  # the id of the token that a marker always is, None: it is text
ANY = "/(.|\\n)*/"  # tokens that are no text end it


def no_tokens(text: str) -> None:
    """`TokenOf` of a vocabulary in which every marker is text."""


class Literals:
    def __init__(self, markers: Iterable[str], token_of: TokenOf) -> None:
        found = {marker: token_of(marker) for marker in markers if marker}
        self._ids = {marker: token for marker, token in found.items() if token is not None}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) if self._ids else r"(?!)")

    def written(self, text: str) -> str:
        """The text, in Lark."""
        parts, at = [], 0
        for found in self._marker.finditer(text):
            parts += [json.dumps(text[at : found.start()]), f"<[{self._ids[found[0]]}]>"]
            at = found.end()
        parts.append(json.dumps(text[at:]))
        return " ".join(part for part in parts if part != '""') or '""'

    def until(self, name: str, end: str, before: str = ANY) -> tuple[str, str]:
        """A rule called `name`, and an expression with it, of texts like `before`, a regular expression between
        slashes, up to the first `end`."""
        found = self._marker.search(end)
        text = end if found is None else end[: found.start()]
        pattern = f"/{before[1:-1]}{in_slashes(re.escape(text))}/"
        if found is None:
            return f"{name}[lazy]: {pattern}", name
        lazy = "[lazy]" if text.strip() else ""
        return f"{name}{lazy}: {pattern}", f"{name} {self.written(end[found.start() :])}"


def in_slashes(pattern: str) -> str:
    """A regular expression as Lark has it between slashes."""
    return re.sub(
        r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found[0], found[0]), pattern, flags=re.S
    )
