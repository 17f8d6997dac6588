"""One answer's output: tokens in, deltas out. It knows nothing of requests and HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from api.text.channels import Channels
from api.text.deltas import Delta, Text, joined
from api.text.detokenize import Detokenizer
from api.text.segments import Segments
from api.text.stops import StopMachine, StopStrings


class Output:
    """Tokens become text, which ends at a stop string and is cut into segments. `detokenizer` None: tokens have no
    text. Stop strings are looked for after `min_tokens` tokens. `segments` None: all text is the answer.
    `include_stop`: the stop string, or the text of the token that ended the output, belongs to the text."""

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stops: StopStrings | None = None,
        min_tokens: int = 0,
        segments: Segments | Channels | None = None,
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMachine(stops, include=include_stop) if stops is not None else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._segments = segments
        self.num_tokens = 0  # up to the one that completes a stop string
        self.num_reasoning_tokens = 0
        self.num_chars = 0  # of their text, before anything is held back or cut

    @property
    def stopped(self) -> bool:
        """Whether a stop string, or the last call that may be made, was found: nothing after it counts."""
        found = self._stops is not None and self._stops.found
        return found or (self._segments is not None and self._segments.ended)

    @property
    def stop_string(self) -> str | None:
        """The one that was found."""
        return None if self._stops is None else self._stops.string

    @property
    def calls(self) -> int:
        return 0 if self._segments is None else self._segments.calls

    def push(self, tokens: Sequence[int]) -> tuple[list[Delta], list[int], list[int]]:
        """What is certain once `tokens` have come; of as many as count, where the text of each begins, and how many
        calls came before it: -1 for one of reasoning, a call or a marker (of several tokens, the last)."""
        if self._segments is None:
            return self._push_plain(tokens)
        deltas: list[Delta] = []
        offsets: list[int] = []
        said: list[int] = []
        for token in tokens:
            offsets.append(self.num_chars)
            self.num_tokens += 1
            if self._detokenizer is None:
                said.append(0)
                continue
            apart = self._segments.apart
            deltas += self._show(self._detokenizer.push(token))
            said.append(self.calls if not apart and self._segments.says else -1)
            self.num_reasoning_tokens += self._segments.reasons
            if self.stopped:
                deltas += self._flush()
                break
        return joined(deltas), offsets, said

    def _push_plain(self, tokens: Sequence[int]) -> tuple[list[Delta], list[int], list[int]]:
        """The same where all text is the answer."""
        text = ""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self.num_chars)
            self.num_tokens += 1
            if self._detokenizer is None:
                continue
            if self._stops is None:
                piece = self._detokenizer.push(token)
                self.num_chars += len(piece)
                text += piece
                continue
            text += self._certain(self._detokenizer.push(token))
            if self._stops.found:
                break
        return [Text(text)] if text else [], offsets, [0] * len(offsets)

    def end(self, token: int) -> list[Delta]:
        """The token that ended the output is one of its tokens; its text is left out unless it is asked for."""
        self.num_tokens += 1
        if self._detokenizer is None or not self._include_stop:
            return []
        return self._show(self._detokenizer.push(token))

    def finish(self) -> list[Delta]:
        """The tokens have ended: what was held back."""
        if self._detokenizer is None:
            return []
        last = self._show(self._detokenizer.finish())
        if self._stops is not None:
            last += self._segment(self._stops.finish())
        return joined([*last, *self._flush()])

    def _certain(self, text: str) -> str:
        """What of a token's text, and of what was held back before it, no stop string will take away."""
        self.num_chars += len(text)
        if self._stops is not None and self.num_tokens > self._min_tokens:
            return self._stops.push(text)
        return text

    def _show(self, text: str) -> list[Delta]:
        return self._segment(self._certain(text))

    def _segment(self, text: str) -> list[Delta]:
        return [Text(text)] if self._segments is None else self._segments.push(text)

    def _flush(self) -> list[Delta]:
        return [] if self._segments is None else self._segments.finish()
