"""Of which beginnings states are kept, who finds them, and what is evicted first."""

from __future__ import annotations

from itertools import pairwise

import pytest

from scheduler.plan import EventKind
from scheduler.request import AdapterKey
from tests.scheduler.harness import FakeEngine, config, make_request
from tests.scheduler.test_prefix_cache import PROMPT, run_one

LONG = [*PROMPT, *range(31, 46)]  # 36 tokens


def make(depth: int = 0, **changes: object) -> FakeEngine:
    values: dict[str, object] = {"num_states": 4, "num_snapshots": 8, "max_num_batched_tokens": 64}
    return FakeEngine(config(**(values | changes)), depth)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("max_tokens", "cached"), [(3, 12), (4, 24), (7, 24), (8, 28), (10, 28)])
def test_a_second_turn_begins_behind_the_answer(depth: int, max_tokens: int, cached: int) -> None:
    """21 tokens of prompt: behind its closing 8 at first, then behind the last full block of what was computed."""
    engine = make(depth)
    first = engine.add(make_request("a", PROMPT, max_tokens))
    engine.drain(20)
    request, row = run_one(engine, "b", [*PROMPT, *first.output, 1, 2])
    assert request.num_cached == row.start == cached
    engine.check_outputs()


def test_a_second_turn_that_repeats_no_answer_begins_behind_the_last_message() -> None:
    """Templates drop what was thought: the answer comes back in other tokens."""
    engine = make()
    run_one(engine, "a", LONG)
    assert run_one(engine, "b", [*LONG[:28], 1, 2, 3, 4, 5])[0].num_cached == 28
    engine.check_outputs()


@pytest.mark.parametrize(("opening", "cached"), [(0, 36), (1, 32), (3, 32), (9, 24), (99, 0)])
def test_a_snapshot_is_where_the_last_message_ends(opening: int, cached: int) -> None:
    """Whoever rendered the prompt says how much of its end opens the answer."""
    engine = make()
    run_one(engine, "a", LONG, opening_tokens=opening)
    assert run_one(engine, "b", [*LONG, 1, 2, 3, 4], opening_tokens=0)[0].num_cached == cached
    engine.check_outputs()


@pytest.mark.parametrize("budget", [5, 64])
def test_where_two_prompts_part_the_third_begins(budget: int) -> None:
    engine = make(max_num_batched_tokens=budget)
    tails = [[n] * 20 for n in (1, 2, 3)]
    assert [run_one(engine, f"r{n}", PROMPT + tail)[0].num_cached for n, tail in enumerate(tails)] == [0, 0, 20]
    engine.check_outputs()


def test_a_full_block_of_no_snapshot_is_no_hit() -> None:
    engine = make(num_snapshots=0)
    run_one(engine, "a", LONG)
    assert run_one(engine, "b", LONG)[0].num_cached == 0
    assert engine.scheduler.stats()["blocks_cached"] > 0


def test_nothing_is_kept_where_the_cache_is_off() -> None:
    engine = make(prefix_caching=False)
    run_one(engine, "a", LONG)
    stats = engine.scheduler.stats()
    assert stats["snapshots_total"] == stats["snapshots_saved"] == 0


def test_tenants_adapters_and_salts_never_share() -> None:
    engine = make(num_snapshots=100, num_blocks=400)
    owners = [
        {"tenant": tenant, "cache_salt": salt, "adapter": AdapterKey(uid, version)}
        for tenant, salt in (("a", ""), ("b", ""), ("a", "b"), ("a", "c"), ("a', 'b", ""))
        for uid, version in ((0, 0), (1, 1), (1, 2), (2, 1))
    ]
    for i, owner in enumerate(owners):
        assert run_one(engine, f"r{i}", LONG, **owner)[0].num_cached == 0
        assert run_one(engine, f"again{i}", LONG, **owner)[0].num_cached == 28
    engine.check_outputs()


