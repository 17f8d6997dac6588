"""The life of adapters: loading beside the engine, replacing, unloading, slots, and every wrong order of calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.errors import AdapterError, EngineError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.version import (
    AdapterStatus,
    Loaded,
    Retiring,
    SlotFailed,
    SlotFilled,
)
from scheduler.plan import SlotLoad
from scheduler.request import BASE, AdapterKey
from tests.lora.book import CONFIG, Book, InThread, adapter, key_of
from tests.lora.make import extra_keys, linear_keys, lora_config, per_expert_keys, random_adapter, write


@pytest.fixture
def book() -> Iterator[Book]:
    book = Book(max_rank=8)
    yield book
    book.check_integrity()
    book.close()
    assert book.reader.num_open == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("adapter-")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return adapter(tmp_path / "one", seed=1)


def test_load_and_use(book: Book, folder: Path) -> None:
    call = book.start("style/pirate:v1", folder)
    (event,) = book.take()
    assert isinstance(event, Loaded) and event.call_id == call
    key = key_of(event.info)
    assert key == AdapterKey(1, 1) == book.resolve("style/pirate:v1") != BASE
    assert book.status("style/pirate:v1") is AdapterStatus.READY
    assert book.infos() == [event.info]
    assert (event.info.format, event.info.rank, event.info.path) == ("peft-attention", 3, str(folder))
    assert event.info.num_bytes == book.weights(key).num_bytes == book.host_bytes > 0


def test_nothing_happens_twice(book: Book, folder: Path) -> None:
    """Each change is one event, and without a change there is none."""
    first = book.loaded("a", folder)
    second = book.loaded("a", folder, replace=True)
    book.unload("a")
    book.take()
    assert [type(event) for event in book.seen] == [Loaded, Retiring, Loaded, Retiring]
    assert book.retiring == [first, second] and book.events() == []
    book.release(first)
    book.release(second)
    assert book.events() == [] and book.host_bytes == 0


def test_loading_does_not_wait(book: Book, folder: Path) -> None:
    book.reader.go.clear()
    book.start("a", folder)
    assert book.reader.began.wait(10)
    assert book.events() == [] and book.status("a") is AdapterStatus.LOADING and book.infos() == [] and book.busy
    with pytest.raises(UserError, match="still being loaded"):
        book.resolve("a")
    with pytest.raises(UserError, match="is being loaded; unload it when"):
        book.unload("a")
    for replace in (False, True):
        with pytest.raises(UserError, match="is being loaded from"):
            book.start("a", folder, replace=replace)
    book.reader.go.set()
    assert [type(event) for event in book.take()] == [Loaded]
    assert not book.busy


def test_replace_keeps_the_old_version(book: Book, folder: Path, tmp_path: Path) -> None:
    first = book.loaded("a", folder)
    old = book.weights(first)
    with pytest.raises(UserError, match="loaded already; set replace"):
        book.start("a", folder)
    second = book.loaded("a", adapter(tmp_path / "two", seed=2), replace=True)
    assert second == AdapterKey(first.uid, first.version + 1) == book.resolve("a")
    assert book.weights(first) is old and book.retiring == [first]
    name = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(book.weights(second).linears[name].a, old.linears[name].a)
    book.release(first)
    with pytest.raises(EngineError, match="no adapter version"):
        book.weights(first)


def test_old_version_serves_while_the_new_one_loads(book: Book, folder: Path) -> None:
    first = book.loaded("a", folder)
    book.reader.go.clear()
    book.start("a", folder, replace=True)
    assert book.resolve("a") == first and book.status("a") is AdapterStatus.READY
    with pytest.raises(UserError, match="is being loaded"):
        book.unload("a")
    book.reader.go.set()
    book.take()
    assert book.resolve("a") != first


def test_failed_replacement_changes_nothing(book: Book, folder: Path, tmp_path: Path) -> None:
    first = book.loaded("a", folder)
    assert isinstance(book.fails("a", tmp_path / "nowhere", replace=True), AdapterError)
    assert book.resolve("a") == first and book.status("a") is AdapterStatus.READY
    assert book.retiring == []
    assert book.loaded("a", folder, replace=True) == AdapterKey(first.uid, first.version + 1)


def test_failed_load(book: Book, folder: Path, tmp_path: Path) -> None:
    assert isinstance(book.fails("a", tmp_path / "nowhere"), AdapterError)
    assert book.status("a") is AdapterStatus.FAILED
    with pytest.raises(UserError, match=r"could not be loaded.*nowhere"):
        book.resolve("a")
    with pytest.raises(UserError, match="not loaded, loading it failed"):
        book.unload("a")
    book.loaded("a", folder)
    assert book.status("a") is AdapterStatus.READY


def test_unload_and_load_again_never_reuses_a_key(book: Book, folder: Path) -> None:
    first = book.loaded("a", folder)
    book.unload("a")
    assert book.infos() == [] and book.take() == [Retiring(first)]
    assert book.status("a") is AdapterStatus.RETIRING
    with pytest.raises(UserError, match="there is no adapter 'a'; models: base"):
        book.resolve("a")
    with pytest.raises(UserError, match="no adapter 'a' to unload; loaded: none"):
        book.unload("a")
    second = book.loaded("a", folder)
    assert second.uid != first.uid
    book.release(first)
    assert book.host_bytes == book.weights(second).num_bytes
    assert book.status("a") is AdapterStatus.READY


def test_release_of_what_serves_is_our_fault(book: Book, folder: Path) -> None:
    key = book.loaded("a", folder)
    with pytest.raises(EngineError, match="is ready, not retiring"):
        book.release(key)
    with pytest.raises(EngineError, match="no adapter version"):
        book.release(AdapterKey(99, 1))


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", "a\n", "ä", "a?", "base"])
def test_bad_names(book: Book, folder: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"allowed are|base model's name") as caught:
        book.start(name, folder)
    assert caught.value.field == "lora_name"


def test_bad_arguments(book: Book, folder: Path) -> None:
    with pytest.raises(UserError, match="expert_scaling is 'alpha'"):
        book.load(1, "a", str(folder), expert_scaling="alpha")
    for path in ("", "adapters/a", "./a"):
        with pytest.raises(UserError, match="must be absolute") as caught:
            book.start("a", path)
        assert caught.value.field == "lora_path"


def test_rank_limit(folder: Path) -> None:
    book = Book(max_rank=2)
    assert "rank 3 is over" in str(book.fails("a", folder))
    book.close()


def test_our_fault_while_reading(book: Book, folder: Path) -> None:
    book.reader.broken = RuntimeError("no such thing")
    error = book.fails("a", folder)
    assert isinstance(error, EngineError) and "RuntimeError: no such thing" in str(error)
    assert book.status("a") is AdapterStatus.FAILED


def test_slots_are_filled_beside_the_caller(folder: Path) -> None:
    filled, go = [], threading.Event()

    def fill(slot: int, weights: AdapterWeights) -> None:
        assert go.wait(10)
        if slot == 2:
            raise MemoryError("no room")
        filled.append((slot, weights))

    book = Book(fill)
    key = book.loaded("a", folder)
    book.fill(SlotLoad(1, key))
    book.fill(SlotLoad(2, key))
    assert book.events() == [] and book.busy
    go.set()
    assert book.take() == [SlotFilled(1), SlotFailed(2, "the adapter could not be loaded: no room")]
    assert filled == [(1, book.weights(key))]
    book.close()


def test_close_while_loading(folder: Path) -> None:
    book = Book()
    book.reader.go.clear()
    book.start("a", folder)
    book.start("b", folder)
    assert book.reader.began.wait(10)
    book.close()
    book.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("adapter-")]
    with pytest.raises(EngineError, match="cannot be loaded any more"):
        book.start("c", folder)


def test_failures_are_not_kept_without_end(book: Book, tmp_path: Path) -> None:
    for index in range(70):
        book.start(f"a{index}", tmp_path / "nowhere")
    assert len(book.take()) == 70
    assert book.status("a0") is None and book.status("a69") is AdapterStatus.FAILED


@given(st.lists(st.tuples(st.sampled_from("lrufb"), st.sampled_from("ab")), max_size=20))
@hypothesis_settings(max_examples=60)
def test_any_order_of_calls(calls: list[tuple[str, str]]) -> None:
    """Against a plain model: what is ready, what retires, no key twice."""
    book = Book(reader=InThread(lambda request: AdapterWeights(request.name, "none")))
    ready: dict[str, AdapterKey] = {}
    retired: list[AdapterKey] = []
    seen: set[AdapterKey] = set()
    for call, name in calls:
        book.reader.broken = AdapterError("broken") if call == "f" else None
        if call == "l" and name in ready:
            with pytest.raises(UserError):
                book.start(name, "/x")
        elif call in "lr":
            key = book.loaded(name, "/x", replace=call == "r")
            assert key not in seen
            seen.add(key)
            retired += [ready[name]] if name in ready else []
            ready[name] = key
        elif call == "f":
            book.fails(name, "/x", replace=True)
        elif call == "u" and name in ready:
            retired.append(ready.pop(name))
            book.unload(name)
            book.take()
        elif call == "b" and retired:
            book.release(retired.pop(0))
        book.check_integrity()
        assert book.retiring[len(book.retiring) - len(retired) :] == retired
        assert {info.name: key_of(info) for info in book.infos()} == ready
    book.close()


def test_an_adapter_with_mlps_of_its_own_is_noted(tmp_path: Path) -> None:
    book = Book(extra_mlps_note="runs without graphs")
    with_mlps = random_adapter(CONFIG, seed=2, experts=False, extra=1)
    write(tmp_path / "extra", {**linear_keys(with_mlps), **extra_keys(with_mlps)}, lora_config())
    book.loaded("extra", tmp_path / "extra")
    book.loaded("plain", adapter(tmp_path / "plain", seed=1))
    noted = {info.name: info.warnings for info in book.infos()}
    assert noted == {"extra": ["runs without graphs"], "plain": []}
    book.close()


def test_lora_in_experts_is_refused_where_it_cannot_be_applied(tmp_path: Path) -> None:
    book = Book(no_expert_lora="kt has no adapter per row")
    weights = random_adapter(CONFIG, seed=5)
    attention = write(tmp_path / "attention", linear_keys(weights), lora_config())
    both = write(tmp_path / "both", {**linear_keys(weights), **per_expert_keys(weights)}, lora_config())
    book.loaded("attention", attention)
    refused = book.fails("both", both)
    assert isinstance(refused, AdapterError) and "no adapter per row" in str(refused)
    assert any("experts" in key for key in refused.keys)
    book.close()
