"""Adapter slots: which adapter is resident where, who uses it, and who comes next.

FREE --assign--> LOADING --loaded--> READY --assign (nobody runs in it)--> LOADING of another
                    `--failed--> FREE     `--retired, last request ended--> FREE
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.errors import IntegrityError
from scheduler.plan import SlotLoad
from scheduler.request import BASE, AdapterKey

Rank = tuple[float, int]  # smaller is served first


class SlotState(enum.Enum):
    FREE = "free"
    LOADING = "loading"
    READY = "ready"


@dataclass
class Slot:
    index: int
    state: SlotState = SlotState.FREE
    adapter: AdapterKey | None = None
    pins: int = 0  # running requests, and ended ones that an in-flight step still reads
    used: bool = False  # since it was loaded
    idle_since: int = 0  # order in which slots lost their last pin
    promised: AdapterKey | None = None  # takes no new requests: this adapter gets the slot next


class AdapterSlots:
    """Slots 1 .. num_slots; the base is in slot 0, always.

    An adapter that waits longer than `patience_s` is promised the least used slot, whose adapter then takes no new
    requests: however popular a set of adapters is, it gives a slot up within the length of its running requests. At
    most half of the slots (rounded up) are promised at a time, in the order of the requests that wait for them.
    """

    def __init__(self, num_slots: int, patience_s: float) -> None:
        self.slots = [Slot(i + 1) for i in range(num_slots)]
        self._patience_s = patience_s
        self._where: dict[AdapterKey, Slot] = {}
        self._users: dict[AdapterKey, int] = {}  # live requests
        self._since: dict[AdapterKey, float] = {}  # adapters that wait for a slot
        self._retired: dict[AdapterKey, None] = {}
        self._released: list[AdapterKey] = []
        self._loads: list[SlotLoad] = []
        self._clock = 0
        self.num_uses = 0  # requests that began to run with an adapter
        self.num_arrivals = 0  # requests with an adapter that came
        self.num_hits = 0  # those of them whose adapter was in a slot
        self.num_loads = 0
        self.waited_s = 0.0  # of adapters, until a slot was theirs

    def is_open(self, adapter: AdapterKey) -> bool:
        """Whether a waiting request of the adapter may run now."""
        if adapter == BASE:
            return True
        slot = self._where.get(adapter)
        return slot is not None and slot.state is SlotState.READY and slot.promised is None

    def has(self, adapter: AdapterKey) -> bool:
        """Whether the adapter is in a slot or on its way into one."""
        return adapter == BASE or adapter in self._where

    def pin(self, adapter: AdapterKey) -> int:
        if adapter == BASE:
            return 0
        slot = self._where[adapter]
        self.num_uses += 1
        slot.pins += 1
        slot.used = True
        return slot.index

    def unpin(self, index: int) -> None:
        if index:
            slot = self.slots[index - 1]
            slot.pins -= 1
            self._clock += 1
            slot.idle_since = self._clock
            if slot.adapter is not None:
                self._release_if_unused(slot.adapter)

    def add_user(self, adapter: AdapterKey) -> None:
        self._users[adapter] = self._users.get(adapter, 0) + 1
        if adapter != BASE:
            slot = self._where.get(adapter)
            self.num_arrivals += 1
            self.num_hits += slot is not None and slot.state is SlotState.READY

    def drop_user(self, adapter: AdapterKey) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._release_if_unused(adapter)

    def assign(self, waiting: Mapping[AdapterKey, Rank], now: float) -> None:
        """Decide loads. `waiting` is the best rank among the waiting requests of each adapter."""
        wanted = {key: rank for key, rank in waiting.items() if key != BASE and key not in self._where}
        self._since = {key: since for key, since in self._since.items() if key in wanted}
        for slot in self.slots:
            if slot.promised not in wanted:
                slot.promised = None
        for rank, key in sorted((rank, key) for key, rank in wanted.items()):
            since = self._since.setdefault(key, now)
            vacant = self._vacant(key, rank, waiting)
            if vacant is not None:
                self.num_loads += 1
                self.waited_s += now - since
                self._load(vacant, key)
            elif now - since >= self._patience_s:
                self._promise(key, waiting)

    def take_loads(self) -> list[SlotLoad]:
        loads, self._loads = self._loads, []
        return loads

    def loaded(self, index: int) -> None:
        slot = self._loading(index)
        slot.state = SlotState.READY
        if slot.adapter is not None:
            self._release_if_unused(slot.adapter)

    def failed(self, index: int) -> AdapterKey:
        """The slot is free again; returns the adapter that could not be loaded."""
        slot = self._loading(index)
        adapter = slot.adapter
        if adapter is None:
            raise IntegrityError(f"slot {index} loads no adapter")
        self._clear(slot)
        self._release_if_unused(adapter)
        return adapter

    def retire(self, adapter: AdapterKey) -> None:
        if adapter == BASE:
            raise IntegrityError("the base model is never retired")
        self._retired[adapter] = None
        self._release_if_unused(adapter)

    def take_released(self) -> list[AdapterKey]:
        released, self._released = self._released, []
        return released

    def problems(self, pins: Mapping[int, int], users: Mapping[AdapterKey, int]) -> list[str]:
        """What contradicts `pins` by slot and `users` by adapter, counted over all requests and in-flight steps."""
        found = []
        for slot in self.slots:
            if slot.pins != pins.get(slot.index, 0):
                found.append(f"slot {slot.index} has {slot.pins} pins, {pins.get(slot.index, 0)} are known")
            if (slot.state is SlotState.FREE) != (slot.adapter is None):
                found.append(f"slot {slot.index} is {slot.state.value} with adapter {slot.adapter}")
            if slot.pins and slot.state is not SlotState.READY:
                found.append(f"slot {slot.index} is {slot.state.value} with {slot.pins} pins")
            if slot.adapter is not None and self._where.get(slot.adapter) is not slot:
                found.append(f"slot {slot.index} holds {slot.adapter}, which is known elsewhere")
            if slot.state is SlotState.READY and slot.adapter in self._retired and self._unused(slot.adapter):
                found.append(f"slot {slot.index} keeps {slot.adapter}, which is retired and unused")
        if len(self._where) != sum(slot.adapter is not None for slot in self.slots):
            found.append("an adapter without a slot is known as resident")
        if self._users != dict(users):
            found.append(f"adapters have users {self._users}, {dict(users)} are known")
        return found

    def _vacant(self, key: AdapterKey, rank: Rank, waiting: Mapping[AdapterKey, Rank]) -> Slot | None:
        for slot in self.slots:
            if slot.promised == key and slot.state is not SlotState.LOADING and not slot.pins:
                return slot
        unpromised = [s for s in self.slots if s.promised is None and not s.pins]
        free = [s for s in unpromised if s.state is SlotState.FREE]
        # a resident adapter whose own waiting requests come first is about to be used: leave it
        idle = [
            s
            for s in unpromised
            if s.state is SlotState.READY
            and s.adapter is not None
            and (s.adapter not in waiting or rank < waiting[s.adapter])
        ]
        return free[0] if free else min(idle, key=lambda s: s.idle_since, default=None)

    def _promise(self, key: AdapterKey, waiting: Mapping[AdapterKey, Rank]) -> None:
        if any(slot.promised == key for slot in self.slots):
            return
        if 2 * sum(slot.promised is not None for slot in self.slots) >= max(2, len(self.slots)):
            return  # the others go on: with all slots promised at once, what runs would dwindle
        # what was loaded is used before it has to go, however long loading takes: else two adapters could
        # evict each other indefinitely
        ready = [
            s
            for s in self.slots
            if s.state is SlotState.READY and s.promised is None and (s.used or s.adapter not in waiting)
        ]
        slot = min(ready, key=lambda s: (s.pins, s.idle_since, s.index), default=None)
        if slot is not None:
            slot.promised = key

    def _load(self, slot: Slot, key: AdapterKey) -> None:
        for other in self.slots:
            if other.promised == key:
                other.promised = None
        evicted = slot.adapter
        self._clear(slot)
        slot.adapter, slot.state = key, SlotState.LOADING
        self._where[key] = slot
        self._since.pop(key, None)
        self._loads.append(SlotLoad(slot.index, key))
        if evicted is not None:
            self._release_if_unused(evicted)

    def _clear(self, slot: Slot) -> None:
        if slot.adapter is not None:
            del self._where[slot.adapter]
        slot.adapter, slot.state, slot.used = None, SlotState.FREE, False

    def _loading(self, index: int) -> Slot:
        if not 1 <= index <= len(self.slots) or self.slots[index - 1].state is not SlotState.LOADING:
            raise IntegrityError(f"slot {index} is not loading")
        return self.slots[index - 1]

    def _unused(self, adapter: AdapterKey | None) -> bool:
        slot = self._where.get(adapter) if adapter is not None else None
        return adapter not in self._users and (slot is None or not slot.pins)

    def _release_if_unused(self, adapter: AdapterKey) -> None:
        slot = self._where.get(adapter)
        if adapter in self._retired and self._unused(adapter) and (slot is None or slot.state is SlotState.READY):
            if slot is not None:
                self._clear(slot)
            del self._retired[adapter]
            self._released.append(adapter)
