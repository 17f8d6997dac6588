"""Stop strings over text that comes in pieces: one automaton (Aho-Corasick) for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMachine:
    """Finds the stop string that ends first in the text (of several that end there, the one that begins first), and
    holds back the end of the text while it may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._goto: list[dict[str, int]] = [{}]
        self._depth: list[int] = [0]
        self._fail: list[int] = [0]
        self._match: list[int] = [0]  # length of the longest stop string that ends in a state, 0 for none
        self._state = 0
        self._held = ""
        self.found = False
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._goto[state]:
                self._goto[state][char] = len(self._goto)
                self._goto.append({})
                self._depth.append(self._depth[state] + 1)
                self._fail.append(0)
                self._match.append(0)
            state = self._goto[state][char]
        self._match[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            self._match[state] = self._match[state] or self._match[self._fail[state]]
            for char, child in self._goto[state].items():
                self._fail[child] = self._step(self._fail[state], char)
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._goto[state]:
            state = self._fail[state]
        return self._goto[state].get(char, 0)

    def push(self, text: str) -> str:
        """The part of the text so far that is certain to come before any stop string. Once `found`, always empty."""
        if self.found:
            return ""
        buffer = self._held + text
        for index in range(len(self._held), len(buffer)):
            self._state = self._step(self._state, buffer[index])
            if length := self._match[self._state]:
                self.found = True
                self._held = ""
                return buffer[: index + 1 - length]
        keep = len(buffer) - self._depth[self._state]
        self._held = buffer[keep:]
        return buffer[:keep]

    def finish(self) -> str:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return held
