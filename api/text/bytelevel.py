"""Byte-level BPE (GPT-2's, used by Qwen, GLM, MiniMax and gpt-oss): tokens as bytes, and a tokenizer made from its
parts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SUFFIX, _SPACE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _REST = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}{_SUFFIX}?" for a, b in ("*+", "+*"))
QWEN2 = "qwen2"
# What `tokenizer.ggml.pre` stands for: the splitting patterns of these models' tokenizer.json.
PATTERNS = {
    QWEN2: rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_REST}|{_SPACE}",
    "glm4": rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_REST}|{_SPACE}",
    "gpt-4o": rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}",
}
PATTERNS |= {"chatglm-bpe": PATTERNS["glm4"], "minimax-m2": PATTERNS["gpt-4o"]}


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
    pre: str = QWEN2,
) -> Tokenizer:
    """A tokenizer that splits by one of `PATTERNS`. `added` tokens must be in `tokens`, their places are their ids.
    `bos_token`: put before every encoded text that asks for special tokens."""
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), fuse_unk=False, byte_fallback=False))
    if pre == QWEN2:  # the others take texts as they are
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated", invert=False),
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
