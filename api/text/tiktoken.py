"""Tokenizers that a vendor ships as tiktoken's ranks (`tiktoken.model`): Kimi's, which has no tokenizer.json."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from api.text.bytelevel import KIMI, byte_level_tokenizer, byte_of_char
from engine.errors import ModelFileError
from engine.files.regular import read_text

_RESERVED = 256  # ids behind those of the file, for special tokens
_KIMI_CLASS = "TikTokenTokenizer"


def tiktoken_tokenizer(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """`config`: tokenizer_config.json, which names the special tokens. Raises ModelFileError."""
    kind = config.get("tokenizer_class")
    if kind != _KIMI_CLASS:
        raise ModelFileError(
            f"{path}: how texts are split is known of Kimi's {_KIMI_CLASS} alone, not of tokenizer_class {kind!r}: put "
            "the model's tokenizer.json beside the file",
            "model",
        )
    ranks = _ranks(path)
    chars = {byte: char for char, byte in byte_of_char().items()}
    tokens = ["".join(chars[byte] for byte in token) for token in ranks]
    merges = [(tokens[ranks[left]], tokens[ranks[right]]) for left, right in _merges(ranks)]
    entries = {int(key): entry for key, entry in (config.get("added_tokens_decoder") or {}).items()}
    special = [
        entries.get(token, {}).get("content", f"<|reserved_token_{token}|>")
        for token in range(len(tokens), len(tokens) + _RESERVED)
    ]
    if len({*tokens, *special}) != len(tokens) + _RESERVED:
        raise ModelFileError(f"{path}: special tokens of tokenizer_config.json stand for one text", "model")
    added = [AddedToken(text, special=True, normalized=False) for text in special]
    return byte_level_tokenizer([*tokens, *special], merges, added, pre=KIMI, whole_words=True)


def _ranks(path: Path) -> dict[bytes, int]:
    """Tokens by their ids, which are their order."""
    ranks: dict[bytes, int] = {}
    for line in read_text(path).split("\n"):
        if not line:
            continue
        text, _, rank = line.partition(" ")
        try:
            token = base64.b64decode(text, validate=True)
        except binascii.Error:
            token = b""
        if not token or rank.strip() != str(len(ranks)) or token in ranks:
            raise ModelFileError(f"{path}: line {len(ranks) + 1} is not a new token in base64 and its rank", "model")
        ranks[token] = len(ranks)
    if missing := sum(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelFileError(f"{path}: {missing} of the 256 bytes have no token", "model")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair that makes a token, in the order of what they make: tiktoken merges what makes the lowest rank."""
    pairs = []
    for token in ranks:
        parts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs += sorted(
            (pair for pair in parts if pair[0] in ranks and pair[1] in ranks),
            key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
        )
    return pairs
