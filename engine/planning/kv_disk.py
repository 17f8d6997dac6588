"""`--kv-disk`: where KV blocks go on disk, how many, and whether they can."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from engine.attention.base import BLOCK_SIZE
from engine.config import EngineConfig
from engine.errors import UserError
from engine.kv_disk.disk import disk_threads
from engine.kv_disk.files import size_on_disk
from engine.memory.items import Item, Kind
from engine.planning.placement import Placement
from engine.units import format_bytes, parse_bytes
from engine.weights.pack_cache import CACHE_FOLDER, plain_name


@dataclass(frozen=True)
class KvDiskPlan:
    """`budget_bytes` in `folder`, `block_bytes` for each block, `state_bytes` for each snapshot of states; 0: layers
    keep none. `unit_bytes`: of a block and a snapshot in memory."""

    folder: Path
    budget_bytes: int
    block_bytes: int
    unit_bytes: int
    state_bytes: int = 0

    @property
    def gpu_items(self) -> list[Item]:
        """What it takes beside a GPU: what is on its way between its memory and the disk."""
        return [Item("CPU", Kind.OTHER, "KV blocks to and from disk, pinned", disk_threads() * self.unit_bytes)]

    @property
    def lines(self) -> list[str]:
        tokens = self.budget_bytes // self.block_bytes * BLOCK_SIZE
        size, each = format_bytes(self.budget_bytes), format_bytes(self.block_bytes // BLOCK_SIZE)
        lines = [f"KV blocks on disk, {self.folder}: up to {size}, {tokens} tokens of {each}"]
        if self.state_bytes:
            lines[0] += f"; a snapshot of states takes {format_bytes(self.state_bytes)} of it"
        free = _free_bytes(self.folder)
        if free is not None and free < self.budget_bytes:
            lines.append(f"note: {format_bytes(free)} are free there; when they are full, no more blocks are written")
        return lines


def plan_kv_disk(config: EngineConfig, placement: Placement, token_bytes: int, state_bytes: int) -> KvDiskPlan | None:
    """What --kv-disk asks for; `token_bytes` are those of a position in the KV cache, `state_bytes` those of a
    sequence's states. UserError for what cannot be."""
    if config.kv_disk is None:
        return None
    budget, block = parse_bytes(config.kv_disk, "kv_disk"), size_on_disk(BLOCK_SIZE * token_bytes)
    if budget < block:
        raise UserError(f"--kv-disk {config.kv_disk}: one block of {BLOCK_SIZE} tokens takes {block} bytes", "kv_disk")
    state = size_on_disk(state_bytes) if state_bytes else 0
    if budget < block + state:
        raise UserError(
            f"--kv-disk {config.kv_disk}: a block of {BLOCK_SIZE} tokens takes {block} bytes, and a snapshot of states "
            f"{state} more",
            "kv_disk",
        )
    if not config.prefix_caching:
        raise UserError("--kv-disk keeps blocks of the prefix cache: leave out --no-prefix-caching", "kv_disk")
    if config.tensor_parallel > 1:
        raise UserError("--kv-disk with --tensor-parallel: ranks have parts of each block; leave one out", "kv_disk")
    if len(kinds := placement.used(".self_attn")) > 1:
        raise UserError(f"--kv-disk takes one attention backend, the rules have {' and '.join(kinds)}", "kv_disk")
    return KvDiskPlan(_folder(config), budget, block, BLOCK_SIZE * token_bytes + state_bytes, state)


def _folder(config: EngineConfig) -> Path:
    if config.kv_disk_dir is not None:
        return Path(os.path.expanduser(config.kv_disk_dir)).absolute()
    files = Path(os.path.expanduser(config.gguf or config.model)).absolute()
    folder, name = (files, files.name) if files.is_dir() else (files.parent, files.stem)
    return folder / CACHE_FOLDER / f"kv-{plain_name(name)}"


def _free_bytes(folder: Path) -> int | None:
    """On the disk that the folder is, or would be, on."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return None if existing is None else shutil.disk_usage(existing).free
