"""When a decode step runs as two half-batches: the cost model against a simulated machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ping_pong import PROBE_EVERY, PROBE_STEPS, Always, Costs, Line, Measured, Work, touched

LAYERS, EXPERTS, TOP_K = 48, 128, 8
ROWS = (1, 2, 4, 8, 16, 32)
GPU_S, READ_S = 60e-6, 6e-10  # of a layer, and of each position that it reads


def costs(expert_s: float, gpu_s: float = GPU_S) -> Costs:
    fixed = dict.fromkeys((False, True), Line(dict.fromkeys(ROWS, gpu_s)))
    pool = {touched(EXPERTS, rows, TOP_K): expert_s * touched(EXPERTS, rows, TOP_K) for rows in ROWS}
    return Costs(LAYERS, EXPERTS, TOP_K, fixed, READ_S, Line(pool))


class Machine:
    """Rows draw from `spread` experts; its pool takes `slow` times what start-up measured, halves `more` on top."""

    def __init__(self, costs: Costs, spread: float = EXPERTS, slow: float = 1.0, more: float = 1.0) -> None:
        self.costs, self.spread, self.slow, self.more = costs, spread, slow, more

    def seconds(self, work: Work, halves: bool) -> float:
        if halves:
            return self.more * self.costs.halves_s(work, self.spread, self.slow)
        return self.costs.whole_s(work, self.spread, self.slow)

    def run(self, chooser: Measured, work: Work, steps: int) -> list[bool]:
        chosen = []
        for _ in range(steps):
            chosen.append(chooser.halves(work))
            chooser.observe(work, chosen[-1], self.seconds(work, chosen[-1]))
        return chosen

    def better(self, work: Work) -> bool:
        return self.seconds(work, True) < self.seconds(work, False)


def test_lines_and_their_inverse():
    line = Line({8: 4.0, 16: 6.0, 32: 5.0, 64: 10.0})
    assert [line.at(x) for x in (0, 4, 8, 12, 32, 48, 128)] == [0, 2, 4, 5, 6, 8, 18]
    assert [line.where(y) for y in (0, 2, 5, 18)] == [0, 4, 12, 128]


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6), st.floats(0.1, 300.0))
def test_a_line_never_falls(values, x):
    line = Line(dict(zip((8.0, 15.0, 29.0, 51.0, 82.0, 111.0), values, strict=False)))
    assert line.at(x) <= line.at(x * 1.1) + 1e-12


def test_small_experts_and_long_contexts_pay_and_short_ones_do_not():
    c = costs(expert_s=18e-6)
    assert c.can_pay(4, 4 * 32768)
    for work, pays in ((Work(4, 4 * 32768, False), True), (Work(32, 32 * 512, False), False)):
        assert Machine(c).run(Measured(c), work, 50)[-10:] == [pays] * 10


def test_halves_that_read_nearly_everything_twice_are_never_chosen():
    c = costs(expert_s=60e-6)
    assert not c.can_pay(32, 32 * 4096)
    chooser = Measured(c)
    assert not any(Machine(c).run(chooser, Work(32, 32 * 4096, False), 400))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("spread", [12, 40, 128])
@pytest.mark.parametrize("slow", [1.0, 1.5])
@pytest.mark.parametrize("rows", [2, 4, 8, 16])
@pytest.mark.parametrize("context", [512, 16384, 40960])
def test_it_comes_to_the_faster_of_both(lora, spread, slow, rows, context):
    """Whatever the routing; a machine whose two ways differ by less than the margin may go either way."""
    c = costs(expert_s=18e-6)
    machine, work = Machine(c, spread, slow), Work(rows, rows * context, lora)
    chosen = machine.run(Measured(c), work, 600)[-300:]
    whole, halves = machine.seconds(work, False), machine.seconds(work, True)
    taken = sum(halves if way else whole for way in chosen) / len(chosen)
    assert taken <= 1.05 * min(whole, halves)
    if abs(whole - halves) > 0.08 * whole:
        assert (sum(chosen) > 250) == machine.better(work)


def test_halves_that_disappoint_are_given_up_and_tried_again():
    c, work = costs(expert_s=18e-6), Work(4, 4 * 32768, False)
    machine, chooser = Machine(c, more=1.5), Measured(c)
    chosen = machine.run(chooser, work, 1000)
    assert True in chosen and sum(chosen) < 200
    machine.more = 1.0
    assert sum(machine.run(chooser, work, 1000)[-200:]) >= 190


def test_a_few_whole_steps_are_looked_at_now_and_then():
    c, work = costs(expert_s=18e-6), Work(4, 4 * 32768, False)
    chosen = Machine(c).run(Measured(c), work, 3 * PROBE_EVERY)
    assert 2 * PROBE_STEPS <= chosen.count(False) <= 4 * PROBE_STEPS and not any(chosen[:PROBE_STEPS])


def test_hysteresis():
    """Contexts that grow past the point where halves begin to pay switch once, not at every step."""
    c = costs(expert_s=18e-6)
    machine, chooser, changes, before = Machine(c), Measured(c), 0, False
    for number in range(400):
        work = Work(4, 4 * (4000 + 40 * number + 300 * (number % 2)), False)
        [now] = machine.run(chooser, work, 1)
        changes += now != before and not (before and chooser.predict(work)[1] < chooser.predict(work)[0] * 0.99)
        before = now
    assert before and changes <= 3


def test_clocks_that_stand_still_or_jump_say_nothing():
    c, work = costs(expert_s=18e-6), Work(4, 4 * 32768, False)
    chooser = Measured(c)
    before = chooser.predict(work)
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        chooser.observe(work, False, seconds)
    assert chooser.predict(work) == before
    chooser.observe(work, False, 1000.0)
    assert chooser.predict(work)[0] < 2.01 * before[0]


def test_on_halves_whatever_has_two_rows():
    assert Always().halves(Work(2, 2, False)) and not Always().halves(Work(1, 100000, True))
    assert not Measured(costs(18e-6)).halves(Work(1, 100000, False))
