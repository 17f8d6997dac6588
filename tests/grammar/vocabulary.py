"""A vocabulary of bytes, for grammars with an engine and without."""

from testing.models.vocabulary import vocabulary_of

END, THINK, THOUGHT = 256, 257, 258
# Every byte, the control tokens, and tokens that cross what grammars know as boundaries.
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(b"<|end|>", b"<think>", b"</think>"),
    *(b"true", b'":', b'{"', b'": ', b"123", b"ab", b"bc", b'"}', b'","', b"}]", b"  ", b"\n\t", b"\xe2\x82", b"e-1"),
]
VOCABULARY = vocabulary_of(TOKENS, [END, THINK, THOUGHT])
