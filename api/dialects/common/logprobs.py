"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.text.tokenizer import Tokenizer
from engine.errors import EngineError
from engine.messages import TokenLogprobs

_LEAST = -9999.0  # JSON has no minus infinity


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _bytes(tokenizer: Tokenizer | None, token: int) -> bytes:
    return f"token_id:{token}".encode() if tokenizer is None else tokenizer.token_bytes(token)


def _name(tokenizer: Tokenizer | None, token: int) -> str:
    """A token's text; one that is not whole characters is written as "bytes:\\x.." so that names stay apart."""
    data = _bytes(tokenizer, token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}]}"""

    def one(token: int, logprob: float) -> dict[str, Any]:
        data = _bytes(tokenizer, token)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}

    return {
        "content": [
            {
                **one(entry.chosen.token, entry.chosen.logprob),
                "top_logprobs": [one(top.token, top.logprob) for top in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: Tokenizer | None,
    tokens: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """{tokens, token_logprobs, top_logprobs, text_offset}; None where a token has no predecessor."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for one in [*entry.top, entry.chosen]:
            top.setdefault(_name(tokenizer, one.token), _finite(one.logprob))
        tops.append(top)
    return {
        "tokens": [_name(tokenizer, token) for token in tokens],
        "token_logprobs": [None if entry is None else _finite(entry.chosen.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    tokenizer: Tokenizer | None, prompt: Sequence[int], entries: Sequence[TokenLogprobs | None] | None, wanted: int
) -> list[dict[str, dict[str, Any]] | None]:
    """For each token of the prompt {token id: {logprob, rank, decoded_token}} of it and the `wanted` most likely;
    None for the first. Raises EngineError if the engine has not sent them."""
    if entries is None or len(entries) != len(prompt):
        raise EngineError("the engine did not send the prompt's log-probabilities")
    return [
        None
        if entry is None
        else {
            str(one.token): {
                "logprob": _finite(one.logprob),
                "rank": one.rank,
                "decoded_token": _name(tokenizer, one.token),
            }
            for one in [*entry.top[:wanted], entry.chosen]
        }
        for entry in entries
    ]
