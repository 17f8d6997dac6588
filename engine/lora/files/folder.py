"""The tensors of an adapter folder: headers first, data on demand."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import reprlib
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from engine.errors import AdapterError, ModelFileError
from engine.files.model_file import FileTensor
from engine.files.regular import open_regular, read_at
from engine.files.safetensors import read_header
from engine.weights.dequant import first_nonfinite

CONFIG_FILE = "adapter_config.json"
MANIFEST_FILE = "kt_adapter_manifest.json"
FUSED_FILE = "fused_expert_lora.safetensors"
TRAINER_STATE = "trainer_state.json"  # which transformers' Trainer writes into every checkpoint
EXTRA_FILE = "lora_experts.safetensors"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_WEIGHT_FILES = (*ADAPTER_FILES, FUSED_FILE, EXTRA_FILE)

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KEYS_SHOWN, _KEY_SHOWN = 4, 160
_MAX_FILES = 10_000
_MAX_HEADER = 32 << 20  # 94 layers of 128 experts, a pair per projection, take 16 MiB
# What the restricted unpickler raises over damaged bytes; it promises no kind of its own.
_PICKLE_ERRORS = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    struct.error,
    zipfile.BadZipFile,
)


NOT_FINITE = "values that are not finite"
NO_MEMORY = "takes more memory than files of its size may"


def finite(tensor: torch.Tensor) -> bool:
    return first_nonfinite(tensor) is None


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def refusal(message: str, keys: list[str]) -> AdapterError:
    """An AdapterError that shows the first few keys and how many there are."""
    return AdapterError(f"{message}: {shown(keys)}" if keys else message, keys)


def shown(keys: list[str]) -> str:
    """The first few, and how many there are."""
    more = f" and {len(keys) - KEYS_SHOWN} more ({len(keys)} in all)" if len(keys) > KEYS_SHOWN else ""
    cut = (key if len(key) <= _KEY_SHOWN else f"{key[:_KEY_SHOWN]}..." for key in keys[:KEYS_SHOWN])
    return ", ".join(cut) + more


def brief(value: object) -> str:
    """The repr of what a file says, short enough for an error message."""
    text = reprlib.Repr()
    text.maxstring = text.maxother = _KEY_SHOWN
    return text.repr(value)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file, not read yet."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def read(self) -> torch.Tensor:
        """Contiguous. Refuses NaN and infinity."""
        tensor = self.load().contiguous()
        if not finite(tensor):
            raise refusal(NOT_FINITE, [self.key])
        return tensor


class AdapterFiles:
    """An open adapter folder. `main` holds adapter_model.* by key, `fused` fused_expert_lora.safetensors,
    `extra` lora_experts.safetensors; None where there is no such file. Files are opened once, and nothing is mapped:
    one that is replaced or cut off meanwhile is read as it was opened, or refused. `opened` gets the bytes of all
    weight files before one is read."""

    def __init__(self, path: str | Path, opened: Callable[[int], None] = lambda num_bytes: None) -> None:
        self.folder = _folder(path)
        self.warnings: list[str] = []
        self._open: dict[str, BinaryIO] = {}
        try:
            self.names = _names(self.folder)
            weight_files = [name for name in _WEIGHT_FILES if name in self.names]
            opened(sum(os.fstat(self.open(name).fileno()).st_size for name in weight_files))
            self.main, self.main_file = self._main()
            self.fused = self._optional(FUSED_FILE)
            self.extra = self._optional(EXTRA_FILE)
        except BaseException:
            self.close()
            raise
        unread = [name for name in self.names if name.endswith(".safetensors") and name not in _WEIGHT_FILES]
        if unread:
            self.warnings.append(f"files that are no part of an adapter were not read: {shown(unread)}")

    def open(self, name: str) -> BinaryIO:
        """A file of the folder, always the same one for a name. ModelFileError if it is none that can be read."""
        if name not in self._open:
            self._open[name] = open_regular(self.folder / name)
        return self._open[name]

    def _main(self) -> tuple[dict[str, Entry] | None, str | None]:
        safetensors, pickled = ADAPTER_FILES
        if safetensors in self.names:
            if pickled in self.names:
                self.warnings.append(f"{pickled} was not read: {safetensors} is there too")
            return self._safetensors(safetensors), safetensors
        if pickled in self.names:
            return self._pickled(pickled), pickled
        return None, None

    def _optional(self, name: str) -> dict[str, Entry] | None:
        return self._safetensors(name) if name in self.names else None

    def _safetensors(self, name: str) -> dict[str, Entry]:
        file, path = self.open(name), self.folder / name

        def entry(tensor: FileTensor) -> Entry:
            dtype = _DTYPES[tensor.type]

            def load() -> torch.Tensor:
                content = read_at(file.fileno(), path, tensor.start, tensor.num_bytes)
                return torch.frombuffer(content, dtype=dtype).reshape(tensor.shape)

            return Entry(tensor.name, tensor.shape, dtype, load)

        try:
            header = read_header(file.fileno(), path, _MAX_HEADER)
        except ModelFileError as error:
            raise AdapterError(str(error), [name]) from error
        return {key: entry(header[key]) for key in sorted(header)}

    def _pickled(self, name: str) -> dict[str, Entry]:
        try:
            state = torch.load(self.open(name), map_location="cpu", weights_only=True)
        except _PICKLE_ERRORS as error:
            if out_of_memory(error):
                raise AdapterError(f"{name} {NO_MEMORY}", [name]) from error
            named = re.search(r"GLOBAL ([\w.]{1,100})", str(error))
            why = f"it names {named[1]}" if named else type(error).__name__  # torch's text advises to load it unsafely
            raise AdapterError(f"{name} is corrupt, or holds more than plain tensors: {why}", [name]) from error
        if not isinstance(state, dict):
            raise AdapterError(f"{name} must hold a dictionary of tensors, not {type(state).__name__}", [name])
        return {str(key): _pickled_entry(name, str(key), value) for key, value in state.items()}

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> AdapterFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_folder(path: str | Path) -> None:
    """What can be seen of an adapter's folder without reading a file. Raises AdapterError."""
    try:
        folder = _folder(path)
        for name in _names(folder):
            if name in _WEIGHT_FILES:
                open_regular(folder / name).close()
    except (ModelFileError, OSError) as error:
        raise AdapterError(f"the adapter's path {brief(str(path))} cannot be read: {error}") from error


