"""The tensors of an adapter folder: headers first, data on demand."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
MANIFEST_FILE = "kt_adapter_manifest.json"
FUSED_FILE = "fused_expert_lora.safetensors"
EXTRA_FILE = "lora_experts.safetensors"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KEYS_SHOWN = 4
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


def finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def refusal(message: str, keys: list[str]) -> AdapterError:
    """An AdapterError that shows the first few keys and how many there are."""
    shown = ", ".join(keys[:KEYS_SHOWN])
    more = f" and {len(keys) - KEYS_SHOWN} more ({len(keys)} in all)" if len(keys) > KEYS_SHOWN else ""
    return AdapterError(f"{message}: {shown}{more}" if keys else message, keys)


@dataclass(frozen=True)
class _Held:
    """An open file: get(key) is a tensor, maybe a view of the mapped file."""

    name: str
    get: Callable[[str], torch.Tensor]
    pause: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file, not read yet."""

    held: _Held
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def load(self) -> torch.Tensor:
        """Maybe a view of the mapped file: to be copied before the file is closed."""
        self.held.pause()
        return self.held.get(self.key)

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def read(self) -> torch.Tensor:
        """A contiguous copy that owns its memory: the file may be replaced later. Refuses NaN and infinity."""
        tensor = self.load().to(memory_format=torch.contiguous_format, copy=True)
        if not finite(tensor):
            raise refusal(NOT_FINITE, [self.key])
        return tensor


class AdapterFiles:
    """An open adapter folder. `main` holds adapter_model.* by key, `fused` fused_expert_lora.safetensors,
    `extra` lora_experts.safetensors; None where there is no such file. `pause` is called between small pieces of work,
    so that a reading thread can let others run."""

    def __init__(self, path: str | Path, pause: Callable[[], None] = lambda: None) -> None:
        self.folder = _folder(path)
        self.pause = pause
        self.warnings: list[str] = []
        self._open: list[Any] = []
        try:
            self.names = sorted(entry.name for entry in self.folder.iterdir())
            self.main, self.main_file = self._main()
            self.fused = self._optional(FUSED_FILE)
            self.extra = self._optional(EXTRA_FILE)
        except BaseException:
            self.close()
            raise
        if self.main is None and self.fused is None:
            raise AdapterError(
                f"{self.folder} holds no adapter: none of {', '.join((*ADAPTER_FILES, FUSED_FILE))} is there"
            )
        read = {*ADAPTER_FILES, FUSED_FILE, EXTRA_FILE}
        unread = [name for name in self.names if name.endswith(".safetensors") and name not in read]
        if unread:
            self.warnings.append(f"files that are no part of an adapter were not read: {', '.join(unread)}")

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
        try:
            file: Any = safe_open(str(self.folder / name), framework="pt")
            self._open.append(file)
            file.__enter__()
            held = _Held(name, file.get_tensor, self.pause)
            return {key: _entry(held, file, key) for key in sorted(file.keys())}
        except SafetensorError as error:
            raise AdapterError(f"{name} is corrupt or truncated: {error}", [name]) from error

    def _pickled(self, name: str) -> dict[str, Entry]:
        path = self.folder / name
        try:
            mmap = zipfile.is_zipfile(path)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except _PICKLE_ERRORS as error:
            raise AdapterError(f"{name} is corrupt, or holds more than plain tensors: {error}", [name]) from error
        if not isinstance(state, dict):
            raise AdapterError(f"{name} must hold a dictionary of tensors, not {type(state).__name__}", [name])
        tensors = {str(key): value for key, value in state.items()}
        held = _Held(name, tensors.__getitem__, self.pause)
        return {key: _pickled_entry(held, key, value) for key, value in tensors.items()}

    def close(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def __enter__(self) -> AdapterFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    try:
        resolved = folder.expanduser().resolve(strict=True)
        if not resolved.is_dir():
            raise AdapterError(f"{folder} is not a folder; an adapter is the folder that holds {CONFIG_FILE}")
    except (OSError, RuntimeError, ValueError) as error:  # missing, a loop of links, a NUL, no home
        raise AdapterError(f"the adapter's path {str(folder)!r} cannot be opened: {error}") from error
    return resolved


def _entry(held: _Held, file: Any, key: str) -> Entry:
    held.pause()
    header = file.get_slice(key)
    dtype = _DTYPES.get(header.get_dtype())
    if dtype is None:
        raise AdapterError(f"{held.name}: {key} has type {header.get_dtype()}; {', '.join(_DTYPES)} are read", [key])
    return Entry(held, key, tuple(header.get_shape()), dtype)


def _pickled_entry(held: _Held, key: str, value: object) -> Entry:
    if not isinstance(value, torch.Tensor):
        raise AdapterError(f"{held.name}: {key} is a {type(value).__name__}, not a tensor", [key])
    if value.dtype not in _DTYPES.values():
        raise AdapterError(f"{held.name}: {key} has type {value.dtype}; {', '.join(_DTYPES)} are read", [key])
    return Entry(held, key, tuple(value.shape), value.dtype)
