"""Adapters between disk, host memory and slots: who is evicted, who is read again, and what never fits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine.errors import UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget, AdapterSize
from engine.lora.version import Loaded, LoadFailed, Residency, SlotFilled
from scheduler.plan import SlotLoad
from scheduler.request import AdapterKey
from testing.shared_reader import SharedReader
from tests.lora.book import Book, InThread, adapter
from tests.lora.make import lora_config, write

DISK, HOST, SLOT = Residency.DISK, Residency.HOST, Residency.SLOT


class Made(NamedTuple):
    """Four folders of adapters of one size."""

    paths: list[Path]
    size: AdapterSize


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [adapter(folder / str(seed), seed) for seed in range(4)]
    book = Book()
    weights = book.weights(book.loaded("a", paths[0]))
    book.close()
    return Made(paths, AdapterSize(weights.num_bytes, weights.slot_bytes(2)))


@pytest.fixture
def tight(made: Made) -> Iterator[Callable[..., Book]]:
    """Makes books whose memory holds so many adapters, and one of them in a slot."""
    books: list[Book] = []

    def make(count: int, spare: int = 0, **options) -> Book:
        limit = count * made.size.read + made.size.slot + spare
        books.append(Book(budget=AdapterBudget(limit, slots=1), **options))
        return books[-1]

    yield make
    for book in books:
        book.check_integrity()
        book.close()
        assert not isinstance(book.reader, InThread) or book.reader.num_open == 0


def where(book: Book, names: str) -> list[Residency]:
    return [book.residency(name) for name in names]


def test_the_least_recently_used_is_evicted_and_read_again(made: Made, tight: Callable[..., Book]) -> None:
    book = tight(2)
    keys = {name: book.loaded(name, path) for name, path in zip("abc", made.paths, strict=False)}
    assert where(book, "abc") == [DISK, HOST, HOST] and book.host_bytes == 2 * made.size.read
    assert book.filled(keys["b"]) == "" and where(book, "abc") == [DISK, SLOT, HOST]
    assert book.filled(keys["a"]) == ""  # c is the least recently used now
    assert where(book, "abc") == [SLOT, HOST, DISK]
    assert [info.name for info in book.infos()] == ["a", "b", "c"]  # known, wherever they are
    known = {"adapters_known": 3, "adapters_in_host_memory": 2, "adapter_reads_again": 1, "adapter_evictions": 2}
    assert known.items() <= book.stats().items()
    latest = dict(book.moves)
    assert latest == {"a": SLOT, "b": HOST, "c": DISK}
    book.unload("c")
    book.take()
    book.release(keys["c"])
    assert book.host_bytes == 2 * made.size.read


def test_what_a_slot_gets_is_what_was_loaded(made: Made, tight: Callable[..., Book]) -> None:
    got: dict[int, AdapterWeights] = {}
    book = tight(1, fill=lambda slot, weights: got.update({slot: weights}))
    first, second = book.loaded("a", made.paths[0]), book.loaded("b", made.paths[1])
    name = "model.layers.0.self_attn.q_proj"
    seen = []
    for key in (first, second, first):
        assert book.filled(key) == ""
        seen.append(got[1].linears[name].a)
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])


def test_pinned_ones_stay(made: Made, tight: Callable[..., Book]) -> None:
    book = tight(2)
    keys = {name: book.loaded(name, made.paths[i], pinned=name == "a") for i, name in enumerate("abc")}
    assert where(book, "abc") == [HOST, DISK, HOST] and book.infos()[0].pinned
    assert book.filled(keys["b"]) == "" and where(book, "abc") == [HOST, SLOT, DISK]
    error = book.fails("d", made.paths[3], pinned=True)  # nothing could be read again beside two pinned ones
    assert isinstance(error, UserError) and error.field == "lora_path"
    assert "would never fit" in str(error) and "--adapter-memory" in str(error)
    assert book.loaded("d", made.paths[3]) and book.residency("a") is HOST
    book.unload("a")
    assert book.loaded("e", made.paths[0], pinned=True)


def test_one_alone_never_fits(made: Made, tight: Callable[..., Book]) -> None:
    book = tight(1, spare=-1)
    assert "would never fit" in str(book.fails("a", made.paths[0]))
    assert book.host_bytes == 0 and book.infos() == []


def test_both_versions_stay_during_a_replacement(made: Made, tight: Callable[..., Book]) -> None:
    book = tight(1)
    first = book.loaded("a", made.paths[0])
    assert "would never fit" in str(book.fails("a", made.paths[1], replace=True))
    assert book.resolve("a") == first
    enough = tight(2)
    first = enough.loaded("a", made.paths[0])
    enough.loaded("b", made.paths[2])
    second = enough.loaded("a", made.paths[1], replace=True)
    assert enough.residency("b") is DISK and enough.weights(first) is not enough.weights(second)
    assert enough.loaded("c", made.paths[3]) and enough.weights(first)  # retiring ones go last


def test_wanted_ones_go_after_those_that_nobody_wants(made: Made, tight: Callable[..., Book]) -> None:
    wanted: set[AdapterKey] = set()
    book = tight(2, wanted=wanted.__contains__)
    wanted.add(book.loaded("a", made.paths[0]))
    book.loaded("b", made.paths[1])
    book.loaded("c", made.paths[2])
    assert where(book, "abc") == [HOST, DISK, HOST]


def test_what_is_being_copied_into_a_slot_stays(made: Made, tight: Callable[..., Book]) -> None:
    """The next waits for the end of the copy, and nothing else does."""
    began, go = threading.Event(), threading.Event()

    def fill(slot: int, weights: AdapterWeights) -> None:
        began.set()
        assert go.wait(10)

    book = tight(1, fill=fill)
    key = book.loaded("a", made.paths[0])
    book.fill(SlotLoad(1, key))
    assert began.wait(10)
    book.start("b", made.paths[1])
    book.wait()
    assert book.events() == [] and book.residency("a") is HOST  # b has been read, and asks for room
    go.set()
    assert [type(event) for event in book.take()] == [SlotFilled, Loaded]
    assert where(book, "ab") == [SLOT, HOST] and book.moves[-2:] == [("a", SLOT), ("b", HOST)]


def test_close_while_one_waits_for_room(made: Made, tight: Callable[..., Book]) -> None:
    go = threading.Event()
    book = tight(1, fill=lambda slot, weights: go.wait(10))
    book.fill(SlotLoad(1, book.loaded("a", made.paths[0])))
    book.start("b", made.paths[1])
    book.wait()
    assert book.events() == []
    threading.Timer(0.05, go.set).start()
    book.close()
    (failed,) = (event for event in book.take() if isinstance(event, LoadFailed))
    assert "the engine ends" in str(failed.error)


@pytest.mark.parametrize("change", ["gone", "other", "other size", "touched"])
def test_a_folder_that_changed(tmp_path: Path, tight: Callable[..., Book], change: str) -> None:
    """It is read by the process that reads adapters in service: what counts is what was read, not the files' times."""
    book = tight(1, reader=SharedReader(), spare=1 << 10)
    path, other = adapter(tmp_path / "a", seed=1), adapter(tmp_path / "b", seed=2)
    first, second = book.loaded("a", path), book.loaded("b", other)
    file = path / "adapter_model.safetensors"
    whole = file.read_bytes()
    if change == "gone":
        file.unlink()
    elif change == "other":
        adapter(path, seed=3)
    elif change == "other size":
        write(path, {}, lora_config())
        file.write_bytes((other / file.name).read_bytes() + b"\0")
    else:
        file.write_bytes(whole)
        (path / "README.md").write_text("an adapter")
    reason = book.filled(first)
    if change == "touched":
        assert reason == "" and book.residency("a") is SLOT
        return
    assert "adapter 'a'" in reason and str(path) in reason
    assert change != "other" or "holds something else by now: load it again" in reason
    assert book.filled(second) == ""
    file.write_bytes(whole)  # back again: so is the adapter
    adapter(path, seed=1)
    assert book.filled(first) == ""


def test_any_traffic_ends(made: Made, tight: Callable[..., Book]) -> None:
    """More slots than room, all asked for at once, a load among them."""
    budget = AdapterBudget(made.size.read + 3 * made.size.slot, slots=3)
    book = Book(budget=budget, reader=InThread())
    keys = [book.loaded(str(i), path) for i, path in enumerate(made.paths[:3])]
    for _ in range(3):
        for slot, key in enumerate(keys, 1):
            book.fill(SlotLoad(slot, key))
        book.take()
        assert [book.residency(str(i)) for i in range(3)] == [SLOT] * 3
        book.check_integrity()
        keys = keys[1:] + keys[:1]
    assert book.host_bytes == made.size.read
    book.close()
