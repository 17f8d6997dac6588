"""A tuning run of the engine, its orders that wait, and whose turn it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine.errors import EngineError, KtserveError, UserError
from engine.lora.adapter import AdapterWeights
from engine.tuning import GONE, Batch, LoadRun, OptimStep, PublishRun, SaveRun
from training.service.adapter import TrainableAdapter


class RefusedOrderError(UserError):
    """With the status of the reply."""

    def __init__(self, status: int, message: str, field: str) -> None:
        super().__init__(message, field)
        self.status = status


def error_of(future: Future[Any]) -> KtserveError | None:
    """Of work on files."""
    error = future.exception()
    if error is None or isinstance(error, KtserveError):
        return error
    return EngineError(f"the run's files: {type(error).__name__}: {error}")


def diverged(run: TunedRun, what: str) -> RefusedOrderError:
    return RefusedOrderError(
        GONE,
        f"the run {run.name!r} has ended: {what} is no finite number; start from an earlier state with a smaller "
        "learning rate",
        "learning_rate",
    )


@dataclass(eq=False)
class WaitingOrder:
    """`done`: samples of a batch that are computed. `copied`: what a publication publishes, once it was made."""

    call_id: int
    order: Batch | OptimStep | SaveRun | LoadRun | PublishRun
    done: int = 0
    loss: float = 0.0
    hits: int = 0
    logprobs: list[bytes] = field(default_factory=list)
    copied: AdapterWeights | None = None


@dataclass(eq=False)
class TunedRun:
    """`wanted`: bytes by device that its adapter takes with all gradients. `blocked`: its publication has found no room
    since the last micro-batch."""

    name: str
    tenant: str
    weight: float
    wanted: Mapping[str, int]
    made: TrainableAdapter | None = None  # None while it is being made
    orders: deque[WaitingOrder] = field(default_factory=deque)
    on_disk: bool = True  # the adapter is a thread's
    closed: bool = False
    learnt: bool = False  # gradients are there
    blocked: bool = False

    @property
    def adapter(self) -> TrainableAdapter:
        """EngineError while it is being made."""
        if self.made is None:
            raise EngineError(f"the run {self.name!r} is not open yet")
        return self.made

    def unallocated(self, device: str) -> int:
        """Bytes that it will take there beside what it has."""
        return self.wanted.get(device, 0) if self.made is None else self.made.missing_gradient_bytes(device)


class Turns:
    """Tokens of each tenant, divided by its weight: who has been computed the least comes first."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def order(self, runs: Iterable[TunedRun]) -> list[TunedRun]:
        return sorted(runs, key=lambda run: self._served.get(run.tenant, 0.0))

    def come(self, tenant: str, others: Iterable[str]) -> None:
        """A tenant that asked for nothing asks again: it starts beside the `others`, who have waited meanwhile, and
        does not catch up."""
        least = min((self._served.get(other, 0.0) for other in others), default=0.0)
        self._served[tenant] = max(self._served.get(tenant, 0.0), least)

    def charge(self, run: TunedRun, tokens: int) -> None:
        self._served[run.tenant] = self._served.get(run.tenant, 0.0) + tokens / run.weight
