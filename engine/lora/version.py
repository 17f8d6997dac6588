"""One version of an adapter, and what can happen to it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from engine.errors import EngineError, KtserveError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterSize
from engine.lora.files.b_layout import B_LAYOUTS
from engine.lora.files.settings import EXPERT_SCALINGS
from engine.messages import AdapterInfo
from scheduler.request import AdapterKey

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


class AdapterStatus(enum.Enum):
    LOADING = "loading"  # being read, or waiting to be; cannot be used yet
    READY = "ready"  # new requests get it
    RETIRING = "retiring"  # replaced or unloaded; requests that have it go on
    FAILED = "failed"  # could not be read


class Residency(enum.Enum):
    """Where the nearest copy of a READY or RETIRING version is."""

    DISK = "disk"  # its folder is read again when a request wants it
    HOST = "host"
    SLOT = "slot"


@dataclass(frozen=True)
class Loaded:
    call_id: int
    info: AdapterInfo


@dataclass(frozen=True)
class LoadFailed:
    """UserError: the files or the call; else ours."""

    call_id: int
    error: KtserveError


@dataclass(frozen=True)
class Moved:
    """A READY adapter's residency is another, or its first."""

    name: str
    residency: Residency


@dataclass(frozen=True)
class Retiring:
    """The scheduler is to say when nothing uses this version any more; `Adapters.release` follows."""

    key: AdapterKey


@dataclass(frozen=True)
class SlotFilled:
    slot: int


@dataclass(frozen=True)
class SlotFailed:
    slot: int
    reason: str


AdapterEvent = Loaded | LoadFailed | Moved | Retiring | SlotFilled | SlotFailed


def check_call(name: str, path: str, expert_scaling: str | None, expert_b_layout: str | None, base_name: str) -> None:
    """UserError for what no adapter may be loaded with."""
    if not _NAME.fullmatch(name):
        raise UserError(f"adapter name {name[:200]!r}: allowed are 1 to 128 of A-Z a-z 0-9 . _ : / -", "lora_name")
    if name == base_name:
        raise UserError(f"adapter name {name!r} is the base model's name", "lora_name")
    if expert_scaling is not None and expert_scaling not in EXPERT_SCALINGS:
        raise UserError(f"expert_scaling is {expert_scaling!r}, it must be one of {EXPERT_SCALINGS}", "expert_scaling")
    if expert_b_layout is not None and expert_b_layout not in B_LAYOUTS:
        raise UserError(f"expert_b_layout is {expert_b_layout!r}, it must be one of {B_LAYOUTS}", "expert_b_layout")
    if not path.startswith(("/", "~")):
        raise UserError(f"path {path[:100]!r} must be absolute: the folder of an adapter", "lora_path")


@dataclass(eq=False)
class Version:
    """`info` and `size` are known once the files have been read; `digest` is that of what was read then."""

    key: AdapterKey
    name: str
    path: str
    expert_scaling: str | None
    expert_b_layout: str | None
    call_id: int
    pinned: bool  # never evicted while READY
    status: AdapterStatus = AdapterStatus.LOADING
    weights: AdapterWeights | None = None  # the host copy
    size: AdapterSize | None = None
    digest: bytes = b""
    about: AdapterInfo | None = None
    slot: int | None = None  # that holds a copy
    filling: bool = False  # a slot is promised to it: its host copy is about to be read
    slot_asked_s: float = 0.0  # since when, on the monotonic clock
    reported: Residency | None = None  # by the last `Moved`
    error: str = ""  # FAILED

    def become_ready(self, weights: AdapterWeights, note: str) -> None:
        """`note` is a warning more, if it is not empty."""
        warnings = [*weights.warnings, note] if note else list(weights.warnings)
        uid, number = self.key
        size = weights.num_bytes
        self.about = AdapterInfo(
            self.name, self.path, uid, number, weights.format, weights.rank, size, warnings, self.pinned
        )
        self.weights, self.digest, self.status = weights, weights.digest, AdapterStatus.READY

    @property
    def residency(self) -> Residency:
        if self.slot is not None:
            return Residency.SLOT
        return Residency.DISK if self.weights is None else Residency.HOST

    @property
    def kept(self) -> bool:
        """Whether its host copy is never evicted."""
        return self.pinned and self.status is AdapterStatus.READY

    @property
    def info(self) -> AdapterInfo:
        if self.about is None:
            raise EngineError(f"adapter {self.name!r} {tuple(self.key)} is {self.status.value}, it was never read")
        return self.about

    @property
    def held(self) -> AdapterWeights:
        """The host copy. EngineError if there is none."""
        if self.weights is None:
            raise EngineError(f"adapter {self.name!r} {tuple(self.key)} is {self.status.value}, it has no weights here")
        return self.weights
