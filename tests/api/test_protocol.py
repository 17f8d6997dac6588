"""Every field is used or refused, and the refusal names it."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.bodies.generation import ChatRequest, CompletionRequest
from api.bodies.parsing import Notes, parse
from api.bodies.sampling import derived_seed, sampling_params
from api.errors import ApiError
from api.text.messages import normalise
from engine.messages import Submit, encode

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


FLAT = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
VALUES = FLAT | st.lists(FLAT, max_size=3)


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({**CHAT, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({**TEXT, **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": "one"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": -0.5}, "top_p", "greater than or equal to 0"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"temperature": 1e-40}, "temperature", "0 (greedy) or a number from 1e-06 to 2"),
        ({"top_k": 2**63}, "top_k", "less than 2147483648"),
        ({"stop_token_ids": [2**64]}, "stop_token_ids.0", "less than 2147483648"),
        ({"max_tokens": 10**3999}, "max_tokens", "less than 2147483648, got an integer of about"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "-1 or a number from 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differ"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "128"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": 5}, "stop", "list"),
        ({"presence_penalty": -3}, "presence_penalty", "-2"),
        ({"frequency_penalty": 3}, "frequency_penalty", "2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "100"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"١": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"007": 1}}, "logit_bias", "token ids"),
        ({"messages": [1] * 8192}, "messages", "[8191] is not an object but 1"),
        ({"messages": [{}] * 100_000}, "messages", "at most 8192"),
        ({"x" * 1_000_000: 1}, "x" * 100, "unknown field"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
        ({"stream": "yes"}, "stream", "bool"),
        ({"tools": [{"type": "function"}]}, "tools", "is expected"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs it"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema", "is 'text'"),
        ({"response_format": "json"}, "response_format", "an object, got 'json'"),
        ({"reasoning_effort": "utmost"}, "reasoning_effort", "'none'"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"priority": 1001}, "priority", "1000"),
    ],
)
def test_wrong_chat_fields(fields: dict[str, Any], param: str, part: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    error = caught.value.body()["error"]
    assert caught.value.status == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert part in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], [True]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
    ],
)
def test_wrong_completion_fields(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_what_clients_send_without_meaning_it() -> None:
    fields: dict[str, Any] = dict.fromkeys(["temperature", "tools", "stop", "logit_bias", "stream_options", "seed"])
    fields |= {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "modalities": ["text"]}
    fields |= {"response_format": {"type": "text"}, "service_tier": "auto", "tool_choice": "none", "n": 1}
    fields |= {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert chat(**fields).stream
    assert completion(best_of=2, n=2, suffix="").n == 2


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'{"a": NaN}', b'"\\ud800"', b"\xff", b"[" * 100_000, b'{"x": "\\ud800"}']
)
def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, raw)
    assert caught.value.status == 400


NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "max_completion_tokens", "priority")
NUMBERS += ("presence_penalty", "frequency_penalty", "repetition_penalty", "top_logprobs")
EXTREME = st.integers() | st.floats() | st.integers(0, 5000).flatmap(lambda n: st.sampled_from([10**n, -(10**n)]))


def as_json(fields: dict[str, Any]) -> bytes:
    """Numbers of more digits than Python prints are written by hand."""

    def text(value: Any) -> str:
        if isinstance(value, int) and abs(value) >= 10**4000:
            return ("-" if value < 0 else "") + "1" + "0" * (len(f"{abs(value):x}") * 6 // 5)
        return json.dumps(value)

    return ("{" + ",".join(f"{json.dumps(key)}:{text(value)}" for key, value in fields.items()) + "}").encode()


@given(st.sampled_from(NUMBERS), EXTREME)
def test_every_number_has_a_range_that_the_kernels_take(name: str, value: float) -> None:
    """An accepted number survives the way to the engine and is not zero or infinite in float32, unless it was."""
    try:
        body = parse(ChatRequest, as_json({**CHAT, "logprobs": True, name: value}))
    except ApiError as error:
        assert error.status == 400 and len(error.message) < 400
        if isinstance(value, int) or math.isfinite(value):
            assert error.param == name and name in error.message
        return
    params = sampling_params(body, {}, 7, 0)
    assert encode(Submit(request_id="r", prompt=[1], sampling=params, priority=body.priority))
    for used in (params.temperature, params.top_p, params.min_p, params.repetition_penalty):
        assert math.isfinite(struct.unpack("f", struct.pack("f", used))[0])
        assert used < 1e-37 or struct.unpack("f", struct.pack("f", used))[0] > 0
    assert 0 <= params.top_k < 2**31 and params.top_p > 0


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
def test_any_object_parses_or_is_refused(fields: dict[str, Any]) -> None:
    known = {*ChatRequest.model_fields}
    try:
        chat(**fields)
    except ApiError as error:
        assert error.status == 400
    else:
        assert {key for key, value in fields.items() if value is not None} <= known


def test_defaults_come_from_the_model_unless_the_request_says() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    params = sampling_params(chat(temperature=0), defaults, 7, 0)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.0, 20, 0.95, 7)
    params = sampling_params(chat(top_k=-1), {}, 7, 0)
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 1.0)


def test_every_sampling_field_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "presence_penalty": 0.2,
        "frequency_penalty": -0.2, "repetition_penalty": 1.1, "stop_token_ids": [4], "ignore_eos": True,
    }  # fmt: skip
    params = sampling_params(chat(**fields, logit_bias={"7": -1.5}, logprobs=True, top_logprobs=2), {}, 9, 0)
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)
    assert params.logit_bias == {7: -1.5}
    assert (params.logprobs, params.prompt_logprobs) == (2, None)
    params = sampling_params(completion(logprobs=3, echo=True), {}, 9, 0)
    assert (params.logprobs, params.prompt_logprobs) == (3, 3)
    assert sampling_params(chat(logprobs=True), {}, 9, 0).logprobs == 0


@given(st.integers(-(2**63), 2**63 - 1))
def test_derived_seeds_differ_and_the_first_is_the_requests(seed: int) -> None:
    seeds = [derived_seed(seed, choice) for choice in range(128)]
    assert len(set(seeds)) == 128
    assert all(0 <= each < 2**63 for each in seeds)
    assert seeds[0] == seed % 2**63


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": {"a": 1}, "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages[0].content[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": "x", "colour": "red"}, "messages[0].colour"),
        ({"role": "tool", "content": 3}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, "messages[0].content[0].x"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
    ],
)
def test_wrong_messages(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        normalise([message])
    assert caught.value.param == param


def test_messages_that_clients_send_back() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    echoed = {
        "role": "assistant",
        "content": "c",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    assert normalise([{"role": "developer", "content": parts}, echoed, {"role": "assistant", "content": None}]) == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"\ude00b", "\ufffdb"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\\ud83d", r"\ud83d"),
        (r"\\\ud83d\"", '\\\ufffd"'),
        (r"\uD83D\n", "\ufffd\n"),
    ],
)
def test_halves_of_characters(written: str, read: str) -> None:
    """Clients of JavaScript cut texts anywhere."""
    for more in ("", f', "seed": {"9" * 30}'):
        notes = Notes()
        raw = f'{{"messages": [{{"role": "user", "content": "x{written}"}}]{more}}}'.encode()
        if more:
            with pytest.raises(ApiError, match="seed"):
                parse(ChatRequest, raw, notes)
            continue
        (message,) = parse(ChatRequest, raw, notes).messages
        assert message["content"] == f"x{read}"
        assert bool(notes.remarks) == ("\ufffd" in read)
