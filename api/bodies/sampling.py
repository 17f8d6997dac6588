"""What the engine is told of sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from api.bodies.generation import ChatOptions, CompletionOptions
from api.bodies.values import INT64
from api.errors import bad_request, shortened
from scheduler.request import SamplingParams


def check_vocabulary(tokens: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 for an id that is no token."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise bad_request(
                f"{param}: token id {shortened(token)} is outside the vocabulary (0 to {vocab_size - 1})", param
            )


def sampling_params(
    body: ChatOptions | CompletionOptions,
    defaults: dict[str, Any],
    max_tokens: int,
    choice: int,
    bad_words: Sequence[Sequence[int]] = (),
) -> SamplingParams:
    """What the engine gets. `defaults` hold the model's temperature, top_p, ... `choice` numbers the n answers:
    each gets a seed of its own, the first one the request's. `bad_words`: the body's, as tokens."""

    def value(name: str, otherwise: float) -> Any:
        given = getattr(body, name)
        return defaults.get(name, otherwise) if given is None else given

    asked = [body.prompt_logprobs, body.logprobs if isinstance(body, CompletionOptions) and body.echo else None]
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=float(value("temperature", 1.0)),
        top_p=float(value("top_p", 1.0)),
        top_k=max(0, int(value("top_k", 0))),
        min_p=float(value("min_p", 0.0)),
        seed=None if body.seed is None else derived_seed(body.seed, choice),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=float(value("repetition_penalty", 1.0)),
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
        logprobs=body.num_logprobs,
        prompt_logprobs=max((count for count in asked if count is not None), default=None),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        bad_words=tuple(map(tuple, bad_words)),
        allowed_token_ids=tuple(body.allowed_token_ids) or None,
    )


def derived_seed(seed: int, choice: int) -> int:
    """The seed of answer number `choice`: well apart, in 0 .. 2^63 - 1 (0x9E37... is 2^64 / golden ratio)."""
    return (seed + choice * 0x9E3779B97F4A7C15) % INT64
