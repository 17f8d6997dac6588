"""Text in pieces is the text of the whole, whatever the tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from api.text.bytelevel import byte_of_char, token_bytes
from api.text.detokenize import WindowDetokenizer
from api.text.tokenizer import Tokenizer as ModelTokenizer
from tests.api.conftest import SPECIAL, tiny_tokenizer

BYTE_LEVEL = ModelTokenizer(tiny_tokenizer(), None, "test")
UNKNOWN = BYTE_LEVEL.vocab_size + 5  # ids beyond the tokenizer's, as in a padded vocabulary
TOKENS = st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1) | st.just(UNKNOWN), max_size=40)
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["👨‍👩‍👧‍👦 naïve 日本語", "e\u0301 ﷺ 🇩🇪", "<|im_end|>a<tool>", "\x00\ufffd\ufeff"]
)


@settings(max_examples=500)
@given(TOKENS, st.booleans())
def test_deltas_of_random_tokens_join_to_the_full_decode(tokens: list[int], skip: bool) -> None:
    detokenizer = BYTE_LEVEL.detokenizer(skip_special_tokens=skip)
    text = "".join(map(detokenizer.push, tokens)) + detokenizer.finish()
    assert text == BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=300)
@given(TEXTS)
def test_no_delta_shows_half_a_character(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False)
    whole = BYTE_LEVEL.decode(tokens, skip_special_tokens=False)
    detokenizer = BYTE_LEVEL.detokenizer(skip_special_tokens=False)
    shown = ""
    for token in tokens:
        shown += detokenizer.push(token)
        assert whole.startswith(shown)
    assert shown + detokenizer.finish() == whole


def test_special_tokens_are_hidden_on_request() -> None:
    tokens = BYTE_LEVEL.encode("a<|im_end|>b<tool>", add_special_tokens=False)
    for skip, expected in ((True, "ab<tool>"), (False, "a<|im_end|>b<tool>")):
        detokenizer = BYTE_LEVEL.detokenizer(skip_special_tokens=skip)
        assert "".join(map(detokenizer.push, tokens)) == expected


def test_every_byte_has_a_token() -> None:
    assert sorted(byte_of_char().values()) == list(range(256))
    assert token_bytes("Ġw") == b" w"
    assert token_bytes("日本") == "日本".encode()  # an added token: not in the table
    assert token_bytes(SPECIAL[0]) == SPECIAL[0].encode()


def sentencepiece_like() -> ModelTokenizer:
    """Byte fallback and a leading-space rule: a token's text depends on its neighbours."""
    pieces = ["<unk>", "▁the", "▁a", "b", "▁", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return ModelTokenizer(tokenizer, None, "test")


SENTENCEPIECE = sentencepiece_like()


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["▁the", "▁a", "b", "▁", "c", "é", "👋", "日"]), max_size=15))
def test_window_detokenizer_on_byte_fallback(words: list[str]) -> None:
    tokens: list[int] = []
    for word in words:
        known = SENTENCEPIECE._backend.token_to_id(word)
        tokens += [known] if known is not None else [6 + byte for byte in word.encode()]
    detokenizer = SENTENCEPIECE.detokenizer(skip_special_tokens=True)
    assert isinstance(detokenizer, WindowDetokenizer)
    deltas = [detokenizer.push(token) for token in tokens]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) + detokenizer.finish() == SENTENCEPIECE.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["hello world", "  two  spaces", "line\r\n\n\tend ", "1234 5.6", "don't I'LL"])
def test_encode_then_decode_gives_the_text(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert BYTE_LEVEL.decode(tokens, skip_special_tokens=False) == text
