"""What the adapters of `make train-demo` are trained on."""

from __future__ import annotations

import json

from demo.texts.style import is_json, is_pirate
from demo.tuning.data import is_right, pairs, shortened, talks, write


def test_a_preference_is_the_beginning_of_a_right_answer() -> None:
    rows = list(pairs(300))
    assert rows == list(pairs(300)) and len({row["prompt"] for row in rows}) > 50
    for row in rows:
        assert row["rejected"].startswith(row["chosen"]) and len(row["chosen"]) < len(row["rejected"])
        assert is_right(row["chosen"]) and not is_right(row["rejected"])
    assert shortened("A banana is yellow.") == "A banana is yellow."
    assert shortened("I do not know. My world is very small.") == "I do not know."
    assert not is_right("Once upon a time, a shy fox named Dan lived in the garden. One day Ada found an old map.")


def test_what_is_learnt_of_a_conversation_is_in_the_adapter_s_style(tmp_path) -> None:
    write(tmp_path, {"pirate": 200, "json": 200})
    for name, in_style in (("pirate", is_pirate), ("json", is_json)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert rows == list(talks(name, 200))
        answers = [m for row in rows for m in row["messages"] if m["role"] == "assistant"]
        learnt = [m["content"] for m in answers if m.get("weight", 1)]
        assert all(map(in_style, learnt)) and len(learnt) >= 200
