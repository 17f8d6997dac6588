"""Grammars of requests, read before the engine does: what explodes does so within this process' limits."""

from __future__ import annotations

from collections import OrderedDict

from api.errors import bad_request
from api.http.bodies.structured import StructuredOutput, grammar_of
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
