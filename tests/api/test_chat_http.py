"""/v1/chat/completions over real HTTP with the openai client."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import Running

USER = [{"role": "user", "content": "héllo wörld 👋 日本"}]
END = 0  # the fake's end-of-sequence token
ECHO = "user\nhéllo wörld 👋 日本\nassistant\n"  # the fake answers with the prompt; special tokens are hidden


def ask(server: Running, **fields: Any) -> Any:
    return server.openai.chat.completions.create(**{"model": "tiny", "messages": USER, **fields})


def test_an_answer(server: Running) -> None:
    answer = ask(server)
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == ECHO
    assert choice.finish_reason == "stop" and choice.logprobs is None
    usage = answer.usage
    assert usage.prompt_tokens == usage.completion_tokens - 1 > 20  # the end token counts
    assert usage.total_tokens == 2 * usage.prompt_tokens + 1
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 16 * 16


@pytest.mark.parametrize("model", ["tiny", "burst"])
def test_a_stream_is_the_same_answer(server: Running, model: str) -> None:
    chunks = list(ask(server, model=model, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == last.usage.prompt_tokens + 1
    assert all(chunk.usage is None and chunk.id == last.id for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ECHO
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert "\ufffd" not in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_the_wire_form_of_a_stream(server: Running) -> None:
    body = {"model": "tiny", "messages": USER, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.read().decode().split("\n\n")
    assert lines[-1] == "" and lines[-2] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert all("usage" not in event for event in events)


def test_usage_in_every_event_of_a_stream(server: Running) -> None:
    """It grows with the tokens that were told of, and there is none unless it is asked for."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = list(ask(server, stream=True, max_tokens=5, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == last.usage.completion_tokens == 5
    assert all(chunk.choices[0].delta.content for chunk in chunks[1:-1])
    assert chunks[-1].choices[0].finish_reason == "length"
    options["include_usage"] = False
    assert all(chunk.usage is None for chunk in ask(server, stream=True, max_tokens=5, stream_options=options))


def test_a_message_may_be_echoed(server: Running) -> None:
    messages = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
    fields = {"messages": messages, "extra_body": {"echo": True, "continue_final_message": True}}
    plain = ask(server, messages=messages, extra_body={"continue_final_message": True}).choices[0].message.content
    assert ask(server, **fields).choices[0].message.content == "Well, " + plain
    text = "".join(chunk.choices[0].delta.content or "" for chunk in ask(server, **fields, stream=True))
    assert text == "Well, " + plain
    assert ask(server, extra_body={"echo": True}).choices[0].message.content == ECHO


def test_adapters_answer_beside_the_base(server: Running) -> None:
    before = len(server.received("Submit"))
    answer = ask(server, model="reverse", extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == [*answer.prompt_token_ids[::-1], END]
    assert server.received("Submit")[before]["adapter"] == "reverse"


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens(server: Running, stream: bool) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        answer = ask(server, **{field: 5}, stream=stream)
        if stream:
            assert [c.choices[0].finish_reason for c in answer][-1] == "length"
        else:
            assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 5


def test_without_max_tokens_the_rest_of_the_context_is_allowed(server: Running) -> None:
    before = len(server.received("Submit"))
    usage = ask(server).usage
    assert server.received("Submit")[before]["sampling"]["max_tokens"] == 2048 - usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["gated", "burst"])
def test_stop_strings(server: Running, model: str, stream: bool) -> None:
    before = len(server.received("StopFound"))
    answer = ask(server, model=model, stop=["wörl", "zzz"], stream=stream, extra_body={"return_token_ids": True})
    if stream:
        chunks = list(answer)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        tokens = [t for c in chunks for t in getattr(c.choices[0], "token_ids", [])]
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, tokens = answer.choices[0].message.content, answer.choices[0].token_ids
        reason = answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len(tokens)
    assert (text, reason) == ("user\nhéllo ", "stop")
    if model == "gated":  # the other has ended before it can be told
        (found,) = server.wait_for("StopFound", before + 1)[before:]
        assert found["num_tokens"] == len(tokens)


