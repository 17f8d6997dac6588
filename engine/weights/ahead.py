"""Packed weights of the start before, read and summed up while this process still imports what computes with them.
Torch-free."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.weights.pack_cache import HEADER_BYTES, SUFFIX, cache_root, plain_name
from native.topology import pool_groups

if TYPE_CHECKING:
    from native import _native

_GPU = Path("/dev/nvidiactl")


def read_ahead(config: EngineConfig) -> _native.MappedFiles | None:
    """Begins to; None where nothing is to be had, or it is not known what. What is read is checked as if it were read
    later, and given up if the model has other files by then. `drop` must follow, which a `PackCache` calls."""
    if config.pack_cache == "off" or config.device == "cuda" or (config.device == "auto" and _GPU.exists()):
        return None
    try:
        groups = pool_groups(config.cpu_threads)
        root, name = cache_root(config.pack_cache, config.model, config.gguf)
        folders = [found for found in root.glob(f"{plain_name(name)}-????????????") if any(found.glob(f"*{SUFFIX}"))]
        if len(groups) != 1 or len(folders) != 1:  # nodes' memory is filled by their own threads
            return None
        paths = sorted((path for path in folders[0].glob(f"*{SUFFIX}")), key=_order)
        native: Any = importlib.import_module("native._native")
    except (OSError, ValueError, ImportError):
        return None  # whoever reads the settings next says what is wrong with them
    mapped: _native.MappedFiles = native.MappedFiles()
    # One thread less: the one that imports has a CPU of its own.
    mapped.read_ahead([str(path) for path in paths], HEADER_BYTES, max(1, len(groups[0]) - 1))
    return mapped


def _order(path: Path) -> tuple[int, str]:
    """The largest first: they take longest, and threads share out a file's chunks, not its end."""
    return -path.stat().st_size, path.name
