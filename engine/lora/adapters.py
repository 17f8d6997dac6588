"""The status of every adapter version.

    load -> LOADING -> READY -> (replaced or unloaded) RETIRING -> release -> gone
                    \\-> FAILED (kept for its reason)

The scheduler decides which adapter gets a slot, and when a retiring one is unused (`scheduler/memory/slots.py`). The
`Loader` brings versions into host memory, and decides which stay there; a version that was evicted is loaded again
when it is to fill a slot. Each change is reported once, by `events`. All methods belong to the engine's thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from engine.architectures.config import ModelConfig
from engine.errors import AdapterError, EngineError, KtserveError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget
from engine.lora.files.whole import BaseTable
from engine.lora.loader import LOAD, AdapterReader, Evicted, LoadEnded, Loader, LoadJob
from engine.lora.version import (
    AdapterEvent,
    AdapterStatus,
    Loaded,
    LoadFailed,
    Moved,
    Residency,
    Retiring,
    SlotFailed,
    SlotFilled,
    Version,
    check_call,
)
from engine.messages import AdapterInfo
from engine.work import Work
from scheduler.plan import SlotLoad
from scheduler.request import BASE, AdapterKey

_FAILURES_KEPT = 64
_FILL = "adapter-slot"  # a kind of work, and its thread's name


class Adapters:
    """Names, status and slots of adapter versions.

    `reader` and `fill`, which puts weights into a slot, may take long: each is called on a thread of its own.
    `base_name` is the base model's name, which no adapter may take; `base_path` is compared with what the files say
    they were trained on, `tables` (`base_tables`) with an embedding or head in them. `budget` is for all versions,
    retiring ones too; `wanted` says whether requests wait for one. `extra_mlps_note` is the warning for an adapter that
    brings MLPs of its own, `no_expert_lora` why LoRA inside experts is refused ("": it is served). A (uid, version)
    pair is never used again, so it may be part of cache keys."""

    def __init__(
        self,
        config: ModelConfig,
        base_name: str,
        reader: AdapterReader,
        fill: Callable[[int, AdapterWeights], None],
        *,
        max_rank: int | None = None,
        base_path: str | None = None,
        tables: Mapping[str, BaseTable] | None = None,
        budget: AdapterBudget | None = None,
        wanted: Callable[[AdapterKey], bool] = lambda key: False,
        extra_mlps_note: str = "",
        no_expert_lora: str = "",
    ) -> None:
        self._base_name = base_name
        self._extra_mlps_note, self._no_expert_lora = extra_mlps_note, no_expert_lora
        self._fill = fill
        self._versions: dict[AdapterKey, Version] = {}
        self._ready: dict[str, Version] = {}  # READY ones by name, looked up by every request
        self._uids = itertools.count(BASE.uid + 1)
        self._work = Work(LOAD, _FILL)
        self._loader = Loader(
            reader, self._work, budget or AdapterBudget(), self._versions, wanted, config, base_path, max_rank,
            tables or {},
        )  # fmt: skip
        self._events: list[AdapterEvent] = []
        self._closed = False
        self._filled_s = 0.0

    # ---- loading

    def load(
        self,
        call_id: int,
        name: str,
        path: str,
        replace: bool = False,
        expert_scaling: str | None = None,
        pinned: bool = False,
        expert_b_layout: str | None = None,
    ) -> None:
        """Start to load an adapter; `Loaded` or `LoadFailed` follows, after those of earlier loads.

        A known name is replaced if `replace` (a new version of the same uid; the old one serves until then and its
        requests go on to their end), else refused. `pinned`: it stays in host memory. UserError: bad name or path,
        name taken, a load of it in progress.
        """
        check_call(name, path, expert_scaling, expert_b_layout, self._base_name)
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
        version = self._versions[key] = Version(key, name, path, expert_scaling, expert_b_layout, call_id, pinned)
        self._loader.load(LoadJob(version, replaces=old))

    def adopt(self, name: str, weights: AdapterWeights) -> bool:
        """`weights` are the newest version of `name` from now on, of no file: they stay in host memory until the next
        version, or until they are unloaded. Requests that have the old version keep it. False, and nothing has changed,
        while copies into slots leave no room. UserError: bad name, a load of it in progress, or never room."""
        check_call(name, "/", None, None, self._base_name)
        if self._find(name, AdapterStatus.LOADING):
            raise UserError(f"adapter {name!r} is being loaded; wait for it", "lora_name")
        if weights.experts and self._no_expert_lora:
            raise UserError(self._no_expert_lora, "lora_name")
        if failed := self._find(name, AdapterStatus.FAILED):
            del self._versions[failed.key]
        old = self._ready.get(name)
        key = AdapterKey(old.key.uid, old.key.version + 1) if old else AdapterKey(next(self._uids), 1)
        version = Version(key, name, "", None, None, 0, pinned=True)
        if not self._loader.adopt(version, weights, old):
            return False
        self._versions[key] = version
        if old is not None:
            self._retire(name)
        version.become_ready(weights, "")
        self._loader.touch(version)
        self._ready[name] = version
        self._moved(version)
        return True

    def fill(self, load: SlotLoad) -> None:
        """Copy a version into a slot, which loses what it held; `SlotFilled` or `SlotFailed` follows. A version that
        is not in host memory is loaded again first."""
        for other in self._versions.values():
            if other.slot == load.slot:
                other.slot = None
                self._moved(other)
        version = self._version(load.adapter)
        version.filling, version.slot_asked_s = True, time.monotonic()
        if version.weights is None:
            self._loader.load(LoadJob(version, load.slot))
        else:
            self._copy(version, load.slot)

    def events(self) -> list[AdapterEvent]:
        """What has happened since the last call. Never waits, and costs nothing if nothing has."""
        self._work.take()
        for outcome in self._loader.outcomes():
            match outcome:
                case Evicted(version):
                    self._moved(version)
                case LoadEnded(job, KtserveError() as error):
                    self._failed(job, error)
                case LoadEnded(job, AdapterWeights() as weights):
                    self._loaded(job, weights)
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        """Whether threads are at work: `events` will report it."""
        return self._work.busy

    def wait(self) -> None:
        """Until some work that is in progress has got on, which `events` may report."""
        self._work.wait()

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
        """Of a version that is in host memory."""
        return self._version(key).held

    def digest(self, key: AdapterKey) -> bytes | None:
        """Of all that the version computes with, b"" if nobody made one; None: of the base."""
        return None if key == BASE else self._version(key).digest

    def residency(self, name: str) -> Residency:
        """Of a READY adapter."""
        return self._ready[name].residency

    def status(self, name: str) -> AdapterStatus | None:
        """Of the name: READY if requests can have it, else what is known of it; None if nothing."""
        order = (AdapterStatus.READY, AdapterStatus.LOADING, AdapterStatus.FAILED, AdapterStatus.RETIRING)
        return next((status for status in order if self._find(name, status)), None)

    def infos(self) -> list[AdapterInfo]:
        """What new requests can use, by name."""
        return [self._ready[name].info for name in sorted(self._ready)]

    def stats(self) -> dict[str, float | int]:
        return {
            "adapters_known": len(self._ready),
            "adapters_pinned": sum(version.pinned for version in self._ready.values()),
            **self._loader.stats(),
            "adapter_load_s": self._filled_s,
        }

    # ---- the end

    def unload(self, name: str) -> None:
        """Forget the name. Its version retires: it can fill slots until `release`."""
        if self._find(name, AdapterStatus.LOADING):
            raise UserError(f"adapter {name!r} is being loaded; unload it when that has ended", "lora_name")
        if failed := self._find(name, AdapterStatus.FAILED):
            raise UserError(f"adapter {name!r} is not loaded, loading it failed: {failed.error}", "lora_name")
        if name not in self._ready:
            known = ", ".join(sorted(self._ready)) or "none"
            raise UserError(f"there is no adapter {name!r} to unload; loaded: {known}", "lora_name")
        self._retire(name)

    def release(self, key: AdapterKey) -> None:
        """Nothing uses a retiring version any more: its memory is released."""
        version = self._version(key)
        if version.status is not AdapterStatus.RETIRING:
            raise EngineError(f"adapter {version.name!r} {tuple(key)} is {version.status.value}, not retiring")
        self._loader.drop(version)
        del self._versions[key]

    def check_integrity(self) -> None:
        """EngineError if names and versions contradict each other."""
        ready = {key for key, version in self._versions.items() if version.status is AdapterStatus.READY}
        if ready != {version.key for version in self._ready.values()}:
            raise EngineError(f"adapters in service {sorted(ready)} are not those with a name")
        if BASE in self._versions:
            raise EngineError("the base has a version of an adapter")
        slots = [version.slot for version in self._versions.values() if version.slot is not None]
        if len(slots) != len(set(slots)):
            raise EngineError(f"two adapters are in one slot: {sorted(slots)}")
        self._loader.check_integrity()

    def close(self) -> None:
        """End a load that is in progress; no thread is left."""
        self._closed = True
        self._loader.close()
        self._work.close()

    # ---- inside

    def _loaded(self, job: LoadJob, weights: AdapterWeights) -> None:
        version = job.version
        if job.slot is not None:  # an evicted version is back
            version.weights = weights
            self._moved(version)
            self._copy(version, job.slot)
            return
        if weights.experts and self._no_expert_lora:
            layers = [f"layers.{layer}.experts" for layer in sorted(weights.experts)]
            self._failed(job, AdapterError(self._no_expert_lora, layers))
            return
        if version.name in self._ready:
            self._retire(version.name)
        version.become_ready(weights, self._extra_mlps_note if weights.extra_mlps else "")
        self._loader.touch(version)
        self._ready[version.name] = version
        self._events.append(Loaded(version.call_id, version.info))
        self._moved(version)

    def _copy(self, version: Version, slot: int) -> None:
        self._loader.touch(version)
        self._work.start(_FILL, partial(self._fill, slot, version.held), partial(self._filled, version, slot))

    def _filled(self, version: Version, slot: int, future: Future[None]) -> None:
        version.filling = False
        if (error := future.exception()) is None:
            version.slot = slot
            self._filled_s += time.monotonic() - version.slot_asked_s
            self._events.append(SlotFilled(slot))
            self._moved(version)
        else:
            self._events.append(SlotFailed(slot, f"the adapter could not be loaded: {error}"))

    def _failed(self, job: LoadJob, error: KtserveError) -> None:
        version = job.version
        if job.slot is not None:
            version.filling = False
            self._events.append(SlotFailed(job.slot, str(error)))
            return
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

    def _moved(self, version: Version) -> None:
        if version.status is AdapterStatus.READY and version.reported is not version.residency:
            version.reported = version.residency
            self._events.append(Moved(version.name, version.residency))

    def _find(self, name: str, status: AdapterStatus) -> Version | None:
        return next((v for v in self._versions.values() if v.name == name and v.status is status), None)

    def _version(self, key: AdapterKey) -> Version:
        if key not in self._versions:
            raise EngineError(f"there is no adapter version {tuple(key)}")
        return self._versions[key]
