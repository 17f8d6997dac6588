"""The lane of long prompts: their steps are launched by a thread of its own, on a stream of its own, while the engine's
thread goes on with steps of decode rows.

engine's thread   launch(plan)                    take() -> None ...    take(): sample    take(): the tokens
lane's thread                launch, as fast as the GPU computes layers

What both threads touch stays apart: the step's arrays are made before it is handed over, and it is sampled, masks
included, by the engine's thread.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from engine.grammar.masks import Masks
from engine.steps.inputs import StepArrays
from engine.steps.runner import InFlight, ModelRunner
from scheduler.plan import StepPlan


class PromptLane:
    """`runner`: of a model beside that of `others`, which runs all other steps (`engine.model.beside`)."""

    def __init__(self, runner: ModelRunner, others: ModelRunner) -> None:
        self.runner = runner
        self._others = others
        self.plan: StepPlan | None = None
        self._thread = ThreadPoolExecutor(1, "prompts")
        self._launching: Future[InFlight] | None = None
        self._sampled: InFlight | None = None

    def launch(self, plan: StepPlan, masks: Masks) -> None:
        """Raises RuntimeError while another step is in flight."""
        if self.plan is not None:
            raise RuntimeError(f"step {self.plan.step} of long prompts is in flight")
        arrays = StepArrays.of(plan, {})
        own = {id_: masks[id_] for row in plan.rows if (id_ := row.request.request_id) in masks}
        after = self._others.arrival() if plan.follows else None
        self.plan = plan
        self._launching = self._thread.submit(self.runner.launch, plan, own, arrays, after)

    def take(self, masks: Masks) -> tuple[InFlight, list[list[int]]] | None:
        """Of the step in flight, once it has ended; None before. Raises what failed in it, when all else of it has
        ended."""
        if self._launching is None or not self._launching.done():
            return None
        try:
            if self._sampled is None:
                step = self._launching.result()
                self.runner.launch_sample(step, masks)
                self._sampled = step
            step = self._sampled
            if not self.runner.ended(step):
                return None
            tokens = self.runner.tokens(step)
        except Exception:
            self._forget()
            self.runner.settle()
            raise
        self._forget()
        return step, tokens

    def close(self) -> None:
        self._thread.shutdown()
        self.runner.settle()
        self._forget()
        self.runner.close()

    def _forget(self) -> None:
        self.plan = self._launching = self._sampled = None