def test_the_least_recently_used_is_given_away() -> None:
    engine = make(num_snapshots=2)
    prompts = {name: [number] * 30 for number, name in enumerate("abc", 1)}
    for name in "ab":
        run_one(engine, name, prompts[name])
    assert run_one(engine, "a again", prompts["a"])[0].num_cached == 20
    run_one(engine, "c", prompts["c"])  # instead of b's
    assert run_one(engine, "a once more", prompts["a"])[0].num_cached == 20
    assert run_one(engine, "b again", prompts["b"])[0].num_cached == 0
    engine.check_outputs()


@pytest.mark.parametrize("repeats", [False, True])
def test_of_a_conversation_what_its_next_turn_begins_from_is_kept(repeats: bool) -> None:
    """Two conversations side by side, with room for two snapshots each and one to come."""
    engine = make(num_snapshots=5, num_blocks=200, max_model_len=400)
    turns, last = [[n] * 30 for n in (1, 2)], [0, 0]
    for turn in range(6):
        for n in (0, 1):
            request, _ = run_one(engine, f"{n}.{turn}", turns[n])
            assert request.num_cached >= last[n], "it begins where the turn before could be used"
            last[n] = (len(turns[n]) - 8) // 4 * 4
            turns[n] = [*turns[n], *(request.output if repeats else [40 + turn]), *[n + 1] * 20]
    engine.check_outputs()


def test_a_failed_step_leaves_no_snapshot_behind_a_block_of_another() -> None:
    engine = make(depth=1, num_snapshots=1)
    run_one(engine, "a", LONG)
    run_one(engine, "other", [7] * 30)  # takes the only slot
    request = engine.add(make_request("b", LONG, 3))
    engine.step()
    assert request.num_cached == 0 and engine.scheduler.stats()["snapshots_findable"] == 1
    engine.drop(0)
    assert engine.scheduler.stats()["snapshots_findable"] == 0
    engine.drain(10)
    assert run_one(engine, "c", LONG)[0].num_cached == 0
    engine.check_outputs()


def test_what_a_spoiled_request_kept_behind_a_block_of_another_is_not_found() -> None:
    engine = make(num_snapshots=1)
    run_one(engine, "a", LONG)
    run_one(engine, "other", [7] * 30)
    engine.add(make_request("b", LONG, 3))
    engine.step()
    engine.take(engine.scheduler.fail("b", "not finite", spoiled=True))
    assert engine.scheduler.stats()["snapshots_findable"] == 0


def test_who_began_from_a_failed_step_begins_again() -> None:
    """Although the blocks that it found are another's, and computed."""
    engine = make(depth=1, num_snapshots=1)
    run_one(engine, "a", LONG)
    run_one(engine, "other", [7] * 30)
    engine.add(make_request("b", LONG, 3))
    engine.step()
    reader = engine.add(make_request("c", LONG, 3))
    engine.launch(engine.scheduler.schedule(engine.now))
    assert reader.num_cached == 28 and len(engine.in_flight) == 2
    engine.drop(0)
    engine.drain(20)
    engine.check_outputs()
    assert reader.num_preemptions == 1 and engine.terminal["c"].kind is EventKind.FINISHED


@pytest.mark.parametrize("num_snapshots", [1, 2])
def test_no_step_writes_where_it_begins_from(num_snapshots: int) -> None:
    engine = make(num_snapshots=num_snapshots, num_blocks=200)
    run_one(engine, "a", LONG)
    engine.add(make_request("b", [*LONG[:28], *[1] * 20], 3))
    engine.add(make_request("c", [2] * 40, 3))
    assert [r.start for r in engine.step().rows] == [28, 0]
    engine.drain(20)
    engine.check_outputs()


def test_an_answer_keeps_its_newest_alone() -> None:
    engine = make()
    engine.add(make_request("a", PROMPT, 30))
    engine.drain(40)
    stats = engine.scheduler.stats()
    assert stats["snapshots_findable"] == 2 < stats["snapshots_saved"]


def test_a_snapshot_goes_with_its_block() -> None:
    engine = make(num_blocks=12)
    run_one(engine, "a", LONG)
    run_one(engine, "b", list(range(60, 100)))
    assert run_one(engine, "c", LONG)[0].num_cached == 0
    engine.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_equal_prompts_that_arrive_together_are_computed_once(depth: int) -> None:
    engine = make(depth)
    for i in range(3):
        engine.add(make_request(f"r{i}", LONG, 3))
    assert [(r.request.request_id, r.num_tokens) for r in engine.step().rows] == [("r0", 36)]
    rows = [(r.request.request_id, r.start) for r in engine.step().rows if not r.is_decode]
    assert rows == [("r1", 28), ("r2", 28)]
    engine.drain(20)
    engine.check_outputs()


