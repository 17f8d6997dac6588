"""The examples of a job, as `training/service/data.py` has written them."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import msgspec

from engine.tuning import Sample

_decode = msgspec.msgpack.Decoder(list[Sample]).decode


class Samples:
    """`out`: the place that was given to the program that made them. Raises OSError."""

    def __init__(self, out: Path) -> None:
        self._ends = array("Q")
        index = Path(f"{out}.index")
        with index.open("rb") as file:
            self._ends.fromfile(file, index.stat().st_size // self._ends.itemsize)
        self._file = Path(f"{out}.samples").open("rb")  # noqa: SIM115 - closed by close()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def example(self, number: int) -> list[Sample]:
        """Its texts: one, or of a preference the chosen and the rejected one."""
        start, end = self._ends[number : number + 2]
        return _decode(os.pread(self._file.fileno(), end - start, start))

    def close(self) -> None:
        self._file.close()
