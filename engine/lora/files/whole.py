"""The embedding and the head, which trainers store beside the LoRA though nothing has trained them.

PEFT does so of its own accord when the vocabulary was resized or one of them is a target. One that equals the base's
changes nothing and is passed over; any other is another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.files.model_file import FileBytes, ModelFile
from engine.lora.files.detect import WHOLE
from engine.lora.files.folder import Entry, refusal
from engine.weights.layout import EMBED, HEAD
from engine.weights.store import WeightSource, WeightTensor

_TABLES = dict(zip(WHOLE, (EMBED, HEAD), strict=True))
_PIECE = 16 << 20  # values that are compared at once


@dataclass(frozen=True)
class BaseTable:
    """Where the base's embedding or head lies in a file; another process can read it."""

    path: str
    start: int
    num_bytes: int
    type: str
    shape: tuple[int, ...]

    def tensor(self) -> WeightTensor:
        """ModelFileError if the file cannot be opened."""
        return WeightTensor(
            self.path, self.shape, self.type, FileBytes(ModelFile(Path(self.path)), self.start, self.num_bytes)
        )


def base_tables(source: WeightSource) -> dict[str, BaseTable]:
    """By module. A tied head is the embedding; one that is made of several parts of a file has none."""
    found, whole = {}, source.undivided
    for module, name in _TABLES.items():
        tensor = whole.tensor(name if whole.has(name) else EMBED)
        if isinstance(data := tensor.data, FileBytes):
            found[module] = BaseTable(
                str(data.file.path.absolute()), data.start, data.nbytes, tensor.type, tensor.shape
            )
    return found


def check_whole(stored: Mapping[str, Entry], tables: Mapping[str, BaseTable]) -> None:
    """AdapterError unless every stored module equals the base's, rounded to the type in which it is stored."""
    for module, entry in stored.items():
        if module not in tables:
            raise refusal(f"a whole {module}, and no base to compare it with", [entry.key])
        if not _equal(entry, tables[module].tensor()):
            raise refusal(f"a whole {module} that is not the base's: trained embeddings are not supported", [entry.key])


def _equal(entry: Entry, base: WeightTensor) -> bool:
    if entry.shape != base.shape:
        return False
    values, rows = entry.load(), max(_PIECE // base.shape[1], 1)
    row_bytes = base.num_bytes // base.shape[0]
    for first in range(0, base.shape[0], rows):
        count = min(rows, base.shape[0] - first)
        data = base.data[first * row_bytes : (first + count) * row_bytes]
        piece = WeightTensor(base.name, (count, base.shape[1]), base.type, data).dequantise()
        if not torch.equal(values[first : first + count], piece.to(entry.dtype)):
            return False
    return True
