"""Minutes of mutated files for each reader. A mutation that ends in a way not seen before joins the seeds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from testing.fuzz.isolate import End, run
from testing.fuzz.mutate import Files, mutated
from testing.fuzz.readers import Reader

_BATCH = 50
_SEEDS_KEPT = 400


@dataclass
class Tally:
    """Of one reader: how many mutations ended how, and how many looked unlike all before them."""

    name: str
    ends: Counter[str] = field(default_factory=Counter)
    signatures: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


def fuzz(reader: Reader, seconds: float, rng: Random, keep: Path) -> Tally:
    """Mutations that end as they must not are kept as folders in `keep`."""
    tally, whole = Tally(reader.name), reader.seeds()
    for files, end in zip(whole, run(reader, whole), strict=True):
        if end.kind != "read":
            raise AssertionError(f"{reader.name}: the seed with {sorted(files)} is not read: {end}")
    seeds, until = list(whole), time.monotonic() + seconds
    while time.monotonic() < until:
        cases = [mutated(rng.choice(rng.choice([whole, seeds])), seeds, rng) for _ in range(_BATCH)]
        for files, end in _until(until, cases, run(reader, cases)):
            tally.ends[end.kind] += 1
            if end.signature not in tally.signatures:
                tally.signatures.add(end.signature)
                if files and len(seeds) < _SEEDS_KEPT:
                    seeds.append(files)
                if not end.allowed:
                    tally.faults.append(f"{reader.name} {end.kind}: {end.signature} (files: {_keep(keep, files, end)})")
    return tally


def _until(deadline: float, cases: list[Files], ends: Iterator[End]) -> Iterator[tuple[Files, End]]:
    for files, end in zip(cases, ends, strict=False):
        yield files, end
        if time.monotonic() > deadline:
            return


def _keep(folder: Path, files: Files, end: End) -> Path:
    number = len(list(folder.iterdir())) if folder.exists() else 0
    path = folder / str(number)
    path.mkdir(parents=True)
    for name, data in files.items():
        with suppress(OSError):
            (path / name).write_bytes(data)
    (path / "END.txt").write_text(f"{end.kind}: {end.signature}\n{end.detail}")
    return path