def _names(folder: Path) -> list[str]:
    """Of the files of an adapter. Raises AdapterError if it is none, OSError."""
    with os.scandir(folder) as found:
        names = sorted(entry.name for entry in itertools.islice(found, _MAX_FILES + 1))
    if len(names) > _MAX_FILES:
        raise AdapterError(f"{folder} holds more than {_MAX_FILES} files")
    if not {*ADAPTER_FILES, FUSED_FILE} & set(names):
        raise AdapterError(_no_adapter(folder, names))
    return names


def _no_adapter(folder: Path, names: list[str]) -> str:
    none = f"none of {', '.join((*ADAPTER_FILES, FUSED_FILE))} is there"
    checkpoints = [name for name in names if name.startswith("checkpoint-")]
    if any(name == "config.json" or name.endswith(".gguf") for name in names):
        kind = "a checkpoint of a whole model" if TRAINER_STATE in names else "a model"
        return f"{folder} is {kind}, not an adapter: {none}"
    if TRAINER_STATE in names:
        return f"{folder} is a trainer's checkpoint without an adapter: {none}"
    if checkpoints:
        named = shown(checkpoints)
        return f"{folder} is a training run without an adapter of its own; name one of its checkpoints: {named}"
    return f"{folder} holds no adapter: {none}"


def _folder(path: str | Path) -> Path:
    try:
        resolved = Path(path).expanduser().resolve(strict=True)
        if not resolved.is_dir():
            raise AdapterError(f"{path} is not a folder; an adapter is the folder that holds {CONFIG_FILE}")
    except (OSError, RuntimeError, ValueError) as error:  # missing, a loop of links, a NUL, no home
        why = error.strerror if isinstance(error, OSError) else error
        raise AdapterError(f"the adapter's path {brief(str(path))} cannot be opened: {why}") from error
    return resolved


def _pickled_entry(name: str, key: str, value: object) -> Entry:
    if not isinstance(value, torch.Tensor):
        raise AdapterError(f"{name}: {key} is a {type(value).__name__}, not a tensor", [key])
    if value.dtype not in _DTYPES.values() or value.layout is not torch.strided:
        kind = value.dtype if value.layout is torch.strided else value.layout
        raise AdapterError(f"{name}: {key} has type {kind}; {', '.join(_DTYPES)} are read", [key])
    return Entry(key, tuple(value.shape), value.dtype, lambda: value)
