"""Byte-level BPE (GPT-2's, used by Qwen, GLM, MiniMax, DeepSeek, Kimi and gpt-oss): tokens as bytes, and a tokenizer
made from its parts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SUFFIX, _SPACE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _REST = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}{_SUFFIX}?" for a, b in ("*+", "+*"))
_KIMI_CASED = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]{a}[{_LOWER}&&[^\p{{Han}}]]{b}{_SUFFIX}?" for a, b in ("*+", "+*")
)


def _ranges(code_points: str) -> str:
    """What stands in a class of characters: code points and ranges of them, in hexadecimal."""
    return re.sub(r"[0-9a-f]+", lambda found: rf"\x{{{found[0]}}}", code_points).replace(" ", "")


# Letters with case, as DeepSeek-V2's tokenizer.json lists them
_DEEPSEEK_LETTERS = _ranges(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 "
    "2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 "
    "2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 "
    "ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_PUNCTUATION = _ranges("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002")
_CJK, _CJK_V3 = _ranges("4e00-9fa5 800-4e00 ac00-d7ff"), _ranges("4e00-9fa5 3040-309f 30a0-30ff")
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
QWEN2, KIMI = "qwen2", "kimi-k2"
# What `tokenizer.ggml.pre` stands for: the splitting patterns of these models' tokenizer.json, one after another.
PATTERNS: dict[str, tuple[str, ...]] = {
    QWEN2: (rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_REST}|{_SPACE}",),
    "glm4": (rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_REST}|{_SPACE}",),
    "gpt-4o": (rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}",),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_PUNCTUATION}]+", r"\s+$", rf"[{_CJK}]+", r"\p{N}"
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        rf"[{_CJK_V3}]+",
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
    ),
    KIMI: (rf"[\p{{Han}}]+|{_KIMI_CASED}|\p{{N}}{{1,3}}|{_REST}|{_SPACE}",),
}  # fmt: skip
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
    whole_words: bool = False,
) -> Tokenizer:
    """A tokenizer that splits by one of `PATTERNS`. `added` tokens must be in `tokens`, their places are their ids.
    `bos_token`: put before every encoded text that asks for special tokens. `whole_words`: a part of a text that is a
    token becomes that, whether or not merges lead to it."""
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=list(merges), fuse_unk=False, byte_fallback=False, ignore_merges=whole_words)
    )
    if pre == QWEN2:  # the others take texts as they are
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), behavior="isolated", invert=False) for each in PATTERNS[pre]),
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
