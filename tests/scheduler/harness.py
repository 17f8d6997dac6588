"""A fake engine whose KV cache, adapter slots and sampler are plain Python, and a client that counts events.

The value at a position is a hash of the value before it, the token and the adapter, read from and written to the
blocks that the plan names. A sampled token is a function of the last value: any wrong, stale, shared or too early
reused block, and any wrong adapter, gives other tokens than `expected_tokens`. Where there are states, the value before
comes from the state that the plan names, and must be the block's.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence

from scheduler.drafts import Drafter, Proposal
from scheduler.memory.disk import DiskBlocks
from scheduler.plan import NO_STATE, DiskOrder, Drop, Event, EventKind, Fetch, RowState, Save, StepPlan, StepRow
from scheduler.request import BASE, AdapterKey, Request, SamplingParams, Status
from scheduler.scheduler import Scheduler, SchedulerConfig

VOCAB = 50
EOS = 7
GARBAGE = -1


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "num_blocks": 32,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "max_queue": 100,
        "num_adapter_slots": 2,
        "eos_token_ids": (EOS,),
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 4,
    *,
    adapter: AdapterKey = BASE,
    tenant: str = "t",
    cache_salt: str = "",
    priority: int = 0,
    deadline: float | None = None,
    ignore_eos: bool = True,
    stop_token_ids: tuple[int, ...] = (),
    prompt_logprobs: int | None = None,
    background: bool = False,
    kv_digest: bytes = b"",
    opening_tokens: int | None = None,
    system_tokens: int = 0,
    part_ends: tuple[int, ...] = (),
) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids, prompt_logprobs=prompt_logprobs
    )
    return Request(
        request_id,
        list(prompt),
        sampling,
        adapter,
        tenant,
        priority,
        deadline,
        background,
        cache_salt=cache_salt,
        kv_digest=kv_digest,
        opening_tokens=opening_tokens,
        system_tokens=system_tokens,
        part_ends=part_ends,
    )


def value_after(value: int, token: int, adapter: AdapterKey) -> int:
    return zlib.crc32(f"{value}/{token}/{adapter.uid}.{adapter.version}".encode())


def sample(value: int) -> int:
    return value % VOCAB


def expected_tokens(request: Request, config: SchedulerConfig) -> tuple[list[int], str]:
    """Output and reason when nothing interferes."""
    value, output = 0, []
    for token in request.prompt:
        value = value_after(value, token, request.adapter)
    limit = min(config.max_model_len, config.num_blocks * config.block_size)
    while len(output) < request.sampling.max_tokens and len(request.prompt) + len(output) < limit:
        token = sample(value)
        if token in request.sampling.stop_token_ids or (
            token in config.eos_token_ids and not request.sampling.ignore_eos
        ):
            return output, "stop"
        output.append(token)
        value = value_after(value, token, request.adapter)
    return output, "length"


class Guesser:
    """Drafts that are right for a random while, then wrong."""

    def __init__(self, config: SchedulerConfig, seed: int, most: int = 5) -> None:
        self._config = config
        self._rng = random.Random(seed)
        self._most = most
        self.known: set[Request] = set()

    def propose(self, request: Request, most: int) -> Proposal:
        assert not request.num_in_flight > 1 and not request.num_drafts
        self.known.add(request)
        rng = self._rng
        coming = expected_tokens(request, self._config)[0][len(request.output) :]
        right = coming[: rng.randint(0, self._most)]
        tokens = (right + [rng.randrange(VOCAB) for _ in range(self._most)])[: rng.randint(0, min(most, self._most))]
        return Proposal(tokens, rng.randint(2, 20))

    def end(self, request: Request) -> None:
        self.known.discard(request)


class FakeDisk:
    """What is on disk, and the orders in flight. Writes and deletions end in order, reads whenever they want."""

    def __init__(self, seed: int = 0) -> None:
        self.kept: dict[bytes, list[int]] = {}  # what blocks hold, or the value of a snapshot
        self.rng = random.Random(seed)
        self.stalls = False  # nothing ends
        self.full = False
        self.writer: deque[tuple[Save | Drop, list[int]]] = deque()
        self.reads: list[Fetch] = []

    def scan(self, block_bytes: int, state_bytes: int) -> list[tuple[bytes, int]]:
        return [(key, block_bytes if len(held) > 1 else state_bytes) for key, held in self.kept.items()]

    def start(self, orders: Sequence[DiskOrder], kv: list[list[int]], states: list[int]) -> None:
        for order in orders:
            if isinstance(order, Fetch):
                self.reads.append(order)
                for _, block in order.parts:
                    kv[block] = [GARBAGE] * len(kv[block])
                if order.state is not None:
                    states[order.state[1]] = GARBAGE
            else:
                self.writer.append((order, _held(order, kv, states) if isinstance(order, Save) else []))
                assert GARBAGE not in self.writer[-1][1], "it is saved before it is computed"

    def finish(self, disk: DiskBlocks, kv: list[list[int]], states: list[int], least: int = 0) -> None:
        """Some of what is in flight, from `least` orders on."""
        for _ in range(self.rng.randint(min(least, len(self.writer)), len(self.writer))):
            order, content = self.writer.popleft()
            if isinstance(order, Save):
                assert _held(order, kv, states) == content, "it changed while it was saved"
                if not self.full:
                    self.kept[order.key] = content
                disk.saved(order.key, not self.full)
            else:
                self.kept.pop(order.key, None)
        self.rng.shuffle(self.reads)
        for _ in range(self.rng.randint(min(least, len(self.reads)), len(self.reads))):
            fetch = self.reads.pop()
            bad = {key for key, _ in fetch.parts if key not in self.kept}
            if fetch.state is not None:
                key, slot = fetch.state
                if key in self.kept:
                    states[slot] = self.kept[key][0]
                else:
                    bad.add(key)
            for key, block in fetch.parts:
                if key not in bad:
                    kv[block] = list(self.kept[key])
            disk.fetched(fetch, bad)

    def crash(self) -> FakeDisk:
        """What a process that was killed leaves to the next one."""
        self.writer.clear()
        self.reads.clear()
        self.stalls = self.full = False
        return self

    def blocks(self) -> set[int]:
        """Those that are read or written."""
        saved = {order.block for order, _ in self.writer if isinstance(order, Save) and not order.state}
        return saved | {block for fetch in self.reads for _, block in fetch.parts}

    def slots(self) -> set[int]:
        """Likewise of states."""
        saved = {order.block for order, _ in self.writer if isinstance(order, Save) and order.state}
        return saved | {fetch.state[1] for fetch in self.reads if fetch.state is not None}


def _held(save: Save, kv: list[list[int]], states: list[int]) -> list[int]:
    return [states[save.block]] if save.state else list(kv[save.block])


class FakeEngine:
    """Runs a scheduler at an overlap depth of 0 or 1. The clock advances by `dt` a step. A step of the lane of long
    prompts writes when it is committed, after some of the others (`lane_steps` draws how many)."""

    def __init__(
        self,
        config: SchedulerConfig,
        depth: int = 0,
        dt: float = 0.01,
        drafter: Drafter | None = None,
        disk: FakeDisk | None = None,
        seconds: Callable[[StepPlan], float] | None = None,
    ) -> None:
        self.config = config
        self.disk = disk or FakeDisk()
        self.scheduler = Scheduler(config, drafter, self.disk.scan(config.disk_block_bytes, config.disk_state_bytes))
        self.depth = depth
        self.now = 0.0
        self.dt = dt
        self.seconds = seconds  # what the scheduler is told that steps took
        self.kv = [[GARBAGE] * config.block_size for _ in range(config.num_blocks)]
        self.states = [GARBAGE] * (config.num_states + config.num_snapshots)
        self.state_steps = [-1] * len(self.states)  # by which they were written
        self.kept: dict[int, list[int]] = {}  # by slot: values of positions that are not in its state yet
        self.resident: dict[int, AdapterKey] = {0: BASE}
        self.loading: dict[int, AdapterKey] = {}
        self.hold_loads = False
        self.in_flight: deque[tuple[StepPlan, list[list[int]], list[int]]] = deque()
        self.prompts: tuple[StepPlan, list[list[int]], dict[int, list[int]]] | None = None  # with the blocks it makes
        self.lane_steps = random.Random(config.num_blocks)
        self.drawn = random.Random(config.num_blocks)  # whether tokens that the scheduler wants first are waited for
        self.num_prompt_steps = 0
        self.device_tokens: dict[tuple[Request, int], int] = {}
        self.events: list[Event] = []
        self.terminal: dict[str, Event] = {}
        self.streamed: dict[str, list[int]] = {}
        self.submitted: dict[str, Request] = {}
        self.cut: set[str] = set()  # ended by a stop string
        self.trace: list[object] = []  # everything that was decided, to compare runs

    # ---- client

    def add(self, request: Request, weight: float = 1.0) -> Request:
        event = self.scheduler.add(request, self.now, weight)
        self.submitted[request.request_id] = request
        self.streamed[request.request_id] = []
        self.take(event)
        return request

    def take(self, *events: Event | None) -> None:
        for event in events:
            if event is None:
                continue
            request_id = event.request.request_id
            assert request_id not in self.terminal, f"{event} after {self.terminal[request_id]}"
            self.events.append(event)
            self.trace.append((event.kind.value, request_id, tuple(event.tokens), event.reason, event.stop_token))
            self.streamed[request_id] += event.tokens
            if event.kind is not EventKind.TOKENS:
                self.terminal[request_id] = event
                assert event.request.status.terminal
                assert not event.request.blocks and not event.request.num_in_flight
            else:
                assert event.request.status in (Status.RUNNING, Status.PREEMPTED)

    def stop_string(self, request_id: str, keep: int) -> None:
        self.take(self.scheduler.finish(request_id, keep))
        self.cut.add(request_id)
        self.streamed[request_id] = self.streamed[request_id][:keep]
        assert self.streamed[request_id] == self.submitted[request_id].output

    # ---- engine

    def step(self) -> StepPlan | None:
        """Schedule and launch; then commit what depth leaves no room for."""
        if self.prompts is not None and self.lane_steps.random() < 0.3:
            self.commit_prompts()
        if self.in_flight and self.drawn.random() < 0.7 and self.scheduler.wants_tokens(self.in_flight[-1][0]):
            while self.in_flight:
                self.commit()
        plan = self.schedule()
        if plan is None and self.prompts is not None:
            self.commit_prompts()
        if len(self.in_flight) > (depth := self.depth if plan is not None else 0):
            while len(self.in_flight) > depth:
                self.commit()
            self.scheduler.check_integrity()
        self.check_requests()
        return plan

    def schedule(self) -> StepPlan | None:
        self.now += self.dt
        if self.scheduler.disk is not None and not self.disk.stalls:
            self.disk.finish(self.scheduler.disk, self.kv, self.states)
        self.take(*self.scheduler.expire(self.now))
        prompts = self.scheduler.schedule_prompts(self.now)
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        for load in self.scheduler.slot_loads():
            assert load.slot not in self.loading
            self._assert_slot_unused(load.slot)
            self.resident.pop(load.slot, None)
            self.loading[load.slot] = load.adapter
            self.trace.append(load)
        if not self.hold_loads:
            self.finish_loads()
        if self.scheduler.disk is not None:
            self.disk.start(self.scheduler.disk.orders(), self.kv, self.states)
        if prompts is not None:
            self.launch_prompts(prompts)
        if plan is not None:
            self.launch(plan)
        return plan

    def finish_loads(self) -> None:
        for slot, adapter in list(self.loading.items()):
            del self.loading[slot]
            self.resident[slot] = adapter
            self.scheduler.slot_loaded(slot)

    def fail_load(self, slot: int) -> None:
        del self.loading[slot]
        self.take(*self.scheduler.slot_failed(slot, "no such file"))

    def launch(self, plan: StepPlan) -> None:
        self._check_plan(plan)
        for block in plan.idle.blocks if plan.idle else ():
            self.kv[block] = [GARBAGE] * self.config.block_size
        for slot in plan.idle.slots if plan.idle else ():
            self.states[slot] = GARBAGE
        self.trace.append([(r.request.request_id, r.start, r.num_tokens, r.adapter_slot, r.samples) for r in plan.rows])
        written: list[int] = []
        results = []
        size = self.config.block_size
        # reads see only what earlier steps wrote: a row never uses what another row of its step writes
        read = [table[(row.start - 1) // size] for row, table in zip(plan.rows, plan.block_tables, strict=True)]
        snapshot = {block: list(self.kv[block]) for block in read}
        states = list(self.states)
        for row, table in zip(plan.rows, plan.block_tables, strict=True):
            adapter = self.resident[row.adapter_slot]
            assert adapter == row.request.adapter
            value = snapshot[table[(row.start - 1) // size]][(row.start - 1) % size] if row.start else 0
            assert value != GARBAGE, f"{row.request.request_id} reads what nobody computed"
            self._check_state(row, states, value)
            sampled: list[int] = []
            values: list[int] = []
            for position in range(row.start, row.start + row.num_tokens):
                token = row.token(position)
                if token is None:
                    assert row.is_decode and not row.drafts
                    token = self.device_tokens[row.request, position]
                value = value_after(value, token, adapter)
                self.kv[table[position // size]][position % size] = value
                written.append(table[position // size])
                sampled.append(sample(value))
                values.append(value)
            if row.state is not None:
                self._end_state(row.state, row, values, plan.step)
            sampled = sampled[-row.num_samples :] if row.samples else []
            accepted = 0
            while accepted < len(row.drafts) and row.drafts[accepted] == sampled[accepted]:
                accepted += 1
            if row.samples:
                self.device_tokens[row.request, row.start + row.num_tokens] = sampled[-1]
            results.append(sampled[: accepted + 1])
        self.in_flight.append((plan, results, written))

    def launch_prompts(self, plan: StepPlan) -> None:
        """What it reads is there, or a step in flight that it follows computes it."""
        assert plan.prompts and self.prompts is None
        self.num_prompt_steps += 1
        size = self.config.block_size
        computing = {block for _, _, written in self.in_flight for block in written}
        made: dict[int, list[int]] = {}
        read = {b for row, table in zip(plan.rows, plan.block_tables, strict=True) for b in table[: row.start // size]}
        assert plan.follows or read.isdisjoint(computing), "it does not wait for what it reads"
        before = [list(values) for values in self.kv]
        self.launch(plan)
        _, results, written = self.in_flight.pop()
        for block in set(written):  # a position that is computed again has the value that it had
            made[block] = self.kv[block]
            self.kv[block] = [
                now if now == was else GARBAGE for now, was in zip(made[block], before[block], strict=True)
            ]
        for row in plan.rows:
            self.device_tokens.pop((row.request, row.start + row.num_tokens), None)
        self.prompts = plan, results, made

    def commit_prompts(self) -> None:
        assert self.prompts is not None
        (plan, results, made), self.prompts = self.prompts, None
        for block, values in made.items():
            self.kv[block] = values
        for row in plan.rows:
            assert self.resident[row.adapter_slot] == row.request.adapter, "the slot changed under a step"
        self.take(*self.scheduler.commit(plan, results, self.now))

    def drop_prompts(self) -> None:
        assert self.prompts is not None
        (plan, _, _), self.prompts = self.prompts, None
        self.take(*self.scheduler.drop(plan))

    def _check_state(self, row: StepRow, states: list[int], value: int) -> None:
        """The row begins from the state behind its first position, in a slot that no row of the step writes."""
        state, config = row.state, self.config
        assert (state is None) == (not config.num_states)
        if state is None:
            return
        assert state.slot < config.num_states
        assert (state.source == NO_STATE) == (row.start == 0)
        if state.replayed:
            assert state.source == state.slot
            assert self.kept[state.slot][state.replayed - 1] == value, f"{row.request.request_id} replays wrong drafts"
        elif row.start:
            assert states[state.source] == value, f"{row.request.request_id} begins from a wrong state"
        assert state.keeps == bool(row.drafts)
        positions = [position for position, _ in state.saves]
        assert positions == sorted(set(positions))
        first, end = row.start - state.replayed, row.start + row.num_tokens - len(row.drafts)
        assert all(first < position <= end for position in positions), "a state of drafts is saved"

    def _end_state(self, state: RowState, row: StepRow, values: list[int], step: int) -> None:
        """What a row leaves behind: states, or its drafts' inputs beside the state before it."""
        replayed = self.kept.pop(state.slot, [])[: state.replayed]
        at = dict(enumerate([*replayed, *values], row.start - state.replayed + 1))
        ends = {slot: at[position] for position, slot in state.saves}
        if not state.keeps:
            ends[state.slot] = values[-1]
        elif row.start in at:
            ends[state.slot] = at[row.start]
        else:
            ends[state.slot] = self.states[state.source]
        for slot, value in ends.items():
            self.states[slot], self.state_steps[slot] = value, step
        if state.keeps:
            self.kept[state.slot] = values

    def commit(self) -> None:
        plan, results, _ = self.in_flight.popleft()
        for row in plan.rows:
            assert self.resident[row.adapter_slot] == row.request.adapter, "the slot changed under a step"
        self.take(*self.scheduler.commit(plan, results, self.now))
        if self.seconds is not None:
            self.scheduler.observe(plan, self.seconds(plan), None)

    def drop(self, index: int) -> None:
        """The step failed: whatever it wrote is garbage."""
        plan, _, written = self.in_flight[index]
        del self.in_flight[index]
        for block in written:
            self.kv[block] = [GARBAGE] * self.config.block_size
        self.states = [GARBAGE if at == plan.step else s for s, at in zip(self.states, self.state_steps, strict=True)]
        self.take(*self.scheduler.drop(plan))

    def drain(self, max_steps: int) -> int:
        """Steps until nothing is left; fails if that takes more than `max_steps`."""
        for count in range(max_steps):
            if not self.scheduler.has_work():
                return count
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.scheduler.stats()}")

    # ---- what must hold

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.check_requests()

    def check_requests(self) -> None:
        known = {r.request_id for r in self.scheduler.requests()}
        assert known == set(self.submitted) - set(self.terminal)

    def settle_disk(self) -> None:
        """Until nothing is written or read."""
        while self.scheduler.disk is not None and self.scheduler.disk.busy:
            self.disk.start(self.scheduler.disk.orders(), self.kv, self.states)
            self.disk.finish(self.scheduler.disk, self.kv, self.states, least=1)
            self.scheduler.check_integrity()

    def check_outputs(self) -> None:
        self.settle_disk()
        for request_id, request in self.submitted.items():
            event = self.terminal[request_id]
            tokens, reason = expected_tokens(request, self.config)
            if event.kind is EventKind.FINISHED and request_id not in self.cut:
                assert event.reason == reason
                assert self.streamed[request_id] == tokens == request.output
            else:  # ended early: what was streamed is right as far as it goes
                assert self.streamed[request_id] == tokens[: len(self.streamed[request_id])]
        assert self.scheduler.stats()["blocks_used"] == 0

    def _check_plan(self, plan: StepPlan) -> None:
        budget = (plan.prompts and self.config.lane_budget) or self.config.max_num_batched_tokens
        assert 0 < plan.num_tokens <= budget
        # the last token of a preempted request, found in the cache but for it, comes as a chunk of one
        streaming = any(row.is_decode and not row.request.num_preemptions for row in plan.rows)
        if streaming and self.config.itl_target_s is None and self.config.mixed_chunk is not None:
            assert sum(row.num_tokens for row in plan.rows if not row.is_decode) <= self.config.mixed_chunk
        assert len(plan.rows) <= self.config.max_num_seqs
        decodes = [row.is_decode for row in plan.rows]
        assert decodes == sorted(decodes, reverse=True)
        assert len({row.request.request_id for row in plan.rows}) == len(plan.rows)
        states = [row.state for row in plan.rows if row.state is not None]
        copies = [slot for state in states for _, slot in state.saves]
        own = [state.slot for state in states]
        assert len(set(copies)) == len(copies) and len(set(own)) == len(own), "written by two rows"
        assert {state.source for state in states}.isdisjoint(copies), "written while a row begins from it"
        assert self.disk.slots().isdisjoint(copies), "written while it is saved or fetched"
        size = self.config.block_size
        others = [p for p, _, _ in self.in_flight] + ([self.prompts[0]] if self.prompts else [])
        assert all(
            other.prompts is plan.prompts
            or {row.request for row in other.rows}.isdisjoint(row.request for row in plan.rows)
            for other in others
        ), "in both lanes"
        busy = self.disk.blocks()
        for row, table in zip(plan.rows, plan.block_tables, strict=True):
            assert row.request.request_id not in self.terminal
            assert len(table) * size >= row.start + row.num_tokens
            writes = set(table[row.start // size : (row.start + row.num_tokens - 1) // size + 1])
            assert writes.isdisjoint(busy), "written while it is saved or fetched"
            for other in [plan, *others]:
                for there, blocks in zip(other.rows, other.block_tables, strict=True):
                    assert there.request is row.request or writes.isdisjoint(blocks), "written while another reads it"

    def _assert_slot_unused(self, slot: int) -> None:
        for plan in [plan for plan, _, _ in self.in_flight] + ([self.prompts[0]] if self.prompts else []):
            assert all(row.adapter_slot != slot for row in plan.rows), "a slot that a step reads is loaded over"
