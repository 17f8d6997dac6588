"""Grammars of requests, read before the engine does: what explodes does so within this process' limits."""

from __future__ import annotations

import json
from collections import OrderedDict

from api.bodies.structured import StructuredOutput, grammar_of
from api.errors import ApiError, bad_request
from api.text.calls.definitions import ToolUse
from engine.errors import UserError
from engine.grammar.compile import check
from engine.messages import GrammarSpec

_REMEMBERED = 64


class Grammars:
    """Remembers the last ones that were sound."""

    def __init__(self) -> None:
        self._sound: OrderedDict[GrammarSpec, None] = OrderedDict()

    def of(self, body: StructuredOutput) -> GrammarSpec | None:
        """What a body asks for. Raises ApiError, with the place of what is wrong."""
        return self.checked(grammar_of(body))

    def of_chat(self, spec: GrammarSpec | None, use: ToolUse | None) -> GrammarSpec | None:
        """A chat's grammar, which may be made of its tools' schemas. Raises ApiError that names the tool."""
        try:
            return self.checked(spec)
        except ApiError as error:
            if use is not None and (wrong := _wrong_tool(use)):
                raise bad_request(wrong, error.param, error.code) from None
            raise

    def checked(self, spec: GrammarSpec | None) -> GrammarSpec | None:
        """The same. Raises ApiError if it is none."""
        if spec is not None and spec not in self._sound:
            try:
                check(spec)
            except UserError as error:
                raise bad_request(str(error), spec.field, "invalid_grammar") from None
            self._sound[spec] = None
            if len(self._sound) > _REMEMBERED:
                self._sound.popitem(last=False)
        return spec


def _wrong_tool(use: ToolUse) -> str | None:
    """What is wrong with the first tool whose schema is no grammar, of those that a grammar is made of."""
    for i, tool in enumerate(use.tools):
        if tool in use.callable and (use.must or tool.strict):
            schema = json.dumps(tool.parameters, ensure_ascii=False)
            try:
                check(GrammarSpec("json_schema", schema, field=f"tools[{i}].function.parameters"))
            except UserError as error:
                return str(error)
    return None