def test_no_more_run_than_there_are_states() -> None:
    engine = make(num_states=2)
    for i in range(4):
        engine.add(make_request(f"r{i}", [i] * 5, 3))
    assert len(engine.step().rows) == 2
    engine.drain(40)
    engine.check_outputs()


@pytest.mark.parametrize("learnt", [False, True])
def test_once_next_turns_repeat_answers_the_prompts_snapshots_go_first(learnt: bool) -> None:
    """Four conversations in six slots: those behind answers are enough to go on from."""
    engine = make(num_snapshots=6, num_blocks=400)

    def turn(name: str, prompt: list[int]) -> tuple[int, list[int]]:
        request = engine.add(make_request(name, prompt, 8, opening_tokens=1))
        engine.drain(20)
        return request.num_cached, [*prompt, *request.output]

    for number in range(20 if learnt else 0):
        context = turn(f"first {number}", [number + 50] * 30)[1]
        assert turn(f"second {number}", [*context, 1, 2])[0] == 36
    contexts = [turn(name, [number] * 30)[1] for number, name in enumerate("wxyz", 1)]
    assert (turn("next", [*contexts[0], 1, 2])[0] == 36) is learnt
    engine.check_outputs()


def test_blocks_take_the_memory_of_snapshots_and_give_it_back() -> None:
    """A cache of 40 blocks, of which a snapshot takes 4: prompts in turn, then one that needs nearly all of it."""
    engine = make(num_blocks=40, num_snapshots=10, snapshot_blocks=4, max_model_len=160)
    for number in range(1, 4):
        run_one(engine, f"r{number}", [number] * 30)
    stats = engine.scheduler.stats()
    assert stats["snapshots_findable"] and stats["blocks_free"] == 40
    assert run_one(engine, "again", [3] * 30)[0].num_cached > 0
    run_one(engine, "long", [9] * 150)
    assert engine.scheduler.stats()["snapshots_evicted"]
    assert run_one(engine, "gone", [3] * 30)[0].num_cached == 0
    engine.check_outputs()


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize(("system", "second"), [(0, 0), (19, 0), (20, 20), (21, 20), (99, 0)])
def test_behind_a_system_message_the_second_conversation_begins(budget: int, system: int, second: int) -> None:
    """From five blocks on; before, that is computed again until a third one shows that it is shared."""
    engine = make(max_num_batched_tokens=budget)
    prompts = [PROMPT + [n] * 20 for n in (1, 2, 3)]
    found = [run_one(engine, f"r{n}", prompt, system_tokens=system)[0] for n, prompt in enumerate(prompts)]
    assert [request.num_cached for request in found] == [0, second, 20]
    engine.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_conversations_that_begin_together_compute_the_system_message_once(depth: int) -> None:
    engine = make(depth)
    for n in (1, 2, 3):
        engine.add(make_request(f"r{n}", PROMPT + [n] * 20, 3, system_tokens=20))
    assert [(r.request.request_id, r.num_tokens) for r in engine.step().rows] == [("r1", 41)]
    rows = [(r.request.request_id, r.start) for r in engine.step().rows if not r.is_decode]
    assert rows == [("r2", 20), ("r3", 20)]
    engine.drain(20)
    engine.check_outputs()


