"""Steps of several tokens a row, and the proposers that look drafts up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.drafts import Drafter, OwnText, Predicted, Proposal, RecentTexts, texts
from scheduler.errors import IntegrityError
from scheduler.plan import EventKind
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler.harness import FakeEngine, config, expected_tokens, make_request


class Fixed:
    """Proposes what it is given."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def propose(self, request, most: int) -> Proposal:
        return Proposal(self.tokens[:most], 4)

    def end(self, request) -> None:
        pass


class Oracle(Fixed):
    """Always right."""

    def propose(self, request, most: int) -> Proposal:
        return Proposal(expected_tokens(request, config())[0][len(request.output) :][:3], 4)


def always(proposer) -> Drafter | None:
    return None if proposer is None else Drafter(proposer, 32, always=True)


def decoding(proposer, max_tokens: int = 20, **changes):
    """A scheduler whose one request has a prompt of 3 tokens and the output [10]."""
    scheduler = Scheduler(config(**changes), always(proposer))
    request = make_request("a", [1, 2, 3], max_tokens, ignore_eos=False, stop_token_ids=(8,))
    scheduler.add(request, 0.0)
    scheduler.commit(scheduler.schedule(0.0), [[10]], 0.0)
    return scheduler, request


def test_right_drafts_save_steps() -> None:
    steps = []
    for proposer in (None, Oracle()):
        engine = FakeEngine(config(), drafter=always(proposer))
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
    engine = FakeEngine(config(max_num_batched_tokens=8, num_blocks=6), drafter=always(Fixed(*range(11, 20))))
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
    proposer, request = OwnText(), make_request("a", prompt)
    for cut in [*sorted(data.draw(st.sets(st.integers(0, len(output))))), len(output)]:
        request.output = output[:cut]
        tokens, matched = proposer.propose(request, count)
        assert list(tokens) == _looked_up(prompt + output[:cut], count)
        assert (matched >= 2) == bool(tokens)
    proposer.end(request)
    assert not proposer._texts


def _looked_up(tokens: list[int], count: int) -> list[int]:
    end = _end(tokens, tokens)
    return [] if end is None else (tokens[end:] * count)[:count]


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "CATCH_UP", 10)
    proposer, request = OwnText(), make_request("a", [1, 2, 3] * 11)
    answers = [list(proposer.propose(request, 2).tokens) for _ in range(4)]
    assert answers == [[], [], [], [1, 2]]


# ---- texts of late


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), max_size=5)


@settings(max_examples=200, deadline=None)
@given(ended=TEXTS, prompt=st.lists(st.integers(0, 2), min_size=1, max_size=30), count=st.integers(1, 8))
def test_the_longest_match_is_proposed(ended, prompt, count) -> None:
    proposer, others = RecentTexts(), list[list[int]]()
    for i, tokens in enumerate([*ended, prompt]):
        request = make_request(str(i), tokens)
        tokens_proposed, matched = proposer.propose(request, count)
        for other in reversed(others):
            if other == tokens[: len(other)]:
                others.remove(other)  # goes on from it
                break
        end = _end(tokens, tokens)
        best = (0, []) if end is None else (_common(tokens, end, tokens), _looked_up(tokens, count))
        if best[0] < texts.ENOUGH:
            for other in others:
                end = _end(other, tokens[-4:]) if len(tokens) >= 4 else None
                if end is not None and _common(other, end, tokens) > best[0]:
                    best = _common(other, end, tokens), other[end : end + count]
        assert (matched, list(tokens_proposed)) == best
        proposer.end(request)
        others = [list(text.tokens) for text in proposer._ended]


def _end(text: list[int], tail: list[int]) -> int | None:
    """Where `text` last goes on after the last four tokens of `tail`, or after two, in its own text alone."""
    for size in (4, 2) if text is tail else (4,):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == tail[len(tail) - size :]:
                return end
    return None


def _common(text: list[int], end: int, tokens: list[int]) -> int:
    count = 0
    while count < min(end, len(tokens)) and text[end - 1 - count] == tokens[-1 - count]:
        count += 1
    return count


