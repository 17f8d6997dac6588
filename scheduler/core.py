"""The scheduler's state and the moves between its parts.

waiting --admit--> running --preempt--> waiting         anywhere --end--> forgotten
What an in-flight step reads is handed to that step (`Flight.held`) and given back when the step has ended.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.config import SchedulerConfig
from scheduler.drafts import Drafter
from scheduler.errors import IntegrityError
from scheduler.memory.blocks import BlockManager, Match
from scheduler.memory.disk import DiskBlocks
from scheduler.memory.slots import AdapterSlots
from scheduler.memory.states import StatePool
from scheduler.plan import StepPlan, StepRow
from scheduler.policy.deadlines import Deadlines
from scheduler.policy.fairness import Fairness
from scheduler.policy.waiting import Entry, WaitingQueue, entry
from scheduler.request import AdapterKey, Request, Status


@dataclass
class Flight:
    """A launched step whose tokens are not committed yet."""

    plan: StepPlan
    rows: dict[Request, StepRow]
    void: set[Request] = field(default_factory=set)  # rows whose outcome is ignored
    published: list[tuple[Request, int]] = field(default_factory=list)  # blocks made findable by it
    held: list[tuple[Sequence[int], int]] = field(default_factory=list)  # blocks and slot of requests that left it
    completed: set[bytes] = field(default_factory=set)  # hashes of blocks that are findable once it has ended


class Core:
    """The requests, and all that they hold: places among the waiting and running, blocks, adapter slots, service. Each
    method is one change of a request's state."""

    def __init__(self, config: SchedulerConfig, drafter: Drafter | None, stored: Iterable[tuple[bytes, int]]) -> None:
        self.config = config
        self.drafter = drafter
        self.requests: dict[str, Request] = {}
        self.deadlines = Deadlines(self.requests)
        self.running: list[Entry] = []  # by rank
        self.waiting = WaitingQueue()
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.prefix_caching)
        self.states: StatePool | None = None
        if config.num_states:
            snapshots = config.num_snapshots if config.prefix_caching else 0
            self.states = StatePool(
                config.num_states,
                snapshots,
                self.blocks.cache,
                config.block_size,
                config.snapshot_blocks,
                self.blocks,
            )
            self.blocks.states = self.states
        self.disk: DiskBlocks | None = None
        if config.disk_block_bytes:
            self.disk = DiskBlocks(
                self.blocks, config.disk_bytes, config.disk_block_bytes, stored, config.disk_state_bytes
            )
        self.slots = AdapterSlots(config.num_adapter_slots, config.slot_patience_s)
        self.fairness = Fairness()
        self.flights: list[Flight] = []  # oldest first: at most two, and one in the lane of long prompts
        self.blocked: tuple[Request, int] | None = None  # the request that did not fit, and the blocks there were
        self.num_arrived = 0
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.num_looked_up_tokens = 0

    def arrive(self, request: Request, now: float, tenant_weight: float) -> None:
        self.fairness.arrive(request.account, tenant_weight)
        request.status = Status.WAITING
        request.arrival = self.num_arrived
        request.arrival_s = now
        request.rank = now + request.priority * self.config.aging_s
        self.num_arrived += 1
        self.requests[request.request_id] = request
        self.deadlines.add(request)
        self.slots.add_user(request.adapter)
        self.waiting.add(request)

    def admit(self, request: Request, match: Match, now: float) -> None:
        self.waiting.remove(request)
        self.fairness.leave(request.account)
        self.blocks.take(request, match)
        request.slot = self.slots.pin(request.adapter)
        if self.states is not None:
            self.states.take(request, match.snapshot, match.diverged)
        request.num_computed = match.num_tokens
        if request.status is Status.WAITING:
            request.queued_s = now - request.arrival_s
            request.num_cached = min(match.num_tokens, len(request.prompt))
            self.num_hit_tokens += request.num_cached
            self.num_looked_up_tokens += len(request.prompt)
        if self.disk is not None:
            self.disk.touch(request.block_hashes[: len(match.blocks)], match.snapshot)
            request.fetched = False
        if match.num_tokens > request.num_charged:
            self.charge(request, match.num_tokens, self.config.cached_weight, self.config.cached_weight)
        request.status = Status.RUNNING
        insort(self.running, entry(request))

    def preempt(self, request: Request) -> None:
        """Back to the queue; prompt and output stay, and so does a sampled token that is still in flight."""
        self._leave_running(request)
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.fairness.wait_again(request.account)
        self.waiting.add(request)

    def end(self, request: Request, status: Status) -> None:
        """The request's only way out."""
        if request.status is Status.RUNNING:
            self._leave_running(request)
        else:
            self.waiting.remove(request)
            self.fairness.leave(request.account)
        for flight in self.flights:
            self.void(flight, request)
        request.status = status
        request.num_in_flight = request.num_drafts = 0
        if self.drafter is not None:
            self.drafter.end(request)
        del self.requests[request.request_id]
        self.fairness.end(request.account)
        self.slots.drop_user(request.adapter)

    def void(self, flight: Flight, request: Request) -> None:
        row = flight.rows.get(request)
        if row is not None and request not in flight.void:
            flight.void.add(request)
            request.num_in_flight -= row.samples
            request.num_drafts -= len(row.drafts)

    def charge(self, request: Request, end: int, prompt_weight: float, output_weight: float) -> None:
        """Charge the tenant for positions up to `end` that it has not been charged for."""
        begin, split = request.num_charged, len(request.prompt)
        if end <= begin:
            return
        request.num_charged = end
        prompt = min(end, split) - begin if begin < split else 0
        output = end - max(begin, split) if end > split else 0
        self.fairness.charge(request.account, prompt * prompt_weight + output * output_weight)

    def accept(self, request: Request, row: StepRow, num_drafts: int) -> None:
        """So many of the row's drafts stay; positions and blocks beyond them are given back."""
        request.num_computed = row.start + 1 + num_drafts
        self.blocks.trim(request, request.num_tokens)
        self.charge(request, request.num_computed, self.config.prefill_weight, self.config.decode_weight)

    def publish(self, request: Request) -> None:
        """Make what is computed findable; the newest step that has a row of the request answers for it."""
        published = self.blocks.publish(request)
        if published and (flight := self._newest_flight(request)) is not None:
            flight.published += [(request, block) for block in published]
        elif self.disk is not None:
            self.disk.offer(published)

    def spoil(self, request: Request) -> None:
        """What the request computed, or went on from, is not to be trusted: nobody finds it any more."""
        for block in request.blocks[: request.num_published]:
            self.blocks.unpublish(block)
        if self.disk is not None:
            self.disk.forget(request.block_hashes[: request.num_published])
        if self.states is not None:
            self.states.discard(request.block_hashes[: request.num_published])

    def land(self, flight: Flight) -> None:
        """The step has ended: nothing reads what was held for it, unless an older step is still in flight. What it
        made findable, if it was not undone, is computed."""
        if self.states is not None:
            self.states.landed(_saved(flight.plan.rows))
        older = [f for f in self.lane(flight.plan.prompts) if f.plan.step < flight.plan.step]
        if older:
            older[-1].held += flight.held
            return
        if self.disk is not None:
            self.disk.offer(block for _, block in flight.published)
        for blocks, slot in flight.held:
            self.blocks.release(blocks)
            self.slots.unpin(slot)

    def undo(self, flight: Flight) -> None:
        """The step did not happen: nothing it computed is findable, and whoever built on it starts again."""
        lost, saved = set(flight.rows), _saved(flight.rows.values())
        for other in [flight, *(f for f in self.flights if f.plan.step > flight.plan.step)]:
            blocks = {block for f in (flight, other) for request, block in f.published if request in lost}
            for request in other.rows:
                if request in lost or request in other.void:
                    continue
                state = other.rows[request].state
                if not blocks.isdisjoint(request.blocks) or (state is not None and state.source in saved):
                    lost.add(request)
                    if request.status is Status.RUNNING:
                        self.preempt(request)
                    self.void(other, request)
            for request, block in other.published:
                if request in lost:
                    self.blocks.unpublish(block)
            saved |= _saved(row for request, row in other.rows.items() if request in lost)
        if self.states is not None:
            self.states.discard_slots(saved)

    def lane(self, prompts: bool) -> list[Flight]:
        """The steps in flight in the lane of long prompts, or in the other one; oldest first. A request is in one lane
        at a time."""
        return [flight for flight in self.flights if flight.plan.prompts is prompts]

    @property
    def num_live_waiting(self) -> int:
        """Requests that wait and are not background work."""
        return self.waiting.num_live

    @property
    def blocks_are_held(self) -> bool:
        return any(flight.held for flight in self.flights)

    def check_integrity(self) -> None:
        found = [
            f"request {request.request_id} is {request.status.value} but runs"
            for _, _, request in self.running
            if request.status is not Status.RUNNING
        ]
        found += [
            f"request {request.request_id} is {request.status.value} but waits"
            for request in self.waiting
            if request.status not in (Status.WAITING, Status.PREEMPTED) or request.blocks or request.slot
        ]
        listed = [request for _, _, request in self.running] + list(self.waiting)
        if len(listed) != len(self.waiting) + len(self.running) or {r.request_id for r in listed} != set(self.requests):
            found.append(f"{len(listed)} requests are listed, {len(self.requests)} are known")
        pins: dict[int, int] = {}
        users: dict[AdapterKey, int] = {}
        holders: list[Sequence[int]] = []
        in_flight: dict[str, tuple[int, int]] = {}  # tokens and drafts by request
        for flight in self.flights:
            for request, row in flight.rows.items():
                if request not in flight.void:
                    tokens, drafts = in_flight.get(request.request_id, (0, 0))
                    in_flight[request.request_id] = tokens + row.samples, drafts + len(row.drafts)
        for request in listed:
            users[request.adapter] = users.get(request.adapter, 0) + 1
            holders.append(request.blocks)
            known = request.num_in_flight, request.num_drafts
            if known != in_flight.get(request.request_id, (0, 0)):
                found.append(
                    f"request {request.request_id}: {known} tokens, drafts in flight, rows say "
                    f"{in_flight.get(request.request_id, (0, 0))}"
                )
            if len(request.blocks) * self.config.block_size < request.num_computed:
                found.append(f"request {request.request_id}: {request.num_computed} positions computed, blocks too few")
            if request.slot:
                pins[request.slot] = pins.get(request.slot, 0) + 1
                if self.slots.slots[request.slot - 1].adapter != request.adapter:
                    found.append(f"request {request.request_id}: slot {request.slot} holds another adapter")
        for flight in self.flights:
            for blocks, slot in flight.held:
                holders.append(blocks)
                pins[slot] = pins.get(slot, 0) + 1
        pins.pop(0, None)
        if self.disk is not None:
            holders += self.disk.holders()
            found += self.disk.problems()
        found += self.blocks.problems(holders)
        if self.states is not None:
            found += self.states.problems(listed)
        found += self.slots.problems(pins, users)
        found += self.fairness.problems(listed, [r for r in listed if r.status is not Status.RUNNING])
        if found:
            raise IntegrityError("; ".join(found))

    def _leave_running(self, request: Request) -> None:
        del self.running[bisect_left(self.running, entry(request))]
        flight = self._newest_flight(request)
        if flight is not None:
            flight.held.append((request.blocks, request.slot))
        else:
            self.blocks.release(request.blocks)
            self.slots.unpin(request.slot)
        if self.states is not None:
            self.states.release(request)
        request.blocks = array("i")
        request.slot = 0
        request.num_computed = 0
        request.num_published = 0

    def _newest_flight(self, request: Request) -> Flight | None:
        return next((flight for flight in reversed(self.flights) if request in flight.rows), None)


def _saved(rows: Iterable[StepRow]) -> set[int]:
    """Slots to which they save states."""
    return {slot for row in rows if row.state is not None for _, slot in row.state.saves}
