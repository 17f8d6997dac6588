"""The locust user that all scenarios are made of."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import gevent
from gevent.pool import Group
from locust import User, constant, task

from ktserve.openai_client import AnswerError, Server
from loadtests.load.records import Answer
from loadtests.load.traffic import Traffic

CHURNED = "churn-"  # begins the names of adapters that come and go
_TOKENS_A_WORD = 4.0  # until usage tells; words are made up, so more than of a language
_TEMPLATE_TOKENS = 64
_AFTER_A_REFUSAL_S = 0.2


class Load(User):  # type: ignore[misc]  # locust has no types
    """Starts conversations: the next one after the last has ended (closed), or at times of its own (open).

    Of each answer the end ("answer", its tokens as length), the first text ("TTFT") and each further piece ("ITL") are
    locust events, named by group."""

    abstract = True
    wait_time = constant(0)
    tenant: ClassVar[str] = ""  # whose key is sent
    paced: ClassVar[bool] = True  # False: closed whatever the run's arrivals are
    refusals_expected: ClassVar[bool] = False
    converse: Callable[[random.Random], None]  # one conversation of a scenario; what is drawn comes from the argument
    _numbers: ClassVar[defaultdict[str, itertools.count[int]]] = defaultdict(itertools.count)

    def on_start(self) -> None:
        name, runner = type(self).__name__, self.environment.runner
        self.traffic = Traffic.of(self.environment.parsed_options)
        self.number = next(self._numbers[name])
        self._name = f"{self.traffic.seed} {name} {runner.worker_index} {self.number}"
        self._jobs = Group()
        self._began = itertools.count()
        key = self.traffic.keys.get(self.tenant, self.traffic.keys.get("", ""))
        self.api = Server(self.host, key, self.traffic.timeout_s)
        listed = self.api.models()
        names = [model["id"] for model in listed]
        self.models = self.traffic.models or [name for name in names if not name.startswith(CHURNED)]
        self._context: int | None = min(
            (known for model in listed if (known := model.get("max_model_len"))), default=None
        )
        self._tokens_a_word = _TOKENS_A_WORD

    def on_stop(self) -> None:
        self._jobs.kill()

    @task  # type: ignore[untyped-decorator]
    def arrive(self) -> None:
        rng = random.Random(f"{self._name} {next(self._began)}")
        if not self.paced or self.traffic.arrival == "closed":
            return self.converse(rng)
        gevent.sleep(self.traffic.gap_s(rng, time.time()))
        self._jobs.spawn(self.converse, rng)

    def room(self, tokens: int) -> float:
        """Words of prompt beside an answer of `tokens`, if the server tells how long its context is."""
        if self._context is None:
            return float("inf")
        return max(1.0, (self._context - tokens - _TEMPLATE_TOKENS) / self._tokens_a_word)

    def ask(
        self, group: str, model: str, messages: list[dict[str, str]], tokens: int, hang_up_after: int | None = None
    ) -> str | None:
        """Stream one chat answer of at most `tokens`; None if it failed, was refused or was left after
        `hang_up_after` pieces of text."""
        body = {"model": model, "messages": messages, "max_tokens": tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        answer = Answer(group, time.time())
        began = last = time.perf_counter()
        pieces: list[str] = []
        error: Exception | None = None
        events = self.api.stream("/v1/chat/completions", body).events()
        try:
            for event in events:
                usage = event.get("usage") or {}
                answer.tokens = usage.get("completion_tokens", answer.tokens)
                answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
                piece = "".join(_text(choice) for choice in event.get("choices", ()))
                if not piece:
                    continue
                now = time.perf_counter()
                if pieces:
                    answer.gaps_s.append(now - last)
                else:
                    answer.ttft_s = now - began
                self._fire("ITL" if pieces else "TTFT", group, now - last)
                pieces.append(piece)
                last = now
                if len(pieces) == hang_up_after:
                    answer.outcome = "hung up"
                    break
        except (OSError, ValueError, AnswerError) as failure:
            if self.refusals_expected and getattr(failure, "status", 0) == 429:
                answer.outcome = "refused"
                gevent.sleep(_AFTER_A_REFUSAL_S)
            else:
                answer.outcome, error = f"{type(failure).__name__}: {failure}", failure
        finally:
            events.close()  # type: ignore[attr-defined]  # a generator
        answer.total_s = time.perf_counter() - began
        words = sum(len(message["content"].split()) for message in messages)
        self._tokens_a_word = max(self._tokens_a_word, answer.prompt_tokens / words)
        answer.tokens = answer.tokens or len(pieces)  # of a server that does not tell
        self._fire("answer", group, answer.total_s, answer.tokens, error, answer)
        return "".join(pieces) if answer.outcome == "ok" else None

    def _fire(
        self,
        kind: str,
        name: str,
        seconds: float,
        tokens: int = 0,
        error: Exception | None = None,
        answer: Answer | None = None,
    ) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=seconds * 1000,
            response_length=tokens,
            exception=error,
            context={"answer": answer},
        )

    def call(self, name: str, path: str, body: dict[str, Any], key: str = "") -> bool:
        """A plain request, as an event "call" and an answer of its own; whether it worked."""
        answer, error = Answer(name, time.time()), None
        began = time.perf_counter()
        try:
            Server(self.host, key or self.api.key, self.traffic.timeout_s).post(path, body)
        except (OSError, AnswerError) as failure:
            answer.outcome, error = f"{type(failure).__name__}: {failure}", failure
        answer.total_s = time.perf_counter() - began
        self._fire("call", name, answer.total_s, 0, error, answer)
        return error is None


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return (delta.get("content") or "") + (delta.get("reasoning_content") or "")
