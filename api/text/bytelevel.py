"""Byte-level BPE (GPT-2's, used by Qwen): tokens as bytes, and a tokenizer made from its parts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# What `tokenizer.ggml.pre` = "qwen2" stands for: the splitting pattern of Qwen2's and Qwen3's tokenizer.json.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte: bytes that print stand for themselves, the others follow from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def token_bytes(token: str) -> bytes:
    """The bytes a token stands for; a token with a character outside the table (an added token) is plain text."""
    table = byte_of_char()
    if all(char in table for char in token):
        return bytes(table[char] for char in token)
    return token.encode()


def byte_level_tokenizer(
    tokens: list[str],
    merges: Iterable[tuple[str, str]],
    added: Iterable[AddedToken],
    *,
    bos_token: str | None = None,
) -> Tokenizer:
    """A Qwen2-style tokenizer. `added` tokens must be in `tokens`, their places are their ids.
    `bos_token`: put before every encoded text that asks for special tokens."""
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_tokens(list(added))
    if bos_token is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, vocab[bos_token])]
        )
    return tokenizer