def test_a_system_message_is_shared_by_its_owner_alone() -> None:
    engine = make(num_snapshots=100, num_blocks=400)
    owners = [
        {"tenant": tenant, "cache_salt": salt, "adapter": AdapterKey(uid, 1)}
        for tenant, salt in (("a", ""), ("b", ""), ("a", "b"))
        for uid in (0, 1)
    ]
    for cached in (0, 20):
        for i, owner in enumerate(owners):
            prompt = PROMPT + [i + 1 + cached] * 20
            request = run_one(engine, f"{cached} {i}", prompt, system_tokens=20, **owner)[0]
            assert request.num_cached == cached
    engine.check_outputs()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_system_message_stays_as_long_as_turns_behind_it_come(goes_on: bool) -> None:
    """New ones or the same again; single turns of others come and go meanwhile, more of them than there are slots."""
    engine = make(num_snapshots=6, num_blocks=400, max_model_len=400)
    talk = PROMPT + [1] * 20
    for turn in range(6):
        assert (run_one(engine, f"turn {turn}", talk, system_tokens=20)[0].num_cached > 20) is (turn > 0)
        talk += [turn + 2] * 20 if goes_on else []
        for other in range(3):
            run_one(engine, f"other {turn} {other}", [40 + 3 * turn + other] * 30)
    assert run_one(engine, "next", PROMPT + [0] * 20, system_tokens=20)[0].num_cached == 20
    engine.check_outputs()


def test_a_system_message_stays_while_an_answer_is_written() -> None:
    engine = make(num_snapshots=5, num_blocks=400, max_model_len=400)
    talk = engine.add(make_request("talk", PROMPT + [1] * 20, 60, system_tokens=20))
    for other in range(10):
        run_one(engine, f"other {other}", [40 + other] * 30)
    assert engine.scheduler.request("talk") is talk
    assert run_one(engine, "next", PROMPT + [2] * 20, system_tokens=20)[0].num_cached == 20
    engine.drain(80)
    engine.check_outputs()


def test_a_conversation_that_begins_leaves_the_answers_of_others_alone() -> None:
    """Also where a short first question ends within the block behind the system message."""
    engine = make(num_snapshots=4, num_blocks=200)
    run_one(engine, "old", [9] * 30)
    first = engine.add(make_request("first", [*PROMPT[:20], 1, 2], 8, system_tokens=20, opening_tokens=1))
    engine.drain(20)
    run_one(engine, "second", [*PROMPT[:20], 3, 4], system_tokens=20, opening_tokens=1)
    for other in (5, 6):  # the second takes the place of the old one
        run_one(engine, f"other {other}", [other] * 30)
    again = [*PROMPT[:20], 1, 2, *first.output, 6, 7]
    assert run_one(engine, "again", again, system_tokens=20, opening_tokens=1)[0].num_cached == 28
    engine.check_outputs()


def test_where_prompts_part_close_behind_a_system_message_no_other_is_kept() -> None:
    engine = make()
    tails = [[1] * 20, [1] * 4 + [2] * 20, [1] * 4 + [3] * 20]
    systems, found = [0, 20, 20], []
    for n, (tail, system) in enumerate(zip(tails, systems, strict=True)):
        found.append(run_one(engine, f"r{n}", PROMPT[:20] + tail, system_tokens=system)[0].num_cached)
    assert found == [0, 0, 20]
    engine.check_outputs()


DOCUMENTS = [[number + 100] * 70 for number in range(4)]


def _asked(*chosen: int, question: int) -> tuple[list[int], tuple[int, ...]]:
    """A prompt of documents and a question, and where the documents end."""
    prompt = [token for number in chosen for token in DOCUMENTS[number]]
    return [*prompt, *[question] * 20], tuple(70 * count for count in range(1, len(chosen) + 1))


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("known", [True, False])
def test_behind_each_document_the_second_prompt_begins(budget: int, known: bool) -> None:
    """That parts there from the first one; where nobody knows the ends, the third one does."""
    engine = make(max_num_batched_tokens=budget, num_blocks=400, max_model_len=400, num_snapshots=30)
    found = []
    for name, chosen in enumerate([(0, 1, 2), (0, 1, 3), (0, 2), (0, 2, 3), (3,), (0, 1, 2)], 1):
        prompt, ends = _asked(*chosen, question=name)
        found.append(run_one(engine, f"r{name}", prompt, part_ends=ends if known else ())[0].num_cached)
    assert found == ([0, 140, 68, 140, 0, 208] if known else [0, 0, 0, 68, 0, 140])
    engine.check_outputs()


