"""From the engine's events to what is written, without an engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from api.client.stream import EngineUnavailable
from api.errors import ApiError
from api.http.answers import streaming
from api.http.answers.generation import Answers
from api.http.answers.streaming import EventStream
from engine import messages as m
from tests.api.streams import Plain, answers_of, finished, run, tokens


async def written(answers: Answers, after: Callable[[], object]) -> list[bytes]:
    """What a stream writes; `after` is called once it waits for more after its first write."""
    chunks: list[bytes] = []
    never = asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        chunks.append(message.get("body", b""))
        if len(chunks) == 2:
            asyncio.get_running_loop().call_soon(after)

    await EventStream(answers, Plain())({"type": "http"}, lambda: never, send)
    return chunks[1:]


def test_all_that_came_in_a_step_is_one_write() -> None:
    async def test() -> None:
        answers, _ = answers_of(3)

        def step() -> None:
            for part, index in itertools.product("ab", range(3)):
                answers.inbox.put(tokens(index, part))
            for index in range(3):
                answers.inbox.put(finished(index))

        assert await written(answers, step) == [b"<", b"0:ab 1:ab 2:ab ", b">data: [DONE]\n\n"]

    run(test())


def test_what_came_before_an_error_is_written_first() -> None:
    async def test() -> None:
        answers, sent = answers_of(2)

        def step() -> None:
            answers.inbox.put(tokens(0, "a"))
            answers.inbox.put(tokens(1, "b"))
            answers.inbox.put(m.Failed(request_id="1", message="why"))

        chunks = await written(answers, step)
        assert chunks[:2] == [b"<", b"0:a 1:b "] and b"failed: why" in chunks[2] and chunks[2].endswith(b"[DONE]\n\n")
        assert m.Abort(request_id="0") in sent

    run(test())


def test_an_engine_that_dies_ends_a_stream() -> None:
    async def test() -> None:
        answers, _ = answers_of(2)

        def step() -> None:
            answers.inbox.put(tokens(0, "a"))
            answers.inbox.fail(EngineUnavailable("it died"))

        assert b"it died" in (await written(answers, step))[-1]

    run(test())


def test_keep_alive_comments_while_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_KEEP_ALIVE_S", 0.01)

    async def test() -> None:
        answers, _ = answers_of(1)
        chunks: list[bytes] = []
        never = asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            chunks.append(message.get("body", b""))
            if chunks.count(b": keep-alive\n\n") == 2:
                answers.inbox.put(finished(0))

        await EventStream(answers, Plain())({"type": "http"}, lambda: never, send)
        assert chunks[2] == chunks[3] == b": keep-alive\n\n" and chunks[-1].startswith(b">")

    run(test())


def test_a_stop_string_ends_one_choice_of_several() -> None:
    async def test() -> None:
        answers, sent = answers_of(2, stop="END")
        for event in (tokens(0, "oneEND and more"), tokens(1, "two E"), tokens(0, "later"), finished(1)):
            answers.inbox.put(event)
        first, second = await answers.whole()
        assert (first.text, first.finish_reason, len(first.tokens)) == ("one", "stop", 6)
        assert (second.text, second.finish_reason) == ("two E", "length")
        assert sent[0] == m.StopFound(request_id="0", num_tokens=6)
        assert answers.usage()["completion_tokens"] == 6 + 5 and answers.usage()["prompt_tokens"] == 3

    run(test())


def test_an_error_before_anything_came_is_raised_at_the_beginning() -> None:
    async def test() -> None:
        answers, _ = answers_of(1)
        answers.inbox.put(m.Refused(request_id="0", status=429, code="queue_full", message="full"))
        with pytest.raises(ApiError) as caught:
            await answers.begun(1)
        assert caught.value.status == 429

    run(test())


def test_aborted_answers_end_for_their_reader() -> None:
    async def test() -> None:
        answers, sent = answers_of(2)
        reader = asyncio.create_task(answers.whole())
        await asyncio.sleep(0)
        answers.abort()
        assert [choice.text for choice in await reader] == ["", ""]
        assert len(sent) == 2

    run(test())
