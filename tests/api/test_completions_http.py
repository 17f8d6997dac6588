"""/v1/completions over real HTTP with the openai client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.api.conftest import Running


def complete(server: Running, prompt: Any = "hello world", **fields: Any) -> Any:
    return server.openai.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 100, **fields})


def ids(server: Running, text: str) -> list[int]:
    response = server.http.post("/tokenize", json={"model": "tiny", "prompt": text})
    return list(response.json()["tokens"])


def test_text_and_token_prompts(server: Running) -> None:
    tokens = ids(server, "hello world")
    for prompt in ("hello world", ["hello world"], tokens, [tokens]):
        answer = complete(server, prompt)
        assert [choice.text for choice in answer.choices] == ["hello world"]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == answer.usage.completion_tokens - 1 == len(tokens)


def test_sixteen_tokens_by_default(server: Running) -> None:
    answer = server.openai.completions.create(model="tiny", prompt="x" * 40)
    assert answer.choices[0].text == "x" * 16 and answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_n(server: Running, stream: bool) -> None:
    answer = complete(server, ["one", "two é"], n=2, stream=stream)
    texts = ["", "", "", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == ["one", "one", "two é", "two é"]
    if not stream:
        assert answer.usage.prompt_tokens == len(ids(server, "one")) + len(ids(server, "two é"))
        assert answer.usage.completion_tokens == 2 * answer.usage.prompt_tokens + 4


def test_logprobs(server: Running) -> None:
    logprobs = complete(server, "hé!", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "!", "<|endoftext|>"]
    assert logprobs.token_logprobs == [-0.25] * 5
    assert logprobs.text_offset == [0, 1, 1, 2, 3]
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 5
    assert logprobs.top_logprobs[0]["h"] == -0.25


def test_a_prompts_seeds_do_not_depend_on_the_other_prompts(server: Running) -> None:
    before = len(server.received("Submit"))
    complete(server, ["one", "two"], n=2, seed=5)
    seeds = [message["sampling"]["seed"] for message in server.received("Submit")[before:]]
    assert seeds[:2] == seeds[2:] and seeds[0] == 5 != seeds[1]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_prompt_logprobs(server: Running, stream: bool) -> None:
    answer = complete(server, "hey", echo=True, logprobs=1, stream=stream)
    parts = list(answer) if stream else [answer]
    merged: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in merged.items():
            if part.choices[0].logprobs is not None:
                values += getattr(part.choices[0].logprobs, name)
    assert "".join(part.choices[0].text for part in parts) == "heyhey"
    assert merged["tokens"] == ["he", "y", "he", "y", "<|endoftext|>"]
    assert merged["text_offset"] == [0, 2, 3, 5, 6]
    assert merged["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert merged["top_logprobs"][0] is None and merged["top_logprobs"][1] == {"y": -0.25}


def test_echo_of_the_prompt_alone(server: Running) -> None:
    """As evaluation harnesses score texts."""
    for prompt in ("hello é", ids(server, "hello é")):
        answer = complete(server, prompt, echo=True, max_tokens=0, logprobs=1)
        assert answer.choices[0].text == "hello é" and answer.choices[0].finish_reason == "length"
        assert len(answer.choices[0].logprobs.tokens) == len(ids(server, "hello é"))
        assert answer.usage.completion_tokens == 0


def test_echo_without_logprobs(server: Running) -> None:
    assert complete(server, "a\u0301", echo=True).choices[0].text == "a\u0301\u00e1"  # the prompt as it was sent
    assert complete(server, ids(server, "b"), echo=True).choices[0].text == "bb"


def test_prompt_logprobs_of_an_answer_that_ends_at_once(server: Running) -> None:
    answer = complete(server, [50, 0], echo=True, logprobs=0, model="reverse")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.25, -0.25]


def test_ignore_eos_and_stop_tokens(server: Running) -> None:
    answer = complete(server, "ab", max_tokens=6, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == "ababab" and answer.choices[0].finish_reason == "length"
    stop = ids(server, "b")
    answer = complete(server, "abc", extra_body={"stop_token_ids": stop})
    assert answer.choices[0].text == "a" and answer.choices[0].finish_reason == "stop"


def test_token_ids(server: Running) -> None:
    (choice,) = complete(server, "hello", extra_body={"return_token_ids": True}).choices
    assert choice.token_ids == [*choice.prompt_token_ids, 0] == [*ids(server, "hello"), 0]


def test_half_a_character_at_the_end_is_shown_as_such(server: Running) -> None:
    tokens = ids(server, "👋")[:-1]
    assert complete(server, tokens).choices[0].text == "\ufffd"
    assert "".join(c.choices[0].text for c in complete(server, tokens, stream=True)) == "\ufffd"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [400]},
        {"prompt": [-1]},
        {"prompt": ["a"] * 129},
        {"prompt": ["a"] * 65, "n": 2},
        {"prompt": "x" * 2048},
        {"max_tokens": 2048},
        {"stop": ["a"] * 17},
        {"suffix": "x"},
        {"best_of": 1, "n": 2},
    ],
)
def test_mistakes_are_400(server: Running, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(server, **fields)


def test_tokenize_and_detokenize(server: Running) -> None:
    tokens = ids(server, "héllo<|im_end|>")
    answer = server.http.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()
    assert answer["prompt"] == answer["content"] == "héllo<|im_end|>"  # vLLM's name and llama-server's
    messages = [{"role": "user", "content": "x"}]
    answer = server.http.post("/tokenize", json={"model": "tiny", "messages": messages}).json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 2048
    assert server.http.post("/detokenize", json={"model": "tiny", "tokens": [4000]}).status_code == 400
    assert server.http.post("/tokenize", json={"model": "tiny"}).status_code == 400


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate", "/tokenize", "/v1/messages"])
def test_a_compressed_body_is_named(server: Running, path: str, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = server.http.post(path, content=b"\x1f\x8b", headers=headers)
    assert answer.status_code == 415 and encoding in answer.text


WRONG_BODIES = {  # -> what the message says
    b"": "empty",
    b" \n": "empty",
    b"{": "truncated",
    "{}".encode("utf-16"): "byte order mark",
    "{}".encode("utf-16-be"): "UTF-8",
    "{}".encode("utf-8-sig"): "byte order mark",
    '{"prompt":"aé"}'.encode("latin-1"): "byte 12 is 0xe9",
    b"[1]": "[1]",
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/load_lora_adapter", "/lora-adapters"])
@pytest.mark.parametrize("body", WRONG_BODIES, ids=range(len(WRONG_BODIES)))
def test_a_body_that_is_no_json_says_why(server: Running, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json", "authorization": "Bearer admin"}
    answer = server.http.post(path, content=body, headers=headers)
    assert answer.status_code == 400
    if path != "/lora-adapters" or body not in (b"{", b"[1]"):  # it takes a list
        assert WRONG_BODIES[body] in answer.json()["error"]["message"]
