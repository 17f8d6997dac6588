"""The adapters that are known, whether or not they sit in a slot.

    load -> LOADING -> READY -> (replace or unload) RETIRING -> released -> gone
                    \\-> FAILED

All methods belong to the engine's thread; only reading files happens in a worker.
"""

from __future__ import annotations

import enum
import itertools
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from engine.errors import EngineError, KtserveError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget, AdapterSize
from engine.lora.reader import read_adapter
from engine.lora.settings import SCALINGS
from engine.memory_costs import file_bytes
from engine.messages import AdapterInfo
from engine.model_config import ModelConfig
from scheduler.request import BASE, AdapterKey

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_FAILURES_KEPT = 64


class AdapterStatus(enum.Enum):
    LOADING = "loading"  # being read, cannot be used yet
    READY = "ready"  # new requests get it
    RETIRING = "retiring"  # replaced or unloaded; requests that have it go on
    FAILED = "failed"  # could not be read, and no earlier version serves


class Pace:
    """Reading is thousands of small steps that hold the interpreter: between them this leaves the engine's thread
    most of the time, unless the engine itself waits."""

    WORK_S, REST = 0.001, 4.0  # rest that many times as long as was worked

    def __init__(self) -> None:
        self.hurry = threading.Event()
        self._since = 0.0

    def begin(self) -> None:
        self._since = time.thread_time()

    def pause(self) -> None:
        worked = time.thread_time() - self._since
        if worked >= self.WORK_S:
            self.hurry.wait(worked * self.REST)
            self._since = time.thread_time()


@dataclass(frozen=True)
class LoadResult:
    """How a load ended: either `info` and `key`, or `error` (UserError: the files or the call; else ours)."""

    load_id: int
    name: str
    key: AdapterKey | None = None
    info: AdapterInfo | None = None
    error: KtserveError | None = None


@dataclass
class _Version:
    key: AdapterKey
    name: str
    path: str
    weights: AdapterWeights
    status: AdapterStatus = AdapterStatus.READY

    @property
    def info(self) -> AdapterInfo:
        w = self.weights
        return AdapterInfo(
            self.name, self.path, self.key.uid, self.key.version, w.format, w.rank, w.num_bytes, list(w.warnings)
        )


@dataclass
class _Load:
    load_id: int
    name: str
    path: str
    size: AdapterSize  # as far as the files tell
    future: Future[AdapterWeights]


