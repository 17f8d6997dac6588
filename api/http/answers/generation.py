"""Answers: events become updates of choices, synchronously; one reader serves all choices of a response."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec

from api.client.stream import EngineUnavailable, Event, Inbox, OpenRequest, merged
from api.errors import ApiError
from api.http.answers.meter import Meter
from api.text.deltas import Delta, Text, joined, text_of
from api.text.output import Output
from engine import messages as m
from engine.errors import EngineError

_is_done = attrgetter("done")


class Update(msgspec.Struct):
    """What came of a choice since its last update. `offsets`: where each token's text begins in the answer, in
    characters, when stop strings and what is held back are left aside; `said`: how many calls came before it, -1 for
    one that is not of the answer's text. The last one has a `finish_reason`."""

    deltas: list[Delta] = []
    tokens: list[int] = []
    logprobs: list[m.TokenLogprobs] | None = None
    prompt_logprobs: list[m.TokenLogprobs | None] | None = None
    offsets: list[int] = []
    said: list[int] = []
    finish_reason: str | None = None
    stop_string: str | None = None  # that ended it
    stop_token: int | None = None  # likewise

    @property
    def matched_stop(self) -> str | int | None:
        """What ended it, as SGLang gives it."""
        return self.stop_token if self.stop_string is None else self.stop_string

    @property
    def text(self) -> str:
        deltas = self.deltas
        return deltas[0].text if len(deltas) == 1 and isinstance(deltas[0], Text) else text_of(deltas)


class Choice:
    """One answer to one prompt. `drop_output`: only the prompt was asked about (max_tokens 0)."""

    def __init__(
        self,
        request: OpenRequest,
        output: Output,
        meter: Meter,
        *,
        prompt_tokens: int,
        drop_output: bool = False,
    ) -> None:
        self._request = request
        self._output = output
        self._meter = meter
        self._drop_output = drop_output
        self.done = False
        self.error: Exception | None = None
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def first_token_s(self) -> float | None:
        return self._meter.first_token_s

    @property
    def num_tokens(self) -> int:
        return self._output.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        return self._output.num_reasoning_tokens

    def feed(self, events: Sequence[Event]) -> Update:
        """What the next events amount to; nothing once the choice is `done`. `error` is set if they end it with one."""
        update = Update()
        if self.done:
            return update
        if len(events) == 1 and isinstance(events[0], m.Tokens):  # nearly always
            self._push(events[0], update)
            return update
        tokens = [event for event in events if isinstance(event, m.Tokens)]
        if tokens:
            self._push(merged(tokens), update)
        if len(tokens) < len(events) and not self.done:
            self._end(events[-1], update)
        return update

    def _push(self, event: m.Tokens, update: Update) -> None:
        self._meter.delivered(len(event.tokens), event.queued_s)
        if event.cached_tokens > self.cached_tokens:
            self.cached_tokens = event.cached_tokens
        update.prompt_logprobs = event.prompt_logprobs
        if self._drop_output:
            return
        if event.logprobs is not None and len(event.logprobs) != len(event.tokens):
            self.error = EngineError(f"{len(event.logprobs)} log-probabilities came with {len(event.tokens)} tokens")
            return self.leave("failed")
        update.deltas, update.offsets, update.said = self._output.push(event.tokens)
        count = len(update.offsets)
        update.tokens = event.tokens if count == len(event.tokens) else event.tokens[:count]
        if event.logprobs is not None:
            update.logprobs = event.logprobs[:count]
        if self._output.stopped:
            self._request.stop(self.num_tokens)
            self._finish("stop", update)

    def _end(self, event: Event, update: Update) -> None:
        match event:
            case m.Finished(reason=reason):
                self.cached_tokens = event.cached_tokens
                if not self._drop_output:
                    if event.stop_token is not None:
                        self._take_stop_token(event.stop_token, event.stop_logprobs, update)
                    update.deltas = joined([*update.deltas, *self._output.finish()])
                self._finish("stop" if self._output.stopped else reason, update)
            case m.Refused():
                self.error = _refusal(event)
                self.leave("refused")
            case m.Cancelled() | m.Failed():
                self.error = _error(event)
                self.leave("failed")

    def _take_stop_token(self, token: int, logprobs: m.TokenLogprobs | None, update: Update) -> None:
        update.stop_token = token
        update.tokens = [*update.tokens, token]
        update.offsets = [*update.offsets, self._output.num_chars]
        update.said = [*update.said, -1]
        if logprobs is not None:
            update.logprobs = [*(update.logprobs or ()), logprobs]
        update.deltas = [*update.deltas, *self._output.end(token)]

    def _finish(self, reason: str, update: Update) -> None:
        update.finish_reason = "tool_calls" if reason == "stop" and self._output.calls else reason
        update.stop_string = self._output.stop_string
        self.leave(reason)

    def leave(self, outcome: str) -> None:
        """No more is wanted of it; `outcome` is counted."""
        if self.done:
            return
        self.done = True
        self._request.abort()  # nothing, if it has ended
        self._meter.ended(
            outcome,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.num_tokens,
        )


