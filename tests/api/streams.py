"""Answers without an engine: choices whose tokens are bytes, the events about them, and a formatter that shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from api.client.stream import OpenRequest
from api.http.answers.generation import Answers, Choice, Update
from api.http.answers.meter import Meter
from api.http.answers.streaming import ResponseFormatter
from api.http.fast.delivery import new_inbox
from api.http.metrics import Metrics
from api.text.detokenize import ByteDetokenizer, TokenTexts
from api.text.output import Output
from api.text.stops import StopStrings
from engine import messages as m
from testing.waiting import PATIENCE_S


def answers_of(n: int, *, stop: str = "") -> tuple[Answers, list[Any]]:
    """n choices whose tokens are bytes, and the list of what is sent to the engine about them."""
    answers, sent = Answers(new_inbox(), n), []
    for index in range(n):
        output = Output(
            ByteDetokenizer(TokenTexts(lambda token: bytes([token]))), StopStrings([stop]) if stop else None
        )
        request = OpenRequest(str(index), answers.inbox, lambda _, message: sent.append(message))
        answers.add(Choice(request, output, Meter(Metrics()), prompt_tokens=3))
    return answers, sent


def tokens(index: int, text: str) -> m.Tokens:
    return m.Tokens(request_id=str(index), tokens=list(text.encode()))


def finished(index: int) -> m.Finished:
    return m.Finished(request_id=str(index), reason="length", prompt_tokens=3, output_tokens=1, cached_tokens=2)


class Plain(ResponseFormatter):
    def whole(self, choices: Sequence[Update]) -> Any:
        return [choice.text for choice in choices]

    def begin(self) -> bytes:
        return b"<"

    def update(self, index: int, update: Update) -> bytes:
        return f"{index}:{update.text} ".encode() if update.text else b""

    def end(self) -> bytes:
        return b">"


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, PATIENCE_S))
