"""`min_tokens`, `bad_words` and `allowed_token_ids` over HTTP."""

from __future__ import annotations

import pytest

PROMPT = [{"role": "user", "content": "Tell me a story about a fox."}]


def answer(demo, model: str = "demo", **fields):
    body = {"model": model, "messages": PROMPT, "temperature": 0, "max_tokens": 60, "return_token_ids": True, **fields}
    response = demo.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def tokens(demo, text: str) -> list[int]:
    body = {"model": "demo", "prompt": text, "add_special_tokens": False}
    return demo.http.post("/tokenize", json=body).json()["tokens"]


def holds(sequence: list[int], part: list[int]) -> bool:
    return any(sequence[i : i + len(part)] == part for i in range(len(sequence)))


@pytest.mark.parametrize("model", ["demo", "pirate"])
def test_bad_words_do_not_come(demo, model):
    answer(demo, model)  # from here on the prompt is in the cache, and all answers are computed alike
    plain = answer(demo, model)
    words = plain["message"]["content"].split()[:3]
    spelt = [tokens(demo, form) for word in words for form in (word, f" {word}")]
    assert any(holds(plain["token_ids"], part) for part in spelt)
    without = answer(demo, model, bad_words=words)["token_ids"]
    assert without and not any(holds(without, part) for part in spelt)
    assert answer(demo, model)["token_ids"] == plain["token_ids"]


def test_no_end_before_min_tokens(demo):
    plain = answer(demo, max_tokens=300)
    length = len(plain["token_ids"])
    assert plain["finish_reason"] == "stop" and length < 280
    longer = answer(demo, max_tokens=300, min_tokens=length + 10)
    assert len(longer["token_ids"]) >= length + 10 and longer["token_ids"][: length - 1] == plain["token_ids"][:-1]
    stop = plain["message"]["content"][:3]
    assert answer(demo, stop=stop)["message"]["content"] == ""
    assert stop in answer(demo, stop=stop, min_tokens=20)["message"]["content"]


def test_only_allowed_tokens_come(demo):
    allowed = sorted(set(tokens(demo, "Once upon a time there was a fox.")))
    got = answer(demo, allowed_token_ids=allowed, max_tokens=20, logprobs=True, top_logprobs=5)
    assert len(got["token_ids"]) == 20 and set(got["token_ids"]) <= set(allowed)
    assert all(len(entry["top_logprobs"]) <= len(allowed) for entry in got["logprobs"]["content"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 61}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": "fox"}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_the_field(demo, fields, param):
    body = {"model": "demo", "messages": PROMPT, "max_tokens": 60, **fields}
    response = demo.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert param.partition(".")[0] in error["message"]
