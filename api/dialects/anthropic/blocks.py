"""Anthropic's blocks as a chat's messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from api.bodies.parsing import Notes
from api.dialects.common.content import kind_of, name_of, string_in, text_in
from api.errors import UnreadableError
from api.text.kinds import BLOCKS, DOCUMENTS, Content, Fate, told, unread
from api.text.messages import json_of, newest_request, objects_of, passed_over, role_of, unsupported

# Claude Code's, which differs for each conversation: no text for a model, and before it nothing is found in the cache.
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")
_ROLES, _OTHER_ROLES = ("system", "user", "assistant"), {"developer": "system"}
_MOST_LEVELS = 4  # of documents within results


@dataclass
class Offers:
    """A request's tools as a chat has them, None for one that is left out. `added`: definitions that stand in
    messages."""

    declared: list[dict[str, Any] | None]
    added: list[dict[str, Any]] = field(default_factory=list)

    def add(self, definition: dict[str, Any]) -> None:
        self.remove(definition.get("name"))
        self.added.append(definition)

    def remove(self, name: Any) -> None:
        self.declared = [tool for tool in self.declared if tool is None or tool["function"].get("name") != name]
        self.added = [tool for tool in self.added if tool.get("name") != name]


def system_of(system: str | list[dict[str, Any]] | None, notes: Notes) -> list[dict[str, Any]]:
    """The system message, without the client's line for the vendor's books. Raises ApiError."""
    if isinstance(system, list):
        kept = []
        for block in system:
            text = block.get("text")
            if isinstance(text, str) and _BILLING.match(text):
                block = {**block, "text": _BILLING.sub("", text)}
            kept.append(block)
        return [{"role": "system", "content": text_in(kept, "system", BLOCKS, notes)}]
    return [] if system is None else [{"role": "system", "content": _BILLING.sub("", system)}]


def messages_of(messages: Sequence[Any], offers: Offers, notes: Notes) -> list[dict[str, Any]]:
    """One of theirs may hold several of ours: each result of a tool is a message. Tools that blocks define are added to
    `offers`. Raises ApiError that names the place."""
    given = objects_of(messages, "messages", notes)
    newest = newest_request(["tool" if _has_results(message) else message.get("role") for _, message in given])
    made: list[dict[str, Any]] = []
    for at, (i, message) in enumerate(given):
        where = f"messages[{i}]"
        role = role_of(message, where, _ROLES, _OTHER_ROLES, notes, last=i == len(messages) - 1)
        made += _Reader(where, offers, notes, newly=at == newest).messages(role, message.get("content"))
    return made


def _has_results(message: dict[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and part.get("type") == "tool_result" for part in parts)


class _Reader:
    """Of one message."""

    def __init__(self, where: str, offers: Offers, notes: Notes, *, newly: bool) -> None:
        self._where, self._offers, self._notes, self._newly = where, offers, notes, newly
        self._text = Content()
        self._results: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._reasoning: list[str] = []

    def messages(self, role: str, content: Any) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        place = f"{self._where}.content"
        if not isinstance(content, list):
            return [{"role": role, "content": json_of(content, place, self._notes, newly=self._newly)}]
        for i, part in enumerate(content):
            with passed_over(self._notes, newly=self._newly):
                if isinstance(part, str):
                    self._text.text(part)
                else:
                    self._read(part, kind_of(part, f"{place}[{i}]"), f"{place}[{i}]")
        own: dict[str, Any] = {"role": role, "content": str(self._text)}
        if self._calls and role != "assistant":
            self._results.append({"role": "assistant", "content": "", "tool_calls": self._calls})
        elif self._calls:
            own["tool_calls"] = self._calls
        if self._reasoning:
            own["reasoning_content"] = "".join(self._reasoning)
        said = own["content"] or len(own) > 2
        return [*self._results, *([own] if said or not self._results else [])]

    def _read(self, part: dict[str, Any], kind: str, place: str) -> None:
        match kind:
            case "thinking":
                self._reasoning.append(string_in(part, "thinking", place))
            case "tool_use":
                self._calls.append(_call(part, place))
            case "tool_result":
                result = Content()
                self._add_all(result, part.get("content") or "", f"{place}.content", newly=False)
                self._results.append(
                    {"role": "tool", "content": str(result), **_id(part, "tool_use_id", "tool_call_id")}
                )
            case "tool_addition":
                self._change(part.get("tool"), adds=True)
            case "tool_removal":
                self._change(part.get("tool"), adds=False)
            case _:
                self._add(self._text, part, kind, place, newly=self._newly)

    def _change(self, tool: Any, *, adds: bool) -> None:
        """A tool that is offered from here on, or no more: a definition, or the name of one of the request's."""
        definition = tool.get("definition") if isinstance(tool, dict) else None
        if adds and isinstance(definition, dict):
            self._offers.add(definition)
        elif not adds and isinstance(tool, dict):
            self._offers.remove(tool.get("name"))

    def _add_all(self, text: Content, content: Any, where: str, *, newly: bool, level: int = 0) -> None:
        if isinstance(content, str):
            return text.text(content)
        if level > _MOST_LEVELS:
            raise UnreadableError(f"{where}: at most {_MOST_LEVELS} levels of documents are read", where)
        if not isinstance(content, list):
            return text.text(json_of(content, where, self._notes, newly=newly))
        for i, part in enumerate(content):
            place = f"{where}[{i}]"
            with passed_over(self._notes, newly=newly):
                if isinstance(part, str):
                    text.text(part)
                else:
                    self._add(text, part, kind_of(part, place), place, newly=newly, level=level)

    def _add(self, text: Content, part: dict[str, Any], kind: str, place: str, *, newly: bool, level: int = 0) -> None:
        """A block that is a text, or becomes a part of one."""
        fate = BLOCKS.fate(kind, newly=newly)
        if kind == "document":
            source = part.get("source")
            fate = DOCUMENTS.fate(str(source.get("type")) if isinstance(source, dict) else "", newly=newly)
            fate = Fate.LINE if fate is Fate.LEFT_OUT else fate
        match fate:
            case Fate.READ:
                self._add_read(text, part, kind, place, newly=newly, level=level)
            case Fate.LINE:
                self._notes.made_a_line(place, kind)
                text.line(_line(part, kind))
            case Fate.LEFT_OUT:
                self._notes.left_out(place, kind)
            case Fate.REFUSED:
                raise unsupported(place, kind, BLOCKS.names_read)

    def _add_read(self, text: Content, part: dict[str, Any], kind: str, place: str, *, newly: bool, level: int) -> None:
        match kind:
            case "text":
                text.text(string_in(part, "text", place))
            case "document":
                source = part["source"]
                if title := name_of(part):
                    text.line(told(f"document {title}"))
                if source["type"] == "text":
                    text.text(string_in(source, "data", f"{place}.source"))
                else:
                    inner = source.get("content", "")
                    self._add_all(text, inner, f"{place}.source.content", newly=newly, level=level + 1)
            case "search_result":
                text.line(told(f"search result: {part.get('title', '')} {part.get('source', '')}"))
                self._add_all(text, part.get("content", []), f"{place}.content", newly=newly, level=level + 1)
            case "compaction":
                if isinstance(part.get("content"), str):
                    text.text(part["content"])
                else:
                    self._notes.left_out(place, kind)
            case _:  # a call or reasoning within a result
                self._notes.left_out(place, kind)


def _call(part: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = json.dumps(part.get("input", {}), ensure_ascii=False)
    function = {"name": string_in(part, "name", where), "arguments": arguments}
    return {"type": "function", "function": function, **_id(part, "id", "id")}


def _id(part: dict[str, Any], key: str, name: str) -> dict[str, str]:
    """Some clients' histories have none; results then stand in the order of their calls."""
    return {name: value} if isinstance(value := part.get(key), str) else {}


def _line(part: dict[str, Any], kind: str) -> str:
    """In place of a block that is no text."""
    match kind:
        case "image" | "document":
            return unread(kind, name_of(part))
        case "container_upload":
            return "a file was uploaded, which cannot be read here"
        case "server_tool_use" | "mcp_tool_use":
            name, given = part.get("name", "a tool"), json.dumps(part.get("input", {}), ensure_ascii=False)
            return told(f"the service called {name}: {given}")
        case "tool_reference":
            return told(f"tool {part.get('tool_name', '')}")
        case _:
            what = kind.removesuffix("_tool_result").replace("_", " ")
            return told(f"result of {what}: {told(part)}")
