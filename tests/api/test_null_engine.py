"""The engine without a model: a real server, scheduler and messages, and answers that are known beforehand."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from api.cli.early import with_demo
from benchmarks.front.client import Tally, closed_loop, post
from benchmarks.front.run import Case, serving
from demo.paths import demo_model
from engine.config import EngineConfig
from engine.errors import UserError
from engine.launch.null.build import build_null
from engine.messages import Submit
from engine.null import NullSettings, null_settings
from loadtests.http import Server
from scheduler.request import SamplingParams
from testing.waiting import PATIENCE_S

ANSWER = 12


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Case("test", 1, ANSWER, stream=True, adapters=100, rows=64)) as (_, server):
        yield server


def ask(server: Server, path: str = "completions", **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=PATIENCE_S)


def test_answers_are_fixed_words(server: Server) -> None:
    first = ask(server, prompt="One", max_tokens=5).json()
    other = ask(server, prompt=[5, 6, 7], max_tokens=5, temperature=1.0, seed=3, model="adapter-99").json()
    assert first["choices"] == other["choices"] and first["usage"]["completion_tokens"] == 5
    assert len(first["choices"][0]["text"].split()) == 5
    chat = ask(server, "chat/completions", messages=[{"role": "user", "content": "Hi"}]).json()["choices"][0]
    assert chat["finish_reason"] == "stop" and len(chat["message"]["content"].split()) == ANSWER
    assert chat["message"]["content"].startswith(first["choices"][0]["text"])
    longer = ask(server, prompt="One", max_tokens=100, min_tokens=70).json()
    assert longer["choices"][0]["finish_reason"] == "stop" and longer["usage"]["completion_tokens"] == 71
    words = ask(server, prompt="One", max_tokens=100, ignore_eos=True).json()["choices"][0]
    assert words["finish_reason"] == "length" and len(words["text"].split()) == 100


@pytest.mark.parametrize("field", [{"logprobs": 1}, {"structured_outputs": {"regex": "[ab]+"}}, {"bad_words": ["a"]}])
def test_what_takes_logits_is_refused(server: Server, field: dict[str, object]) -> None:
    reply = ask(server, prompt="One", max_tokens=5, **field)
    assert reply.status_code == 400 and "the null engine answers fixed tokens" in reply.json()["error"]["message"]


def test_many_streams_at_once_all_end(server: Server) -> None:
    """Far more connections than rows, and adapters than slots."""
    body = {"prompt": "One", "max_tokens": ANSWER, "stream": True}
    requests = [post(server, {**body, "model": f"adapter-{i}"}) for i in range(100)]
    tally = Tally()
    closed_loop(server, requests, 300, 0.1, tally)
    assert tally.ended >= 300 and tally.refused == 0
    assert len(tally.firsts_s) == tally.ended
    metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    assert "ktserve_engine_running 0.0" in metrics and "ktserve_engine_blocks_used 0.0" in metrics


def test_options() -> None:
    assert null_settings("null:") == NullSettings()
    assert null_settings("null:row_us=2.5,answer=7") == NullSettings(row_us=2.5, answer=7)
    for text, message in (
        ("null:steps=1", "'steps' is not an option; options: step_ms, row_us, token_us, load_ms, answer"),
        ("null:answer=1,answer=2", "'answer' is given twice"),
        ("null:answer=1.5", "answer=1.5 is not a number"),
        ("null:answer=0", "answer 0: allowed is 1 to"),
        ("null:step_ms=nan", "step-ms nan: allowed is 0 to"),
        ("null:step_ms=-1", "step-ms -1.0: allowed is"),
    ):
        with pytest.raises(UserError, match=message.replace(":", ".")):
            with_demo(EngineConfig(model=text))


def test_settings_of_what_is_not_there_are_refused() -> None:
    gguf = str(demo_model())
    with pytest.raises(UserError, match="--quantise int8: the null engine has no weights to place; leave it out"):
        build_null(EngineConfig(model="null:", gguf=gguf, quantise="int8"), print)
    with pytest.raises(UserError, match="max_num_batched_tokens is 8, must be at least max_num_seqs"):
        build_null(EngineConfig(model="null:", gguf=gguf, max_num_batched_tokens=8), print)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_told_apart_in_time(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was launched while another one ran is not taken to have lasted as long as both."""
    settings = EngineConfig(model="null:step_ms=5", gguf=str(demo_model()), overlap=overlap)
    core, _ = build_null(settings, lambda message: None)
    seconds: list[float] = []
    monkeypatch.setattr(core.scheduler, "observe", lambda plan, taken, experts: seconds.append(taken))
    core.handle(Submit(request_id="a", prompt=[5, 6], sampling=SamplingParams(max_tokens=30, ignore_eos=True)))
    began = time.monotonic()
    while core.busy:
        core.step()
    elapsed = time.monotonic() - began
    core.close()
    assert len(seconds) == 30
    assert 0.14 <= sum(seconds) <= elapsed