class AdapterRegistry:
    """Names, versions and host memory of adapters.

    `base_name` is the base model's name, which no adapter may take; `base_path` is compared with what the files say
    they were trained on. `budget` is for all versions, retiring ones too: a load that does not fit is refused, by what
    its files tell before it is read, and for certain when it has been. `extra_mlps_note` is what to say of an adapter
    that brings MLPs of its own. A (uid, version) pair never comes back, so it may be part of cache keys.
    """

    def __init__(
        self,
        config: ModelConfig,
        base_name: str,
        *,
        max_rank: int | None = None,
        base_path: str | None = None,
        budget: AdapterBudget | None = None,
        extra_mlps_note: str = "",
    ) -> None:
        self._budget = budget or AdapterBudget()
        self._config, self._base_name, self._max_rank, self._base_path = config, base_name, max_rank, base_path
        self._extra_mlps_note = extra_mlps_note
        self._ready: dict[str, _Version] = {}
        self._versions: dict[AdapterKey, _Version] = {}
        self._loads: dict[str, _Load] = {}
        self._failed: dict[str, str] = {}
        self._uids, self._load_ids = itertools.count(BASE.uid + 1), itertools.count(1)
        self._worker: ThreadPoolExecutor | None = None
        self._pace = Pace()
        self._closed = False

    # ---- loading

    def load(self, name: str, path: str, replace: bool = False, expert_scaling: str | None = None) -> int:
        """Start to read an adapter; `poll` brings the result under the number returned here.

        A known name is replaced if `replace` (a new version of the same uid; the old one serves until then and its
        requests go on to their end), else refused. UserError: bad name, name taken, a load of it under way,
        more than the budget.
        """
        self._check_name(name)
        if expert_scaling is not None and expert_scaling not in SCALINGS:
            raise UserError(f"expert_scaling is {expert_scaling!r}, it must be one of {SCALINGS}", "expert_scaling")
        if not path:
            raise UserError("path is empty, it must name an adapter's folder", "path")
        if name in self._loads:
            raise UserError(f"adapter {name!r} is being loaded from {self._loads[name].path!r}; wait for it", "name")
        if name in self._ready and not replace:
            raise UserError(f"adapter {name!r} is loaded already; set replace to load it anew", "name")
        if self._closed:
            raise EngineError("the adapter registry is closed")
        size = AdapterSize(file_bytes(path), 0)
        self._budget.check(name, [*self._sizes(), *(pending.size for pending in self._loads.values())], size)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-load")
        read = self._reader(name, path, expert_scaling)
        load = _Load(next(self._load_ids), name, path, size, self._worker.submit(read))
        self._loads[name] = load
        self._failed.pop(name, None)
        return load.load_id

    def poll(self) -> list[LoadResult]:
        """The loads that have ended since the last call, in the order of their start. Never waits."""
        ended = [load for load in self._loads.values() if load.future.done()]
        return [self._end(load) for load in ended]

    def wait(self, timeout_s: float | None = None) -> list[LoadResult]:
        """Like `poll`, after waiting for every load under way (at start-up)."""
        self._pace.hurry.set()
        wait([load.future for load in self._loads.values()], timeout=timeout_s)
        self._pace.hurry.clear()
        return self.poll()

    # ---- use

    def resolve(self, name: str) -> AdapterKey:
        """The version that new requests get. UserError names what there is."""
        if name in self._ready:
            return self._ready[name].key
        if name in self._loads:
            raise UserError(f"adapter {name!r} is still being loaded", "model")
        if name in self._failed:
            raise UserError(f"adapter {name!r} could not be loaded: {self._failed[name]}", "model")
        known = ", ".join([self._base_name, *sorted(self._ready)])
        raise UserError(f"there is no adapter {name!r}; models: {known}", "model")

    def weights(self, key: AdapterKey) -> AdapterWeights:
        """Of a version that is ready or retiring."""
        return self._version(key).weights

    def status(self, name: str) -> AdapterStatus | None:
        """Of the name's newest version; None if it is not known. A failed replacement leaves READY."""
        if name in self._ready:
            return AdapterStatus.READY
        if name in self._loads:
            return AdapterStatus.LOADING
        if name in self._failed:
            return AdapterStatus.FAILED
        retiring = any(version.name == name for version in self._versions.values())
        return AdapterStatus.RETIRING if retiring else None

    def infos(self) -> list[AdapterInfo]:
        """What new requests can use, by name."""
        return [self._ready[name].info for name in sorted(self._ready)]

    @property
    def num_bytes(self) -> int:
        """Host memory of all versions, retiring ones too."""
        return sum(version.weights.num_bytes for version in self._versions.values())

    # ---- the end

    def unload(self, name: str) -> AdapterKey:
        """Forget the name. Its version retires: `weights` still answers until `released`."""
        if name in self._loads:
            raise UserError(f"adapter {name!r} is being loaded; unload it when that has ended", "name")
        if name in self._failed:
            raise UserError(f"adapter {name!r} is not loaded, loading it failed: {self._failed[name]}", "name")
        if name not in self._ready:
            known = ", ".join(sorted(self._ready)) or "none"
            raise UserError(f"there is no adapter {name!r} to unload; loaded: {known}", "name")
        return self._retire(name)

    def retiring(self) -> list[AdapterKey]:
        """Versions to release as soon as no request, step or slot holds them."""
        return [key for key, version in self._versions.items() if version.status is AdapterStatus.RETIRING]

    def released(self, key: AdapterKey) -> None:
        """Nothing uses a retiring version any more: its memory is given back."""
        if self._version(key).status is not AdapterStatus.RETIRING:
            raise EngineError(f"adapter {self._version(key).name!r} {tuple(key)} is in service and cannot be released")
        del self._versions[key]

    def check_integrity(self) -> None:
        """EngineError if names and versions contradict each other."""
        ready = {key for key, version in self._versions.items() if version.status is AdapterStatus.READY}
        if ready != {version.key for version in self._ready.values()}:
            raise EngineError(f"adapters in service {sorted(ready)} are not those with a name")
        both = (self._failed.keys() & self._ready.keys()) | (self._failed.keys() & self._loads.keys())
        if both or BASE in self._versions:
            raise EngineError(f"adapters with two states: {sorted(both)}")

    def close(self) -> None:
        """Drop loads that have not begun, wait for the one that has. No thread is left."""
        self._closed = True
        self._pace.hurry.set()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._worker = None

    # ---- inside

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise UserError(f"adapter name {name!r}: allowed are 1 to 128 of A-Z a-z 0-9 . _ : / -", "name")
        if name == self._base_name:
            raise UserError(f"adapter name {name!r} is the base model's name", "name")

    def _reader(self, name: str, path: str, expert_scaling: str | None) -> Callable[[], AdapterWeights]:
        def read() -> AdapterWeights:
            self._pace.begin()
            return read_adapter(
                path,
                self._config,
                name=name,
                expert_scaling=expert_scaling,
                max_rank=self._max_rank,
                base=self._base_path,
                pause=self._pace.pause,
            )

        return read

    def _end(self, load: _Load) -> LoadResult:
        del self._loads[load.name]
        error = EngineError("cancelled") if load.future.cancelled() else load.future.exception()
        if error is not None:
            return self._fail(load, error)
        try:
            self._budget.check(load.name, self._sizes(), self._size(load.future.result()))
        except UserError as full:
            return self._fail(load, full)
        if load.name in self._ready:
            old = self._retire(load.name)
            key = AdapterKey(old.uid, old.version + 1)
        else:
            key = AdapterKey(next(self._uids), 1)
        weights = load.future.result()
        if weights.extra_mlps and self._extra_mlps_note:
            weights.warnings.append(self._extra_mlps_note)
        version = _Version(key, load.name, load.path, weights)
        self._ready[load.name] = self._versions[key] = version
        return LoadResult(load.load_id, load.name, key, version.info)

    def _size(self, weights: AdapterWeights) -> AdapterSize:
        return AdapterSize(weights.num_bytes, weights.slot_bytes(self._budget.element_bytes))

    def _sizes(self) -> list[AdapterSize]:
        return [self._size(version.weights) for version in self._versions.values()]

    def _fail(self, load: _Load, error: BaseException) -> LoadResult:
        if not isinstance(error, KtserveError):
            ours = EngineError(f"adapter {load.name!r} could not be read: {type(error).__name__}: {error}")
            ours.__cause__ = error
            error = ours
        if load.name not in self._ready:
            self._failed[load.name] = str(error)
            while len(self._failed) > _FAILURES_KEPT:
                del self._failed[next(iter(self._failed))]
        return LoadResult(load.load_id, load.name, error=error)

    def _retire(self, name: str) -> AdapterKey:
        version = self._ready.pop(name)
        version.status = AdapterStatus.RETIRING
        return version.key

    def _version(self, key: AdapterKey) -> _Version:
        if key not in self._versions:
            raise EngineError(f"there is no adapter version {tuple(key)}")
        return self._versions[key]
