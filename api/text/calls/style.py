"""How a chat template has calls: the form, and whether it lists tools and writes calls itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from api.text.calls.definitions import Tool
from api.text.calls.formats import HERMES, ToolFormat, format_named, format_of
from api.text.calls.history import in_order
from api.text.calls.plain import with_tools, without_calls
from api.text.template import ChatTemplate


@dataclass(frozen=True)
class CallStyle:
    """`takes_tools`: the template lists them. `writes_calls`: it writes calls and results in its form, else they are
    text. `form`: in which the model writes calls: where we have to tell it of tools, the form that we tell it."""

    form: ToolFormat
    takes_tools: bool
    writes_calls: bool

    @classmethod
    def of(cls, template: ChatTemplate, tool_format: str = "auto") -> CallStyle:
        """`tool_format`: a name of the table, or "auto": by the template's text. Raises KeyError for another name."""
        known = format_of(template.source) if tool_format == "auto" else format_named(tool_format)
        takes_tools = "tools" in template.variables
        told = takes_tools or (known is not None and (known.marks is not None or known.channels))
        if known is None or (tool_format == "auto" and not told):
            return cls(HERMES, takes_tools=False, writes_calls=False)
        return cls(known, takes_tools, takes_tools or (known.marks is not None and "tool_calls" in template.source))

    def definitions(self, tools: Iterable[Tool]) -> list[dict[str, Any]]:
        """As the template, or a model without a template for them, is to have them."""
        return [self.form.described(tool.definition) for tool in tools]

    def history(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template expects them."""
        messages = in_order(messages)
        return self.form.messages(messages) if self.writes_calls else without_calls(messages)

    def offered(
        self, messages: Sequence[dict[str, Any]], definitions: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The messages and the template's variables that tell the model of tools."""
        if not definitions:
            return list(messages), {}
        if self.takes_tools:
            return list(messages), {"tools": definitions}
        return with_tools(messages, definitions, self.form), {}
