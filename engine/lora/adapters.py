"""The life of every adapter version, in one book.

    load -> LOADING -> READY -> (replaced or unloaded) RETIRING -> release -> gone
                    \\-> FAILED (kept for its reason)

Which adapter gets a slot, and when a retiring one is unused, is the scheduler's to decide
(`scheduler/memory/slots.py`), which versions stay in host memory is `HostMemory`'s; the work is done here, on threads,
and each change is reported once by `events`. A version that was evicted is read again when it is to fill a slot. All
methods belong to the engine's thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from engine.architectures.config import ModelConfig
from engine.errors import AdapterError, EngineError, KtserveError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget
from engine.lora.reading.process import ReadRequest
from engine.lora.reads import READ, Read, Reader, Reads, changed
from engine.lora.residency import HostMemory
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
    """Names, versions, host memory and slots of adapters.

    `reader` and `fill`, which puts weights into a slot, may take long: each is called on a thread of its own.
    `base_name` is the base model's name, which no adapter may take; `base_path` is compared with what the files say
    they were trained on. `budget` is for all versions, retiring ones too; `wanted` says whether requests wait for one.
    `extra_mlps_note` is the warning for an adapter that brings MLPs of its own, `no_expert_lora` why LoRA inside
    experts is refused ("": it is served). A (uid, version) pair is never used again, so it may be part of cache keys.
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
        wanted: Callable[[AdapterKey], bool] = lambda key: False,
        extra_mlps_note: str = "",
        no_expert_lora: str = "",
    ) -> None:
        self._config, self._base_name, self._max_rank, self._base_path = config, base_name, max_rank, base_path
        self._extra_mlps_note, self._no_expert_lora = extra_mlps_note, no_expert_lora
        self._fill = fill
        self._versions: dict[AdapterKey, Version] = {}  # the book
        self._ready: dict[str, Version] = {}  # its READY ones by name, looked up by every request
        self._memory = HostMemory(budget or AdapterBudget(), self._versions, wanted)
        self._uids = itertools.count(BASE.uid + 1)
        self._work = Work(READ, _FILL)
        self._reads = Reads(
            reader, self._work, self._memory, self._request, self._replaced, self._was_read, self._moved
        )
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
    ) -> None:
        """Start to read an adapter; `Loaded` or `LoadFailed` follows, after those of earlier loads.

        A known name is replaced if `replace` (a new version of the same uid; the old one serves until then and its
        requests go on to their end), else refused. `pinned`: it stays in host memory. UserError: bad name or path,
        name taken, a load of it in progress.
        """
        check_call(name, path, expert_scaling, self._base_name)
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
        version = self._versions[key] = Version(key, name, path, expert_scaling, call_id, pinned)
        self._reads.add(Read(version, None))

    def fill(self, load: SlotLoad) -> None:
        """Copy a version into a slot, which loses what it held; `SlotFilled` or `SlotFailed` follows. A version that
        is not in host memory is read again first."""
        for other in self._versions.values():
            if other.slot == load.slot:
                other.slot = None
                self._moved(other)
        version = self._version(load.adapter)
        version.filling, version.slot_asked_s = True, time.monotonic()
        if version.weights is None:
            self._reads.add(Read(version, load.slot))
        else:
            self._copy(version, load.slot)

    def events(self) -> list[AdapterEvent]:
        """What has happened since the last call. Never waits, and costs nothing if nothing has."""
        self._work.take()
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

    @property
    def num_bytes(self) -> int:
        """Host memory of all versions, retiring ones too; copies in slots not counted."""
        return self._memory.num_bytes

    def stats(self) -> dict[str, float | int]:
        return {
            "adapters_known": len(self._ready),
            "adapters_pinned": sum(version.pinned for version in self._ready.values()),
            "adapters_in_host_memory": len(self._memory),
            "adapter_host_bytes": self._memory.num_bytes,
            "adapter_reads_again": self._reads.num_again,
            "adapter_evictions": self._memory.num_evictions,
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
        """Nothing uses a retiring version any more: its memory is given back."""
        version = self._version(key)
        if version.status is not AdapterStatus.RETIRING:
            raise EngineError(f"adapter {version.name!r} {tuple(key)} is {version.status.value}, not retiring")
        self._memory.drop(version)
        del self._versions[key]
        self._reads.grant_room()

    def check_integrity(self) -> None:
        """EngineError if names and versions contradict each other."""
        ready = {key for key, version in self._versions.items() if version.status is AdapterStatus.READY}
        if ready != {version.key for version in self._ready.values()}:
            raise EngineError(f"adapters in service {sorted(ready)} are not those with a name")
        loading = [version for version in self._versions.values() if version.status is AdapterStatus.LOADING]
        if loading != self._reads.loading() or BASE in self._versions:
            raise EngineError(f"{len(loading)} adapters are being loaded, {len(self._reads.loading())} are to be read")
        if any(version.weights is not None or not version.filling for version in self._reads.again()):
            raise EngineError("an adapter that is in host memory, or fills no slot, is to be read again")
        slots = [version.slot for version in self._versions.values() if version.slot is not None]
        if len(slots) != len(set(slots)):
            raise EngineError(f"two adapters are in one slot: {sorted(slots)}")
        self._memory.check_integrity()

    def close(self) -> None:
        """End a read that is in progress; no thread is left."""
        self._closed = True
        self._reads.close()
        self._work.close()

    # ---- inside

    def _request(self, version: Version) -> ReadRequest:
        kept, others = self._memory.known(self._replaced(version), version)
        return ReadRequest(
            path=version.path,
            name=version.name,
            config=self._config,
            expert_scaling=version.expert_scaling,
            max_rank=self._max_rank,
            base=self._base_path,
            budget=self._memory.budget,
            pinned=version.pinned,
            kept=kept,
            others=others,
        )

    def _replaced(self, version: Version) -> Version | None:
        """The version that serves while this one is loaded, and is to stay until then."""
        return self._ready.get(version.name) if version.status is AdapterStatus.LOADING else None

    def _was_read(self, read: Read, future: Future[AdapterWeights]) -> None:
        version = read.version
        try:
            weights = future.result()
            if read.slot is None:
                self._serve(version, weights)
            else:
                self._return(version, weights, read.slot)
        except KtserveError as error:
            self._failed(read, error)
        except Exception as error:  # noqa: BLE001 - whatever reading raises ends this read, not the engine
            self._failed(read, EngineError(f"adapter {version.name!r} not read: {type(error).__name__}: {error}"))

    def _serve(self, version: Version, weights: AdapterWeights) -> None:
        if weights.experts and self._no_expert_lora:
            layers = [f"layers.{layer}.experts" for layer in sorted(weights.experts)]
            raise AdapterError(self._no_expert_lora, layers)
        if version.name in self._ready:
            self._retire(version.name)
        version.become_ready(weights, self._extra_mlps_note if weights.extra_mlps else "")
        self._memory.touch(version)
        self._ready[version.name] = version
        self._events.append(Loaded(version.call_id, version.info))
        self._moved(version)

    def _return(self, version: Version, weights: AdapterWeights, slot: int) -> None:
        """An evicted version is back in host memory, if it is the same."""
        if weights.digest != version.digest:
            raise changed(version)
        version.weights = weights
        self._moved(version)
        self._copy(version, slot)

    def _copy(self, version: Version, slot: int) -> None:
        self._memory.touch(version)
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
        self._reads.grant_room()

    def _failed(self, read: Read, error: KtserveError) -> None:
        version = read.version
        if read.slot is not None:
            version.filling = False
            self._events.append(SlotFailed(read.slot, str(error)))
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
        self._reads.grant_room()

    def _moved(self, version: Version) -> None:
        if version.status is AdapterStatus.READY and version.told is not version.residency:
            version.told = version.residency
            self._events.append(Moved(version.name, version.residency))

    def _find(self, name: str, status: AdapterStatus) -> Version | None:
        return next((v for v in self._versions.values() if v.name == name and v.status is status), None)

    def _version(self, key: AdapterKey) -> Version:
        if key not in self._versions:
            raise EngineError(f"there is no adapter version {tuple(key)}")
        return self._versions[key]
