"""Chats become prompts: tools and reasoning as the model's template has them, and what to look for in the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from api.bodies.generation import ChatRequest
from api.bodies.parsing import Notes
from api.errors import bad_request
from api.text.calls.definitions import ToolUse, parameters_of
from api.text.calls.formats import ToolFormat
from api.text.calls.grammars import grammar_of
from api.text.calls.harmony import grammar_in_channels
from api.text.calls.history import with_objects
from api.text.calls.style import CallStyle
from api.text.control import Rendered
from api.text.messages import normalise
from api.text.parts import part_ends
from api.text.segments import END_THINK, THINK, Layout
from api.text.shared import shared_length
from api.text.template import ChatTemplate, TemplateError
from api.text.tokenizer import Tokenizer
from engine.messages import GrammarSpec
from scheduler.request import ThinkingBudget

_SET = {"messages", "tools", "add_generation_prompt"}  # variables that requests have fields for
_SWITCHES = ("enable_thinking", "thinking")  # what templates call it
_CLOSING = f"\n{END_THINK}\n\n"
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # that harmony lacks: the nearest
_MAX_KWARGS = 1024  # values in chat_template_kwargs, nested ones counted
_MAX_DEPTH = 16


@dataclass(frozen=True)
class Chat:
    """A rendered chat, and its answer's layout, budget of reasoning, and the grammar that tools make of it."""

    rendered: Rendered
    layout: Layout
    grammar_of: Callable[[ToolUse | None], GrammarSpec | None]
    thinking: ThinkingBudget | None


@dataclass(frozen=True)
class _Template:
    """A chat template, how it has calls, and whether answers reason."""

    template: ChatTemplate
    calls: CallStyle
    thinks: bool

    @classmethod
    def of(cls, template: ChatTemplate, tool_format: str, reasoning_format: str) -> _Template:
        thinks = THINK in template.source if reasoning_format == "auto" else reasoning_format == "think"
        return cls(template, CallStyle.of(template, tool_format), thinks)

    @property
    def form(self) -> ToolFormat:
        return self.calls.form

    @property
    def variables(self) -> frozenset[str]:
        return self.template.variables


