"""One step: decode rows first, then prefill chunks into what is left of the token budget."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from scheduler.core import Core, Flight
from scheduler.cost import CostModel
from scheduler.errors import IntegrityError
from scheduler.plan import StepPlan, StepRow
from scheduler.request import AdapterKey, Request, Status
from scheduler.waiting import entry


class Batch:
    """What goes into one step, while it is put together."""

    def __init__(self, core: Core, cost: CostModel) -> None:
        self._core = core
        self._config = core.config
        self._cost = cost
        self._rows: list[StepRow] = []
        self._partial: dict[str, list[Request]] = {}  # running requests still in prefill, by tenant, best first
        self._owed = 0  # blocks that they will still need for their known tokens
        self._admitting = True
        self._open: dict[AdapterKey, bool] = {}
        self._planned: set[Request] = set()
        self._put_off: set[Request] = set()  # waiting requests that do better to come in the next step
        self._completed: set[bytes] = set()  # hashes of the blocks that the prefill chunks of this step complete

    def build(self, step: int, now: float) -> Flight | None:
        """Raises IntegrityError if two steps are in flight already."""
        core = self._core
        if len(core.flights) >= 2:
            raise IntegrityError(f"steps {[f.plan.step for f in core.flights]} are in flight; commit one first")
        if self._config.num_adapter_slots:
            core.slots.assign(core.waiting.best_ranks(), now)
        self._add_decodes()
        self._add_prefills()
        if not self._rows:
            return None
        rows = sorted(self._rows, key=lambda row: not row.is_decode)
        plan = StepPlan(step, rows, [tuple(row.request.blocks) for row in rows])
        flight = Flight(plan, {row.request: row for row in rows})
        core.flights.append(flight)
        for row in rows:
            core.publish(row.request)
        return flight

    # ---- decode

    def _add_decodes(self) -> None:
        core, limit = self._core, self._config.max_tokens_held
        for _, _, request in list(core.running):
            if request.status is not Status.RUNNING:
                continue  # a better one just took its place
            num_tokens = request.num_tokens
            if request.num_computed < len(request.prompt) or num_tokens - request.num_computed > 1:
                self._partial.setdefault(request.tenant, []).append(request)
                continue
            if num_tokens >= limit or num_tokens - len(request.prompt) >= request.sampling.max_tokens:
                continue  # the tokens in flight end it
            if self._grow(request, num_tokens):
                self._add_row(request, 1)

    # ---- prefill

    def _add_prefills(self) -> None:
        """Chunks go to the tenant that got the least service, one request after another."""
        core = self._core
        budget = self._prefill_budget()
        for tenant, requests in self._partial.items():
            self._partial[tenant] = [request for request in requests if request.status is Status.RUNNING]
            self._owed += sum(self._blocks_missing(request) for request in self._partial[tenant])
        self._admitting &= len(core.waiting) > 0
        heap: list[tuple[float, float, int, str]] = []
        for tenant in dict.fromkeys([*self._partial, *(core.waiting.tenants() if self._admitting else ())]):
            self._push(heap, tenant)
        heapify(heap)
        while heap and budget > 0:
            tenant = heappop(heap)[-1]
            request = self._next(tenant)
            if request is None:
                continue
            if request.status is Status.RUNNING:
                self._partial[tenant].pop(0)
                budget -= self._continue(request, budget)
            else:
                budget -= self._admit(request, budget)
            self._push(heap, tenant)

    def _prefill_budget(self) -> int:
        config = self._config
        budget = config.max_num_batched_tokens - len(self._rows)
        if not self._rows:
            return budget  # nobody waits for a next token
        if config.itl_target_s is None:
            return budget if config.mixed_chunk is None else min(budget, config.mixed_chunk)
        read = sum(row.start + 1 for row in self._rows)
        return self._cost.chunk(len(self._rows), read, budget, config.itl_target_s)

    def _push(self, heap: list[tuple[float, float, int, str]], tenant: str) -> None:
        request = self._next(tenant)
        if request is not None:
            heappush(heap, (self._core.fairness[tenant].counter, request.rank, request.arrival, tenant))

    def _next(self, tenant: str) -> Request | None:
        partial = self._partial.get(tenant)
        while partial and partial[0].status is not Status.RUNNING:
            partial.pop(0)
        running = partial[0] if partial else None
        waiting = None
        if self._admitting and len(self._core.running) < self._config.max_num_seqs:
            waiting = self._core.waiting.first(tenant, self._is_open, self._put_off)
        if running is None or waiting is None:
            return running or waiting
        return running if entry(running) < entry(waiting) else waiting

    def _is_open(self, adapter: AdapterKey) -> bool:
        is_open = self._open.get(adapter)
        if is_open is None:
            is_open = self._open[adapter] = self._core.slots.is_open(adapter)
        return is_open

    def _continue(self, request: Request, budget: int) -> int:
        """The next chunk of a running request, cut to the blocks there are; returns its tokens."""
        blocks = self._core.blocks
        missing = self._blocks_missing(request)
        if not self._grow(request, request.num_computed + 1):
            return 0
        have = (len(request.blocks) + blocks.num_free) * blocks.block_size
        size = min(budget, request.num_tokens - request.num_computed, have - request.num_computed)
        blocks.grow(request, request.num_computed + size)
        self._owed -= missing - self._blocks_missing(request)
        self._add_chunk(request, size)
        return size

    def _admit(self, request: Request, budget: int) -> int:
        """The first chunk of a waiting request, if all its known tokens fit beside what runs; returns its tokens.

        If they do not, nobody is admitted in this step: smaller requests must not overtake it for ever.
        """
        core = self._core
        spare = core.blocks.num_free - self._owed
        if core.running:
            spare -= self._config.num_blocks // 100  # so that decode rows do not preempt it at once
            if core.blocked is not None and core.blocked[0] is request and spare <= core.blocked[1]:
                self._admitting = False
                return 0
        match = core.blocks.match(request)
        if core.blocks.next_hash(request, match) in self._completed:
            # another request computes its next block right now: in the next step it is a hit
            self._put_off.add(request)
            self._admitting = len(self._put_off) < self._config.max_num_seqs
            return 0
        if core.blocks.blocks_for(request.num_tokens) - len(match.blocks) > spare - match.num_free:
            core.blocked = request, spare
            self._admitting = False
            return 0
        core.admit(request, match)
        size = min(budget, request.num_tokens - request.num_computed)
        core.blocks.grow(request, request.num_computed + size)
        self._owed += self._blocks_missing(request)
        self._add_chunk(request, size)
        return size

    def _add_chunk(self, request: Request, size: int) -> None:
        start = request.num_computed
        self._completed.update(self._core.blocks.hashes(request, start, start + size))
        self._add_row(request, size)

    # ---- both

    def _add_row(self, request: Request, num_tokens: int) -> None:
        config = self._config
        start = request.num_computed
        end = start + num_tokens
        samples = end == request.num_tokens and request.sampling.max_tokens > 0
        self._planned.add(request)
        self._rows.append(StepRow(request, start, num_tokens, request.slot, samples))
        request.num_computed = end
        request.num_in_flight += samples
        self._core.charge(request, end, config.prefill_weight, config.decode_weight)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Blocks for so many positions. If there are none, the newest of the lowest priority are preempted, as long
        as they come after this request and are not in the step yet."""
        core = self._core
        while not core.blocks.grow(request, num_tokens):
            if core.blocks_are_held:
                return False  # some come back when the step before has ended
            victim = self._victim(request)
            if victim is None:
                return False
            core.preempt(victim)
            self._admitting = False
        return True

    def _victim(self, request: Request) -> Request | None:
        for _, _, victim in reversed(self._core.running):
            if victim is request:
                break
            if victim not in self._planned:
                return victim
        return None

    def _blocks_missing(self, request: Request) -> int:
        return max(0, self._core.blocks.blocks_for(request.num_tokens) - len(request.blocks))
