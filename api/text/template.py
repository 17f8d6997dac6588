"""Chat templates: jinja in a sandbox, with the names and filters that model authors rely on
(https://huggingface.co/docs/transformers/chat_templating_writing)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import UserError


class TemplateError(UserError):
    """The template refused the messages, or is wrong itself."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant says, for training; here its body is shown."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """Compiled once. `special_tokens`: bos_token, eos_token, ... as the template may name them.
    Raises TemplateError if `source` is not a template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template is wrong: {error}", "chat_template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `continue_final_message` cuts it right after the last message's content, which the
        model then goes on writing; `variables` are the template's own, e.g. enable_thinking. Raises TemplateError."""
        values: dict[str, Any] = {"tools": None, "documents": None, **self._special, **(variables or {})}
        values.update(messages=list(messages), add_generation_prompt=add_generation_prompt)
        try:
            text = self._template.render(values)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            OverflowError,
        ) as error:
            raise TemplateError(f"the chat template cannot render these messages: {error}", "messages") from error
        return _cut(text, messages) if continue_final_message else text


def _cut(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    content = messages[-1].get("content")
    final = content.strip() if isinstance(content, str) else ""
    at = text.rfind(final) if final else -1
    if at < 0:
        raise TemplateError("the final message is not in the rendered prompt, so it cannot be continued", "messages")
    end = at + len(final)
    if isinstance(content, str) and text[at:].startswith(content.lstrip()):
        end = at + len(content.lstrip())
    return text[:end]
