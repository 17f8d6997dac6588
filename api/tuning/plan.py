"""Hyperparameters that are "auto", the order of examples and the learning rate: what a job does in each step."""

from __future__ import annotations

import math
import random
from functools import lru_cache

from api.tuning.records import Asked, Plan

RANK, ALPHA = 16, 32.0
WARM_UP, LEAST = 0.05, 0.1  # parts of the steps, and of the learning rate at the end
_EXAMPLES = (100, 25_000)  # that "auto" epochs go through
_RATES = {"supervised": 5e-4, "dpo": 5e-5}  # at a hidden size of 2048
BETA = 0.1


def plan_of(asked: Asked, examples: int, valid: int, tokens: int) -> Plan:
    """`tokens`: of the training file, `valid`: examples of the validation file."""
    least, most = (bound / examples for bound in _EXAMPLES)
    epochs = max(1, min(25, max(3, math.ceil(least)), math.floor(most)))
    size = max(min(4, examples), min(256, examples // 500))
    multiplier, beta = asked.learning_rate_multiplier, asked.beta
    return Plan(
        n_epochs=epochs if asked.n_epochs == "auto" else asked.n_epochs,
        batch_size=min(size if asked.batch_size == "auto" else asked.batch_size, examples),
        learning_rate_multiplier=1.0 if multiplier == "auto" else multiplier,
        beta=BETA if beta == "auto" else beta,
        examples=examples,
        valid=valid,
        tokens=tokens,
    )


def base_rate(method: str, hidden_size: int) -> float:
    """Of LoRA's matrices: narrower models take larger steps."""
    return _RATES[method] * math.sqrt(2048 / hidden_size)


def learning_rate(plan: Plan, base: float, step: int) -> float:
    """Of the step (from 1): it rises over the first ones, then falls to a tenth."""
    warm = max(1, round(WARM_UP * plan.steps))
    share = step / warm if step <= warm else 1 - (1 - LEAST) * (step - warm) / max(1, plan.steps - warm)
    return plan.learning_rate_multiplier * base * share


def examples_of(plan: Plan, seed: int, step: int) -> list[int]:
    """The step's examples (from step 1): each epoch goes through all of them in an order of its own."""
    epoch, within = divmod(step - 1, plan.steps_an_epoch)
    order = _order(plan.examples, seed, epoch)
    return list(order[within * plan.batch_size : (within + 1) * plan.batch_size])


@lru_cache(maxsize=8)
def _order(examples: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(examples))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return tuple(order)
