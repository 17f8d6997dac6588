"""Steps of several tokens a row, and the proposer that looks drafts up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import IntegrityError
from scheduler.plan import EventKind
from scheduler.policy import drafts
from scheduler.policy.drafts import NgramProposer
from scheduler.scheduler import Scheduler
from tests.scheduler.harness import FakeEngine, config, expected_tokens, make_request


class Fixed:
    """Proposes what it is given."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def propose(self, request) -> list[int]:
        return list(self.tokens)

    def forget(self, request) -> None:
        pass


class Oracle(Fixed):
    """Always right."""

    def propose(self, request) -> list[int]:
        return expected_tokens(request, config())[0][len(request.output) :][:3]


def decoding(proposer, max_tokens: int = 20, **changes):
    """A scheduler whose one request has a prompt of 3 tokens and the output [10]."""
    scheduler = Scheduler(config(**changes), proposer)
    request = make_request("a", [1, 2, 3], max_tokens, ignore_eos=False, stop_token_ids=(8,))
    scheduler.add(request, 0.0)
    scheduler.commit(scheduler.schedule(0.0), [[10]], 0.0)
    return scheduler, request


def test_right_drafts_save_steps() -> None:
    steps = []
    for proposer in (None, Oracle()):
        engine = FakeEngine(config(), proposer=proposer)
        engine.add(make_request("a", [1, 2], 21))
        steps.append(engine.drain(50))
        engine.check_outputs()
    assert steps == [21, 6]  # the prompt's token, then four a step


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_what_is_accepted_counts_and_the_rest_is_given_back(accepted: int) -> None:
    scheduler, request = decoding(Fixed(11, 12, 13), block_size=2)
    plan = scheduler.schedule(0.0)
    (row,) = plan.rows
    assert (row.start, row.num_tokens, row.drafts, row.num_samples) == (3, 4, (11, 12, 13), 4)
    assert [row.token(p) for p in range(3, 7)] == [10, 11, 12, 13]
    assert len(plan.block_tables[0]) == 4
    service = scheduler.stats()["tenant_service/t"]
    tokens = [*[11, 12][:accepted], 40]
    (event,) = scheduler.commit(plan, [tokens], 0.0)
    assert event.tokens == tokens and request.output == [10, *tokens]
    assert request.num_computed == 4 + accepted and request.num_drafts == request.num_in_flight == 0
    assert len(request.blocks) == -(-request.num_tokens // 2)
    stats = scheduler.stats()
    assert (stats["drafted_tokens"], stats["accepted_tokens"]) == (3, accepted)
    assert stats["tenant_service/t"] - service == 2.0 * accepted
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("tokens", "kept", "reason", "stop"),
    [([11, 7, 13, 14], [11], "stop", 7), ([8], [], "stop", 8), ([11, 12, 13, 14], [11, 12, 13], "length", None)],
)
def test_a_run_ends_where_its_request_ends(tokens, kept, reason, stop) -> None:
    scheduler, request = decoding(Fixed(11, tokens[1] if len(tokens) > 1 else 0, 13), max_tokens=20)
    plan = scheduler.schedule(0.0)
    request.ending, request.most_output = frozenset((7, 8)), 4
    (event,) = scheduler.commit(plan, [tokens], 0.0)
    assert (event.kind, event.tokens, event.reason, event.stop_token) == (EventKind.FINISHED, kept, reason, stop)
    assert request.output == [10, *kept] and not scheduler.has_work()
    scheduler.check_integrity()


@pytest.mark.parametrize("tokens", [[], [12, 1], [11, 12, 13, 1, 1], [1, 12]])
def test_tokens_that_cannot_be_right_are_refused(tokens) -> None:
    scheduler, _ = decoding(Fixed(11, 12, 13))
    plan = scheduler.schedule(0.0)
    with pytest.raises(IntegrityError, match="accepted drafts"):
        scheduler.commit(plan, [tokens], 0.0)


def test_drafts_end_before_the_limits() -> None:
    assert len(_drafted(max_tokens=4)) == 2  # one output token is there, one is sampled after the drafts
    assert len(_drafted(max_model_len=7)) == 2
    assert _drafted(max_tokens=2) == ()
    assert len(_drafted(max_num_batched_tokens=4)) == 3
    assert len(_drafted(num_blocks=2, block_size=3)) == 1


def _drafted(max_tokens: int = 20, **changes) -> tuple[int, ...]:
    scheduler, _ = decoding(Fixed(*range(11, 20)), max_tokens, **changes)
    return scheduler.schedule(0.0).rows[0].drafts


def test_drafts_take_only_what_no_row_wants() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=8, num_blocks=6), proposer=Fixed(*range(11, 20)))
    engine.add(make_request("a", [1, 2], 9))
    engine.step()
    engine.add(make_request("b", [5] * 12, 3))
    plan = engine.step()
    assert [(r.request.request_id, r.num_tokens, len(r.drafts)) for r in plan.rows] == [("a", 1, 0), ("b", 7, 0)]
    plan = engine.step()
    assert [(r.request.request_id, r.num_tokens, len(r.drafts)) for r in plan.rows] == [("a", 3, 2), ("b", 5, 0)]
    engine.drain(30)
    engine.check_outputs()
    assert engine.scheduler.stats()["preemptions"] == 0


def test_rows_whose_last_token_is_in_flight_have_no_drafts_and_drafts_are_waited_for() -> None:
    scheduler, request = decoding(Fixed(11, 12))
    first = scheduler.schedule(0.0)
    assert first.rows[0].drafts and scheduler.schedule(0.0) is None  # nothing else to do before they are committed
    scheduler.commit(first, [[11, 5]], 0.0)
    assert scheduler.schedule(0.0).rows[0].start == len(request.prompt) + 2


# ---- prompt lookup


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    output=st.lists(st.integers(0, 3), max_size=40),
    count=st.integers(1, 8),
    data=st.data(),
)
def test_lookup_proposes_what_followed_the_last_time(prompt, output, count, data) -> None:
    proposer, request = NgramProposer(count), make_request("a", prompt)
    for cut in [*sorted(data.draw(st.sets(st.integers(0, len(output))))), len(output)]:
        request.output = output[:cut]
        assert proposer.propose(request) == _looked_up(prompt + output[:cut], count)
    proposer.forget(request)
    assert not proposer._indices


def _looked_up(tokens: list[int], count: int) -> list[int]:
    for size in (4, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return (tokens[end:] * count)[:count]
    return []


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_CATCH_UP", 10)
    proposer, request = NgramProposer(2), make_request("a", [1, 2, 3] * 11)
    answers = [proposer.propose(request) for _ in range(4)]
    assert answers == [[], [], [], [1, 2]]
