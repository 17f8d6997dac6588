"""Reinforcement learning with Tinker's own client: stories are to have a word in them. The reward of an answer is 1 or
0, its advantage what that is above the mean of its group (Shao et al., 2024)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import tinker
from tinker import types

ASKED, WORD = "Tell me a short story.", "dragon"
_TOKENS = 24  # of an answer, at most
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Round:
    """`reward`: mean of all answers. Seconds of its parts."""

    reward: float
    sampling_s: float
    batch_s: float
    step_s: float
    publish_s: float


def rounds(
    url: str,
    key: str,
    model: str,
    prompt: list[int],
    count: int,
    answers: int,
    rate: float = 3e-3,
    reward: Callable[[list[int]], float] | None = None,
) -> Iterator[Round]:
    """`count` times: samples `answers` answers, learns by them and publishes what it has learnt. `prompt`: tokens of
    what is `ASKED`. `reward`: of an answer's tokens; default: whether `WORD` is in it."""
    service = tinker.ServiceClient(base_url=url, api_key=f"tml-{key}")
    training = service.create_lora_training_client(base_model=model, rank=8, seed=1).result()
    texts = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=_PATIENCE_S)

    def has_word(tokens: list[int]) -> float:
        answer = texts.post("/detokenize", json={"model": model, "tokens": tokens}).raise_for_status()
        return float(WORD in answer.json()["prompt"])

    params = types.SamplingParams(max_tokens=_TOKENS, temperature=1.0)
    sampler = training.save_weights_and_get_sampling_client().result()
    for _ in range(count):
        began = time.perf_counter()
        found = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=answers, sampling_params=params).result()
        sampled = time.perf_counter()
        rewards = [(reward or has_word)(list(each.tokens)) for each in found.sequences]
        judged = time.perf_counter()
        mean = sum(rewards) / len(rewards)
        pairs = zip(found.sequences, rewards, strict=True)
        data = [_datum(prompt, each, value - mean) for each, value in pairs if value != mean]
        learnt = stepped = judged
        if data:
            training.forward_backward(data, "importance_sampling").result()
            learnt = time.perf_counter()
            training.optim_step(types.AdamParams(learning_rate=rate)).result()
            stepped = time.perf_counter()
        sampler = training.save_weights_and_get_sampling_client().result()
        yield Round(mean, sampled - began, learnt - judged, stepped - learnt, time.perf_counter() - stepped)


def _datum(prompt: list[int], answer: Any, advantage: float) -> types.Datum:
    tokens, before = list(answer.tokens), len(prompt) - 1
    inputs: Any = {
        "target_tokens": [0] * before + tokens,
        "logprobs": [0.0] * before + list(answer.logprobs),
        "advantages": [0.0] * before + [advantage] * len(tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(prompt + tokens[:-1]), loss_fn_inputs=inputs)
