"""Kimi's tokenizer out of tiktoken's ranks: the ids that tiktoken's rule gives."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from api.text.bytelevel import PATTERNS
from api.text.tokenizer import Tokenizer, load_tokenizer
from engine.errors import UserError

WORDS = [b"he", b"ll", b"hel", b"lo", b"llo", b" w", b"or", b" wor", b"ld", b"hello", b"\xe4\xbd", "你".encode(), b"12"]
PARTS = ["hello", " world", "he", "llo", "l", "o", " w", "12", "123", "你", "好", "\n"]
RANKS = {token: i for i, token in enumerate([*(bytes([byte]) for byte in range(256)), *WORDS])}
CONFIG = {
    "tokenizer_class": "TikTokenTokenizer",
    "chat_template": "{{ messages[0].content }}<|im_end|>",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(len(RANKS) + i): {"content": text, "special": True}
        for i, text in ((0, "[BOS]"), (1, "[EOS]"), (2, "<|im_end|>"), (9, "<|tool_call_begin|>"))
    },
}


def write(folder: Path, lines: list[str] | None = None, config: dict[str, Any] | None = None) -> Path:
    made = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("\n".join(made if lines is None else lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("kimi")))


def expected(text: str) -> list[int]:
    """tiktoken's rule: a whole part, else the pair that makes the lowest rank, again and again."""
    ids = []
    for piece, _ in pre_tokenizers.Split(Regex(PATTERNS["kimi-k2"][0]), "isolated").pre_tokenize_str(text):
        parts = [bytes([byte]) for byte in piece.encode()]
        if piece.encode() in RANKS:
            parts = [piece.encode()]
        while found := [(RANKS[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in RANKS]:
            _, at = min(found)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [RANKS[part] for part in parts]
    return ids


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=3)))
def test_ids_are_those_of_tiktoken(made: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    if not any(token in text for token in made.control_tokens.values()):
        assert made.encode(text, add_special_tokens=True) == expected(text)
        assert made.decode(expected(text), skip_special_tokens=True) == text


def test_special_tokens_stand_behind_the_ranks(made: Tokenizer) -> None:
    assert made.encode("[BOS]<|im_end|>", add_special_tokens=False) == [len(RANKS), len(RANKS) + 2]
    assert made.vocab_size == len(RANKS) + 256
    assert made.added_token("<|tool_call_begin|>") == len(RANKS) + 9
    assert made.added_token(f"<|reserved_token_{len(RANKS) + 3}|>") == len(RANKS) + 3


@pytest.mark.parametrize(
    ("lines", "config", "words"),
    [
        (["YQ== 1"], None, "line 1 is not a new token"),
        (["YQ== 0", "YQ== 1"], None, "line 2 is not a new token"),
        (["?? 0"], None, "line 1 is not a new token"),
        (["YQ== 0"], None, "255 of the 256 bytes have no token"),
        (None, {**CONFIG, "added_tokens_decoder": {key: {"content": "x"} for key in ("269", "270")}}, "stand for one"),
        (None, {**CONFIG, "tokenizer_class": "QWenTokenizer"}, "not of tokenizer_class 'QWenTokenizer'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, lines: list[str] | None, config: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_tokenizer(write(tmp_path, lines, config))
