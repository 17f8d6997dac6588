"""A GGUF model: one file or a split set, opened as a whole. Torch-free.

>>> file = open_gguf(Path("model-00001-of-00003.gguf"))
>>> file.metadata["general.architecture"], file.tensors["token_embd.weight"].shape
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelFileError, UserError, shown
from engine.files.gguf.header import GGUFArray, GGUFHeader, MetadataValue, read_header
from engine.files.model_file import FileBytes, FileTensor, ModelFile

__all__ = ["GGUFArray", "GGUFFile", "MetadataValue", "find_gguf", "open_gguf"]

_PART = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_PARTS = 9999


@dataclass(frozen=True)
class GGUFFile:
    """`metadata` is the first part's; arrays in it are `GGUFArray`. `tensors` are in file order, part after part."""

    files: list[ModelFile]
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, FileTensor]
    parts: Mapping[str, GGUFHeader]  # tensor name -> the part that holds it

    @property
    def path(self) -> Path:
        return self.files[0].path

    def data(self, name: str) -> FileBytes:
        """A tensor's bytes. KeyError if there is none."""
        tensor = self.tensors[name]
        return self.parts[name].file.bytes(tensor.start, tensor.num_bytes)


def _is_projector(path: Path) -> bool:
    return "mmproj" in path.name.lower()


def find_gguf(path: Path) -> Path:
    """The GGUF file that a path means: the file itself, or the one model of a folder (its first part if split).

    A multimodal model's projector (`mmproj-F16.gguf`) is none. Raises UserError if the path does not exist or the
    folder holds no GGUF model or several.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder", "model")
    files = sorted(p for p in path.iterdir() if p.suffix == ".gguf" and p.is_file() and not _is_projector(p))
    models = {(m["stem"], m["count"]) if (m := _PART.fullmatch(p.name)) else p.name: p for p in reversed(files)}
    if not models:
        raise UserError(f"{path}: the folder holds no .gguf file", "model")
    if len(models) > 1:
        names = ", ".join(sorted(p.name for p in models.values()))
        found = f"the folder holds several GGUF models, name one of them: {names}"
        raise UserError(f"{path}: {found} (ktserve plan {path} compares them)", "model")
    return next(iter(models.values()))


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file, or a folder with one model, and all its parts. Reads headers only.

    Raises UserError for a path that leads to no model. Raises ModelFileError for a file that is truncated or corrupt,
    for a missing part and for parts that do not belong together.
    """
    path = find_gguf(path)
    header = read_header(path)
    count = _split_number(header, "split.count", 1)
    if count <= 1:
        return GGUFFile([header.file], header.metadata, header.tensors, dict.fromkeys(header.tensors, header))
    headers = [header if p == path else _read_part(p, path) for p in _part_paths(path, count)]
    tensors: dict[str, FileTensor] = {}
    parts: dict[str, GGUFHeader] = {}
    for index, part in enumerate(headers):
        _check_part(part, index, count)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelFileError(f"{part.path}: tensor {name} is also in {parts[name].path.name}", "model")
            tensors[name], parts[name] = tensor, part
    total = _split_number(headers[0], "split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelFileError(
            f"{headers[0].path}: split.tensors.count says {total}, but the {count} parts hold {len(tensors)} tensors",
            "model",
        )
    return GGUFFile([h.file for h in headers], headers[0].metadata, tensors, parts)


def _split_number(header: GGUFHeader, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelFileError(f"{header.path}: {key} is {shown(value)}, not a count", "model")
    return value


def _part_paths(path: Path, count: int) -> list[Path]:
    if count > _MAX_PARTS:
        raise ModelFileError(f"{path}: split.count is {count}; at most {_MAX_PARTS} parts are read", "model")
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelFileError(
            f"{path}: one of {count} parts by its metadata; such files must be named <name>-00001-of-{count:05d}.gguf",
            "model",
        )
    return [path.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}.gguf") for no in range(1, count + 1)]


def _read_part(path: Path, opened: Path) -> GGUFHeader:
    if not path.is_file():
        raise ModelFileError(
            f"{path}: this part of {opened.name} is missing; fetch it: ktserve pull hf:ORG/REPO:QUANT", "model"
        )
    return read_header(path)


def _check_part(part: GGUFHeader, index: int, count: int) -> None:
    number, total = _split_number(part, "split.no", -1 & 0xFFFF), _split_number(part, "split.count", 1)
    if (number, total) != (index, count):
        raise ModelFileError(
            f"{part.path}: its metadata says part {number + 1} of {total}, its name part {index + 1} of {count}",
            "model",
        )
