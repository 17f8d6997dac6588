"""The one exception that reading or applying placement rules raises."""

from __future__ import annotations

from collections.abc import Iterable


class RulesError(Exception):
    """Placement rules that are wrong. The message holds everything below; `rule` counts from 1, as people do."""

    def __init__(
        self,
        message: str,
        *,
        file: str,
        line: int | None = None,
        rule: int | None = None,
        key: str | None = None,
        allowed: Iterable[object] = (),
    ) -> None:
        self.file = file
        self.line = line
        self.rule = rule
        self.key = key
        self.allowed = tuple(str(a) for a in allowed)
        where = file if line is None else f"{file}, line {line}"
        parts = [where, *([f"rule {rule}"] if rule is not None else []), *([key] if key is not None else []), message]
        text = ": ".join(parts)
        if self.allowed:
            text += f"; allowed: {', '.join(self.allowed)}"
        super().__init__(text)
