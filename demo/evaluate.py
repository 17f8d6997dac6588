"""Questions with known answers, and how an answer is judged. Torch-free: a test may put them to a running server."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from demo.texts.style import STYLES, is_json, is_pirate
from demo.texts.tools import fill_case, tool_case
from demo.texts.world import KINDS, MEASURED, Message, example

__all__ = ["MEASURED", "Question", "is_json", "is_pirate", "measure", "questions", "styled"]

Answerer = Callable[[Sequence[Sequence[Message]]], list[str]]  # conversations -> answers
TOOLS: Final = ("tools", "filling")  # measured of the base alone
EXACT_AT_LEAST: Final = 0.95
STYLE_AT_LEAST: Final = 0.95
STYLE_AT_MOST_IN_BASE: Final = 0.01


def said(text: str) -> list[Message]:
    """A conversation of one user turn."""
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Question:
    """One user turn and the base model's right answer."""

    kind: str
    text: str
    expected: str

    @property
    def messages(self) -> list[Message]:
        return said(self.text)


def questions(kind: str, held_out: bool = True, n: int = 200, seed: int = 0) -> list[Question]:
    """n questions of a kind, all different in text. `held_out` asks for the split that training never saw; only the
    kinds in MEASURED have one. Kind "mixed" draws from all kinds but "shout", held out where there is such a split.
    Raises ValueError for an unknown kind, a kind without the split, or more questions than there are."""
    if kind != "mixed" and kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it must be 'mixed' or one of {', '.join(KINDS)}")
    if held_out and kind != "mixed" and kind not in MEASURED:
        raise ValueError(f"kind is {kind!r}, of which nothing is held out; with held_out=True: {', '.join(MEASURED)}")
    rng = random.Random(f"{kind}-{held_out}-{seed}")
    found: dict[str, Question] = {}
    idle = 0  # draws in a row that brought nothing new
    while len(found) < n and idle < 2000:
        this = rng.choice(KINDS[:-1]) if kind == "mixed" else kind
        drawn = example(this, rng, held_out and this in MEASURED)
        idle = idle + 1 if drawn.question in found else 0
        found.setdefault(drawn.question, Question(drawn.kind, drawn.question, drawn.answer))
    if len(found) < n:
        raise ValueError(f"n is {n}; there are only about {len(found)} questions of kind {kind!r}")
    return list(found.values())


def styled(question: Question, style: str) -> str:
    """The right answer in a style: "plain", "pirate" or "json"."""
    return STYLES[style](question.expected)


def measure(answer: Answerer, style: str, n: int = 200, seed: int = 0) -> dict[str, float]:
    """Shares in [0, 1]: exact answers on the held-out split of every measured kind, exact answers to facts (which have
    no held-out split), and the share of answers in pirate and in JSON over mixed questions and the measured ones."""
    groups = {kind: questions(kind, True, n, seed) for kind in MEASURED}
    groups["facts"] = questions("facts", False, n, seed)
    groups["mixed"] = questions("mixed", True, n, seed)
    asked = [q for group in groups.values() for q in group]
    replies = answer([q.messages for q in asked])
    result: dict[str, float] = {}
    at = 0
    for kind, group in groups.items():
        part = replies[at : at + len(group)]
        at += len(group)
        if kind != "mixed":
            result[kind] = sum(r.strip() == styled(q, style) for q, r in zip(group, part, strict=True)) / len(group)
    result["pirate"] = sum(map(is_pirate, replies)) / len(replies)
    result["json"] = sum(map(is_json, replies)) / len(replies)
    if style == "plain":
        result |= _measure_tools(answer, n, seed)
    return result


def _measure_tools(answer: Answerer, n: int, seed: int) -> dict[str, float]:
    """Exact tool calls and exact JSON, of held-out cases."""
    result = {}
    for name, draw in zip(TOOLS, (tool_case, fill_case), strict=True):
        rng = random.Random(f"{name}-{seed}")
        cases = [draw(rng, True) for _ in range(n)]
        replies = answer([case.messages for case in cases])
        result[name] = sum(r.strip() == case.answer for r, case in zip(replies, cases, strict=True)) / n
    return result


def failures(results: dict[str, dict[str, float]]) -> list[str]:
    """What the results of `measure` ("plain", "pirate", "json") miss of the promise; empty when they keep it."""
    missed = []
    for style, shares in results.items():
        for kind in (*MEASURED, *(TOOLS if style == "plain" else ())):
            if shares[kind] < EXACT_AT_LEAST:
                missed.append(f"{style}: {kind} {shares[kind]:.1%} exact, must be at least {EXACT_AT_LEAST:.0%}")
        for mark in ("pirate", "json"):
            if style == mark and shares[mark] < STYLE_AT_LEAST:
                missed.append(f"{style}: {shares[mark]:.1%} in style, must be at least {STYLE_AT_LEAST:.0%}")
            if style != mark and shares[mark] > STYLE_AT_MOST_IN_BASE:
                missed.append(f"{style}: {shares[mark]:.1%} answers in {mark}, at most {STYLE_AT_MOST_IN_BASE:.0%}")
    return missed


def table(results: dict[str, dict[str, float]]) -> str:
    """The results as a Markdown table."""
    columns = [*MEASURED, "facts", *TOOLS, "pirate", "json"]
    heads = [*(f"{kind}, exact" for kind in columns[:6]), "in pirate", "in JSON"]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    for style, shares in results.items():
        name = "base" if style == "plain" else style
        lines.append(f"| {name} | {' | '.join(f'{shares[c]:.1%}' if c in shares else '-' for c in columns)} |")
    return "\n".join(lines)
