"""A vocabulary given as bytes, as the api hands it to the engine."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api.text.bytelevel import byte_of_char
from engine.messages import SetVocabulary


def vocabulary_of(tokens: Sequence[bytes], special: Sequence[int]) -> SetVocabulary:
    """`tokens` hold every single byte. The tokenizer merges nothing: text becomes one token a byte."""
    chars = {byte: char for char, byte in byte_of_char().items()}
    ids = {chars[token[0]]: i for i, token in enumerate(tokens) if len(token) == 1}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return SetVocabulary(tokens=list(tokens), special=list(special), definition=tokenizer.to_str())
