"""The tensors of an adapter folder: headers first, data on demand."""

from __future__ import annotations

import pickle
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


def refusal(message: str, keys: list[str]) -> AdapterError:
    """An AdapterError that shows the first few keys and how many there are."""
    shown = ", ".join(keys[:KEYS_SHOWN])
    more = f" and {len(keys) - KEYS_SHOWN} more ({len(keys)} in all)" if len(keys) > KEYS_SHOWN else ""
    return AdapterError(f"{message}: {shown}{more}" if keys else message, keys)


@dataclass(frozen=True)
class Entry:
    """One tensor in a file, not read yet."""

    file: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def read(self) -> torch.Tensor:
        """A contiguous copy that owns its memory: the file may be replaced later. Refuses NaN and infinity."""
        tensor = self.load().to(memory_format=torch.contiguous_format, copy=True)
        if not bool(torch.isfinite(tensor).all()):
            raise refusal("values that are not finite", [self.key])
        return tensor


class AdapterFiles:
    """An open adapter folder. `main` holds adapter_model.* by key, `fused` fused_expert_lora.safetensors,
    `extra` lora_experts.safetensors; None where there is no such file."""

    def __init__(self, path: str | Path) -> None:
        self.folder = _folder(path)
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
            return {key: _safetensors_entry(file, name, key) for key in sorted(file.keys())}
        except SafetensorError as error:
            raise AdapterError(f"{name} is corrupt or truncated: {error}", [name]) from error

    def _pickled(self, name: str) -> dict[str, Entry]:
        path = self.folder / name
        try:
            mmap = zipfile.is_zipfile(path)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
            raise AdapterError(f"{name} is corrupt, or holds more than plain tensors: {error}", [name]) from error
        if not isinstance(state, dict):
            raise AdapterError(f"{name} must hold a dictionary of tensors, not {type(state).__name__}", [name])
        return {str(key): _pickled_entry(name, str(key), value) for key, value in state.items()}

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


def _safetensors_entry(file: Any, name: str, key: str) -> Entry:
    header = file.get_slice(key)
    dtype = _DTYPES.get(header.get_dtype())
    if dtype is None:
        raise AdapterError(f"{name}: {key} has type {header.get_dtype()}; {', '.join(_DTYPES)} are read", [key])
    return Entry(name, key, tuple(header.get_shape()), dtype, lambda: file.get_tensor(key))


def _pickled_entry(name: str, key: str, value: object) -> Entry:
    if not isinstance(value, torch.Tensor):
        raise AdapterError(f"{name}: {key} is a {type(value).__name__}, not a tensor", [key])
    if value.dtype not in _DTYPES.values():
        raise AdapterError(f"{name}: {key} has type {value.dtype}; {', '.join(_DTYPES)} are read", [key])
    return Entry(name, key, tuple(value.shape), value.dtype, lambda: value)
