"""Text from tokens as they come, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Callable
from encodings import utf_8
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token: int) -> str:
        """The text that is certain once `token` has come; may be empty."""

    def finish(self) -> str:
        """What was held back: bytes that never became a character, as U+FFFD."""


class TokenTexts(dict[int, str | bytes]):
    """What each token stands for, looked up once: text, or bytes where these may be parts of characters. `bytes_of`
    gives a token's bytes, b"" for one that is not shown."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of

    def __missing__(self, token: int) -> str | bytes:
        data = self._bytes_of(token)
        piece = self[token] = data.decode() if data.isascii() else data
        return piece


class ByteDetokenizer:
    """For byte-level tokenizers: a token is bytes, so an incremental UTF-8 decoder is exact."""

    def __init__(self, pieces: TokenTexts) -> None:
        self._pieces = pieces
        self._decoder = utf_8.IncrementalDecoder(errors="replace")

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, str):
            if not self._decoder.buffer:
                return piece
            piece = piece.encode()
        return self._decoder.decode(piece)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer, where a token's text depends on its neighbours: the text of a window of tokens is
    compared with that of the window before; what ends in U+FFFD is held back."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._shown = 0  # tokens of the window whose text has been given out

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(REPLACEMENT):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._tokens))

    def _advance(self, text: str) -> str:
        before = self._decode(self._tokens[: self._shown])
        if len(text) <= len(before):
            return ""
        if self._shown:
            # the tokens just shown are the next ones' left neighbours; older ones are no longer needed
            self._tokens = self._tokens[self._shown :] if self._shown < len(self._tokens) else self._tokens
        delta = text[len(before) :]
        self._shown = len(self._tokens)
        return delta