class Answers:
    """All choices of one response, `n` for each prompt, prompt after prompt; their requests share `inbox`."""

    def __init__(self, inbox: Inbox, n: int) -> None:
        self.inbox = inbox
        self._n = n
        self.choices: list[Choice] = []
        self._index: dict[str, int] = {}
        self._ahead: list[tuple[int, Update]] = []  # taken already, for the next `take`
        self._error: Exception | None = None  # to raise after them

    def add(self, choice: Choice) -> None:
        self._index[choice.request_id] = len(self.choices)
        self.choices.append(choice)

    @property
    def done(self) -> bool:
        """Whether there is nothing more to take."""
        return self._error is None and not self._ahead and all(map(_is_done, self.choices))

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to the first token of the first answer. None: there was none."""
        return self.choices[0].first_token_s

    def abort(self) -> None:
        for choice in self.choices:
            choice.leave("cancelled")
        self._ahead, self._error = [], None
        self.inbox.close()

    async def begun(self, timeout_s: float) -> None:
        """Wait until something has come. Raises what `take` would if that is an error."""
        self._ahead = await self.take(timeout_s)

    async def take(self, timeout_s: float | None = None) -> list[tuple[int, Update]]:
        """(number of the choice, update) of each choice that has news; empty after `timeout_s` or if aborted. Raises
        ApiError if a request was refused, cancelled or failed, EngineUnavailable if the engine died; what came before
        is delivered first."""
        if self._ahead:
            updates, self._ahead = self._ahead, []
            return updates
        if self._error is None:
            updates = await self._next(timeout_s)
            if updates or self._error is None:
                return updates
        error, self._error = self._error, None
        raise error

    def take_now(self) -> list[tuple[int, Update]]:
        """The same of what has come. Raises nothing: the next `take` does, if `failed`."""
        return self._updates(self.inbox.drain())

    def take_ahead(self) -> bool:
        """Take what has come, for the next `take`. False if it is time to: there is no more to come."""
        self._ahead += self.take_now()
        return self._error is None and not all(map(_is_done, self.choices))

    @property
    def failed(self) -> bool:
        return self._error is not None

    async def _next(self, timeout_s: float | None) -> list[tuple[int, Update]]:
        try:
            events = await self.inbox.take(timeout_s)
        except EngineUnavailable as error:
            for choice in self.choices:
                choice.leave("unavailable")
            self._error = error
            return []
        return self._updates(events)

    def _updates(self, events: Sequence[Event]) -> list[tuple[int, Update]]:
        news: dict[int, list[Event]] = {}
        for event in events:
            news.setdefault(self._index[event.request_id], []).append(event)
        updates = []
        for index, mine in news.items():
            choice = self.choices[index]
            update = choice.feed(mine)
            self._error = self._error or choice.error
            if choice.error is None or update.tokens:
                updates.append((index, update))
        return updates

    async def whole(self) -> list[Update]:
        """Each choice as one update."""
        parts: list[list[Update]] = [[] for _ in self.choices]
        while not self.done:
            for index, update in await self.take():
                parts[index].append(update)
        return [_sum(updates) for updates in parts]

    def usage(self, *, told: bool = True) -> dict[str, Any]:
        """Prompts count once, however many answers they have; outputs as delivered. `told` False: none of the output
        has been delivered yet."""
        firsts = self.choices[:: self._n]
        outputs = self.choices if told else []
        prompt = sum(choice.prompt_tokens for choice in firsts)
        output = sum(choice.num_tokens for choice in outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts)},
            "completion_tokens_details": {"reasoning_tokens": sum(choice.num_reasoning_tokens for choice in outputs)},
        }


def _sum(updates: Sequence[Update]) -> Update:
    if len(updates) == 1:
        return updates[0]
    whole = Update(joined([delta for update in updates for delta in update.deltas]))
    for update in updates:
        whole.tokens += update.tokens
        whole.offsets += update.offsets
        whole.said += update.said
        whole.finish_reason, whole.stop_string = update.finish_reason, update.stop_string
        whole.stop_token = update.stop_token
        whole.prompt_logprobs = whole.prompt_logprobs or update.prompt_logprobs
        if update.logprobs is not None:
            whole.logprobs = whole.logprobs or []
            whole.logprobs += update.logprobs
    return whole


def _refusal(event: m.Refused) -> ApiError:
    if event.code == "unknown_adapter":  # the engine's list of adapters is not for every key
        return ApiError(404, "the model was unloaded", param="model", code="model_not_found")
    return ApiError(event.status, event.message, param=event.field, code=event.code, retry_after_s=event.retry_after_s)


def _error(event: m.Cancelled | m.Failed) -> ApiError:
    match event:
        case m.Cancelled(reason="timeout"):
            return ApiError(504, "the request took longer than the server allows", code="timeout")
        case m.Cancelled():
            return ApiError(503, f"the request was cancelled ({event.reason})", code="cancelled")
        case m.Failed(status=400):
            return ApiError(400, event.message, code="cannot_go_on")
        case m.Failed():
            return ApiError(500, f"request {event.request_id} failed: {event.message}", code="engine_error")
