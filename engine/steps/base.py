"""What the engine's loop asks of whoever runs its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.grammar.masks import NO_MASKS, Masks
from engine.messages import TokenLogprobs, Tune
from scheduler.plan import StepPlan

if TYPE_CHECKING:
    from engine.architectures.config import ModelConfig
    from engine.experts.capabilities import ExpertCounters, ExpertPlaces
    from engine.model.step import Trace


@dataclass
class Launched:
    """A step in flight; what is stated by request id is there once its tokens are."""

    plan: StepPlan
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of positions start + 1 ...
    failed: dict[str, Exception] = field(default_factory=dict)
    proposals: dict[str, list[int]] = field(default_factory=dict)  # what the model says may follow
    experts_touched: dict[int, int] = field(default_factory=dict)  # distinct ones, by layer whose backend counts them
    trace: Trace | None = None
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    launched_s: float = 0.0  # time.monotonic


class Model(Protocol):
    """What the loop itself asks of a model."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def expert_counters(self) -> Sequence[ExpertCounters]: ...

    @property
    def expert_places(self) -> Sequence[ExpertPlaces]: ...


S = TypeVar("S", bound=Launched)


class Runner(Protocol[S]):
    """Runs steps: `launch_forward`, `launch_sample`, then `tokens`, each once a step and in that order. `notes` are
    logged at start; `spare_cpus`, if there are any, are where the engine's own thread belongs."""

    notes: list[str]
    spare_cpus: list[int]

    @property
    def model(self) -> Model: ...

    def launch_forward(self, plan: StepPlan, masks: Masks = NO_MASKS) -> S:
        """`masks` of the requests that have some."""
        ...

    def launch_sample(self, step: S, masks: Masks = NO_MASKS) -> None: ...

    def tokens(self, step: S) -> list[list[int]]:
        """Waits for the step. One list per row of the plan: the drafts that were sampled, from the first on, and the
        token after them; empty for a row that samples nothing or is among `step.failed`. Raises what failed in it."""
        ...

    def ended(self, step: S) -> bool:
        """Whether `tokens` would not wait."""
        ...

    def close(self) -> None:
        """No step follows, and none is in flight."""
        ...


class PromptRunner(Protocol):
    """Runs steps of long prompts, one at a time, while a `Runner` runs the others."""

    @property
    def plan(self) -> StepPlan | None:
        """The step in flight."""
        ...

    def launch(self, plan: StepPlan, masks: Masks) -> None:
        """Only hands the step over."""
        ...

    def take(self, masks: Masks) -> tuple[Launched, list[list[int]]] | None:
        """The step and what `Runner.tokens` gives of it, once it has ended; None before. Raises what failed in it; then
        nothing of it is in flight any more."""
        ...

    def close(self) -> None:
        """Waits for the step in flight."""
        ...


class Tuner(Protocol):
    """Trains adapters over the served weights, on the engine's thread, a piece at a time: no piece is longer than a
    layer of a micro-batch takes forward and back."""

    def handle(self, message: Tune) -> None:
        """Take an order. Whatever is wrong with it is answered, never raised."""

    @property
    def ready(self) -> bool:
        """Whether `advance` would compute something now."""

    @property
    def busy(self) -> bool:
        """Whether orders are left, those included that wait for files."""

    def advance(self, seconds: float) -> float:
        """Compute pieces until so long has passed, at least one; returns how long it took."""

    def stats(self) -> dict[str, float | int]:
        """Counters for /metrics."""

    def close(self) -> None:
        """No thread is left. Orders that wait are not answered."""
