"""What the api asks of a tuning run: an adapter that is trained over the served weights. Part of the wire, torch-free.

A run's orders are worked one after another; runs take turns.
"""

from __future__ import annotations

import msgspec

LOSSES: dict[str, tuple[str, ...]] = {  # and the numbers that each takes of every target
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "dpo": ("weights", "reference"),
}


# Statuses of refused orders: the run has ended or was never opened; there is no room for one more now.
GONE, NO_ROOM = 410, 429


class _Order(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A text of N tokens, and the token that is to follow each. `numbers`: N each, by the names of `LOSSES`."""

    tokens: list[int]
    targets: list[int]
    numbers: dict[str, list[float]] = {}


class OpenRun(_Order, frozen=True):
    """A new adapter: A drawn with `seed`, B zero; or the one of a `state` that `SaveRun` wrote, with its moments; or,
    without a state, of the `adapter` in a folder, whose rank is at most `rank`. `targets`: "attention", "mlp"."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("attention", "mlp")
    seed: int = 0
    state: str | None = None
    adapter: str | None = None
    tenant: str = "default"
    weight: float = 1.0


class Batch(_Order, frozen=True):
    """Log-probabilities of targets, and if `learn` gradients of their loss, added to those that are there. `base`: of
    the base model without the adapter; learns nothing. `settings`: of the loss. Sums over targets, no means; of
    preferences the sum over pairs, a chosen text before its rejected one. `outputs`: the log-probabilities of all
    targets are wanted, not only of those that the loss counts."""

    samples: list[Sample]
    loss: str = "cross_entropy"
    settings: dict[str, float] = {}
    learn: bool = True
    base: bool = False
    outputs: bool = False


class OptimStep(_Order, frozen=True):
    """AdamW by the gradients that have been added up, which are zero afterwards. `clip`: their largest norm, 0: any;
    they are multiplied by `scale` first."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip: float = 0.0
    scale: float = 1.0


class SaveRun(_Order, frozen=True):
    """Into folders that do not exist or are replaced as a whole: `state` what OpenRun and LoadRun read; `adapter` the
    adapter in PEFT's form."""

    state: str | None = None
    adapter: str | None = None


class LoadRun(_Order, frozen=True):
    """The adapter of a state, of the same rank and targets. `optimizer`: and its moments; else they begin at zero."""

    state: str
    optimizer: bool = True


class PublishRun(_Order, frozen=True):
    """The adapter as it is now becomes the newest version of `name`: requests that come later get it, those that run
    keep theirs. No file is written, and none is read."""

    name: str


class CloseRun(_Order, frozen=True):
    """Forget the run at once; orders that wait are answered as failed."""


Order = OpenRun | Batch | OptimStep | SaveRun | LoadRun | PublishRun | CloseRun


class Tuned(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of an order. `logprobs`: float32 of each sample's targets, little-endian; 0 of those that were not
    wanted."""

    metrics: dict[str, float] = {}
    logprobs: list[bytes] = []