def test_n_answers_with_seeds_of_their_own(server: Running) -> None:
    before = len(server.received("Submit"))
    answer = ask(server, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {ECHO}
    seeds = [message["sampling"]["seed"] for message in server.received("Submit")[before:]]
    assert seeds[0] == 7 and len(set(seeds)) == 3
    usage = answer.usage
    assert usage.completion_tokens == 3 * (usage.prompt_tokens + 1)


def test_a_stream_of_n_answers(server: Running) -> None:
    texts = {0: "", 1: ""}
    for chunk in ask(server, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: ECHO, 1: ECHO}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Running, stream: bool) -> None:
    answer = ask(server, logprobs=True, top_logprobs=3, max_tokens=12, stream=stream)
    if stream:
        entries = [entry for c in answer for entry in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])]
    else:
        entries = answer.choices[0].logprobs.content
    assert len(entries) == 12
    assert bytes(b for entry in entries for b in entry.bytes).decode().startswith("<|im_start|>user\nh")
    assert all(entry.logprob == -0.25 and len(entry.top_logprobs) == 3 for entry in entries)
    assert entries[0].top_logprobs[0].token == entries[0].token == "<|im_start|>"


def test_logprobs_without_alternatives(server: Running) -> None:
    entries = ask(server, logprobs=True, max_tokens=2).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [0, 0]


def test_token_ids(server: Running) -> None:
    answer = ask(server, extra_body={"return_token_ids": True})
    assert [*answer.prompt_token_ids, END] == answer.choices[0].token_ids
    chunks = list(ask(server, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    assert [t for c in chunks for t in getattr(c.choices[0], "token_ids", [])] == answer.choices[0].token_ids


def test_special_tokens_can_be_shown(server: Running) -> None:
    text = ask(server, extra_body={"skip_special_tokens": False}).choices[0].message.content
    assert text.startswith("<|im_start|>user\n")


def test_content_parts_and_final_message(server: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Well,"}]
    answer = ask(server, messages=messages, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == "user\nab\nassistant\nWell,"
    answer = ask(server, messages=messages, extra_body={"add_generation_prompt": False})
    assert answer.choices[0].message.content == "user\nab\nassistant\nWell,\n"


def test_template_variables(server: Running) -> None:
    for name in ("enable_thinking", "self", "source"):
        assert ask(server, extra_body={"chat_template_kwargs": {name: False}}).choices[0].message.content == ECHO


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"logit_bias": {"400": 1}}, "logit_bias"),
        ({"max_tokens": 3000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 2100}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"max_completion_tokens": 3000}, "max_completion_tokens"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ],
)
def test_mistakes_are_400(server: Running, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **fields)
    assert caught.value.type == "invalid_request_error"
    assert param is None or caught.value.param == param


def test_an_unknown_model_lists_the_known(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(server, model="nope")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert "'tiny'" in caught.value.message and "'reverse'" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_its_status_also_for_streams(server: Running, stream: bool) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        ask(server, model="refuse", stream=stream)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.code == "queue_full"


def test_a_fault_of_the_engine(server: Running) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ask(server, model="fail")
    assert caught.value.status_code == 500 and "a fault of the fake" in caught.value.message
    with pytest.raises(openai.APIError, match="a fault of the fake"):
        list(ask(server, model="fail", stream=True))


def test_a_body_that_is_too_large(server: Running) -> None:
    response = server.http.post("/v1/chat/completions", content=b" " * (17 * 2**20))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_types_of_bodies(server: Running) -> None:
    body = json.dumps({"model": "tiny", "messages": USER, "stream": False})
    form, page = "application/x-www-form-urlencoded", {"Origin": "https://one.example"}

    def status(path: str, kind: str | None, **headers: str) -> int:
        headers |= {"Content-Type": kind} if kind else {}
        return server.http.post(path, content=body, headers=headers).status_code

    for kind in (None, "application/json; charset=utf-8", "application/octet-stream"):
        assert status("/v1/chat/completions", kind) == 200
    for kind in (form, "text/plain; charset=utf-8", "Multipart/Form-Data; boundary=x"):
        for path in ("/v1/chat/completions", "/api/chat"):
            assert status(path, kind, **page) == 415
            assert status(path, kind) == 200  # curl -d


def test_a_chunked_body_that_is_too_large(server: Running) -> None:
    def chunks() -> Any:
        for _ in range(17):
            yield b" " * 2**20

    try:
        response = server.http.post("/v1/chat/completions", content=chunks())
    except httpx.TransportError:  # the server may close while we still send
        return
    assert response.status_code == 413


def test_unknown_paths_and_methods(server: Running) -> None:
    for method, path, status in (("GET", "/v1/nope", 404), ("GET", "/v1/chat/completions", 405)):
        response = server.http.request(method, path)
        assert response.status_code == status and response.json()["error"]["message"]


def test_many_at_once(server: Running) -> None:
    def one(number: int) -> bool:
        content = f"number {number} é"
        answer = ask(server, messages=[{"role": "user", "content": content}])
        return answer.choices[0].message.content == f"user\n{content}\nassistant\n"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(40)))
