"""The tools of a response's request as a chat has them, and what calls of them are called in its answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from api.bodies.parsing import Notes
from api.dialects.common.content import kind_of
from api.errors import UnreadableError, shortened
from api.text.calls.definitions import MAX_TOOLS, check_tool
from api.text.kinds import TOOLS, Fate
from api.text.messages import passed_over

_MOST_NAME = 128  # characters that a tool's name has in a chat


def full_name(name: str, namespace: str | None) -> str:
    """What a tool of a namespace is called in a chat."""
    return f"{namespace}__{name}" if namespace else name


@dataclass
class Offered:
    """`names`: a tool's name in the chat -> its own, and its namespace; of those in one."""

    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    _by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def tools(self) -> list[dict[str, Any]]:
        return list(self._by_name.values())

    def add(
        self, tool: dict[str, Any], kind: str, where: str, notes: Notes, namespace: str | None = None, *, found: bool
    ) -> None:
        """A function, or a tool of free text. Of several with one name the last is offered. `found`: in the history."""
        name = tool.get("name")
        if not isinstance(name, str):
            raise UnreadableError(f"{where}.name: a text is expected, got {shortened(name)}", f"{where}.name")
        full = full_name(name, namespace)
        if namespace and len(full) > _MOST_NAME:
            notes.remark(where, f"{shortened(full)} is left out: its name is long")
            return
        keys = ("description", "parameters", "strict") if kind == "function" else ("description", "format")
        given = {key: tool[key] for key in keys if tool.get(key) is not None}
        offered = {"type": kind, kind: {"name": full, **given}}
        if found:
            check_tool(offered, where)
            if full not in self._by_name and len(self._by_name) >= MAX_TOOLS:
                notes.remark(where, f"{shortened(full)} is left out: there are {MAX_TOOLS} tools")
                return
        if full in self._by_name:
            notes.remark(where, f"{shortened(full)} is defined again: its last definition is offered")
        self._by_name[full] = offered
        self.names.pop(full, None)
        if namespace:
            self.names[full] = (name, namespace)

    def choice(self, chosen: Any) -> dict[str, Any] | None:
        """The tool that a choice names, as a chat does. None: it is not offered."""
        name = chosen.get("name") if isinstance(chosen, dict) else None
        namespace = chosen.get("namespace") if isinstance(chosen, dict) else None
        full = full_name(str(name), namespace if isinstance(namespace, str) else None)
        for tool in self.tools:
            kind = tool["type"]
            if tool[kind]["name"] == full:
                return {"type": kind, kind: {"name": full}}
        return None


def offered_of(tools: list[dict[str, Any]], found: list[Any], notes: Notes) -> Offered:
    """`found`: those that stand in the history; one without the form of a tool is left out. Raises ApiError that names
    the place."""
    offered = Offered()
    for i, tool in enumerate([*tools, *found]):
        with passed_over(notes, newly=i < len(tools)):
            _offer(offered, tool, f"tools[{i}]", notes, found=i >= len(tools))
    return offered


def _offer(offered: Offered, tool: dict[str, Any], where: str, notes: Notes, *, found: bool) -> None:
    kind = kind_of(tool, where)
    if TOOLS.fate(kind) is not Fate.READ:
        notes.left_out(where, kind)
    elif kind == "namespace":
        _add_namespace(offered, tool, where, notes, found=found)
    else:
        offered.add(tool, kind, where, notes, found=found)


def _add_namespace(
    offered: Offered, namespace: dict[str, Any], where: str, notes: Notes, *, found: bool
) -> None:  # fmt: skip
    name, inner = namespace.get("name"), namespace.get("tools")
    if not isinstance(name, str) or not isinstance(inner, list):
        raise UnreadableError(f'{where}: {{"type": "namespace", "name": ..., "tools": [...]}} is expected', where)
    for i, tool in enumerate(inner):
        place = f"{where}.tools[{i}]"
        with passed_over(notes, newly=not found):
            kind = kind_of(tool, place)
            if kind in ("function", "custom"):
                offered.add(tool, kind, place, notes, name, found=found)
            else:
                notes.left_out(place, kind)