@given(st.lists(st.tuples(st.sampled_from("xy"), st.integers(1, 30)), max_size=20), st.integers(1, 60))
def test_what_is_kept_is_bounded(ended, most_tokens) -> None:
    proposer = RecentTexts(most_tokens)
    for i, (tenant, length) in enumerate(ended):
        request = make_request(str(i), [i] * length, tenant=tenant)
        proposer.propose(request, 1)
        proposer.end(request)
        assert proposer._held == sum(len(text.tokens) for text in proposer._ended) <= most_tokens
        assert sorted(proposer._ended.values()) == sorted(t for t, own in proposer._by_tenant.items() for _ in own)


def test_the_next_turn_takes_the_index_over() -> None:
    proposer = RecentTexts()
    first = make_request("a", [1, 2, 3, 4, 5, 6])
    proposer.propose(first, 4)
    first.output = [7, 8]
    proposer.propose(first, 4)
    proposer.end(first)
    (text,) = proposer._ended
    second = make_request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5])
    assert list(proposer.propose(second, 3).tokens) == [6, 7, 8]
    assert proposer._texts[second] is text and not proposer._ended


def test_other_tenants_texts_are_not_looked_at() -> None:
    proposer = RecentTexts()
    ended = make_request("a", [1, 2, 3, 4, 5, 6, 7, 8], tenant="x")
    proposer.propose(ended, 4)
    proposer.end(ended)
    for tenant, wanted in (("x", [5, 6, 7]), ("y", [])):
        request = make_request(f"of {tenant}", [1, 2, 3, 4], tenant=tenant)
        assert list(proposer.propose(request, 3).tokens) == wanted


# ---- what the model itself says


def predicted(always: bool = True) -> tuple[Scheduler, Request, Drafter]:
    drafter = Drafter(Predicted(), 4, always=always)
    scheduler = Scheduler(config(), drafter)
    request = make_request("a", [1, 2, 3], 40)
    scheduler.add(request, 0.0)
    scheduler.commit(scheduler.schedule(0.0), [[10]], 0.0)
    return scheduler, request, drafter


def test_what_the_model_says_is_drafted_once() -> None:
    scheduler, request, _ = predicted()
    scheduler.take_proposals({"a": [11, 12, 13, 14, 15], "unknown": [5]})
    plan = scheduler.schedule(0.0)
    assert plan.rows[0].drafts == (11, 12, 13, 14)
    scheduler.commit(plan, [[11, 12, 9]], 0.0)
    plan = scheduler.schedule(0.0)
    assert plan.rows[0].drafts == (), "tokens have followed since"
    scheduler.commit(plan, [[8]], 0.0)
    assert request.output == [10, 11, 12, 9, 8]
    scheduler.take_proposals({"a": []})
    assert scheduler.schedule(0.0).rows[0].drafts == ()


def test_proposals_of_ended_requests_are_ignored() -> None:
    scheduler, _, drafter = predicted()
    scheduler.abort("a", "")
    scheduler.take_proposals({"a": [11]})
    assert not drafter._proposer._taken
    Scheduler(config()).take_proposals({})
    with pytest.raises(ValueError, match="made by OwnText"):
        always(OwnText()).take(make_request("b", [1], 4), [2])


@given(chances=st.lists(st.booleans(), min_size=30, max_size=30))
def test_drafts_are_made_when_they_would_be_looked_at(chances: list[bool]) -> None:
    """Whatever the drafter waits for: behind each step for which the plan lets proposals be made, and only then, the
    next step looks for drafts."""
    scheduler, request, drafter = predicted(always=False)
    looked: list[int] = []
    propose = drafter._proposer.propose

    def watched(request: Request, most: int) -> Proposal:
        looked.append(len(request.output))
        return propose(request, most)

    drafter._proposer.propose = watched  # type: ignore[method-assign]
    plan = scheduler.schedule(0.0)
    for right in chances:
        row = plan.rows[0]
        new = [*row.drafts, 9] if right else [9 - (row.drafts[:1] == (9,))]
        scheduler.commit(plan, [new], 0.0)
        after, most = plan.wanted["a"]
        assert most == min(4, 2 * len(row.drafts) + 1)
        wanted = len(request.output) >= after
        if wanted:
            scheduler.take_proposals({"a": ([9 if right else 7] * 4)[:most]})
        before = len(looked)
        plan = scheduler.schedule(0.0)
        if plan is None:
            break
        assert (len(looked) > before) == wanted