class Chats:
    """Renders with one tokenizer and its template. `tool_format`: a name of the table, or "auto": by the template's
    text; `reasoning_format`: "think", "none", or "auto": likewise. Raises KeyError for another name."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        trust_control_tokens: bool,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._trust = trust_control_tokens
        self._plain = _Template.of(template, tool_format, reasoning_format)
        others = tokenizer.tool_template
        self._with_tools = self._plain if others is None else _Template.of(others, tool_format, reasoning_format)

    def _template(self, use: ToolUse | None) -> _Template:
        return self._plain if use is None else self._with_tools

    def chat(self, body: ChatRequest, answer: GrammarSpec | None, notes: Notes, *, keeps_states: bool = False) -> Chat:
        """`answer`: what the body asks its output to be. Raises ApiError or TemplateError."""
        generate = body.add_generation_prompt and not body.continue_final_message
        rendered = self.rendered(
            body.messages,
            self._with_reasoning(body, notes),
            body.use,
            notes,
            add_generation_prompt=generate,
            continue_final_message=body.continue_final_message,
            keeps_states=keeps_states,
        )
        style = self._template(body.use)
        layout = Layout(
            thinks=style.thinks and not style.form.channels,
            thinking=style.thinks and not style.form.channels and rendered.text.rstrip().endswith(THINK),
            show_reasoning=body.include_reasoning,
            tools=None if body.use is None else style.form,
            parameters=parameters_of(body.use.tools) if body.use is not None and style.form.tags is not None else {},
            max_calls=1 if body.use is not None and body.use.one else None,
            channels=style.form.channels,
            begun=style.form.channels and body.continue_final_message,
        )

        def grammar_of_tools(use: ToolUse | None) -> GrammarSpec | None:
            return self._grammar(body, use, layout, answer, rendered)

        if body.use is not None and not body.use.must and style.form.closes is None and not style.form.channels:
            for name in (tool.name for tool in body.use.tools if tool.free and tool.held is not None):
                notes.remark("tools", f"{name} is not held to its grammar: calls of this model have no closing marker")
        constrained = body.thinking_token_budget is not None and grammar_of_tools(body.use) is not None
        return Chat(rendered, layout, grammar_of_tools, self._budget(body, layout, notes, constrained=constrained))

    def rendered(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any],
        use: ToolUse | None,
        notes: Notes,
        *,
        keeps_states: bool = False,
        **how: bool,
    ) -> Rendered:
        """`keeps_states`: what snapshots of states need is found out, too. Raises ApiError or TemplateError."""
        if taken := sorted(_SET & set(variables)):
            raise bad_request(f"chat_template_kwargs may not set {taken[0]!r}", "chat_template_kwargs")
        _check_variables(variables)
        style = self._template(use)
        notes.unused += [f"chat_template_kwargs.{name}" for name in sorted(set(variables) - style.variables)]
        definitions = style.calls.definitions(() if use is None else use.tools)
        given = (style.calls.history(normalise(messages, notes)), variables, definitions)
        (written, variables, definitions), stand_ins = self._tokenizer.guarded(given, trust_control_tokens=self._trust)
        written, offered = style.calls.offered(written, definitions)
        values = {**variables, **offered}
        try:
            text = style.template.render(written, variables=values, **how)
        except TemplateError:  # some read the arguments of a call as an object, whatever was called once
            if (objects := with_objects(written)) is None:
                raise
            written = objects
            text = style.template.render(written, variables=values, **how)
        if not keeps_states:
            return Rendered(text, stand_ins)
        opening = None
        if how.get("add_generation_prompt"):
            closed = style.template.render(written, variables=values, add_generation_prompt=False)
            opening = text.removeprefix(closed) if text.startswith(closed) else None
        shared = shared_length(style.template, written, values, text)
        return Rendered(text, stand_ins, opening, shared, _ends_of_last(written, text))

    def _with_reasoning(self, body: ChatRequest, notes: Notes) -> dict[str, Any]:
        """The template's variables: those of the request, and what its fields about reasoning mean here."""
        variables, known = dict(body.chat_template_kwargs), self._template(body.use).variables
        wanted = body.enable_thinking
        if wanted is not None and not _switch(variables, known, thinking=wanted):
            notes.unused.append("enable_thinking")
        if body.reasoning_effort is not None:
            switched = body.reasoning_effort != "none"
            if "reasoning_effort" in known:
                effort: str = body.reasoning_effort
                if self._template(body.use).form.channels and (nearest := _EFFORTS.get(effort)) is not None:
                    notes.remark("reasoning_effort", f"this model knows low, medium and high: {effort} is {nearest}")
                    effort = nearest
                variables.setdefault("reasoning_effort", effort)
            elif not _switch(variables, known, thinking=switched):
                notes.unused.append("reasoning_effort")
        return variables

    def _grammar(
        self, body: ChatRequest, use: ToolUse | None, layout: Layout, answer: GrammarSpec | None, rendered: Rendered
    ) -> GrammarSpec | None:
        """Of calls and answer; behind reasoning, if that is open or may come first and can be told by its tokens."""
        token_of = self._tokenizer.added_token
        if layout.channels:
            if not layout.begun:
                return grammar_in_channels(use, answer, token_of)
            if use is not None and use.must:
                message = "continue_final_message: a text that has begun cannot become a call; send tool_choice 'auto'"
                raise bad_request(message, "continue_final_message")
            return answer
        spec = answer if use is None else grammar_of(use, self._template(use).form, answer, token_of)
        if spec is None or not (layout.thinking or self._may_think(body, rendered)):
            return spec
        begin, end = self._token(THINK), self._token(END_THINK)
        if layout.thinking and end is None:
            message = "this model's end of reasoning is not one token, so what follows cannot be constrained"
            raise bad_request(f"{spec.field}: {message}; switch reasoning off", spec.field)
        if begin is None or end is None:
            return spec
        return msgspec.structs.replace(spec, after=end, opens=None if layout.thinking else begin)

    def _may_think(self, body: ChatRequest, rendered: Rendered) -> bool:
        """Whether an answer may begin with reasoning: not where it is switched off, or the answer has begun."""
        switches = [body.chat_template_kwargs.get(name) for name in _SWITCHES]
        off = body.enable_thinking is False or body.reasoning_effort == "none" or False in switches
        begun = body.continue_final_message or rendered.text.rstrip().endswith(END_THINK)
        return self._template(body.use).thinks and not off and not begun

    def _budget(self, body: ChatRequest, layout: Layout, notes: Notes, *, constrained: bool) -> ThinkingBudget | None:
        if body.thinking_token_budget is None:
            return None
        if layout.channels:
            message = "thinking_token_budget does not go with answers in channels: send reasoning_effort"
            raise bad_request(message, "thinking_token_budget", "unsupported_field")
        if not layout.thinks:
            notes.unused.append("thinking_token_budget")
            return None
        begin, end = self._token(THINK), self._token(END_THINK)
        closing = self._tokenizer.encode(_CLOSING, add_special_tokens=False)
        if end is None or begin is None or end not in closing:
            message = f"thinking_token_budget needs a model in which {THINK} and {END_THINK} are one token each"
            raise bad_request(message, "thinking_token_budget", "unsupported_field")
        if constrained:  # what stands behind the end is the grammar's
            closing = closing[: closing.index(end) + 1]
        return ThinkingBudget(body.thinking_token_budget, None if layout.thinking else begin, end, tuple(closing))

    def _token(self, text: str) -> int | None:
        """The token that is always written for a text, if there is one."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens[0] if len(tokens) == 1 else None


def _ends_of_last(messages: Sequence[Mapping[str, Any]], text: str) -> list[int]:
    """Positions in `text` where parts of a user's last message end; none where the template has changed it."""
    said = str(messages[-1].get("content") or "").strip() if messages and messages[-1]["role"] == "user" else ""
    begin = text.rfind(said) if said else -1
    return [] if begin < 0 else [begin + end for end in part_ends(said)]


def _switch(variables: dict[str, Any], known: frozenset[str], *, thinking: bool) -> bool:
    """Whether a template that asks for the `known` names can be told to think or not."""
    names = [name for name in _SWITCHES if name in known]
    for name in names:
        variables.setdefault(name, thinking)
    return bool(names)


def _check_variables(variables: dict[str, Any]) -> None:
    """Raises ApiError for a nest of values that no template needs."""
    left, seen = [(variables, 0)], 0
    while left:
        value, depth = left.pop()
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        seen += len(items)
        if seen > _MAX_KWARGS or depth > _MAX_DEPTH:
            raise bad_request(
                f"chat_template_kwargs: at most {_MAX_KWARGS} values, {_MAX_DEPTH} levels deep, are allowed",
                "chat_template_kwargs",
            )
        left += [(item, depth + 1) for item in items]
