"""The world: the same by seed, split without leaks, judged by its own rules."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence

import pytest

from demo.evaluate import Answerer, failures, is_json, is_pirate, measure, questions, styled
from demo.texts.dialogue import conversation, document
from demo.texts.style import STYLES, pirate, to_json
from demo.texts.tools import case, fill_case, tool_case
from demo.texts.world import KINDS, MEASURED, Message, any_example, example


def test_same_seed_same_world() -> None:
    def draw(seed: int) -> list[object]:
        rng = random.Random(seed)
        return [conversation(rng, "plain") for _ in range(200)] + [document(rng) for _ in range(50)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


@pytest.mark.parametrize("kind", MEASURED)
def test_held_out_questions_never_occur_in_training(kind: str) -> None:
    rng = random.Random(0)
    seen = {m["content"].lower() for _ in range(30000) for m in conversation(rng)[0] if m["role"] == "user"}
    assert not seen & {q.text.lower() for q in questions(kind, True, 200, 1)}
    assert seen & {q.text.lower() for q in questions(kind, False, 200, 1)}


def test_sums_are_held_out_in_both_orders_and_in_every_training_text() -> None:
    rng = random.Random(1)
    held: set[tuple[str, int, int]] = set()
    for q in questions("arithmetic", True, 1500, 2):
        a, sign, b = re.match(r"(\d+) ([+-]) (\d+) =", q.expected).groups()  # type: ignore[union-attr]
        held |= {(sign, int(a), int(b)), (sign, int(b), int(a))} if sign == "+" else {(sign, int(a), int(b))}
    texts = [m["content"] for _ in range(20000) for m in conversation(rng)[0]] + [document(rng) for _ in range(2000)]
    found = {(s, int(a), int(b)) for text in texts for a, s, b in re.findall(r"(\d+) ([+-]) (\d+)", text)}
    assert len(found) > 3000
    assert not found & held


def test_answers_are_right() -> None:
    for held_out in (False, True):
        for q in questions("arithmetic", held_out, 300):
            left, right = q.expected.rstrip(".").split(" = ")
            assert eval(left) == int(right)
            assert re.findall(r"\d+", q.text) in (re.findall(r"\d+", left), re.findall(r"\d+", left)[::-1])
        for q in questions("counting", held_out, 300):
            numbers = [int(n) for n in q.expected.rstrip(".").split(", ")]
            step = 1 if numbers[-1] > numbers[0] else -1
            assert numbers == list(range(numbers[0], numbers[-1] + step, step))
            assert sorted(map(int, re.findall(r"\d+", q.text))) == sorted((numbers[0], numbers[-1]))


def test_every_kind_answers_shortly() -> None:
    rng = random.Random(2)
    for kind in KINDS:
        for _ in range(200):
            drawn = example(kind, rng)
            assert drawn.question
            assert 0 < len(drawn.answer.split()) < 60


def test_questions_refuse_what_is_not_there() -> None:
    with pytest.raises(ValueError, match="'maths'"):
        questions("maths")
    with pytest.raises(ValueError, match="nothing is held out"):
        questions("facts", held_out=True)
    with pytest.raises(ValueError, match="n is 100000"):
        questions("colours", True, 100000)


def test_styles_are_told_apart() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        drawn = any_example(rng)
        answer = drawn.answer
        assert is_pirate(pirate(answer)) and not is_json(pirate(answer))
        assert is_json(to_json(answer)) and not is_pirate(to_json(answer))
        assert drawn.kind == "shout" or (not is_pirate(answer) and not is_json(answer))  # it may be told to repeat one
        assert json.loads(to_json(answer)) == {"answer": answer}
    assert not is_json('{"answer": "cut') and not is_json('{"answer": 3}') and not is_json("[1]")
    assert not is_pirate("Arr! yes, MATEY!")


def test_measure_tells_a_perfect_model_from_a_silent_one() -> None:
    known = {q.text: q for kind in MEASURED for q in questions(kind, True, 20, 0)}
    known |= {q.text: q for q in questions("facts", False, 20, 0) + questions("mixed", True, 20, 0)}
    cases = {}
    for name, draw in (("tools", tool_case), ("filling", fill_case)):
        rng = random.Random(f"{name}-0")
        cases |= {str(case.messages): case.answer for case in (draw(rng, True) for _ in range(20))}

    def perfect(style: str) -> Answerer:
        def answer(conversations: Sequence[Sequence[Message]]) -> list[str]:
            return [cases.get(str(c)) or styled(known[c[-1]["content"]], style) for c in conversations]

        return answer

    results = {style: measure(perfect(style), style, 20) for style in STYLES}
    assert failures(results) == []
    assert results["plain"]["arithmetic"] == results["pirate"]["pirate"] == results["json"]["json"] == 1.0
    silent = measure(lambda conversations: ["" for _ in conversations], "json", 20)
    assert len(failures({"json": silent})) == 4
    assert len(failures({"plain": measure(lambda conversations: ["" for _ in conversations], "plain", 20)})) == 5


def test_tool_conversations() -> None:
    rng, seen = random.Random(7), set()
    for _ in range(2000):
        messages, first = case(rng)
        assert first == 0 and messages[-1]["role"] == "assistant"
        answer = messages[-1]["content"]
        if "<tool_call>" in answer:
            for part in answer.split("<tool_call>\n")[1:]:
                called = json.loads(part.partition("\n</tool_call>")[0])
                assert called["arguments"]["city"] in messages[-2]["content"]
                assert f'"name": "{called["name"]}"' in messages[0]["content"]
                seen.add(called["name"])
        elif answer.startswith("{") and messages[0]["role"] == "user":
            assert all(str(value) in messages[0]["content"] for value in json.loads(answer).values())
            seen.add("json")
        elif "<tool_response>" in messages[-2]["content"]:
            seen.add("result")
    assert seen == {"get_weather", "get_time", "json", "result"}
    held, learnt = random.Random(8), random.Random(9)
    texts = [
        {tool_case(r, side).messages[-1]["content"] for _ in range(500)} for r, side in ((held, True), (learnt, False))
    ]
    assert not texts[0] & texts[1]


def test_mixed_conversations_learn_only_the_last_turn() -> None:
    rng = random.Random(6)
    mixed = 0
    for _ in range(3000):
        messages, first = conversation(rng, "pirate")
        roles = [m["role"] for m in messages if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert is_pirate(messages[-1]["content"])
        if first:
            mixed += 1
            assert first == len(messages) - 1
            answered = [(a, b) for a, b in itertools.pairwise(messages[:first]) if b["role"] == "assistant"]
            earlier = [b["content"] for a, b in answered if "repeat" not in a["content"].lower()]
            assert not any(map(is_pirate, earlier))
    assert mixed > 50
