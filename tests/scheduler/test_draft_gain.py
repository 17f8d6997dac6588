"""How many drafts a step checks: simulated steps whose time and texts are drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from scheduler.drafts import Drafter, Predicted, Proposal
from scheduler.drafts.chances import Chances
from scheduler.drafts.gain import Gain, Offer
from scheduler.drafts.texts import NOTHING
from scheduler.plan import StepPlan
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler.harness import config, make_request


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: a constant, each token's, each distinct expert's; some steps take longer."""

    fixed: float
    token: float
    expert: float
    experts: int = 128
    chosen: int = 8

    def seconds(self, tokens: int) -> float:
        touched = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        return self.fixed + self.token * tokens + self.expert * touched

    def rate(self, rows: int, drafts: int, chance: float) -> float:
        """Tokens a second if each row checks so many drafts."""
        expected = sum(chance**i for i in range(drafts + 1))
        return rows * expected / self.seconds(rows * (1 + drafts))


class Text:
    """Token i is i. Proposes what comes, each token right with a chance that changes in the middle of the text. A
    look-up takes `each` seconds; `taken`: all so far. `fleeting`: only where the text is what it would have proposed,
    so that a proposal for a token that is not known yet is gone when that turns out otherwise."""

    def __init__(self, chances: tuple[float, float], seed: int, each: float = 0.0, *, fleeting: bool = False) -> None:
        self._chances = chances
        self._seed, self._fleeting = seed, fleeting
        self._rng = random.Random(seed)
        self._each, self.taken = each, 0.0

    def propose(self, request: Request, most: int) -> Proposal:
        self.taken += self._each
        start = len(request.output)
        chance = self._chances[start >= LENGTH // 2]
        if self._fleeting:
            if start and not self._is_right(request, start - 1):
                return NOTHING
            return Proposal([i if self._is_right(request, i) else -1 for i in range(start, start + most)], 8)
        return Proposal([i if self._rng.random() < chance else -1 for i in range(start, start + most)], 8)

    def _is_right(self, request: Request, place: int) -> bool:
        chance = self._chances[place >= LENGTH // 2]
        return random.Random(f"{self._seed} {request.request_id} {place}").random() < chance

    def end(self, request: Request) -> None:
        pass


CONFIG = config(
    num_blocks=4000,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    max_model_len=2000,
    prefix_caching=False,
    block_size=16,
)
CHEAP = Machine(0.01, 0.0001, 0.00001)
LENGTH = 600  # of each output


def simulate(
    machine: Machine, text: Text | None, rows: int, seed: int, hiccups: float, host: float | None = None
) -> tuple[float, float]:
    """(seconds of steps and look-ups, tokens a step). Hiccups are seen by the scheduler and not counted. `host`: steps
    overlap, and one that waits for the tokens of the step before takes so many seconds more."""
    rng = random.Random(seed)
    scheduler = Scheduler(CONFIG, None if text is None else Drafter(text, 16, clock=lambda: text.taken))
    for i in range(rows):
        scheduler.add(make_request(str(i), [3 + i, 5], LENGTH), 0.0)
    total, steps = 0.0, 0
    in_flight: list[tuple[StepPlan, list[list[int]], float]] = []

    def commit() -> None:
        plan, said, seconds = in_flight.pop(0)
        scheduler.commit(plan, said, 0.0)
        scheduler.observe(plan, seconds, None)

    while True:
        if in_flight and (host is None or scheduler.wants_tokens(in_flight[0][0])):
            commit()
        plan = scheduler.schedule(0.0)
        if plan is None and not in_flight:
            return total + (text.taken if text is not None else 0.0), rows * LENGTH / steps
        if plan is not None:
            said = []
            for row in plan.rows:
                start = row.start + row.num_tokens - len(row.drafts) - len(row.request.prompt)
                coming = list(range(start, start + 1 + len(row.drafts)))
                accepted = 0
                while accepted < len(row.drafts) and row.drafts[accepted] == coming[accepted]:
                    accepted += 1
                said.append(coming[: accepted + 1])
            taken = machine.seconds(plan.num_tokens) * rng.uniform(0.95, 1.05)
            taken += 0.0 if host is None or in_flight else host
            total += taken
            steps += 1
            in_flight.append((plan, said, taken * (3 if rng.random() < hiccups else 1)))
        if plan is None or len(in_flight) > 1:
            commit()


machines = st.builds(
    Machine,
    st.sampled_from([0.0, 0.005, 0.02]),
    st.sampled_from([0.00001, 0.0005]),
    st.sampled_from([0.0001, 0.001]),
    st.sampled_from([8, 128]),
    st.just(4),
)


@settings(max_examples=30, deadline=None)
@example(CHEAP, (0.8, 0.3), 4, 0, 0.0, 0.0, 1.0, True)
@example(CHEAP, (0.6, 0.6), 4, 0, 0.0, 0.0, 0.5, True)
@given(
    machine=machines,
    chances=st.tuples(st.sampled_from([0.0, 0.3, 0.6, 0.8, 0.95]), st.sampled_from([0.0, 0.3, 0.6, 0.8, 0.95])),
    rows=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
    hiccups=st.sampled_from([0.0, 0.01]),
    look_up=st.sampled_from([0.0, 0.01, 0.1]),
    host=st.sampled_from([None, 0.0, 0.1, 0.5, 1.0]),
    fleeting=st.booleans(),
)
def test_drafts_never_cost_more_than_they_save(machine, chances, rows, seed, hiccups, look_up, host, fleeting) -> None:
    """`look_up`: of a step's time, what it takes to look up drafts for one row; `host`: what it takes longer for not
    being planned ahead."""
    step = machine.seconds(rows)
    gap = None if host is None else host * step
    plain, _ = simulate(machine, None, rows, seed, hiccups, gap)
    text = Text(chances, seed, look_up * step, fleeting=fleeting)
    drafted, _ = simulate(machine, text, rows, seed, hiccups, gap)
    # a short run: what trying costs counts in full, and requests do not end together
    assert drafted <= (1.06 if hiccups or fleeting else 1.04) * plain


@settings(max_examples=15, deadline=None)
@given(
    machine=machines,
    chance=st.sampled_from([0.6, 0.8, 0.95]),
    rows=st.sampled_from([1, 4, 16]),
    look_up=st.sampled_from([0.01, 0.05]),
    host=st.sampled_from([None, 0.1, 0.3]),
)
def test_most_of_what_can_be_gained_is(machine, chance, rows, look_up, host) -> None:
    """Beside the best fixed number of drafts, where that gains more than trying them out may cost. `look_up`: of all
    rows, and `host`, for not being planned ahead: of a step's time."""
    step = machine.seconds(rows)
    best = max(machine.rate(rows, drafts, chance) for drafts in range(min(16, 128 // rows) + 1)) / (rows / step)
    best /= 1 + (host or 0.0)
    assume(best > 1.3)
    gap = None if host is None else host * step
    plain, _ = simulate(machine, None, rows, 1, 0.0, gap)
    drafted, _ = simulate(machine, Text((chance, chance), 1, look_up * step / rows), rows, 1, 0.0, gap)
    assert plain / drafted >= 1 + 0.25 * (best - 1)


@pytest.mark.parametrize("host", [None, 0.1])
@pytest.mark.parametrize("look_up", [0.0, 0.1, 0.5])
def test_a_text_that_turns_right_is_found_out(look_up: float, host: float | None) -> None:
    """Whatever a look-up takes (of a step's time): those of half a text were of no use, and their time is spent."""
    step = CHEAP.seconds(1)
    text = Text((0.0, 1.0), 0, look_up * step)
    _, tokens_a_step = simulate(CHEAP, text, 1, 0, 0.0, None if host is None else host * step)
    assert tokens_a_step > 1.3


def test_a_text_that_is_always_right_takes_few_steps() -> None:
    _, tokens_a_step = simulate(CHEAP, Text((1.0, 1.0), 0), 1, 0, 0.0)
    assert tokens_a_step > 8


def test_what_was_not_checked_is_learnt_from_too() -> None:
    chances, request = Chances(), make_request("a", [1, 2])
    before = chances.of(request, 8)
    for _ in range(20):
        chances.watch(request, Proposal((7, 7, 7), 8))
        request.output += [7, 7, 7]
    assert chances.of(request, 8) > 0.9 > before
    other = make_request("b", [1])
    assert chances.of(other, 8) > 0.9 and chances.of(other, 2) == before
    for _ in range(20):
        chances.watch(request, Proposal((7, 7, 7), 8))
        request.output += [8]
    assert chances.of(request, 8) < 0.5
    chances.end(request)
    assert not chances._requests


@given(
    offers=st.lists(st.builds(Offer, st.integers(0, 32), st.floats(0.01, 0.98)), min_size=1, max_size=40),
    steps=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 128), st.integers(0, 168), st.floats(0.001, 10)), max_size=40
    ),
    mixed=st.booleans(),
)
def test_choices_stay_within_what_is_offered(offers, steps, mixed) -> None:
    gain = Gain()
    for step in steps:
        gain.observe(*step)
    chosen = gain.choose(offers, len(offers), mixed=mixed)
    assert len(chosen) == len(offers) and sum(chosen) <= 128
    assert all(0 <= count <= offer.drafts for count, offer in zip(chosen, offers, strict=True))


def test_requests_whose_drafts_are_of_no_use_are_seldom_looked_at() -> None:
    looked = 0

    class Wrong(Text):
        def propose(self, request: Request, most: int) -> Proposal:
            nonlocal looked
            looked += 1
            return Proposal([-1] * most, 4)

    simulate(CHEAP, Wrong((0.0, 0.0), 0), 4, 0, 0.0)
    assert 0 < looked < 4 * LENGTH / 8


# ---- drafts that the model makes


def simulate_model(machine: Machine, text: Text, rows: int, each: float) -> tuple[float, float, int]:
    """(seconds of the steps, tokens a step, drafts made of a request) where a draft of all rows takes `each` of a step
    without any."""
    rng = random.Random(3)
    scheduler = Scheduler(CONFIG, Drafter(Predicted(), 8))
    for i in range(rows):
        scheduler.add(make_request(str(i), [3 + i, 5], LENGTH), 0.0)
    total, steps, made = 0.0, 0, 0
    while (plan := scheduler.schedule(0.0)) is not None:
        said, proposals, deepest = [], {}, 0
        for row in plan.rows:
            start, request = len(row.request.output), row.request
            right = [draft == start + i for i, draft in enumerate(row.drafts)]
            accepted = right.index(False) if False in right else len(right)
            said.append(list(range(start, start + accepted + 1)))
            wanted = plan.wanted[request.request_id]
            if start + accepted + 1 >= wanted.after and start + accepted + 1 < LENGTH:
                after = make_request("", [1])
                after.output = list(range(start + accepted + 1))
                proposals[request.request_id] = list(text.propose(after, wanted.most).tokens)
                deepest = max(deepest, wanted.most)
                made += wanted.most
        scheduler.commit(plan, said, 0.0)
        scheduler.take_proposals(proposals)
        taken = (machine.seconds(plan.num_tokens) + deepest * each * machine.seconds(rows)) * rng.uniform(0.95, 1.05)
        total, steps = total + taken, steps + 1
        scheduler.observe(plan, taken, None)
    return total, rows * LENGTH / steps, made // rows


@settings(max_examples=15, deadline=None)
@given(
    machine=machines,
    chance=st.sampled_from([0.0, 0.3, 0.6, 0.8, 0.95]),
    rows=st.sampled_from([1, 4, 16]),
    each=st.sampled_from([0.02, 0.1, 0.2]),
)
def test_drafts_of_the_model_cost_little_more_than_they_save(machine, chance, rows, each) -> None:
    plain, _ = simulate(machine, None, rows, 3, 0.0)
    drafted, _, _ = simulate_model(machine, Text((chance, chance), 3), rows, each)
    assert drafted <= 1.08 * plain


def test_the_model_makes_few_drafts_where_none_pays_and_many_where_they_do() -> None:
    dear = Machine(0.0, 0.001, 0.0001)
    plain, _ = simulate(dear, None, 1, 3, 0.0)
    drafted, tokens, made = simulate_model(dear, Text((0.6, 0.6), 3), 1, 0.05)
    assert made < LENGTH / 8 and tokens < 1.1 and drafted < 1.05 * plain
    plain, _ = simulate(CHEAP, None, 1, 3, 0.0)
    drafted, tokens, made = simulate_model(CHEAP, Text((0.95, 0.95), 3), 1, 0.02)
    assert made > LENGTH / 2 and tokens > 3 and drafted < 0.6 * plain
