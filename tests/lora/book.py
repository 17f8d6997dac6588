"""Adapters with a reader in a thread, and the events that were taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from engine.lora.adapter import AdapterWeights
from engine.lora.adapters import Adapters
from engine.lora.budget import AdapterSize
from engine.lora.files.parse import parse_adapter
from engine.lora.reader_process import ParsedAdapter, ParseRequest
from engine.lora.version import (
    Loaded,
    LoadFailed,
    Moved,
    Residency,
    Retiring,
    SlotFailed,
    SlotFilled,
)
from engine.messages import AdapterInfo
from scheduler.plan import SlotLoad
from scheduler.request import AdapterKey
from tests.lora.make import linear_keys, lora_config, model_config, random_adapter, write

CONFIG = model_config()


class InThread:
    """A reader without a process. `go` holds every folder until it is set; `broken` is raised instead.
    `num_open`: folders that were parsed, and neither taken nor closed."""

    def __init__(self, parse: Callable[[ParseRequest], AdapterWeights] | None = None) -> None:
        self.began, self.go, self.broken = threading.Event(), threading.Event(), None
        self.go.set()
        self.num_open = 0
        self._parse = parse or (lambda r: parse_adapter(r.path, r.config, name=r.name, max_rank=r.max_rank))

    def parse(self, request: ParseRequest) -> ParsedAdapter:
        self.began.set()
        assert self.go.wait(10)
        if self.broken is not None:
            raise self.broken
        weights = self._parse(request)
        size = AdapterSize(weights.num_bytes, weights.slot_bytes(request.budget.element_bytes))
        self.num_open += 1

        def close() -> None:
            self.num_open -= 1

        def take() -> AdapterWeights:
            close()
            return weights

        return ParsedAdapter(size, take, close)

    def close(self) -> None:
        self.go.set()


class Book(Adapters):
    """With the events that were taken."""

    def __init__(self, fill: Callable[[int, AdapterWeights], None] = lambda slot, weights: None, **options) -> None:
        self.reader: InThread = options.pop("reader", None) or InThread()
        super().__init__(CONFIG, "base", self.reader, fill, **options)
        self.seen: list = []
        self.moves: list[tuple[str, Residency]] = []
        self._calls = 0

    def start(self, name: str, path: Path | str, replace: bool = False, pinned: bool = False) -> int:
        self._calls += 1
        self.load(self._calls, name, str(path), replace, pinned=pinned)
        return self._calls

    def events(self) -> list:
        """All but moves, which are kept apart."""
        found = super().events()
        self.moves += [(event.name, event.residency) for event in found if isinstance(event, Moved)]
        return [event for event in found if not isinstance(event, Moved)]

    def take(self) -> list:
        """All events until nothing is in progress."""
        events = self.events()
        while self.busy:
            self.wait()
            events += self.events()
        self.seen += events
        return events

    def loaded(self, name: str, path: Path | str, replace: bool = False, pinned: bool = False) -> AdapterKey:
        call = self.start(name, path, replace, pinned)
        event = self.take()[-1]
        assert isinstance(event, Loaded) and event.call_id == call, event
        return key_of(event.info)

    def fails(self, name: str, path: Path | str, replace: bool = False, pinned: bool = False) -> Exception:
        call = self.start(name, path, replace, pinned)
        (event,) = self.take()
        assert isinstance(event, LoadFailed) and event.call_id == call
        return event.error

    def filled(self, key: AdapterKey, slot: int = 1) -> str:
        """Put it into a slot; the reason if that fails."""
        self.fill(SlotLoad(slot, key))
        event = self.take()[-1]
        assert event == SlotFilled(slot) or (isinstance(event, SlotFailed) and event.slot == slot)
        self.check_integrity()
        return "" if isinstance(event, SlotFilled) else event.reason

    @property
    def host_bytes(self) -> int:
        return self.stats()["adapter_host_bytes"]

    @property
    def retiring(self) -> list[AdapterKey]:
        """By the events."""
        return [event.key for event in self.seen if isinstance(event, Retiring)]


def adapter(folder: Path, seed: int) -> Path:
    return write(folder, linear_keys(random_adapter(CONFIG, seed=seed, experts=False)), lora_config())


def key_of(info: AdapterInfo) -> AdapterKey:
    return AdapterKey(info.uid, info.version)
