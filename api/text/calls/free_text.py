"""Tools that take a text instead of arguments: calls with one argument, whose text may have to follow a grammar.

A grammar holds where it is a regular one, which can stand within JSON or between tags: a regular expression, or a Lark
grammar whose rules do not lead back to themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from api.text.kinds import FREE_TEXT

MAX_GRAMMAR = 2**16  # characters of a definition, and of the expression that it becomes
_RULE = re.compile(r"^[?!]?([a-zA-Z_]\w*)(?:\.-?\d+)?\s*:", re.MULTILINE)
_TOKEN = re.compile(
    r'"((?:[^"\\\n]|\\.)*)"(i?)|/((?:[^/\\\n]|\\.)+)/([imslux]*)|->\s*\w+|([a-zA-Z_]\w*)|~\s*(\d+)(?:\s*\.\.\s*(\d+))?'
    r"|([|()\[\]?*+])|(\.\.)|//[^\n]*|\s+"
)
_COMMON = {  # of Lark's own library
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "DIGIT": r"[0-9]", "INT": r"[0-9]+", "LETTER": r"[a-zA-Z]", "WORD": r"[a-zA-Z]+", "HEXDIGIT": r"[0-9a-fA-F]",
    "CNAME": r"[a-zA-Z_][a-zA-Z0-9_]*", "NUMBER": r"[0-9]+(?:\.[0-9]+)?", "SIGNED_INT": r"[+-]?[0-9]+",
}  # fmt: skip


class NotRegularError(ValueError):
    """Why a grammar is not enforced."""


def parameters_of_text(pattern: str | None = None) -> dict[str, Any]:
    """The schema of a call's arguments. `pattern`: a regular expression that the text follows."""
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": f"^(?:{pattern})$"}
    return {"type": "object", "properties": {FREE_TEXT: text}, "required": [FREE_TEXT], "additionalProperties": False}


def text_in_arguments(arguments: str) -> str:
    """The text of a call, whole or cut off; arguments of another form as they are."""
    reader = TextReader()
    text = reader.push(arguments)
    return text if reader.begun else arguments


class TextReader:
    """The text in the JSON of arguments that come in parts."""

    _HEAD = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')

    def __init__(self) -> None:
        self._unread = ""
        self.begun = self._ended = False

    def push(self, arguments: str) -> str:
        """What more of the text is known."""
        if self._ended:
            return ""
        self._unread += arguments
        if not self.begun:
            head = self._HEAD.match(self._unread)
            if head is None:
                return ""
            self.begun, self._unread = True, self._unread[head.end() :]
        whole = re.match(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*', self._unread)
        assert whole is not None  # it may be empty
        read = whole[0]
        if re.search(r"\\u[dD][89abAB][0-9a-fA-F]{2}$", read):  # half of a pair
            read = read[:-6]
        self._ended = self._unread[len(read) : len(read) + 1] == '"'
        self._unread = self._unread[len(read) :]
        try:
            return str(json.loads(f'"{read}"', strict=False))
        except ValueError:  # an escape that JSON does not have
            return read


def regex_of_format(form: Mapping[str, Any]) -> str | None:
    """The regular expression of a tool's `format`; None: any text. Raises NotRegularError."""
    if form.get("type", "text") == "text":
        return None
    grammar = form.get("grammar", form)
    syntax, definition = (grammar.get("syntax"), grammar.get("definition")) if isinstance(grammar, dict) else ("", "")
    if not isinstance(definition, str) or len(definition) > MAX_GRAMMAR:
        raise NotRegularError(f"a definition of at most {MAX_GRAMMAR} characters is expected")
    if syntax == "regex":
        return definition
    if syntax == "lark":
        return regex_of_lark(definition)
    raise NotRegularError("its syntax is neither lark nor regex")


def regex_of_lark(grammar: str) -> str:
    """Raises NotRegularError."""
    return _Lark(grammar).regex("start", ())


class _Lark:
    def __init__(self, grammar: str) -> None:
        self._bodies: dict[str, str] = {}
        self._done: dict[str, str] = {}
        lines = []
        for line in grammar.splitlines():
            if line.lstrip().startswith("%"):
                self._directive(line.strip())
            elif not line.lstrip().startswith("//"):
                lines.append(line)
        text = "\n".join(lines)
        heads = list(_RULE.finditer(text))
        if not heads or text[: heads[0].start()].strip():
            raise NotRegularError("it has no rules")
        for head, following in zip(heads, [*heads[1:], None], strict=True):
            self._bodies[head[1]] = text[head.end() : following.start() if following else len(text)]

    def _directive(self, line: str) -> None:
        found = re.fullmatch(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?", line)
        if found is None or found[1] not in _COMMON:
            raise NotRegularError(f"{line[:60]!r} is not understood")
        self._done[found[2] or found[1]] = f"(?:{_COMMON[found[1]]})"

    def regex(self, name: str, within: tuple[str, ...]) -> str:
        if name not in self._done:
            if name not in self._bodies:
                raise NotRegularError(f"it has no rule {name[:60]!r}")
            if name in within or len(within) > 50:
                raise NotRegularError(f"its rule {name[:60]!r} leads back to itself")
            self._done[name] = f"(?:{self._body(self._bodies[name], (*within, name))})"
        return self._done[name]

    def _body(self, body: str, within: tuple[str, ...]) -> str:
        parts: list[str] = []
        at = 0
        while at < len(body):
            token = _TOKEN.match(body, at)
            if token is None or token[9]:
                raise NotRegularError(f"{body[at : at + 20]!r} is not understood")
            at = token.end()
            parts.append(self._part(token, within))
            if sum(map(len, parts)) > MAX_GRAMMAR:
                raise NotRegularError("it becomes too long")
        return "".join(parts)

    def _part(self, token: re.Match[str], within: tuple[str, ...]) -> str:
        text, ignoring, pattern, flags, name, least, most, sign = (token[i] for i in (1, 2, 3, 4, 5, 6, 7, 8))
        if text is not None:
            try:
                literal = re.escape(json.loads(f'"{text}"', strict=False))
            except ValueError:
                raise NotRegularError(f"{text[:60]!r} is not understood") from None
            return f"(?i:{literal})" if ignoring else f"(?:{literal})"
        if pattern is not None:
            return f"(?{flags}:{pattern})".replace("\\/", "/")
        if name is not None:
            return self.regex(name, within)
        if least is not None:
            return f"{{{least},{most or least}}}"
        return {"[": "(?:", "]": ")?", "(": "(?:"}.get(sign or "", sign or "")
