"""One step: decode rows first, then prefill chunks into what is left of the token budget, then drafts.

Background requests have steps of their own, in which no live request could take part, no longer than one that comes
meanwhile can well wait; between such steps they keep their running slots and blocks until live requests need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from scheduler.batching.drafting import add_drafts
from scheduler.batching.missing import Missing
from scheduler.batching.shares import Shares
from scheduler.core import Core, Flight
from scheduler.errors import IntegrityError
from scheduler.plan import RowState, StepPlan, StepRow, pairs
from scheduler.policy.cost import CostModel
from scheduler.policy.gaps import Gaps
from scheduler.policy.room import PacedRoom, Room
from scheduler.policy.turns import Turns
from scheduler.policy.waiting import entry
from scheduler.request import AdapterKey, Request, Status, is_background

LOOKED_AT = 16  # of an account's waiting requests, for one that is cached


class Batch:
    """What goes into one step, while it is put together."""

    def __init__(self, core: Core, cost: CostModel, gaps: Gaps, turns: Turns) -> None:
        self._core = core
        self._config = core.config
        self._cost = cost
        self._gaps = gaps
        self._turns = turns
        self._missing = Missing(core)
        self._rows: list[StepRow] = []
        self._num_decodes = 0  # the first of them
        self._step, self._now = 0, 0.0
        self._background = False  # whose rows are planned now
        self._allowed_s: float | None = None  # of the step, while those are background rows
        self._everyone = False  # whatever else, nobody leaves this step out
        self._pressed = False  # a live request lacks blocks that will come back
        self._partial: dict[str, list[Request]] = {}  # running requests still in prefill, by account, best first
        self._owed = 0  # blocks that they will still need for their known tokens
        self._admitting = True
        self._reserved: set[str] = set()  # accounts for whose next request a running slot is kept free
        self._open: dict[AdapterKey, bool] = {}
        self._put_off: set[Request] = set()  # waiting requests that do better to come in the next step
        # hashes of the blocks that the prefill chunks of this step complete, or of one in the other lane
        self._completed: set[bytes] = set()
        self._elsewhere: set[Request] = set()  # requests in a step of the other lane

    def build(self, step: int, now: float) -> Flight | None:
        """Raises IntegrityError if two steps are in flight already."""
        self._step, self._now = step, now
        core = self._core
        if len(in_flight := core.lane(False)) >= 2:
            raise IntegrityError(f"steps {[f.plan.step for f in in_flight]} are in flight; commit one first")
        self._look_beside(core.lane(True))
        if core.states is not None:
            core.states.begin_step()
        live = any(not request.background for request in core.requests.values())
        if live:
            self._gaps.live(now)
        if self._config.num_adapter_slots:
            core.slots.assign(core.waiting.best_ranks(background=not live), now)
        self._preempt_background()
        self._add_rows()
        if not self._rows and self._turns.held:  # those who were to have the step for themselves cannot use it
            self._partial, self._owed, self._everyone = {}, 0, True
            self._add_rows()
        if not self._rows and not self._live_could_run and (live or not self._gaps.paused(now)):
            self._background, self._admitting = True, not core.num_live_waiting
            self._allowed_s, ahead_s = self._gaps.allowed_s(now), self._background_s(in_flight)
            if self._allowed_s is not None and ahead_s:  # a live request would wait for both
                self._allowed_s -= ahead_s
            if self._allowed_s is None or self._allowed_s > 0:
                self._add_rows()
        add_drafts(core, self._rows, max(0, self._owed))
        if not self._rows:
            return None
        first = self._num_decodes  # among the prefill chunks, one of a preempted request may be a decode row
        rows = [*self._rows[:first], *sorted(self._rows[first:], key=lambda row: not row.is_decode)]
        idle = None if core.states is None else core.states.take_idle()
        wanted = {} if core.drafter is None else core.drafter.wanted(row.request for row in rows if row.samples)
        ahead = bool(core.lane(False))
        plan = StepPlan(step, rows, [row.request.blocks[:] for row in rows], idle, ahead=ahead, wanted=wanted)
        flight = Flight(plan, {row.request: row for row in rows})
        core.flights.append(flight)
        size = self._config.block_size
        for row in rows:
            full = row.request.num_computed // size > row.request.num_published
            if full or (row.state is not None and row.state.saves):
                core.publish(row.request)
        return flight

    def _background_s(self, flights: Sequence[Flight]) -> float:
        """What those of the steps that are background work are predicted to take."""
        plans = [flight.plan for flight in flights if flight.plan.rows[0].request.background]
        return sum(self._cost.predict(plan.num_tokens, plan.num_read) for plan in plans)

    def _look_beside(self, flights: Sequence[Flight]) -> None:
        """At the steps of the other lane, whose requests take no part in this one."""
        for flight in flights:
            self._elsewhere |= flight.rows.keys()
            self._completed |= flight.completed
        self._put_off |= self._elsewhere  # if they are preempted

    def _is_long(self, missing: int) -> bool:
        """Whether so many tokens of a prompt are left to the lane of long ones. Background requests may have to be
        computed in shorter steps than that lane has."""
        return not self._background and missing >= (self._config.lane_tokens or missing + 1)

    def _add_rows(self) -> None:
        """Live ones, or those of background requests."""
        self._make_room()
        self._add_decodes()
        self._num_decodes = len(self._rows)
        self._add_prefills()

    # ---- background requests give way

    @property
    def _live_could_run(self) -> bool:
        """Whether a live request waits for nothing but room, so that a step without it would delay it."""
        waiting = self._core.waiting
        accounts = (name for name in waiting.accounts() if not is_background(name))
        return self._pressed or any(waiting.first(name, self._is_open, ()) is not None for name in accounts)

    def _preempt_background(self) -> None:
        """Take the running slots, blocks and adapter slots that waiting live requests lack from background ones, newest
        first."""
        core, most = self._core, self._config.most_running
        if not core.num_live_waiting:
            return
        background = [request for _, _, request in core.running if request.background]
        if not background:
            return
        live = [request for request in core.waiting if not request.background]
        no_slot = any(not core.slots.has(request.adapter) for request in live)
        live = [request for request in live if self._is_open(request.adapter)][:most]
        missing_slots = len(live) - (most - len(core.running))
        owed = sum(self._missing.of(request) for _, _, request in core.running if not request.background)
        blocks = sum(core.blocks.blocks_for(request.num_tokens) for request in live) - self._spare(owed) if live else 0
        for victim in reversed(background):
            if missing_slots > 0 or blocks > 0 or (no_slot and victim.slot):
                missing_slots -= 1
                blocks -= len(victim.blocks)
                self._preempt(victim)

    # ---- room for tenants that have less than their share

    def _accounts(self) -> list[str]:
        """Those with waiting requests whose rows are planned now."""
        return [name for name in self._core.waiting.accounts() if is_background(name) is self._background]

    def _make_room(self) -> None:
        """Reserve a running slot for each waiting tenant, fewest first; others that have more give way."""
        core = self._core
        tenants = self._accounts() if self._admitting else []
        if not tenants:
            return
        running = {request.account for _, _, request in core.running if request.background is self._background}
        if len({*tenants, *running}) < 2:
            return
        shares = Shares(core)
        budget = self._config.max_num_batched_tokens - len(core.running)
        for tenant in sorted(tenants, key=lambda name: (shares.running_slots(name), core.fairness[name].counter)):
            request = core.waiting.first(tenant, self._is_open, ())
            if request is None or budget <= 0:
                continue
            if self._free_running_slots <= 0:
                victim = shares.running_slot_from(tenant)
                if victim is None:
                    continue
                self._preempt(victim)
                shares = Shares(core)
            self._reserved.add(tenant)
            budget -= request.num_tokens
            while (lack := self._lacks(request)) > 0 and not core.blocks_are_held:
                victim = shares.blocks_from(tenant, lack)
                if victim is None:
                    break
                self._preempt(victim)
                shares = Shares(core)

    @property
    def _free_running_slots(self) -> int:
        """Those that are not reserved."""
        return self._config.most_running - len(self._core.running) - len(self._reserved)

    def _lacks(self, request: Request) -> int:
        """Blocks that a waiting request lacks at most."""
        core = self._core
        owed = sum(self._missing.of(other) for _, _, other in core.running)
        return core.blocks.blocks_for(request.num_tokens) - self._spare(owed)

    def _spare(self, owed: int) -> int:
        """Free blocks that a waiting request may have."""
        # some stay free so that decode rows do not preempt it at once
        return self._core.blocks.num_free - owed - (self._config.num_blocks // 100 if self._core.running else 0)

    # ---- decode

    def _add_decodes(self) -> None:
        core, rows, size = self._core, self._rows, self._config.block_size
        states, elsewhere = core.states, self._elsewhere
        running, background, allowed_s = Status.RUNNING, self._background, self._allowed_s
        others: frozenset[Request] = frozenset()
        if not background and not self._everyone:
            others = self._turns.left_out(core.running, core.waiting, self._is_open, self._step, self._now)
        decoded: dict[str, int] = {}  # rows by account
        for _, _, request in list(core.running):
            if request.status is not running or request.background is not background:
                continue  # a better one just took its place, or not its turn
            if request.num_drafts or request in elsewhere:
                continue  # where its next token stands is known once they are committed
            num_prompt, num_output = len(request.prompt), len(request.output) + request.num_in_flight
            start, num_tokens = request.num_computed, num_prompt + num_output
            if start < num_prompt or num_tokens - start > 1:
                if self._is_long(num_tokens - start):
                    continue
                self._partial.setdefault(request.account, []).append(request)
                continue
            if num_output >= request.most_output:
                continue  # the tokens in flight end it
            if request in others or (allowed_s is not None and rows and not self._cost.allows_another(rows, allowed_s)):
                continue
            if num_tokens <= len(request.blocks) * size or self._grow(request, num_tokens):
                if request.num_charged != start:  # it was preempted: what is computed again costs nothing
                    self._add_row(request, 1)
                    continue
                # as _add_row, once for each of many rows in every step
                row = StepRow(request, start, 1, request.slot, True)
                if states is not None:
                    row = StepRow(request, start, 1, request.slot, True, state=self._state(request, start, num_tokens))
                    self._missing.changed(request)
                rows.append(row)
                request.num_computed = request.num_charged = num_tokens
                request.num_in_flight += 1
                account = request.account
                decoded[account] = decoded.get(account, 0) + 1
        for account, count in decoded.items():
            core.fairness.charge(account, count * self._config.decode_weight)

    # ---- prefill

    def _add_prefills(self) -> None:
        """Chunks go to the tenant that got the least service, one request after another; to those first for which
        streams made room."""
        for tenant, requests in self._partial.items():
            self._partial[tenant] = [request for request in requests if request.status is Status.RUNNING]
            self._owed += sum(self._missing.of(request) for request in self._partial[tenant])
        heap: list[tuple[bool, float, float, int, str]] = []
        held = () if self._background or self._everyone else self._turns.held
        for tenant in dict.fromkeys([*self._partial, *self._accounts()]):
            if tenant not in held:
                self._push(heap, tenant)
        if not heap:
            return
        heapify(heap)
        room = self._room()
        while heap and room.num_tokens > 0:
            tenant = heappop(heap)[-1]
            request = self._next(tenant)
            if request is None:
                continue
            if request.status is Status.RUNNING:
                self._partial[tenant].pop(0)
                self._continue(request, room)
            else:
                self._admit(request, room)
            self._push(heap, tenant)

    def _room(self) -> Room:
        config = self._config
        budget = config.max_num_batched_tokens - len(self._rows)
        if config.lane_tokens is not None and not self._background:
            budget = min(budget, config.lane_tokens)  # a step of more is one of the lane of long prompts
        if self._allowed_s is not None:
            if self._rows and config.mixed_chunk is not None:
                budget = min(budget, config.mixed_chunk)
            return PacedRoom(budget, self._rows, self._cost, self._allowed_s, 0 if self._rows else 1)
        if not self._rows and not self._background:
            return Room(budget)  # nobody waits for a next token
        if config.itl_target_s is None:
            return Room(budget if config.mixed_chunk is None else min(budget, config.mixed_chunk))
        target_s = config.itl_target_s
        if config.itl_decode_steps:
            read = sum(pairs(row.start, 1) for row in self._rows)
            target_s = max(target_s, config.itl_decode_steps * self._cost.predict(len(self._rows), read))
        least = max(config.min_chunk, self._turns.chunk)
        return PacedRoom(budget, self._rows, self._cost, target_s, least)

    def _push(self, heap: list[tuple[bool, float, float, int, str]], tenant: str) -> None:
        if (request := self._next(tenant)) is not None:
            later = tenant not in self._turns.first
            heappush(heap, (later, self._core.fairness[tenant].counter, request.rank, request.arrival, tenant))

    def _next(self, tenant: str) -> Request | None:
        partial = self._partial.get(tenant)
        while partial and partial[0].status is not Status.RUNNING:
            partial.pop(0)
        running = partial[0] if partial else None
        waiting = None
        if tenant in self._reserved or (self._admitting and self._free_running_slots > 0):
            waiting = self._best_waiting(tenant)
        if running is None or waiting is None:
            return running or waiting
        return running if entry(running) < entry(waiting) else waiting

    def _best_waiting(self, tenant: str) -> Request | None:
        """The first. While its blocks would push cached ones out, rather the one close behind it, of the same priority,
        that uses the most of these; but nobody is overtaken who has waited for `overtake_s`."""
        core, blocks = self._core, self._core.blocks
        first = core.waiting.first(tenant, self._is_open, self._put_off)
        if first is None or self._now - first.arrival_s >= self._config.overtake_s:
            return first
        if blocks.num_unused >= blocks.blocks_for(first.num_tokens):
            return first
        few = core.waiting.first_few(tenant, self._is_open, self._put_off, LOOKED_AT)
        return max((each for each in few if each.priority == first.priority), key=blocks.num_findable)

    def _is_open(self, adapter: AdapterKey) -> bool:
        is_open = self._open.get(adapter)
        if is_open is None:
            is_open = self._open[adapter] = self._core.slots.is_open(adapter)
        return is_open

    def _continue(self, request: Request, room: Room) -> None:
        """The next chunk of a running request, cut to the blocks there are."""
        blocks = self._core.blocks
        missing = self._missing.of(request)
        start = request.num_computed
        if not self._grow(request, start + 1):
            return
        have = (len(request.blocks) + blocks.num_free) * blocks.block_size
        size = room.fit(start, min(request.num_tokens, have) - start)
        blocks.grow(request, start + size)
        self._owed -= missing - self._missing.of(request)
        self._add_chunk(request, size, room)

    def _admit(self, request: Request, room: Room) -> None:
        """The first chunk of a waiting request, if all its known tokens fit beside what runs.

        If they do not, nobody is admitted in this step: smaller requests must not overtake it indefinitely.
        """
        core = self._core
        spare = self._spare(self._owed)
        if core.running and core.blocked is not None and core.blocked[0] is request and spare <= core.blocked[1]:
            return self._stop_admitting(request)
        match = core.blocks.match(request)
        if core.blocks.hits_soon(request, match, self._completed):
            # another request computes its next block right now: in the next step it is a hit
            self._put_off.add(request)
            if len(self._put_off) - len(self._elsewhere) >= self._config.max_num_seqs:
                self._stop_admitting(request)
            return None
        if core.blocks.blocks_for(request.num_tokens) - len(match.blocks) > spare - match.num_free:
            if request is not core.waiting.first(request.account, self._is_open, self._put_off):
                self._put_off.add(request)  # whom it was to overtake may fit
                return None
            core.blocked = request, spare
            return self._stop_admitting(request)
        if self._is_long(request.num_tokens - match.num_tokens):
            self._put_off.add(request)
            return None
        if core.disk is not None and core.disk.fetch(request, match, self._now, lambda: self._spare(self._owed)):
            return None
        if not (size := room.fit(match.num_tokens, request.num_tokens - match.num_tokens)):
            return None
        core.admit(request, match, self._now)
        self._reserved.discard(request.account)
        core.blocks.grow(request, request.num_computed + size)
        self._owed += self._missing.of(request)
        self._add_chunk(request, size, room)
        return None

    def _stop_admitting(self, request: Request) -> None:
        self._admitting = False
        self._reserved.discard(request.account)

    def _add_chunk(self, request: Request, size: int, room: Room) -> None:
        if not size:
            return
        start = request.num_computed
        room.take(start, size)
        self._add_row(request, size)
        state, states = self._rows[-1].state, self._core.states
        if state is not None and states is not None:
            self._completed.update(states.saved_hashes(request, state))
        else:
            self._completed.update(self._core.blocks.hashes(request, start, start + size))

    # ---- both

    def _add_row(self, request: Request, num_tokens: int) -> None:
        config = self._config
        start, end = request.num_computed, request.num_computed + num_tokens
        samples = end == request.num_tokens and request.sampling.max_tokens > 0
        state = self._state(request, start, end)
        self._rows.append(StepRow(request, start, num_tokens, request.slot, samples, state=state))
        request.num_computed = end
        request.num_in_flight += samples
        self._missing.changed(request)
        self._core.charge(request, end, config.prefill_weight, config.decode_weight)

    def _state(self, request: Request, start: int, end: int) -> RowState | None:
        states = self._core.states
        self._missing.changed(request)
        return None if states is None else states.row(request, start, end, lambda: self._spare(self._missing.total()))

    def _preempt(self, request: Request) -> None:
        self._core.preempt(request)
        self._missing.changed(request)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Blocks for so many positions. If there are none, requests are preempted that are not in the step yet: of the
        tenant that holds the most blocks for its weight the newest of the lowest priority, unless that is this one."""
        core = self._core
        while not core.blocks.grow(request, num_tokens):
            if core.blocks_are_held:
                self._pressed = True
                return False  # some come back when the step before has ended
            victim = self._victim(request)
            if victim is None:
                return False
            self._preempt(victim)
            self._admitting = self._admitting and victim.background is not request.background
        self._missing.changed(request)
        return True

    def _victim(self, request: Request) -> Request | None:
        standing = Shares(self._core).standing
        planned = {row.request for row in self._rows}
        others = [other for _, _, other in self._core.running if other not in planned]
        victim = max(others, key=standing, default=request)
        return victim if standing(victim) > standing(request) else None
