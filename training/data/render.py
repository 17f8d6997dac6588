"""Conversations become tokens, and a mask of those that are learnt. Torch-free.

Every answer is learnt behind the very tokens that the server would show the model before it: the template's rendering
of all messages before the answer, with its generation prompt. Where the rendering for a later answer begins with what
there is so far, the sample goes on. Some templates rewrite the history: Qwen3's leaves out the reasoning of earlier
turns. There the later answer becomes a sample of its own, behind the history as it is then shown. So every answer is
learnt exactly once, and never behind a text that the model will not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from api.text.calls.style import CallStyle
from api.text.control import Rendered
from api.text.template import ChatTemplate, TemplateError
from api.text.tokenizer import Tokenizer
from engine.errors import UserError
from training.data.files import Row
from training.data.formats import Conversation, Message, Preference


@dataclass(frozen=True)
class Tokens:
    """`learnt`: whether the loss counts a token, one flag per id."""

    ids: list[int]
    learnt: list[bool]


@dataclass(frozen=True)
class Pair:
    """Token ids of a prompt and two answers to it."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class Renderer:
    """Renders with a tokenizer and its templates, as the server does: conversations with tools with the one for them,
    where the model has one. `variables`: the templates' own."""

    def __init__(self, tokenizer: Tokenizer, variables: dict[str, Any], *, trust_control_tokens: bool) -> None:
        if tokenizer.template is None:
            raise UserError(f"{tokenizer.source}: no chat template; give template: FILE.jinja", "template")
        self._tokenizer, self._plain = tokenizer, tokenizer.template
        self._with_tools = tokenizer.tool_template or tokenizer.template
        unknown = sorted(set(variables) - self._plain.variables - self._with_tools.variables)
        if unknown:
            raise UserError(f"{unknown[0]} changes nothing: the chat template has no such variable", unknown[0])
        self._variables, self._trust = variables, trust_control_tokens

    def conversation(self, sample: Conversation, *, last_only: bool = False) -> Iterator[Tokens]:
        """One sample, or several where the template rewrites history. `last_only`: only the last answer is learnt."""
        chat = self._chat(sample.messages, sample)
        turns = [i for i, learnt in enumerate(sample.trained) if learnt]
        ids: list[int] = []
        learnt: list[bool] = []
        for turn in turns[-1:] if last_only else turns:
            prompt, answer = chat.turn(turn, turn + 1)
            if prompt[: len(ids)] != ids:
                yield _ended(ids, learnt)
                ids, learnt = [], []
            learnt = learnt + [False] * (len(prompt) - len(ids)) + chat.counted(answer)
            ids = prompt + answer
        yield _ended(ids, learnt)

    def whole(self, sample: Conversation) -> Tokens:
        """One sample in which every token is learnt."""
        chat = self._chat(sample.messages, sample)
        prompt, answer = chat.turn(len(sample.messages) - 1, len(sample.messages))
        return _ended(prompt + answer, [True] * len(prompt) + chat.counted(answer))

    def pair(self, sample: Preference) -> Pair:
        """Answers end where the model's turn does."""
        start, ends = len(sample.messages), []
        for answer in (sample.chosen, sample.rejected):
            chat = self._chat((*sample.messages, *answer), sample)
            prompt, tokens = chat.turn(start, start + len(answer))
            ends.append([token for token, counts in zip(tokens, chat.counted(tokens), strict=True) if counts])
        return Pair(prompt, *ends)

    def _chat(self, messages: Sequence[Message], sample: Conversation | Preference) -> _Chat:
        template = self._with_tools if sample.tools else self._plain
        return _Chat(self._tokenizer, template, *self._written(messages, sample, template), sample.row)

    def _written(
        self, messages: Sequence[Message], sample: Conversation | Preference, template: ChatTemplate
    ) -> tuple[list[list[Message]], dict[str, Any], dict[str, str]]:
        """What the template is given for the first 0, 1, ... messages, without control tokens in their strings."""
        calls = CallStyle.of(template)
        prefixes = [calls.history(messages[:count]) for count in range(len(messages) + 1)]
        given = (prefixes, dict(self._variables), calls.definitions(sample.tools or ()))
        guarded, stand_ins = self._tokenizer.guarded(given, trust_control_tokens=self._trust)
        prefixes, variables, definitions = guarded
        offered = [calls.offered(prefix, definitions) for prefix in prefixes]
        return [prefix for prefix, _ in offered], {**variables, **offered[-1][1]}, stand_ins


def _ended(ids: list[int], learnt: list[bool]) -> Tokens:
    """Without what comes behind the last token that is learnt."""
    end = len(learnt) - learnt[::-1].index(True)
    return Tokens(ids[:end], learnt[:end])


@dataclass(frozen=True)
class _Chat:
    """One conversation, its strings guarded once, so that renderings of its parts can be compared as texts."""

    tokenizer: Tokenizer
    template: ChatTemplate
    prefixes: list[list[Message]]
    variables: dict[str, Any]
    stand_ins: dict[str, str]
    row: Row

    def turn(self, start: int, end: int) -> tuple[list[int], list[int]]:
        """Ids of the messages before `start` with the generation prompt, and of what messages `start` to `end` add."""
        try:
            before = self.template.render(self.prefixes[start], add_generation_prompt=True, variables=self.variables)
            whole = self.template.render(self.prefixes[end], add_generation_prompt=False, variables=self.variables)
        except TemplateError as error:
            raise self.row.error(str(error)) from None
        if not whole.startswith(before):
            raise self.row.error(
                "the template's text of the messages with the answer does not begin with its text of the prompt: the "
                "answer's first part cannot be told from the prompt (an answer with reasoning and enable_thinking: "
                "false, for instance)"
            )
        return self._encoded(before), self._encoded(whole[len(before) :])

    def _encoded(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode_rendered(Rendered(text, self.stand_ins))
        except UserError as error:
            raise self.row.error(str(error)) from None

    def counted(self, answer: Sequence[int]) -> list[bool]:
        """True up to the control token that ends the turn: white space that the template puts behind it is never
        generated."""
        control = self.tokenizer.control_tokens
        end = next((i + 1 for i in range(len(answer) - 1, -1, -1) if answer[i] in control), len(answer))
        if self.tokenizer.decode(answer[end:], skip_special_tokens=False).strip():
            end = len(answer)
        return [i < end for i in range(len(answer))]
