"""Steps that compute nothing: they take a set time and sample fixed tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.architectures.config import ModelConfig
from engine.errors import UserError
from engine.experts.capabilities import ExpertCounters, ExpertPlaces
from engine.grammar.mask import GrammarMask
from engine.grammar.masks import NO_MASKS, Masks
from engine.null import NullSettings
from engine.steps.base import Launched
from scheduler.plan import StepPlan, StepRow

_UNSERVED = ("logprobs", "prompt_logprobs", "bad_words", "allowed_token_ids", "thinking")


@dataclass
class NullStep(Launched):
    ends_s: float = 0.0  # time.monotonic


@dataclass(frozen=True)
class NullModel:
    """`words` are the ids that answers are made of, the first `settings.answer` of them again and again."""

    config: ModelConfig
    words: Sequence[int]
    answer: int

    @property
    def expert_counters(self) -> list[ExpertCounters]:
        return []

    @property
    def expert_places(self) -> list[ExpertPlaces]:
        return []

    def token(self, row: StepRow, index: int) -> int:
        """Token `index` of a request's output, whatever its sampling settings say about choosing among tokens."""
        sampling = row.request.sampling
        if index >= self.answer and index >= sampling.min_tokens and not sampling.ignore_eos:
            return self.config.eos_token_ids[0]
        return self.words[index % len(self.words)]


class NullRunner:
    """One step after another, each as long as the settings say; the process sleeps meanwhile."""

    def __init__(self, settings: NullSettings, model: NullModel) -> None:
        self.model = model
        self.notes: list[str] = []
        self.spare_cpus: list[int] = []
        self._settings = settings
        self._free_s = 0.0  # when the last launched step ends

    def launch_forward(self, plan: StepPlan, masks: Masks = NO_MASKS) -> NullStep:
        settings, now = self._settings, time.monotonic()
        micros = 1000 * settings.step_ms + settings.row_us * len(plan.rows) + settings.token_us * plan.num_tokens
        self._free_s = max(now, self._free_s) + micros / 1e6
        step = NullStep(plan, launched_s=now, ends_s=self._free_s)
        for row in plan.rows[plan.num_decodes :]:  # it is known before the first token
            if what := _unserved(row, masks):
                error = UserError(f"{what}: the null engine answers fixed tokens, there are no logits", what)
                step.failed[row.request.request_id] = error
        return step

    def launch_sample(self, step: NullStep, masks: Masks = NO_MASKS) -> None:
        """The tokens are known already."""

    def tokens(self, step: NullStep) -> list[list[int]]:
        time.sleep(max(0.0, step.ends_s - time.monotonic()))
        return [[] if row.request.request_id in step.failed else self._tokens(row) for row in step.plan.rows]

    def ended(self, step: NullStep) -> bool:
        return time.monotonic() >= step.ends_s

    def close(self) -> None:
        """There is nothing to close."""

    def _tokens(self, row: StepRow) -> list[int]:
        first = row.start + row.num_tokens - len(row.drafts) - len(row.request.prompt)
        if not row.drafts:
            return [self.model.token(row, first)] if row.samples else []
        sampled: list[int] = []
        for i in range(row.num_samples):
            sampled.append(self.model.token(row, first + i))
            if i < len(row.drafts) and sampled[i] != row.drafts[i]:
                break
        return sampled


def _unserved(row: StepRow, masks: Masks) -> str:
    """What a request asks for that takes logits; "" if nothing."""
    request = row.request
    if any(isinstance(mask, GrammarMask) for mask in masks.get(request.request_id, ())):
        return "grammar"
    wanted = (name for name in _UNSERVED if getattr(request.sampling, name) not in (None, ()))
    return next(wanted, "")
