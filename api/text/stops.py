"""Stop strings over text that comes in pieces: one automaton (Aho-Corasick) for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton, made once for all answers of a request. Raises ValueError for an empty stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._goto: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self._fail: list[int] = [0]
        self.match: list[int] = [0]  # length of the longest stop string that ends in a state, 0 for none
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._goto[state]:
                self._goto[state][char] = len(self._goto)
                self._goto.append({})
                self.depth.append(self.depth[state] + 1)
                self._fail.append(0)
                self.match.append(0)
            state = self._goto[state][char]
        self.match[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            self.match[state] = self.match[state] or self.match[self._fail[state]]
            for char, child in self._goto[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        while state and char not in self._goto[state]:
            state = self._fail[state]
        return self._goto[state].get(char, 0)


class StopMachine:
    """Finds the stop string that ends first in the text; of several that end there, the one that begins first. Holds
    back the end of the text while it may still become one. `include`: the stop string belongs to the text."""

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""
        self.string: str | None = None  # the stop string that was found

    @property
    def found(self) -> bool:
        return self.string is not None

    def push(self, text: str) -> str:
        """The part of the text so far that is certain to be shown. Once `found`, always empty."""
        if self.found:
            return ""
        buffer = self._held + text
        for index in range(len(self._held), len(buffer)):
            self._state = self._stops.step(self._state, buffer[index])
            if length := self._stops.match[self._state]:
                self.string = buffer[index + 1 - length : index + 1]
                self._held = ""
                return buffer[: index + 1 - (0 if self._include else length)]
        keep = len(buffer) - self._stops.depth[self._state]
        self._held = buffer[keep:]
        return buffer[:keep]

    def finish(self) -> str:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return held
