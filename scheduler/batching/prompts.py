"""The lane of long prompts: steps of prompt chunks alone, computed beside the steps of decode rows by other parts of
the machine. They take what would hold decode rows up; short prompts stay with those.

    decode rows     | step | step | step | step | step | step | ...     short prompts among them
    long prompts    | chunk               | chunk               | ...     one step in flight

A request is in one lane at a time: it changes over when the step that it is in has been committed. What a prompt step
computes is findable from then on, and prompts that begin alike wait for that; the other way around, a prompt step may
read what a step of decode rows is still computing (`StepPlan.follows`).
"""

from __future__ import annotations

from scheduler.batching.batch import LOOKED_AT, Batch
from scheduler.core import Flight
from scheduler.plan import StepPlan
from scheduler.policy.room import Room
from scheduler.policy.waiting import entry
from scheduler.request import Request


class PromptBatch(Batch):
    """What goes into one step of the lane. Its time is not bounded: nobody waits for a next token."""

    def build(self, step: int, now: float) -> Flight | None:
        """None while one is in flight, or for too few tokens. Background requests have steps while nobody else is
        there, unless the last one took longer than they may."""
        core = self._core
        if core.lane(True):
            return None
        self._step, self._now, self._everyone = step, now, True
        self._look_beside(core.lane(False))
        self._background = not any(not request.background for request in core.requests.values())
        if self._background and not self._gaps.allows(self._cost.prompt_step_s, now):
            return None
        self._make_room()
        if not self._enough():
            return None
        self._add_partial()
        self._add_prefills()
        rows = sorted(self._rows, key=lambda row: not row.is_decode)  # of a preempted request, its last token alone
        if not rows:
            return None
        computing = {block for flight in core.lane(False) for _, block in flight.published}
        follows = any(not computing.isdisjoint(row.request.blocks) for row in rows)
        plan = StepPlan(step, rows, [row.request.blocks[:] for row in rows], prompts=True, follows=follows)
        flight = Flight(plan, {row.request: row for row in rows}, completed=self._completed)
        core.flights.append(flight)
        return flight

    def _enough(self) -> bool:
        """Whether the prompts that can be in the step are worth one."""
        core, left = self._core, self._config.lane_tokens or 0
        for _, _, request in core.running:
            if self._may_continue(request):
                left -= request.num_tokens - request.num_computed
        left -= sum(request.num_tokens - core.blocks.num_findable(request) for request in self._startable())
        return left <= 0

    def _startable(self) -> list[Request]:
        """Waiting requests for which there is a running slot: the first of each account that has one reserved, however
        long others have waited, then by rank. The other lane keeps a reserved slot for that request and leaves a long
        prompt to this one; with another counted in its place the two lanes would deadlock."""
        free = max(0, self._free_running_slots)
        first: list[Request] = []
        others: list[Request] = []
        for account in self._accounts():
            reserved = account in self._reserved
            if most := min(free + reserved, LOOKED_AT):
                few = self._core.waiting.first_few(account, self._is_open, self._put_off, most)
                first += few[:reserved]
                others += few[reserved:]
        return first + sorted(others, key=entry)[:free]

    def _may_continue(self, request: Request) -> bool:
        """Whether a running request lacks more than its next token."""
        if request.background is not self._background or request in self._elsewhere or request.num_in_flight:
            return False
        return request.num_tokens - request.num_computed > 1 or request.num_computed < len(request.prompt)

    def _add_partial(self) -> None:
        for _, _, request in list(self._core.running):
            if self._may_continue(request):
                self._partial.setdefault(request.account, []).append(request)
            else:
                self._owed += self._missing.of(request)  # rows of the other lane take their blocks afterwards

    def _is_long(self, missing: int) -> bool:
        return False  # too long for this lane is none

    def _room(self) -> Room:
        config = self._config
        return _Room(config.lane_budget or config.max_num_batched_tokens, config.lane_tokens or 0)


class _Room(Room):
    """What is left of a prompt is worth a step of the lane, where it has enough for two."""

    def __init__(self, num_tokens: int, least: int) -> None:
        super().__init__(num_tokens)
        self._least = least

    def fit(self, start: int, wanted: int) -> int:
        size = super().fit(start, wanted)
        if 0 < wanted - size < self._least and wanted >= 2 * self._least:
            size = self.num_tokens = wanted - self._least
        return size
