"""Grammars of requests, read before the engine does: what explodes does so within this process' limits."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from api.bodies.parsing import Notes
from api.bodies.structured import StructuredOutput, grammar_of
from api.errors import ApiError, bad_request
from api.prepare.looser import Looser
from api.text.calls.definitions import Tool, ToolUse
from api.text.calls.grammars import ANY_ARGUMENTS
from engine.errors import UserError
from engine.grammar.compile import check
from engine.messages import GrammarSpec

SpecOf = Callable[[ToolUse | None], GrammarSpec | None]
_REMEMBERED = 64
_INVALID = "invalid_grammar"


class Grammars:
    """Remembers the last ones that were sound."""

    def __init__(self) -> None:
        self._sound: OrderedDict[GrammarSpec, None] = OrderedDict()

    def of(self, body: StructuredOutput) -> GrammarSpec | None:
        """What a body asks for. Raises ApiError, with the place of what is wrong."""
        return self.checked(grammar_of(body))

    def of_chat(self, spec_of: SpecOf, use: ToolUse | None, notes: Notes) -> GrammarSpec | None:
        """A chat's grammar, which may be made of its tools' schemas. Where they hold what no grammar can, arguments are
        held to the rest, and `notes` say what is left out; not of tools that are `strict`. Raises ApiError."""
        try:
            return self.checked(spec_of(use))
        except ApiError as error:
            if use is None or error.code != _INVALID:
                raise
            complaint = error
        try:
            return self.checked(spec_of(_with(use, [self._held(use, i, notes) for i in range(len(use.tools))])))
        except ApiError as error:
            if not use.must or error.param != complaint.param or any(tool.strict for tool in use.callable):
                raise
        notes.remark("tools", "the schemas together are too much for a grammar, none of them is enforced")
        return self.checked(spec_of(_with(use, [replace(tool, held=ANY_ARGUMENTS) for tool in use.tools])))

    def _held(self, use: ToolUse, i: int, notes: Notes) -> Tool:
        """The tool number `i` with a schema that can be held. Raises ApiError for a strict one."""
        tool = use.tools[i]
        if tool not in use.callable or not (use.must or tool.strict):
            return tool
        complaint = _complaint(tool.enforced, f"tools[{i}].function.parameters")
        if complaint is None:
            return tool
        if tool.strict and not tool.free:
            raise bad_request(complaint, "tools", _INVALID)
        if tool.free:
            notes.remark(f"tools[{i}].custom.format", f"{tool.name} is not held to its grammar: {complaint}")
            return replace(tool, held=None, strict=False)
        looser = Looser(lambda schema: _complaint(schema, "") is None)
        held = looser.of(tool.parameters)
        for place in looser.dropped:
            notes.remark(f"tools[{i}].function.parameters", f"{place} of {tool.name} is not enforced")
        return replace(tool, held=held)

    def checked(self, spec: GrammarSpec | None) -> GrammarSpec | None:
        """The same. Raises ApiError if it is none."""
        if spec is not None and spec not in self._sound:
            try:
                check(spec)
            except UserError as error:
                raise bad_request(str(error), spec.field, _INVALID) from None
            self._sound[spec] = None
            if len(self._sound) > _REMEMBERED:
                self._sound.popitem(last=False)
        return spec


def _with(use: ToolUse, tools: Sequence[Tool]) -> ToolUse:
    return replace(use, tools=tuple(tools))


def _complaint(schema: dict[str, Any], field: str) -> str | None:
    """What is wrong with a schema as a grammar."""
    try:
        check(GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False), field=field))
    except UserError as error:
        return str(error)
    return None
