"""The same engine under hypothesis' own choice of calls, which it can shrink to the few that matter."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.drafts import Drafter
from scheduler.plan import AdmissionError, EventKind
from scheduler.request import BASE, AdapterKey
from tests.scheduler.harness import EOS, FakeEngine, Guesser, config, make_request

ADAPTERS = (BASE, AdapterKey(1, 1), AdapterKey(1, 2), AdapterKey(2, 1))


class SchedulerMachine(RuleBasedStateMachine):
    engine: FakeEngine

    @initialize(
        depth=st.sampled_from([0, 1]),
        num_blocks=st.integers(2, 12),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 20),
        slots=st.integers(1, 2),
        patience=st.sampled_from([0.0, 0.05]),
        caching=st.booleans(),
        guesses=st.none() | st.integers(0, 99),
        disk=st.none() | st.integers(1, 12),
        states=st.none() | st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 3)),
    )
    def start(self, depth, num_blocks, max_num_seqs, budget, slots, patience, caching, guesses, disk, states) -> None:
        self.retired: set[AdapterKey] = set()
        self.released: list[AdapterKey] = []
        settings = config(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            num_adapter_slots=slots,
            slot_patience_s=patience,
            prefix_caching=caching,
            max_queue=6,
            max_model_len=40,
            disk_bytes=0 if disk is None else disk + (0 if states is None else 2),
            disk_block_bytes=int(disk is not None),
            disk_state_bytes=0 if disk is None or states is None else 2,
            num_states=states[0] if states is not None else 0,
            num_snapshots=states[1] if states is not None else 0,
            snapshot_blocks=states[2] if states is not None else 0,
        )
        self.proposer = None if guesses is None else Guesser(settings, guesses)
        self.engine = FakeEngine(settings, depth, drafter=self.proposer and Drafter(self.proposer, 32, always=True))

    @rule(
        same=st.integers(0, 23),
        tail=st.lists(st.integers(10, 12), max_size=3),
        max_tokens=st.integers(0, 24),
        adapter=st.sampled_from(ADAPTERS),
        tenant=st.sampled_from("ab"),
        priority=st.integers(-1, 1),
        ignore_eos=st.booleans(),
        stop=st.booleans(),
        background=st.booleans(),
        system_tokens=st.sampled_from([0, 4, 20, 99]),
        part_ends=st.lists(st.integers(0, 30), max_size=4).map(sorted).map(tuple),
    )
    def arrive(
        self, same, tail, max_tokens, adapter, tenant, priority, ignore_eos, stop, background, system_tokens, part_ends
    ) -> None:
        if adapter in self.retired:
            return
        request = make_request(
            f"r{len(self.engine.submitted)}",
            [1] * same + tail,
            max_tokens,
            adapter=adapter,
            tenant=tenant,
            priority=priority,
            ignore_eos=ignore_eos,
            stop_token_ids=(EOS + 1, EOS + 2) if stop else (),
            background=background,
            system_tokens=system_tokens,
            part_ends=part_ends,
            kv_digest=repr(adapter).encode() if self.engine.scheduler.disk is not None else b"",
        )
        known = len(self.engine.scheduler.requests())
        try:
            self.engine.add(request)
        except AdmissionError as error:
            assert error.code in ("queue_full", "too_long", "empty_prompt")
            assert len(self.engine.scheduler.requests()) == known

    @rule(count=st.integers(1, 6))
    def steps(self, count) -> None:
        while len(self.engine.in_flight) > self.engine.depth:
            self.engine.commit()
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: len(self.engine.in_flight) < 2)
    @rule()
    def launch(self) -> None:
        """Whatever the depth: two steps may stay in flight while other things happen."""
        self.engine.schedule()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def commit(self) -> None:
        self.engine.commit()

    @precondition(lambda self: self.engine.scheduler.requests())
    @rule(data=st.data(), how=st.sampled_from(["abort", "finish", "fail"]))
    def end(self, data, how) -> None:
        request = data.draw(st.sampled_from(self.engine.scheduler.requests()))
        scheduler = self.engine.scheduler
        if how == "finish":
            self.engine.stop_string(request.request_id, data.draw(st.integers(0, len(request.output))))
        elif how == "abort":
            self.engine.take(scheduler.abort(request.request_id, "client"))
        else:
            self.engine.take(scheduler.fail(request.request_id, "fault"))
        assert scheduler.request(request.request_id) is None

    @precondition(lambda self: self.engine.in_flight)
    @rule(data=st.data())
    def step_fails(self, data) -> None:
        self.engine.drop(data.draw(st.integers(0, len(self.engine.in_flight) - 1)))

    @rule()
    def loading_pauses(self) -> None:
        self.engine.hold_loads = not self.engine.hold_loads

    @precondition(lambda self: self.engine.loading)
    @rule()
    def load_fails(self) -> None:
        self.engine.fail_load(next(iter(self.engine.loading)))

    @precondition(lambda self: self.engine.scheduler.disk is not None)
    @rule(data=st.data(), what=st.sampled_from(["stalls", "full", "damaged"]))
    def disk_fails(self, data, what) -> None:
        disk = self.engine.disk
        if what == "stalls":
            disk.stalls = not disk.stalls
        elif what == "full":
            disk.full = not disk.full
        elif disk.kept:
            del disk.kept[data.draw(st.sampled_from(sorted(disk.kept)))]

    @rule(adapter=st.sampled_from(ADAPTERS[1:]))
    def retire(self, adapter) -> None:
        if adapter not in self.retired:
            self.retired.add(adapter)
            self.engine.scheduler.retire_adapter(adapter)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()
            self.released += self.engine.scheduler.released_adapters()
            assert len(self.released) == len(set(self.released)) and set(self.released) <= self.retired

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.hold_loads = self.engine.disk.stalls = False
        self.engine.finish_loads()
        self.steps(1)
        self.engine.drain(100 + 60 * len(self.engine.submitted))
        self.engine.check_outputs()
        self.consistent()
        assert set(self.released) == self.retired
        assert self.proposer is None or not self.proposer.known
        assert all(e.kind is not EventKind.TOKENS for e in self.engine.terminal.values())


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
