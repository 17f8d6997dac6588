"""Moves hot experts and their LoRA into GPU memory, between steps and in the order of the compute stream.

    begin_step  evicted experts leave the tables  ->  event  ->  side stream copies newcomers into their expert slots
    later       a copy has ended                  ->  the newcomer enters the tables

Tables change only here, before a step is launched, so a step sees one state in all its kernels. What a step in flight
still reads is overwritten only by copies that wait for the event behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.experts.gpu.adapters import HostAdapter, HostAdapters
from engine.experts.gpu.compute import SlotTables
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.source import PackedSource
from engine.experts.hybrid.copies import Arrival, Copies
from engine.experts.hybrid.memory import ExpertSlots
from engine.experts.hybrid.policy import HotPolicy
from engine.experts.stream import event_here

INTERVAL = 4  # steps between two looks at the uses
SWAP_STEPS = 128  # all expert slots can be exchanged in so many steps
_UNSEEN = 1e-6  # average of an expert before any use, a layer's first twice that: slots fill up evenly over the layers


@dataclass(frozen=True)
class Tables:
    """On the device: place int32 and address int64 [layers, slots, E], uses int32 [layers, E]."""

    place: torch.Tensor
    address: torch.Tensor
    uses: torch.Tensor
    slots: SlotTables

    @classmethod
    def allocate(cls, layers: int, slots: int, experts: int, device: torch.device) -> Tables:
        return cls(
            torch.full((layers, slots, experts), -1, dtype=torch.int32, device=device),
            torch.zeros(layers, slots, experts, dtype=torch.int64, device=device),
            torch.zeros(layers, experts, dtype=torch.int32, device=device),
            SlotTables.allocate(layers, slots, device),
        )


class Mover:
    """`layers`: the model's numbers of the layers, in the order of the tables' first axis. `expert_slots`:
    [F, >= an expert], bytes or numbers of the adapters' `dtype`."""

    def __init__(
        self,
        sizes: Sizes,
        layers: list[int],
        expert_slots: torch.Tensor,
        tables: Tables,
        source: PackedSource,
        adapters: HostAdapters,
        dtype: torch.dtype,
        policy: HotPolicy | None = None,
    ) -> None:
        self._sizes = sizes
        self._layers = layers
        self._expert_slots = expert_slots
        self._tables = tables
        self._adapters = adapters
        self._gpu = expert_slots.is_cuda
        self._copies = Copies(sizes, layers, expert_slots, source, dtype)
        experts = len(layers) * sizes.experts
        self.policy = policy or HotPolicy(experts)
        self.policy.average += torch.linspace(2, 1, sizes.experts).repeat(len(layers)) * _UNSEEN
        self.memory = ExpertSlots(expert_slots.shape[0], expert_slots.shape[1])
        slots = tables.place.shape[1]
        self._slot_of_expert = torch.full((experts,), -1, dtype=torch.int32)  # of experts in the tables
        self._address = torch.zeros(experts, slots, dtype=torch.int64)
        self._needs = torch.zeros(experts, slots, dtype=torch.bool)  # the slot's adapter has LoRA in the expert
        self._arrivals: list[Arrival] = []
        self._loaded: dict[int, HostAdapter] = {}  # by slot, as the tables have it
        self._lora_at: dict[tuple[int, int], int] = {}  # (slot, expert) -> first value
        self._steps = 0
        self._seen = torch.zeros(experts, dtype=torch.int32)
        self._reading: tuple[torch.Tensor, Any, int] | None = None
        self._read_at = 0  # step of the counts seen last
        self._dirty = False
        self.num_choices = self.num_hits = 0  # of rows; those whose expert was in the tables when that was looked at

    @property
    def resident(self) -> int:
        """Experts in the tables."""
        return int((self._slot_of_expert >= 0).sum())

    def expert_slots_of(self, number: int) -> torch.Tensor:
        """int64 [E]: of the experts of a layer, the expert slot in the tables, -1: none."""
        return self._slot_of_expert.view(len(self._layers), -1)[number].long()

    def step(self) -> None:
        """Before a launch, on the compute stream."""
        for slot in self._adapters.take_changed():
            self._change_slot(slot)
        self._land()
        starts: list[Arrival] = []
        if self._steps % INTERVAL == 0:
            self._read_uses()
            starts = self._decide()
        self._steps += 1
        if self._dirty:
            self._publish()
        if starts:
            self._start(starts)

    def fill(self) -> None:
        """Put the hottest experts into all expert slots. No step may be in flight; waits for the copies."""
        moves = self.policy.moves(self.memory.expert_slots, self.memory.expert_slots)
        self._start([Arrival(expert, self.memory.take()) for expert in moves.admit])
        self._copies.synchronize()
        self._land()
        self._publish()

    # ---- state

    def _change_slot(self, slot: int) -> None:
        """No step in flight uses the slot: its blocks are free at once."""
        self.memory.close_slot(slot)
        for key in [key for key in self._lora_at if key[0] == slot]:
            del self._lora_at[key]
        self._address[:, slot] = 0
        self._needs[:, slot] = False
        adapter = self._adapters.get(slot)
        self._loaded.pop(slot, None)
        if adapter is not None:
            self._loaded[slot] = adapter
            self.memory.open_slot(slot, adapter.block_bytes // self._expert_slots.element_size())
            needs = self._needs[:, slot].view(len(self._layers), -1)
            for number, layer in enumerate(self._layers):
                if layer in adapter.present:
                    needs[number] = adapter.present[layer]
                    self._tables.slots.scales[number, slot] = torch.tensor(adapter.scales[layer]).to(
                        self._expert_slots.device
                    )
        self._tables.slots.ranks[slot] = adapter.rank if adapter else 0
        self._dirty = True

    def _land(self) -> None:
        while self._arrivals and (self._arrivals[0].done is None or self._arrivals[0].done.query()):
            arrival = self._arrivals.pop(0)
            if arrival.expert_slot >= 0:
                self._slot_of_expert[arrival.expert] = arrival.expert_slot
            for slot, (adapter, at) in arrival.lora.items():
                if self._loaded.get(slot) is adapter and self._lora_at.get((slot, arrival.expert)) == at:
                    address = self._expert_slots.data_ptr() + at * self._expert_slots.element_size()
                    self._address[arrival.expert, slot] = address
            self._dirty = True

    def _evict(self, expert: int) -> None:
        expert_slot = int(self._slot_of_expert[expert])
        self._slot_of_expert[expert] = -1
        self._address[expert] = 0
        for arrival in [a for a in self._arrivals if a.expert == expert]:
            self._arrivals.remove(arrival)  # the side stream writes in order: its expert slot may be given to the next
            expert_slot = arrival.expert_slot if arrival.expert_slot >= 0 else expert_slot
        for slot, number in [key for key in self._lora_at if key[1] == expert]:
            self.memory.give_lora(slot, self._lora_at.pop((slot, number)))
        self.memory.give(expert_slot)
        self._dirty = True

    def _decide(self) -> list[Arrival]:
        most = -(-self.memory.expert_slots * INTERVAL // SWAP_STEPS)
        room = self._room_for_lora()
        moves = self.policy.moves(self.memory.expert_slots - self.memory.lora_expert_slots - room, most)
        for expert in moves.evict:
            self._evict(expert)
        starts = [Arrival(expert, self.memory.take()) for expert in moves.admit]
        for arrival in starts:
            self._add_lora(arrival)
        return starts + self._missing_lora(most)

    def _missing(self) -> torch.Tensor:
        """bool [experts]: here, without the LoRA of some adapter."""
        return (self._needs & (self._address == 0)).any(1) & (self._slot_of_expert >= 0)

    def _room_for_lora(self) -> int:
        """Frames to keep free for LoRA; if some is missing and there is no place, the coldest expert makes room."""
        if self.memory.lora_expert_slots >= self.memory.expert_slots // 2 or not self._missing().any():
            return 0
        if not self.memory.num_free:
            for expert in self.policy.drop(1):
                self._evict(expert)
        return 1

    def _add_lora(self, arrival: Arrival) -> None:
        for slot, adapter in self._loaded.items():
            wanted = bool(self._needs[arrival.expert, slot]) and (slot, arrival.expert) not in self._lora_at
            if not wanted or not self.memory.can_take_lora(slot):
                continue
            at = self.memory.take_lora(slot)
            self._lora_at[slot, arrival.expert] = at
            arrival.lora[slot] = (adapter, at)

    def _missing_lora(self, most: int) -> list[Arrival]:
        """LoRA of experts that are here already, for adapters that came later."""
        heat = torch.where(self._missing(), self.policy.average, -1.0)
        hottest, numbers = heat.topk(min(4 * most, heat.numel()))
        starts = [Arrival(int(n), -1) for n, value in zip(numbers, hottest, strict=True) if value >= 0]
        for arrival in starts:
            self._add_lora(arrival)
        return [arrival for arrival in starts if arrival.lora]

    # ---- the device

    def _read_uses(self) -> None:
        """Counts of some steps ago: nothing here waits for the GPU."""
        if self._reading is not None:
            host, event, steps = self._reading
            if event is not None and not event.query():
                return
            uses = host.flatten() - self._seen
            self._seen = host.flatten().clone()
            self.num_choices += int(uses.sum())
            self.num_hits += int(uses[self._slot_of_expert >= 0].sum())
            self.policy.observe(uses.float(), max(steps - self._read_at, 1))
            self._read_at = steps
        host = torch.empty(self._tables.uses.shape, dtype=torch.int32, pin_memory=self._gpu)
        host.copy_(self._tables.uses, non_blocking=True)
        self._reading = (host, event_here(self._gpu), self._steps)

    def _publish(self) -> None:
        layers, slots, experts = self._tables.place.shape
        here = self._slot_of_expert[:, None] >= 0
        place = torch.where(here & (~self._needs | (self._address != 0)), self._slot_of_expert[:, None], -1)
        for table, host in ((self._tables.place, place), (self._tables.address, self._address)):
            there = host.view(layers, experts, slots).transpose(1, 2).contiguous()
            table.copy_(there.pin_memory() if self._gpu else there, non_blocking=True)
        self._dirty = False

    def _start(self, starts: list[Arrival]) -> None:
        self._copies.start(starts)
        self._arrivals += starts
