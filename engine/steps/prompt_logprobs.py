"""Log-probabilities of a prompt's own tokens, a few positions at a time."""

from __future__ import annotations

import torch

from engine.device import to_device
from engine.model.causal_lm import CausalLM
from engine.steps.inputs import StepArrays
from engine.steps.sampling import PendingLogprobs
from scheduler.plan import StepRow

_ROWS = 64  # positions at a time: [64, V] float32

Parts = list[tuple[int, int]]  # tokens of a step: from, to


def wants_prompt(row: StepRow) -> bool:
    return row.request.sampling.prompt_logprobs is not None


def prompt_parts(arrays: StepArrays, index: int, row: StepRow) -> Parts:
    """The tokens of row `index` whose next one is the prompt's, if its log-probability is asked for."""
    if not wants_prompt(row):
        return []
    first = int(arrays.row_starts[index])
    end = first + min(row.num_tokens, len(row.request.prompt) - row.start - 1)
    return [(at, min(at + _ROWS, end)) for at in range(first, end, _ROWS)]


def prompt_logprobs(model: CausalLM, hidden: torch.Tensor, row: StepRow, parts: Parts) -> list[PendingLogprobs]:
    """Of the prompt's tokens at positions start + 1 ... start + num_tokens, as far as the prompt goes. hidden [T, H]
    of the whole step."""
    prompt, at, top = row.request.prompt, row.start + 1, row.request.sampling.prompt_logprobs
    out: list[PendingLogprobs] = []
    for first, end in parts:
        targets = to_device(prompt[at : at + end - first], torch.int64, hidden.device)
        out.append(PendingLogprobs(model.logits(hidden[first:end]), targets, [top] * (end - first)))
        at += end - first
    return out
