"""The life of every adapter version, in one book.

    load -> LOADING -> READY -> (replaced or unloaded) RETIRING -> release -> gone
                    \\-> FAILED (kept for its reason)

Which adapter gets a slot, and when a retiring one is unused, is the scheduler's to decide
(`scheduler/memory/slots.py`); the work is done here, on threads, and each change is reported once by `events`. All
methods belong to the engine's thread.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from engine.errors import AdapterError, EngineError, KtserveError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget, AdapterSize
from engine.lora.process import ReadRequest
from engine.lora.settings import EXPERT_SCALINGS
from engine.messages import AdapterInfo
from engine.model.config import ModelConfig
from scheduler.plan import SlotLoad
from scheduler.request import BASE, AdapterKey

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_FAILURES_KEPT = 64


class AdapterStatus(enum.Enum):
    LOADING = "loading"  # being read, or waiting to be; cannot be used yet
    READY = "ready"  # new requests get it
    RETIRING = "retiring"  # replaced or unloaded; requests that have it go on
    FAILED = "failed"  # could not be read


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


AdapterEvent = Loaded | LoadFailed | Retiring | SlotFilled | SlotFailed


class Reader(Protocol):
    """Reads one folder at a time. Raises UserError for one that cannot be served. `close` ends a read."""

    def read(self, request: ReadRequest) -> AdapterWeights: ...

    def close(self) -> None: ...


@dataclass
class _Version:
    key: AdapterKey
    name: str
    path: str
    expert_scaling: str | None
    call_id: int
    status: AdapterStatus = AdapterStatus.LOADING
    weights: AdapterWeights | None = None  # READY and RETIRING
    error: str = ""  # FAILED

    @property
    def info(self) -> AdapterInfo:
        w = self.read
        return AdapterInfo(
            self.name, self.path, self.key.uid, self.key.version, w.format, w.rank, w.num_bytes, list(w.warnings)
        )

    @property
    def read(self) -> AdapterWeights:
        if self.weights is None:
            raise EngineError(f"adapter {self.name!r} {tuple(self.key)} is {self.status.value}, it has no weights")
        return self.weights


class Adapters:
    """Names, versions, host memory and slots of adapters.

    `reader` and `fill`, which puts weights into a slot, may take long: each is called on a thread of its own.
    `base_name` is the base model's name, which no adapter may take; `base_path` is compared with what the files say
    they were trained on. `budget` is for all versions, retiring ones too. `extra_mlps_note` is the warning for an
    adapter that brings MLPs of its own, `no_expert_lora` why LoRA inside experts is refused ("": it is served).
    A (uid, version) pair is never used again, so it may be part of cache keys.
    """

    def __init__(
        self,
        config: ModelConfig,
        base_name: str,
        reader: Reader,
        fill: Callable[[int, AdapterWeights], None],
        *,
        max_rank: int | None = None,
        base_path: str | None = None,
        budget: AdapterBudget | None = None,
        extra_mlps_note: str = "",
        no_expert_lora: str = "",
    ) -> None:
        self._budget = budget or AdapterBudget()
        self._config, self._base_name, self._max_rank, self._base_path = config, base_name, max_rank, base_path
        self._extra_mlps_note, self._no_expert_lora = extra_mlps_note, no_expert_lora
        self._reader, self._fill = reader, fill
        self._versions: dict[AdapterKey, _Version] = {}  # the book
        self._ready: dict[str, _Version] = {}  # its READY ones by name, looked up by every request
        self._unread: deque[_Version] = deque()  # LOADING, the first of them being read
        self._uids = itertools.count(BASE.uid + 1)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="adapter-load")
        self._fillers = ThreadPoolExecutor(1, thread_name_prefix="adapter-slot")
        self._work: dict[Future[Any], Callable[[Future[Any]], None]] = {}  # in progress, and what takes its result
        self._ended: deque[Future[Any]] = deque()  # appended to by the threads
        self._events: list[AdapterEvent] = []
        self._closed = False

    # ---- loading

    def load(
        self, call_id: int, name: str, path: str, replace: bool = False, expert_scaling: str | None = None
    ) -> None:
        """Start to read an adapter; `Loaded` or `LoadFailed` follows, after those of earlier loads.

        A known name is replaced if `replace` (a new version of the same uid; the old one serves until then and its
        requests go on to their end), else refused. UserError: bad name or path, name taken, a load of it in progress.
        """
        self._check_name(name)
        if expert_scaling is not None and expert_scaling not in EXPERT_SCALINGS:
            raise UserError(
                f"expert_scaling is {expert_scaling!r}, it must be one of {EXPERT_SCALINGS}", "expert_scaling"
            )
        if not path.startswith(("/", "~")):
            raise UserError(f"path {path[:100]!r} must be absolute: the folder of an adapter", "lora_path")
        if loading := self._find(name, AdapterStatus.LOADING):
            raise UserError(f"adapter {name!r} is being loaded from {loading.path!r}; wait for it", "lora_name")
        old = self._ready.get(name)
        if old and not replace:
            raise UserError(f"adapter {name!r} is loaded already; set replace to load it again", "lora_name")
        if self._closed:
            raise EngineError("adapters cannot be loaded any more")
        if failed := self._find(name, AdapterStatus.FAILED):
            del self._versions[failed.key]
        key = AdapterKey(old.key.uid, old.key.version + 1) if old else AdapterKey(next(self._uids), 1)
        version = self._versions[key] = _Version(key, name, path, expert_scaling, call_id)
        self._unread.append(version)
        if len(self._unread) == 1:
            self._read_next()

    def fill(self, load: SlotLoad) -> None:
        """Copy a version into a slot; `SlotFilled` or `SlotFailed` follows."""
        weights = self.weights(load.adapter)
        self._start(self._fillers, partial(self._fill, load.slot, weights), partial(self._filled, load.slot))

    def events(self) -> list[AdapterEvent]:
        """What has happened since the last call. Never waits, and costs nothing if nothing has."""
        while self._ended:
            future = self._ended.popleft()
            self._work.pop(future)(future)
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        """Whether threads are at work: `events` will report it."""
        return bool(self._work)

    def wait(self) -> None:
        """Until the work that is in progress now has ended and can be seen by `events`."""
        while self._work and not self._ended:
            wait_for(list(self._work), timeout=0.1)

    # ---- use

    def resolve(self, name: str) -> AdapterKey:
        """The version that new requests get. UserError says why there is none."""
        if name in self._ready:
            return self._ready[name].key
        if self._find(name, AdapterStatus.LOADING):
            raise UserError(f"adapter {name!r} is still being loaded", "model")
        if failed := self._find(name, AdapterStatus.FAILED):
            raise UserError(f"adapter {name!r} could not be loaded: {failed.error}", "model")
        known = ", ".join([self._base_name, *sorted(self._ready)])
        raise UserError(f"there is no adapter {name!r}; models: {known}", "model")

    def weights(self, key: AdapterKey) -> AdapterWeights:
        """Of a version that is ready or retiring."""
        return self._version(key).read

    def status(self, name: str) -> AdapterStatus | None:
        """Of the name: READY if requests can have it, else what is known of it; None if nothing."""
        order = (AdapterStatus.READY, AdapterStatus.LOADING, AdapterStatus.FAILED, AdapterStatus.RETIRING)
        return next((status for status in order if self._find(name, status)), None)

    def infos(self) -> list[AdapterInfo]:
        """What new requests can use, by name."""
        return [self._ready[name].info for name in sorted(self._ready)]

    @property
    def num_bytes(self) -> int:
        """Host memory of all versions, retiring ones too."""
        return sum(version.read.num_bytes for version in self._held())

    # ---- the end

    def unload(self, name: str) -> None:
        """Forget the name. Its version retires: `weights` still answers until `release`."""
        if self._find(name, AdapterStatus.LOADING):
            raise UserError(f"adapter {name!r} is being loaded; unload it when that has ended", "lora_name")
        if failed := self._find(name, AdapterStatus.FAILED):
            raise UserError(f"adapter {name!r} is not loaded, loading it failed: {failed.error}", "lora_name")
        if name not in self._ready:
            known = ", ".join(sorted(self._ready)) or "none"
            raise UserError(f"there is no adapter {name!r} to unload; loaded: {known}", "lora_name")
        self._retire(name)

    def release(self, key: AdapterKey) -> None:
        """Nothing uses a retiring version any more: its memory is given back."""
        version = self._version(key)
        if version.status is not AdapterStatus.RETIRING:
            raise EngineError(f"adapter {version.name!r} {tuple(key)} is {version.status.value}, not retiring")
        del self._versions[key]

    def check_integrity(self) -> None:
        """EngineError if names and versions contradict each other."""
        ready = {key for key, version in self._versions.items() if version.status is AdapterStatus.READY}
        if ready != {version.key for version in self._ready.values()}:
            raise EngineError(f"adapters in service {sorted(ready)} are not those with a name")
        loading = [version for version in self._versions.values() if version.status is AdapterStatus.LOADING]
        if loading != list(self._unread) or BASE in self._versions:
            raise EngineError(f"{len(loading)} adapters are being loaded, {len(self._unread)} are in the queue")

    def close(self) -> None:
        """End a read that is in progress; no thread is left."""
        self._closed = True
        self._reader.close()
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._fillers.shutdown(wait=True, cancel_futures=True)

    # ---- inside

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise UserError(f"adapter name {name[:200]!r}: allowed are 1 to 128 of A-Z a-z 0-9 . _ : / -", "lora_name")
        if name == self._base_name:
            raise UserError(f"adapter name {name!r} is the base model's name", "lora_name")

    def _start(self, threads: ThreadPoolExecutor, work: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        future = threads.submit(work)
        self._work[future] = then
        future.add_done_callback(self._ended.append)

    def _read_next(self) -> None:
        """One at a time: what it may take is known when it begins."""
        version = self._unread[0]
        request = ReadRequest(
            path=version.path,
            name=version.name,
            config=self._config,
            expert_scaling=version.expert_scaling,
            max_rank=self._max_rank,
            base=self._base_path,
            budget=self._budget,
            held=[self._size(held.read) for held in self._held()],
        )
        self._start(self._readers, partial(self._reader.read, request), partial(self._was_read, version))

    def _was_read(self, version: _Version, future: Future[AdapterWeights]) -> None:
        self._unread.popleft()
        try:
            weights = future.result()
            if weights.experts and self._no_expert_lora:
                layers = [f"layers.{layer}.experts" for layer in sorted(weights.experts)]
                raise AdapterError(self._no_expert_lora, layers)
            self._budget.check(version.name, [self._size(held.read) for held in self._held()], self._size(weights))
            self._serve(version, weights)
        except KtserveError as error:
            self._failed(version, error)
        except Exception as error:  # noqa: BLE001 - whatever reading raises ends this load, not the engine
            self._failed(version, EngineError(f"adapter {version.name!r} not read: {type(error).__name__}: {error}"))
        if self._unread and not self._closed:
            self._read_next()

    def _serve(self, version: _Version, weights: AdapterWeights) -> None:
        if version.name in self._ready:
            self._retire(version.name)
        if weights.extra_mlps and self._extra_mlps_note:
            weights.warnings.append(self._extra_mlps_note)
        version.weights, version.status = weights, AdapterStatus.READY
        self._ready[version.name] = version
        self._events.append(Loaded(version.call_id, version.info))

    def _failed(self, version: _Version, error: KtserveError) -> None:
        self._events.append(LoadFailed(version.call_id, error))
        if version.name in self._ready:  # a replacement that fails changes nothing
            del self._versions[version.key]
            return
        version.status, version.error = AdapterStatus.FAILED, str(error)
        failed = [key for key, other in self._versions.items() if other.status is AdapterStatus.FAILED]
        for key in failed[:-_FAILURES_KEPT]:
            del self._versions[key]

    def _retire(self, name: str) -> None:
        version = self._ready.pop(name)
        version.status = AdapterStatus.RETIRING
        self._events.append(Retiring(version.key))

    def _filled(self, slot: int, future: Future[None]) -> None:
        error = future.exception()
        reason = f"the adapter could not be loaded: {error}"
        self._events.append(SlotFilled(slot) if error is None else SlotFailed(slot, reason))

    def _held(self) -> list[_Version]:
        return [version for version in self._versions.values() if version.weights is not None]

    def _size(self, weights: AdapterWeights) -> AdapterSize:
        return AdapterSize(weights.num_bytes, weights.slot_bytes(self._budget.element_bytes))

    def _find(self, name: str, status: AdapterStatus) -> _Version | None:
        return next((v for v in self._versions.values() if v.name == name and v.status is status), None)

    def _version(self, key: AdapterKey) -> _Version:
        if key not in self._versions:
            raise EngineError(f"there is no adapter version {tuple(key)}")
        return self._versions[key]
