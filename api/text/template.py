"""Chat templates: jinja in a sandbox, with the names and filters that model authors rely on
(https://huggingface.co/docs/transformers/chat_templating_writing)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
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


@jinja2.pass_context
def _as_it_is(context: jinja2.runtime.Context, value: Any) -> Any:
    """Wanting the context, it keeps the compiler from computing constant expressions, which may be of any size."""
    return value


def _asked_for(environment: jinja2.Environment, source: str) -> frozenset[str]:
    """The names that a template asks for: `meta.find_undeclared_variables`, without its optimizer, which computes
    constants of any size."""
    generator = meta.TrackingCodeGenerator(environment)
    generator.optimizer = None
    generator.visit(environment.parse(source))
    return frozenset(generator.undeclared_identifiers)


class ChatTemplate:
    """Compiled once. `special_tokens`: bos_token, eos_token, ... as the template may name them. `strings`: the string
    literals in its source; `variables`: the names that it asks for.
    Raises TemplateError if `source` is not a template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            optimized=False,
            finalize=_as_it_is,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self.special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self.strings = [text for _, kind, text in environment.lex(source) if kind == "string"]
            self.variables = _asked_for(environment, source)
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
        values: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens, **(variables or {})}
        written = _marked(messages) if continue_final_message else messages
        values.update(messages=list(written), add_generation_prompt=add_generation_prompt)
        try:
            text = self._template.render(values)
        except Exception as error:
            what = str(error) or type(error).__name__
            raise TemplateError(f"the chat template cannot render these messages: {what[:500]}", "messages") from error
        return _cut(text, messages[-1]["content"]) if continue_final_message else text


_MARK = f"{secrets.token_hex(16)} "  # a template that trims drops the space


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with a mark behind the last one's content, which the template's own text may hold elsewhere too."""
    last = messages[-1]
    if not isinstance(last.get("content"), str) or last.get("tool_calls"):
        raise TemplateError("the final message is not a text alone, so it cannot be continued", "messages")
    return [*messages[:-1], {**last, "content": last["content"] + _MARK}]


def _cut(text: str, content: str) -> str:
    """What stands before the mark."""
    at = text.rfind(_MARK.strip())
    if at < 0 or content.strip() not in text:
        raise TemplateError("the final message is not in the rendered prompt, so it cannot be continued", "messages")
    trimmed = content.strip() and not text.startswith(_MARK, at)
    return text[:at].rstrip() if trimmed else text[:at]
