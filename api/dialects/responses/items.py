"""The items of a response's input as a chat's messages."""

from __future__ import annotations

import json
from typing import Any

from api.bodies.parsing import Notes
from api.dialects.common.content import kind_of, string_in, text_in
from api.dialects.responses.offers import full_name
from api.dialects.responses.summaries import opened
from api.errors import UnreadableError
from api.text.kinds import FREE_TEXT, ITEMS, PARTS, Fate, told
from api.text.messages import newest_request, objects_of, passed_over, role_of

_ROLES = ("user", "assistant", "system", "developer")
_CALLS_OF_VENDOR = {"local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation"}


class Items:
    """`messages`: calls and reasoning join the assistant's message that they belong to. `tools`: those that stand in
    items. Raises ApiError that names the place."""

    def __init__(self, given: str | list[Any], notes: Notes) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[Any] = []
        self._notes = notes
        if isinstance(given, str):
            self.messages.append({"role": "user", "content": given})
            return
        items = objects_of(given, "input", notes)
        newest = newest_request([_role(item) for _, item in items])
        for at, (i, item) in enumerate(items):
            self._last = i == len(given) - 1
            with passed_over(notes, newly=at == newest):
                self._add(item, f"input[{i}]", newly=at == newest)

    def _add(self, item: dict[str, Any], where: str, *, newly: bool) -> None:
        kind = _kind(item, where)
        match ITEMS.fate(kind):
            case Fate.LEFT_OUT | Fate.REFUSED:
                self._notes.left_out(where, kind)
            case Fate.LINE:
                self._notes.made_a_line(where, kind)
                self._say(_line(item, kind))
            case Fate.READ:
                self._read(item, kind, where, newly=newly)

    def _read(self, item: dict[str, Any], kind: str, where: str, *, newly: bool) -> None:
        match kind:
            case "message":
                self._message(item, where, newly=newly)
            case "reasoning":
                text = text_in(item.get("content") or [], f"{where}.content", PARTS, self._notes)
                last = self._assistant()
                last["reasoning_content"] = last.get("reasoning_content", "") + text
            case "function_call":
                arguments = item.get("arguments") or {}
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                self._call(item, arguments, where)
            case "custom_tool_call":
                text = string_in(item, "input", where)
                self._call(item, json.dumps({FREE_TEXT: text}, ensure_ascii=False), where)
            case "compaction" | "context_compaction":
                if (summary := opened(item.get("encrypted_content"))) is None:
                    self._notes.left_out(where, kind)
                else:
                    self.messages.append({"role": "user", "content": summary})
            case "compaction_trigger":  # one that the input does not end with
                self._notes.left_out(where, kind)
            case "additional_tools" | "tool_search_output":
                tools = item.get("tools") or []
                if not isinstance(tools, list):
                    raise UnreadableError(f"{where}.tools: a list of tools is expected", f"{where}.tools")
                self.tools += tools
            case _ if kind.endswith("_output"):
                self._output(item, kind, where)
            case _:
                arguments = json.dumps(item.get(_CALLS_OF_VENDOR[kind]) or {}, ensure_ascii=False)
                self._call({**item, "name": kind.removesuffix("_call")}, arguments, where)

    def _message(self, item: dict[str, Any], where: str, *, newly: bool) -> None:
        role = role_of(item, where, _ROLES, {}, self._notes, last=self._last)
        content = text_in(item.get("content"), f"{where}.content", PARTS, self._notes, newly=newly)
        if role == "assistant":
            self._assistant()["content"] += content
        else:
            self.messages.append({"role": role, "content": content})

    def _call(self, item: dict[str, Any], arguments: str, where: str) -> None:
        namespace = item.get("namespace")
        name = full_name(string_in(item, "name", where), namespace if isinstance(namespace, str) else None)
        call = {"id": _call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _output(self, item: dict[str, Any], kind: str, where: str) -> None:
        output = item.get("output")
        if output is None:
            text = ""
        elif kind in ("function_call_output", "custom_tool_call_output", "apply_patch_call_output"):
            text = text_in(output, f"{where}.output", PARTS, self._notes)
        else:  # a text, or a list of what commands wrote
            text = output if isinstance(output, str) else told(output)
        self.messages.append({"role": "tool", "tool_call_id": _call_id(item), "content": text})

    def _say(self, line: str) -> None:
        """A line in the assistant's message at the end."""
        last = self._assistant()
        last["content"] = f"{last['content']}\n[{line}]".lstrip("\n")

    def _assistant(self) -> dict[str, Any]:
        """The assistant's message at the end."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _kind(item: dict[str, Any], where: str) -> str:
    """Messages and references may leave their type out."""
    if item.get("type") is not None:
        return kind_of(item, where)
    return "item_reference" if "id" in item and "role" not in item else "message"


def _role(item: dict[str, Any]) -> Any:
    """Whose turn an item is, as a chat says it."""
    kind = item.get("type")
    if kind in (None, "message"):
        return item.get("role")
    if kind in ("additional_tools", "configuration_update"):
        return "system"
    return "tool" if isinstance(kind, str) and kind.endswith("_output") else "assistant"


def _call_id(item: dict[str, Any]) -> str:
    """Some of the vendor's own calls have an id alone, and outputs may have none."""
    return next((value for key in ("call_id", "id") if isinstance(value := item.get(key), str)), "")


def _line(item: dict[str, Any], kind: str) -> str:
    what = kind.removesuffix("_call").replace("_", " ")
    given = told(item.get("name", ""), item.get("arguments", ""), item.get("code", ""))
    return told(f"the service ran {what}: {given}; its result: {told(item.get('output'), item.get('outputs'))}")