@pytest.mark.parametrize(
    ("ends", "kept"),
    [
        ((), []),
        ((30, 70, 139, 145, 220), [68, 136, 220]),  # 64 tokens behind the one before, or the last one
        ((30, 70, 139, 145), [68, 136]),
        ((30, 70, 139, 170), [68, 136, 168]),
        ((8, 12, 14), []),  # less than what is computed again rather than kept
        ((70, 239, 240, 400), [68, 236]),  # the prompt's own is at 240
        ((220, 70, 70), [68, 220]),
    ],
)
def test_of_many_ends_of_parts_few_are_kept(ends: tuple[int, ...], kept: list[int]) -> None:
    engine = make(num_blocks=400, max_model_len=400, max_num_batched_tokens=300)
    engine.add(make_request("a", [*range(100, 344)], 3, opening_tokens=1, part_ends=ends))
    plan = engine.step()
    assert plan is not None and plan.rows[0].state is not None
    assert [position for position, _ in plan.rows[0].state.saves] == [*kept, 240]
    engine.drain(10)
    engine.check_outputs()


def test_far_into_a_prompt_parts_are_farther_from_each_other() -> None:
    """So their number grows with the logarithm of the prompt's length."""
    engine = make(num_blocks=1000, max_model_len=4000, max_num_batched_tokens=4000, num_snapshots=90)
    ends = tuple(range(4, 3900, 4))
    engine.add(make_request("a", [n % 50 + 100 for n in range(3900)], 3, part_ends=ends))
    plan = engine.step()
    assert plan is not None and plan.rows[0].state is not None
    *saves, last, closing = (position for position, _ in plan.rows[0].state.saves)
    assert saves[:3] == [68, 136, 204] and (last, closing) == (3888, 3892) and len(saves) == 22
    assert all(after - before > after // 8 for before, after in pairwise(saves))
    engine.drain(10)


def test_parts_of_prompts_take_no_slots_of_chats_that_go_on() -> None:
    """Once it has been seen that nobody begins behind them, and next turns come."""
    engine = make(num_snapshots=8, num_blocks=800, max_model_len=800)
    talks = {n: [n] * 30 for n in range(1, 5)}
    number, missed = 0, 0
    for turn in range(12):
        for n in talks:
            request = engine.add(make_request(f"{n}.{turn}", talks[n], 6, opening_tokens=1))
            engine.drain(30)
            missed += turn > 3 and request.num_cached == 0
            talks[n] = [*talks[n], *request.output, *[n + 10] * 8]
            prompt = [token for document in range(2) for token in [1000 + 10 * number + document] * 70]
            run_one(engine, f"once {number}", [*prompt, 1, 2, 3, 4, 5], part_ends=(70, 140), opening_tokens=1)
            number += 1
    assert missed <= 4
    engine.check_outputs()


def test_what_several_begin_from_outlives_what_nobody_does() -> None:
    engine = make(num_snapshots=6, num_blocks=1000, max_model_len=400)
    for question in (1, 2):
        prompt, ends = _asked(0, question=question)
        found = run_one(engine, f"first {question}", prompt, part_ends=ends, opening_tokens=1)[0].num_cached
    assert found == 68
    for number in range(12):
        run_one(engine, f"once {number}", [1000 + number] * 100, part_ends=(70,), opening_tokens=1)
    prompt, ends = _asked(0, question=3)
    assert run_one(engine, "again", prompt, part_ends=ends)[0].num_cached == 68
    engine.check_outputs()


def test_parts_go_to_disk_once_somebody_has_begun_from_them() -> None:
    engine = make(num_blocks=400, max_model_len=400, disk_bytes=1000, disk_block_bytes=1, disk_state_bytes=2)
    saved = []
    for question, second in enumerate((1, 1, 2), 1):
        prompt, ends = _asked(0, second, question=question)
        run_one(engine, f"r{question}", prompt, part_ends=ends, opening_tokens=1, kv_digest=b"model")
        engine.settle_disk()
        saved.append(engine.scheduler.stats()["disk_saved_snapshots"])
    each = saved[0]  # prompt and answer have
    assert saved == [each, 2 * each + 1, 3 * each + 2]
    engine.check_outputs()
