"""The fast path of answers: when events are written, what they look like, and that the plain way has the same bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl

from api.bodies.generation import ChatOptions, CompletionOptions, StreamOptions
from api.client.stream import EngineUnavailable
from api.dialects.anthropic.routes import MessagesFormatter
from api.dialects.ollama.routes import OllamaFormatter
from api.dialects.openai.chat import ChatFormatter
from api.dialects.openai.completions import CompletionFormatter
from api.dialects.responses.routes import ResponsesFormatter
from api.errors import ApiError
from api.http import fast
from api.http.answers import streaming
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import ResponseFormatter
from api.http.fast import delivery
from api.http.fast.chunks import chunks_of, offer_chunks
from api.http.fast.delivery import ChunkStream
from api.text.deltas import Reasoning, Text
from engine import messages as m
from engine.errors import EngineError
from tests.api.streams import Plain, answers_of, finished, run, tokens


class Wire:
    """A connection that takes chunks: what was written to it, in order, by `send` too."""

    def __init__(self) -> None:
        self.flow = FlowControl(self)  # type: ignore[arg-type]
        self.closed = False
        self.written: list[bytes] = []
        self.wrote = asyncio.Event()

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        size, end, chunk = data.partition(b"\r\n")
        assert end and int(size, 16) == len(chunk) - 2 and chunk.endswith(b"\r\n")
        self.add(b"chunk " + chunk[:-2])

    async def send(self, message: Any) -> None:
        await self.flow.drain()
        self.add(b"sent " + message.get("body", b""))

    def add(self, data: bytes) -> None:
        self.written.append(data)
        self.wrote.set()

    async def until(self, last: bytes) -> None:
        while not self.written or self.written[-1] != last:
            self.wrote.clear()
            await self.wrote.wait()

    async def until_longer(self, count: int) -> None:
        while len(self.written) <= count:
            self.wrote.clear()
            await self.wrote.wait()

    @property
    def body(self) -> bytes:
        return b"".join(each.partition(b" ")[2] for each in self.written)


@asynccontextmanager
async def streamed(answers: Answers, formatter: ResponseFormatter | None = None) -> AsyncIterator[Wire]:
    """A stream over a connection that takes chunks, once its beginning has been sent; its end is waited for."""
    wire, never = Wire(), asyncio.get_running_loop().create_future()
    scope = {"type": "http", "http_version": "1.1", "method": "POST"}
    offer_chunks(scope, wire, wire.flow)  # type: ignore[arg-type]
    stream = asyncio.create_task(ChunkStream(answers, formatter or Plain())(scope, lambda: never, wire.send))
    await wire.until(b"sent <")
    yield wire
    await stream


def test_events_are_written_as_chunks_when_they_come() -> None:
    async def test() -> None:
        answers, _ = answers_of(2)
        async with streamed(answers) as wire:
            for part in "ab":
                for index in range(2):
                    answers.inbox.put(tokens(index, part))
                await wire.until(f"chunk 0:{part} 1:{part} ".encode())
            for event in (tokens(0, "x"), tokens(0, "y"), finished(0), tokens(1, "z")):
                answers.inbox.put(event)
            await wire.until(b"chunk 0:xy 1:z ")
            answers.inbox.put(tokens(1, "!"))
            answers.inbox.put(finished(1))
        assert wire.written[2:] == [
            b"chunk 0:a 1:a ", b"chunk 0:b 1:b ", b"chunk 0:xy 1:z ", b"sent 1:! ", b"sent >data: [DONE]\n\n",
        ]  # fmt: skip

    run(test())


def test_a_client_that_is_behind_is_waited_for() -> None:
    async def test() -> None:
        answers, _ = answers_of(1)
        async with streamed(answers) as wire:
            wire.flow.pause_writing()
            for part in "abc":
                answers.inbox.put(tokens(0, part))
                for _ in range(3):
                    await asyncio.sleep(0)
            assert wire.written[2:] == []
            wire.flow.resume_writing()
            await wire.until(b"sent 0:bc ")  # it was there already
            answers.inbox.put(tokens(0, "d"))
            await wire.until(b"chunk 0:d ")
            answers.inbox.put(finished(0))
        assert wire.written[2:5] == [b"sent 0:a ", b"sent 0:bc ", b"chunk 0:d "]

    run(test())


def test_errors_come_after_the_chunks_before_them() -> None:
    async def test() -> None:
        answers, sent = answers_of(2)
        async with streamed(answers) as wire:
            for event in (tokens(0, "a"), tokens(1, "b"), m.Failed(request_id="1", message="why"), tokens(0, "c")):
                answers.inbox.put(event)
        assert wire.written[2] == b"chunk 0:ac 1:b " and b"failed: why" in wire.written[3] and len(wire.written) == 4
        assert m.Abort(request_id="0") in sent
        answers, _ = answers_of(1)
        async with streamed(answers) as wire:
            answers.inbox.put(tokens(0, "a"))
            answers.inbox.fail(EngineUnavailable("it died"))
        assert wire.written[2] == b"sent 0:a " and b"it died" in wire.written[3]

    run(test())


def test_a_formatter_that_fails_ends_its_stream() -> None:
    class Broken(Plain):
        def update(self, index: int, update: Update) -> bytes:
            raise EngineError("what the engine sent cannot be written")

    async def test() -> None:
        answers, sent = answers_of(1)
        async with streamed(answers, Broken()) as wire:
            answers.inbox.put(tokens(0, "a"))
        assert b"cannot be written" in wire.written[-1] and sent == [m.Abort(request_id="0")]

    run(test())


def test_nothing_is_written_to_a_client_that_has_gone() -> None:
    async def test() -> None:
        answers, _ = answers_of(1)
        async with streamed(answers) as wire:
            wire.closed = True
            answers.inbox.put(tokens(0, "a"))
            for _ in range(3):
                await asyncio.sleep(0)
            answers.inbox.put(finished(0))
        assert not any(each.startswith(b"chunk") for each in wire.written)

    run(test())


def test_a_form_without_keep_alives_is_looked_at_no_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_KEEP_ALIVE_S", 0.1)

    class Bare(Plain):
        keep_alive = b""

    async def test() -> None:
        answers, _ = answers_of(1)
        take, waited = answers.take, list[float]()

        async def noted(timeout_s: float | None = None) -> Any:
            waited.append(timeout_s or 0.0)
            if len(waited) == 4:
                answers.inbox.put(finished(0))
            return await take(timeout_s)

        monkeypatch.setattr(answers, "take", noted)
        async with streamed(answers, Bare()):
            pass
        assert max(waited[1:]) > streaming._LEAST_WAIT_S, waited

    run(test())


@pytest.mark.parametrize(("version", "method"), [("1.0", "POST"), ("1.1", "HEAD")])
def test_answers_that_are_not_in_chunks_are_sent(version: str, method: str) -> None:
    scope = {"http_version": version, "method": method}
    offer_chunks(scope, None, None)  # type: ignore[arg-type]
    assert chunks_of(scope) is None


COMPLETION = {"object": "text_completion", "id": "cmpl-1", "created": 1, "model": 'a "model"'}
CHAT = {key: COMPLETION[key] for key in ("id", "created", "model")}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4), st.booleans(), st.integers(0, 3))
def test_events_of_text_alone_are_those_of_the_encoder(texts: list[str], usage: bool, index: int) -> None:
    answers, _ = answers_of(4)
    options = StreamOptions(include_usage=True) if usage else None
    completion = CompletionOptions(n=4, stream=True, stream_options=options)
    formatter = CompletionFormatter(None, completion, [[1]], [], answers, COMPLETION)
    more = {"usage": None} if usage else {}
    for text in texts:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        expected = streaming.event({**COMPLETION, **more, "choices": [choice]})
        assert formatter.update(index, Update([Text(text)], [1])) == expected
    chat_formatter = ChatFormatter(None, ChatOptions(n=4, stream=True, stream_options=options), [1], answers, CHAT)
    for text in texts:
        for delta, shown in (
            (Text(text), {"content": text}),
            (Reasoning(text), {"reasoning_content": text, "reasoning": text}),
        ):
            choice = {"index": index, "delta": shown, "logprobs": None, "finish_reason": None}
            expected = streaming.event({**CHAT, "object": "chat.completion.chunk", **more, "choices": [choice]})
            assert chat_formatter.update(index, Update([delta], [1])) == expected


USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)
FORMATTERS: dict[str, tuple[int, Callable[[Answers], ResponseFormatter]]] = {  # with the number of choices
    "chat": (2, lambda answers: ChatFormatter(None, ChatOptions(n=2), [1], answers, CHAT)),
    "chat with usage": (
        2,
        lambda answers: ChatFormatter(None, ChatOptions(n=2, stream=True, stream_options=USAGE), [1], answers, CHAT),
    ),
    "completions": (
        2,
        lambda answers: CompletionFormatter(None, CompletionOptions(n=2), [[1]], [], answers, COMPLETION),
    ),
    "responses": (1, lambda answers: ResponsesFormatter(dict(CHAT), answers, None)),
    "messages": (1, lambda answers: MessagesFormatter("msg_1", "m", answers)),
    "ollama": (1, lambda answers: OllamaFormatter("m", answers, "message")),
}
STEPS = st.lists(st.lists(st.tuples(st.integers(0, 1), st.text(min_size=1)), min_size=1, max_size=4), max_size=5)
CLOCK = re.compile(rb'"(created_at|(?:total|prompt_eval|eval)_duration)":("[^"]*"|[0-9]+)')  # of Ollama's lines


class Delivered(NamedTuple):
    streamed: bytes
    chunks: int
    gathered: Any


async def delivered(form: str, steps: list[list[tuple[int, str]]], ending: str) -> Delivered:
    """A response as a stream and as a whole; each step's tokens come once those before have been written."""
    n, make = FORMATTERS[form]

    def end(answers: Answers) -> None:
        if ending == "died":
            answers.inbox.fail(EngineUnavailable("it died"))
        for index in range(n):
            last = finished(index) if ending == "finished" else m.Failed(request_id=str(index), message="why")
            answers.inbox.put(last)

    answers, _ = answers_of(n)
    begun = bool(make(answers).begin())
    wire, never = Wire(), asyncio.get_running_loop().create_future()
    scope = {"type": "http", "http_version": "1.1", "method": "POST"}
    offer_chunks(scope, wire, wire.flow)  # type: ignore[arg-type]
    stream = asyncio.create_task(ChunkStream(answers, make(answers))(scope, lambda: never, wire.send))
    await wire.until_longer(begun)
    for step in steps:
        count = len(wire.written)
        for index, text in step:
            answers.inbox.put(tokens(index % n, text))
        await wire.until_longer(count)
    end(answers)
    await stream

    answers, _ = answers_of(n)
    whole = asyncio.create_task(delivery.whole(answers))
    for step in steps:
        for index, text in step:
            answers.inbox.put(tokens(index % n, text))
        await asyncio.sleep(0)
    end(answers)
    try:
        gathered = make(answers).whole(await whole)
    except (ApiError, EngineError) as error:
        gathered = str(error)
    chunks = sum(each.startswith(b"chunk ") for each in wire.written)
    return Delivered(CLOCK.sub(b"", wire.body), chunks, CLOCK.sub(b"", msgspec.json.encode(gathered)))


@pytest.mark.parametrize("form", list(FORMATTERS))
@settings(max_examples=25, deadline=None)
@given(steps=STEPS, ending=st.sampled_from(["finished", "failed", "died"]))
def test_the_plain_way_gives_the_same_bytes(form: str, steps: list[list[tuple[int, str]]], ending: str) -> None:
    quick = run(delivered(form, steps, ending))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "ENABLED", False)
        plain = run(delivered(form, steps, ending))
    assert (quick.streamed, quick.gathered) == (plain.streamed, plain.gathered)
    assert (quick.chunks, plain.chunks) == (len(steps), 0)
