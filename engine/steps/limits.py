"""What a request may ask of sampling, whoever sends it: what the kernels can compute. Torch-free.

The api has the same or narrower ranges for what clients may send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.errors import UserError
from scheduler.request import SamplingParams

_COUNT = 2**31 - 1
_SEED = 2**63
_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (0, _COUNT),
    "min_tokens": (0, _COUNT),
    "temperature": (0, 100),
    "top_p": (1e-6, 1),
    "top_k": (0, _COUNT),
    "min_p": (0, 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_penalty": (0.01, 100),
}
_MIN_TEMPERATURE = 1e-6  # but for 0
_MAX_BIAS = 1e4


def check_sampling(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises UserError that names the field, the value and the range."""
    for name, (low, high) in _RANGES.items():
        _in_range(name, getattr(params, name), low, high)
    if 0 < params.temperature < _MIN_TEMPERATURE:
        _refuse("temperature", params.temperature, f"0 (greedy) or at least {_MIN_TEMPERATURE:g}")
    if params.min_tokens > params.max_tokens:
        _refuse("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    if params.seed is not None and not -_SEED <= params.seed < _SEED:
        _refuse("seed", params.seed, "in -2^63 .. 2^63 - 1")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _in_range(name, getattr(params, name), 0, vocab_size)
    for bias in params.logit_bias.values():
        _in_range("logit_bias", bias, -_MAX_BIAS, _MAX_BIAS)
    _check_tokens("logit_bias", params.logit_bias, vocab_size)
    _check_tokens("stop_token_ids", params.stop_token_ids, vocab_size)
    for word in params.bad_words:
        if not word:
            _refuse("bad_words", word, "at least one token a word")
        _check_tokens("bad_words", word, vocab_size)
    if params.allowed_token_ids is not None:
        _check_tokens("allowed_token_ids", params.allowed_token_ids, vocab_size)
        left = set(params.allowed_token_ids) - {word[0] for word in params.bad_words if len(word) == 1}
        if params.min_tokens:
            left -= params.ending_tokens(eos_token_ids)
        if not left:
            raise UserError("allowed_token_ids: no token is left that may come first", "allowed_token_ids")

    if params.thinking is not None:
        _in_range("thinking_token_budget", params.thinking.num_tokens, 0, _COUNT)
        begin = () if params.thinking.begin is None else (params.thinking.begin,)
        _check_tokens("thinking_token_budget", (*begin, params.thinking.end, *params.thinking.closing), vocab_size)
        if params.thinking.end not in params.thinking.closing:
            _refuse("thinking_token_budget", params.thinking.closing, f"tokens with {params.thinking.end} among them")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is not in any
        _refuse(name, value, f"from {low:g} to {high:g}")


def _check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            _refuse(name, token, f"a token id in 0 .. {vocab_size - 1}")


def _refuse(name: str, value: object, allowed: str) -> None:
    raise UserError(f"{name} is {value!r}, must be {allowed}", name)
