"""Losses over log-probabilities of targets: sums, so that batches of any size add up.

q: the sampler's log-probabilities; A: advantages; r = exp(lp - q).
    cross_entropy         -sum w lp
    importance_sampling   -sum r A
    ppo                   -sum min(r A, clip(r, low, high) A)                           Schulman et al., 2017
    cispo                 -sum stop_gradient(clip(r, low, high)) A lp                   MiniMax-M1, 2025
    dro                   -sum (A lp - beta / 2 (lp - q)^2)                             Richemond et al., 2024
    dpo                   -log sigmoid(beta (d_chosen - d_rejected)), d = sum w (lp - reference)   Rafailov et al., 2023
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from engine.errors import UserError
from engine.tuning import LOSSES, Batch, Sample

Numbers = Mapping[str, torch.Tensor]
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _CLIP,
    "cispo": _CLIP,
    "dro": {"beta": 0.05},
    "dpo": {"beta": 0.1},
}
_COUNTS = {  # a target counts if one of these is not zero
    "cross_entropy": ("weights",),
    "importance_sampling": ("advantages",),
    "ppo": ("advantages",),
    "cispo": ("advantages",),
    "dro": ("logprobs", "advantages"),
    "dpo": ("weights",),
}


def group_of(loss: str) -> int:
    """Samples that are computed together: a preference's two texts."""
    return 2 if loss == "dpo" else 1


def check_batch(order: Batch, vocabulary: int, longest: int) -> None:
    """UserError for what cannot be computed, with the sample's number."""
    if order.loss not in LOSSES:
        raise UserError(f"loss {order.loss[:60]!r}; allowed are {', '.join(LOSSES)}", "loss_fn")
    if unknown := sorted(set(order.settings) - set(SETTINGS[order.loss])):
        known = ", ".join(SETTINGS[order.loss]) or "none"
        raise UserError(f"{order.loss} has no setting {unknown[0][:60]!r}; settings: {known}", "loss_fn_config")
    if not order.samples or len(order.samples) % group_of(order.loss):
        raise UserError(f"{len(order.samples)} samples; {order.loss} takes them {group_of(order.loss)} by 1", "data")
    wanted = set(LOSSES[order.loss])
    for number, sample in enumerate(order.samples):
        length = len(sample.tokens)
        if not 1 <= length <= longest:
            raise UserError(f"data[{number}]: {length} tokens; allowed are 1 to {longest} (--training-tokens)", "data")
        if len(sample.targets) != length or any(len(values) != length for values in sample.numbers.values()):
            raise UserError(f"data[{number}]: targets and numbers must be as many as the {length} tokens", "data")
        if set(sample.numbers) != wanted:
            got = ", ".join(sorted(sample.numbers)) or "none"
            raise UserError(f"data[{number}]: {order.loss} takes {', '.join(sorted(wanted))}; got {got}", "data")
        for ids in (sample.tokens, sample.targets):
            if not 0 <= min(ids) <= max(ids) < vocabulary:
                raise UserError(f"data[{number}]: token ids are 0 to {vocabulary - 1}", "data")


def counted(sample: Sample, loss: str) -> list[int]:
    """Places of the targets that the loss counts."""
    columns = [sample.numbers[name] for name in _COUNTS[loss]]
    return [place for place, numbers in enumerate(zip(*columns, strict=True)) if any(numbers)]


def loss_of(
    loss: str, settings: Mapping[str, float], logprobs: Sequence[torch.Tensor], numbers: Sequence[Numbers]
) -> torch.Tensor:
    """Of one group: float32 log-probabilities of each sample's targets."""
    given = {**SETTINGS[loss], **settings}
    if loss == "dpo":
        chosen, rejected = (
            (of["weights"] * (lp - of["reference"])).sum() for lp, of in zip(logprobs, numbers, strict=True)
        )
        return -F.logsigmoid(given["beta"] * (chosen - rejected))
    return _PLAIN[loss](logprobs[0], numbers[0], given)


def _cross_entropy(lp: torch.Tensor, of: Numbers, settings: Mapping[str, float]) -> torch.Tensor:
    return -(of["weights"] * lp).sum()


def _importance_sampling(lp: torch.Tensor, of: Numbers, settings: Mapping[str, float]) -> torch.Tensor:
    return -((lp - of["logprobs"]).exp() * of["advantages"]).sum()


def _ppo(lp: torch.Tensor, of: Numbers, settings: Mapping[str, float]) -> torch.Tensor:
    ratio = (lp - of["logprobs"]).exp()
    return -torch.minimum(ratio * of["advantages"], _clipped(ratio, settings) * of["advantages"]).sum()


def _cispo(lp: torch.Tensor, of: Numbers, settings: Mapping[str, float]) -> torch.Tensor:
    ratio = (lp.detach() - of["logprobs"]).exp()
    return -(_clipped(ratio, settings) * of["advantages"] * lp).sum()


def _dro(lp: torch.Tensor, of: Numbers, settings: Mapping[str, float]) -> torch.Tensor:
    return -(of["advantages"] * lp - settings["beta"] / 2 * (lp - of["logprobs"]).square()).sum()


def _clipped(ratio: torch.Tensor, settings: Mapping[str, float]) -> torch.Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


_PLAIN: dict[str, Callable[[torch.Tensor, Numbers, Mapping[str, float]], torch.Tensor]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}
