"""Thresholds that fail a run: METRIC[/GROUP]=VALUE."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtests.load.records import Answer, Stage

_TIMES: dict[str, Callable[[Answer], Sequence[float]]] = {
    "ttft": lambda answer: [] if answer.ttft_s is None else [answer.ttft_s],
    "itl": lambda answer: answer.gaps_s,
    "e2e": lambda answer: [answer.total_s] if answer.outcome == "ok" else [],
}
_FORM = re.compile(r"(?P<metric>(?:ttft|itl|e2e)\.p(?P<p>\d{1,2}(?:\.\d+)?)|errors|tokens_s)(?:/(?P<group>.+))?")
FORMS = "ttft.pNN, itl.pNN, e2e.pNN (milliseconds at most), errors (a share at most), tokens_s (at least)"


def times_s(kind: str, answers: Sequence[Answer]) -> list[float]:
    """All of "ttft", "itl" or "e2e"."""
    return [value for answer in answers for value in _TIMES[kind](answer)]


def percentile_ms(kind: str, answers: Sequence[Answer], p: float) -> float:
    """nan if nothing was measured."""
    values = times_s(kind, answers)
    return 1000 * float(np.percentile(values, p)) if values else float("nan")


def error_share(answers: Sequence[Answer]) -> float:
    return sum(answer.failed for answer in answers) / max(1, len(answers))


@dataclass(frozen=True)
class Limit:
    """`group` None: all answers."""

    metric: str
    group: str | None
    value: float

    @staticmethod
    def parse(text: str) -> Limit:
        """ValueError for what is none."""
        name, _, value = text.rpartition("=")
        found = _FORM.fullmatch(name)
        if found is None:
            raise ValueError(f"{text!r} is no METRIC[/GROUP]=VALUE with one of {FORMS}")
        try:
            bound = float(value)
        except ValueError:
            raise ValueError(f"{text!r}: {value!r} is no number") from None
        if not bound >= 0:
            raise ValueError(f"{text!r}: {value} must be at least 0")
        return Limit(found["metric"], found["group"], bound)

    def broken(self, stage: Stage) -> str | None:
        """What was found instead; None if the stage is within the limit. Nothing measured is never within."""
        answers = [answer for answer in stage.answers if self.group in (None, answer.group)]
        who = f"{self.metric}{'' if self.group is None else '/' + self.group}"
        if not answers:
            return f"{who}: no answers"
        if self.metric == "tokens_s":
            found = sum(answer.tokens for answer in answers) / stage.duration_s
            return None if found >= self.value else f"{who} is {found:.1f}, at least {self.value:g}"
        if self.metric == "errors":
            found = error_share(answers)
        else:
            kind, _, p = self.metric.partition(".p")
            found = percentile_ms(kind, answers, float(p))
        return None if found <= self.value else f"{who} is {found:.4g}, at most {self.value:g}"
