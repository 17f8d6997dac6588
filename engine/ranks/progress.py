"""How far each rank of a group is: words in memory that all of them map. Each writes its own; they are read by
`engine.ranks.watch` alone. Torch-free.

    rank 0   beats  stage  parts  step  exchange  wait
    rank 1   beats  stage  parts  step  exchange  wait
    ...                                                   int64
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class Stage(IntEnum):
    STARTING = 0  # its process
    LOADING = 1
    CONNECTING = 2
    PREPARING = 3  # graphs are captured, kernels are compiled
    SERVING = 4


class Wait(IntEnum):
    """What a rank's main thread waits for."""

    NOTHING = 0  # it computes
    STEP = 1  # that rank 0 sends
    EXCHANGE = 2
    RESULTS = 3  # of a step on the GPU
    OTHERS = 4  # to be where it is, while they start
    SENT = 5  # a step, to the other ranks


@dataclass(frozen=True)
class Place:
    """A rank's words. `parts` have been loaded; `step`: how many it was told of, or, rank 0, has told; `exchange`: how
    many it has come to."""

    beats: int
    stage: Stage
    parts: int
    step: int
    exchange: int
    wait: Wait

    @property
    def without_beats(self) -> tuple[int, ...]:
        """Changes whenever the rank's main thread goes on."""
        return self.stage, self.parts, self.step, self.exchange, self.wait


_WORDS = 6
_BEATS, _STAGE, _PARTS, _STEP, _EXCHANGE, _WAIT = range(_WORDS)


class Progress:
    """`words` of all ranks, int64, as rank `rank` writes them: its own. A word is written by one thread alone."""

    def __init__(self, words: memoryview, rank: int) -> None:
        self.rank = rank
        self.size = len(words) // _WORDS
        self._words = words
        self._own = words[rank * _WORDS : (rank + 1) * _WORDS]

    @classmethod
    def create(cls, path: Path, size: int) -> Progress:
        """Of rank 0, in a new file. Raises OSError."""
        path.write_bytes(bytes(8 * _WORDS * size))
        return cls.open(path, 0)

    @classmethod
    def open(cls, path: Path, rank: int) -> Progress:
        """In the file that rank 0 has made. Raises OSError."""
        with path.open("r+b") as file:
            return cls(memoryview(mmap.mmap(file.fileno(), 0)).cast("q"), rank)

    @classmethod
    def in_memory(cls, size: int, rank: int = 0) -> Progress:
        """Of ranks that no other process looks at."""
        return cls(memoryview(bytearray(8 * _WORDS * size)).cast("q"), rank)

    def beat(self) -> None:
        """The process runs."""
        self._own[_BEATS] += 1

    def enter(self, stage: Stage) -> None:
        self._own[_STAGE] = stage

    def loaded_part(self, *_: object) -> None:
        """As the progress that loading reports."""
        self._own[_PARTS] += 1

    def begin_step(self) -> None:
        """Before rank 0 tells the others of a step; when another rank has been told of it."""
        self._own[_STEP] += 1

    def begin_exchange(self) -> None:
        self._own[_EXCHANGE] += 1
        self._own[_WAIT] = Wait.EXCHANGE

    def begin_wait(self, wait: Wait) -> None:
        self._own[_WAIT] = wait

    def end_wait(self) -> None:
        self._own[_WAIT] = Wait.NOTHING

    def places(self) -> list[Place]:
        """Of all ranks, in their order."""
        found = []
        for first in range(0, len(self._words), _WORDS):
            beats, stage, parts, step, exchange, wait = self._words[first : first + _WORDS]
            found.append(Place(beats, Stage(stage), parts, step, exchange, Wait(wait)))
        return found
