"""The scenarios. With locust's own command: `locust -f loadtests/load/scenarios.py --host URL Chat`."""

from __future__ import annotations

import random
from typing import ClassVar

import gevent

from loadtests.load.traffic import text, zipf
from loadtests.load.users import CHURNED, Load

Messages = list[dict[str, str]]
_SYSTEMS = (40, 80, 160)  # words
_MOST_TURNS = 6
_SHORT = 8  # tokens
_THINK_S = 0.5  # between an answer and the next turn, on average


class Chat(Load):
    """Conversations of a few turns behind one of three system prompts, on the base and all adapters in turn."""

    def converse(self, rng: random.Random) -> None:
        self.talk(rng, self.models[0] if self.traffic.models else rng.choice(self.models))

    def talk(self, rng: random.Random, model: str, group: str = "") -> None:
        system = rng.randrange(len(_SYSTEMS))
        words = text(random.Random(f"system {self.traffic.seed} {system}"), _SYSTEMS[system])
        messages: Messages = [{"role": "system", "content": words}]
        for turn in range(min(_MOST_TURNS, 1 + int(rng.expovariate(0.5)))):
            if turn:
                gevent.sleep(rng.expovariate(1 / _THINK_S))
            tokens = self.traffic.tokens(rng)
            messages.append({"role": "user", "content": text(rng, self.traffic.words(rng))})
            if sum(len(message["content"].split()) for message in messages) > self.room(tokens):
                return
            said = self.ask(group or model, model, messages, tokens)
            if said is None:
                return
            messages.append({"role": "assistant", "content": said})


class Quiet(Chat):
    """A tenant who chats."""

    tenant = "quiet"

    def converse(self, rng: random.Random) -> None:
        self.talk(rng, self.models[0], self.tenant)


class Heavy(Quiet):
    """One of more weight."""

    tenant = "heavy"


class Flood(Load):
    """A tenant that sends as much as it can, without a pause; its refusals are no errors."""

    tenant = "flood"
    paced = False
    refusals_expected = True
    _AT_ONCE: ClassVar[int] = 16

    def converse(self, rng: random.Random) -> None:
        model, tokens = self.models[0], self.traffic.tokens
        asks = [
            gevent.spawn(self.ask, self.tenant, model, _question(text(rng, self.traffic.words(rng))), tokens(rng))
            for _ in range(self._AT_ONCE)
        ]
        try:
            gevent.joinall(asks)
        finally:
            gevent.killall(asks)


class Adapters(Load):
    """Single questions on adapters, the first far more often than the last. The base has rank 0 among them."""

    def converse(self, rng: random.Random) -> None:
        model = self.models[zipf(rng, len(self.models))]
        self.ask(model, model, _question(text(rng, self.traffic.words(rng))), self.traffic.tokens(rng))


class Decoding(Load):
    """Short questions with long answers: what long prompts must not hold up."""

    weight = 3

    def converse(self, rng: random.Random) -> None:
        question = _question("Tell me a long story about " + text(rng, 3))
        self.ask("decoding", self.models[0], question, self.traffic.max_tokens)


class LongPrompt(Load):
    """Long prompts with short answers."""

    def converse(self, rng: random.Random) -> None:
        words = min(self.traffic.long_words, self.room(_SHORT)) * rng.uniform(0.5, 1.0)
        self.ask("long prompt", self.models[0], _question(text(rng, round(words))), _SHORT)


class HangUp(Load):
    """Leaves in the middle of each answer."""

    def converse(self, rng: random.Random) -> None:
        question = _question(text(rng, self.traffic.words(rng)))
        self.ask("hang-up", rng.choice(self.models), question, self.traffic.max_tokens, rng.randint(1, 8))


class Churner(Load):
    """Loads an adapter under a new name, asks, replaces it, asks again, unloads it."""

    paced = False

    def converse(self, rng: random.Random) -> None:
        name, key = f"{CHURNED}{rng.randrange(1 << 40):x}", self.traffic.admin_key
        adapter = {"lora_name": name, "lora_path": self.traffic.adapter_path}
        if not self.call("load", "/v1/load_lora_adapter", adapter, key):
            gevent.sleep(0.5)
            return
        for replace in (False, True):
            if replace:
                self.call("replace", "/v1/load_lora_adapter", adapter | {"load_inplace": True}, key)
            self.ask("churned adapter", name, _question(text(rng, 12)), self.traffic.tokens(rng))
        self.call("unload", "/v1/unload_lora_adapter", {"lora_name": name}, key)


class BaseChat(Chat):
    """Chat while others churn."""

    weight = 2


SCENARIOS: dict[str, tuple[type[Load], ...]] = {
    "chat": (Chat,),
    "tenants": (Quiet, Heavy, Flood),
    "adapters": (Adapters,),
    "long_prefill": (Decoding, LongPrompt),
    "churn": (BaseChat, Churner, HangUp),
    "soak": (BaseChat, Adapters, Churner, HangUp, Flood),
}
TENANTS = {"quiet": 1.0, "heavy": 2.0, "flood": 1.0}  # and their weights


def _question(words: str) -> Messages:
    return [{"role": "user", "content": words}]
