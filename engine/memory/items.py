"""What a plan says of each device's memory: items, against what is free. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.memory.limits import Memory
from engine.messages import PlannedItem, PlannedKind, PlannedMemory
from engine.units import format_bytes


class Kind(Enum):
    """What an item's memory is for, with the name that it has on the wire."""

    _value_: PlannedKind

    WEIGHTS = "weights"  # all but routed experts
    EXPERTS = "experts"
    KV_CACHE = "kv_cache"
    STEP = "step"  # buffers, activations and scratch memory of a step
    ADAPTERS = "adapters"  # as they are read, in slots, and in training; not tables that are there whatever is loaded
    OTHER = "other"  # workspaces, tables, what loading takes, reserves


@dataclass(frozen=True)
class Item:
    """`label` is for people: what a plan decides never depends on it. `step_bytes`: of `num_bytes`, those in proportion
    to the tokens of the engine's steps; scratch memory for a chunk of rows at a time is not."""

    device: str
    kind: Kind
    label: str
    num_bytes: int
    step_bytes: int = 0


class DevicePlan:
    """Items by device, against what is free there."""

    devices: list[Memory]
    items: list[Item]
    notes: list[str]

    def needed(self, device: Memory) -> int:
        """Bytes of all items there."""
        return sum(item.num_bytes for item in self.items if item.device == device.name)

    @property
    def short(self) -> list[Memory]:
        """The devices on which it does not fit."""
        return [device for device in self.devices if self.needed(device) > device.free_bytes]

    def message(self) -> list[PlannedMemory]:
        """As the api is told of it."""
        return [
            PlannedMemory(
                device.name,
                device.limit_bytes,
                device.free_bytes,
                [PlannedItem(i.kind.value, i.label, i.num_bytes) for i in self.items if i.device == device.name],
            )
            for device in self.devices
        ]

    def render(self) -> str:
        """A table for a terminal."""
        rows: list[tuple[str, str]] = []
        for device in self.devices:
            free, limit = format_bytes(device.free_bytes), format_bytes(device.limit_bytes)
            rows.append((f"memory plan, {device.name}: {free} free of {limit}", ""))
            rows += [(f"  {i.label}", format_bytes(i.num_bytes)) for i in self.items if i.device == device.name]
            over = self.needed(device) - device.free_bytes
            verdict = f"  needed, {format_bytes(over)} too much" if over > 0 else "  needed"
            rows.append((verdict, format_bytes(self.needed(device))))
        left = max(len(label) for label, size in rows if size)
        right = max(len(size) for _, size in rows)
        lines = [f"{label:<{left}}  {size:>{right}}" if size else label for label, size in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def shortage(self) -> str:
        """What is needed where it does not fit, and the largest items there."""
        lines = []
        for device in self.short:
            need, free = format_bytes(self.needed(device)), format_bytes(device.free_bytes)
            largest = sorted((i for i in self.items if i.device == device.name), key=lambda i: -i.num_bytes)[:3]
            what = ", ".join(f"{item.label} {format_bytes(item.num_bytes)}" for item in largest)
            lines.append(f"{device.name}: {need} needed, {free} free ({what})")
        return "; ".join(lines)
