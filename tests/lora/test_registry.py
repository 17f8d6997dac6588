"""The life of adapters: loading beside the engine, replacing, unloading, and every wrong order of calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import engine.lora.registry as registry_module
from engine.errors import AdapterError, EngineError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget
from engine.lora.registry import AdapterRegistry, AdapterStatus, LoadResult, Pace
from scheduler.request import BASE, AdapterKey
from tests.lora.make import extra_keys, linear_keys, lora_config, model_config, random_adapter, write

CONFIG = model_config()


@pytest.fixture
def registry() -> Iterator[AdapterRegistry]:
    registry = AdapterRegistry(CONFIG, "base", max_rank=8)
    yield registry
    registry.check_integrity()
    registry.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("adapter-load")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return adapter(tmp_path / "one", seed=1)


def adapter(folder: Path, seed: int) -> Path:
    return write(folder, linear_keys(random_adapter(CONFIG, seed=seed, experts=False)), lora_config())


def load(registry: AdapterRegistry, name: str, path: Path, replace: bool = False) -> LoadResult:
    load_id = registry.load(name, str(path), replace)
    (result,) = registry.wait()
    assert result.load_id == load_id and result.name == name
    return result


class Gate:
    """Holds every read until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        read = registry_module.read_adapter

        def held(*args: object, **kwargs: object) -> AdapterWeights:
            self.began.set()
            assert self.go.wait(10)
            return read(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(registry_module, "read_adapter", held)


def test_load_and_use(registry: AdapterRegistry, folder: Path) -> None:
    result = load(registry, "style/pirate:v1", folder)
    assert result.error is None and result.key == AdapterKey(1, 1) != BASE
    assert registry.resolve("style/pirate:v1") == result.key
    assert registry.status("style/pirate:v1") is AdapterStatus.READY
    assert registry.infos() == [result.info]
    assert result.info is not None
    assert (result.info.format, result.info.rank, result.info.path) == ("peft-attention", 3, str(folder))
    weights = registry.weights(result.key)
    assert result.info.num_bytes == weights.num_bytes == registry.num_bytes > 0


def test_loading_does_not_wait(registry: AdapterRegistry, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    registry.load("a", str(folder))
    assert gate.began.wait(10)
    assert registry.poll() == [] and registry.status("a") is AdapterStatus.LOADING and registry.infos() == []
    with pytest.raises(UserError, match="still being loaded"):
        registry.resolve("a")
    with pytest.raises(UserError, match="is being loaded; unload it when"):
        registry.unload("a")
    for replace in (False, True):
        with pytest.raises(UserError, match="is being loaded from"):
            registry.load("a", str(folder), replace=replace)
    gate.go.set()
    assert [result.name for result in registry.wait()] == ["a"]
    assert registry.poll() == []


def test_replace_keeps_the_old_version(registry: AdapterRegistry, folder: Path, tmp_path: Path) -> None:
    first = load(registry, "a", folder).key
    assert first is not None
    old = registry.weights(first)
    with pytest.raises(UserError, match="loaded already; set replace"):
        registry.load("a", str(folder))
    second = load(registry, "a", adapter(tmp_path / "two", seed=2), replace=True).key
    assert second == AdapterKey(first.uid, first.version + 1) == registry.resolve("a")
    assert registry.weights(first) is old and registry.retiring() == [first]
    name = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(registry.weights(second).linears[name].a, old.linears[name].a)
    registry.released(first)
    assert registry.retiring() == []
    with pytest.raises(EngineError, match="no adapter version"):
        registry.weights(first)


def test_old_version_serves_while_the_new_one_loads(
    registry: AdapterRegistry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(registry, "a", folder).key
    gate = Gate(monkeypatch)
    registry.load("a", str(folder), replace=True)
    assert registry.resolve("a") == first and registry.status("a") is AdapterStatus.READY
    with pytest.raises(UserError, match="is being loaded"):
        registry.unload("a")
    gate.go.set()
    registry.wait()
    assert registry.resolve("a") != first


def test_failed_replacement_changes_nothing(registry: AdapterRegistry, folder: Path, tmp_path: Path) -> None:
    first = load(registry, "a", folder).key
    result = load(registry, "a", tmp_path / "nowhere", replace=True)
    assert isinstance(result.error, AdapterError) and result.key is None and result.info is None
    assert registry.resolve("a") == first and registry.status("a") is AdapterStatus.READY
    assert registry.retiring() == []


def test_failed_load(registry: AdapterRegistry, folder: Path, tmp_path: Path) -> None:
    result = load(registry, "a", tmp_path / "nowhere")
    assert isinstance(result.error, AdapterError) and registry.status("a") is AdapterStatus.FAILED
    with pytest.raises(UserError, match=r"could not be loaded.*nowhere"):
        registry.resolve("a")
    with pytest.raises(UserError, match="not loaded, loading it failed"):
        registry.unload("a")
    assert load(registry, "a", folder).error is None and registry.status("a") is AdapterStatus.READY


def test_unload_and_load_again_never_reuses_a_key(registry: AdapterRegistry, folder: Path) -> None:
    first = load(registry, "a", folder).key
    assert registry.unload("a") == first and registry.infos() == []
    assert registry.status("a") is AdapterStatus.RETIRING and registry.retiring() == [first]
    with pytest.raises(UserError, match="there is no adapter 'a'; models: base"):
        registry.resolve("a")
    with pytest.raises(UserError, match="no adapter 'a' to unload; loaded: none"):
        registry.unload("a")
    second = load(registry, "a", folder).key
    assert second is not None and first is not None and second.uid != first.uid
    registry.released(first)
    assert registry.num_bytes == registry.weights(second).num_bytes
    assert registry.status("a") is AdapterStatus.READY


def test_release_of_what_serves_is_our_fault(registry: AdapterRegistry, folder: Path) -> None:
    key = load(registry, "a", folder).key
    assert key is not None
    with pytest.raises(EngineError, match="is in service"):
        registry.released(key)
    with pytest.raises(EngineError, match="no adapter version"):
        registry.released(AdapterKey(99, 1))


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", "a\n", "ä", "a?", "base"])
def test_bad_names(registry: AdapterRegistry, folder: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"allowed are|base model's name") as caught:
        registry.load(name, str(folder))
    assert caught.value.field == "name"


def test_bad_arguments(registry: AdapterRegistry, folder: Path) -> None:
    with pytest.raises(UserError, match="expert_scaling is 'alpha'"):
        registry.load("a", str(folder), expert_scaling="alpha")
    with pytest.raises(UserError, match="path is empty"):
        registry.load("a", "")


def test_rank_limit(folder: Path) -> None:
    registry = AdapterRegistry(CONFIG, "base", max_rank=2)
    result = load(registry, "a", folder)
    assert isinstance(result.error, AdapterError) and "rank 3 is over" in str(result.error)
    registry.close()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """By the files before they are read, by the tensors after; nothing that serves is touched."""
    one, two = adapter(tmp_path / "one", seed=1), adapter(tmp_path / "two", seed=2)
    sizes = AdapterRegistry(CONFIG, "base")
    load(sizes, "a", one)
    weights = sizes.weights(sizes.resolve("a"))
    read, copy = weights.num_bytes, weights.slot_bytes(2)
    sizes.close()
    tight = AdapterRegistry(CONFIG, "base", budget=AdapterBudget(2 * read + copy - 1, slots=1))
    assert load(tight, "a", one).error is None
    with pytest.raises(UserError, match=r"adapter 'b' needs .* 1 loaded ones take .*--adapter-memory"):
        tight.load("b", str(two))
    with pytest.raises(UserError, match="--adapter-memory"):
        tight.load("a", str(two), replace=True)  # both versions would be there for a while
    assert tight.status("a") is AdapterStatus.READY and tight.status("b") is None
    tight.released(tight.unload("a"))
    assert load(tight, "b", two).error is None
    tight.close()
    enough = AdapterRegistry(CONFIG, "base", budget=AdapterBudget(3 * read + copy, slots=1))
    enough.load("a", str(one))
    enough.load("b", str(two))  # what is being read counts too
    assert [result.error for result in enough.wait()] == [None, None]
    enough.close()
    for slots, fits in ((2, False), (1, True)):  # two copies, or one
        registry = AdapterRegistry(CONFIG, "base", budget=AdapterBudget(2 * read + 2 * copy - 1, slots=slots))
        load(registry, "a", one)
        error = load(registry, "b", two).error
        assert (error is None) == fits and (fits or registry.status("b") is AdapterStatus.FAILED)
        registry.close()


def test_our_fault_while_reading(registry: AdapterRegistry, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> AdapterWeights:
        raise MemoryError("no room")

    monkeypatch.setattr(registry_module, "read_adapter", broken)
    error = load(registry, "a", folder).error
    assert isinstance(error, EngineError) and "MemoryError: no room" in str(error)
    assert registry.status("a") is AdapterStatus.FAILED


def test_reading_rests_between_pieces_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as long as it worked, unless somebody waits for it."""
    pace, now, rests = Pace(), [0.0], []
    monkeypatch.setattr("time.thread_time", lambda: now[0])
    monkeypatch.setattr(pace.hurry, "wait", rests.append)
    pace.begin()
    for worked in (0.0004, 0.0004, 0.0004, 0.0, 0.002):
        now[0] += worked
        pace.pause()
    assert rests == [pytest.approx(0.0048), pytest.approx(0.008)]


def test_waiting_for_a_load_hurries_it(registry: AdapterRegistry, folder: Path) -> None:
    hurried = []
    registry._pace.pause = lambda: hurried.append(registry._pace.hurry.wait(10))  # type: ignore[method-assign]
    assert load(registry, "a", folder).error is None
    assert hurried and all(hurried) and not registry._pace.hurry.is_set()


def test_close_while_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = AdapterRegistry(CONFIG, "base")
    gate = Gate(monkeypatch)
    registry.load("a", str(folder))
    registry.load("b", str(folder))
    assert gate.began.wait(10)
    gate.go.set()
    registry.close()
    registry.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("adapter-load")]
    results = {result.name: result.error for result in registry.poll()}
    assert set(results) == {"a", "b"} and results["a"] is None
    with pytest.raises(EngineError, match="closed"):
        registry.load("c", str(folder))


def test_failures_are_not_kept_for_ever(registry: AdapterRegistry, tmp_path: Path) -> None:
    for index in range(70):
        registry.load(f"a{index}", str(tmp_path / "nowhere"))
    assert len(registry.wait()) == 70
    assert registry.status("a0") is None and registry.status("a69") is AdapterStatus.FAILED


@given(st.lists(st.tuples(st.sampled_from("lrub"), st.sampled_from("ab")), max_size=20))
@hypothesis_settings(max_examples=60)
def test_any_order_of_calls(calls: list[tuple[str, str]]) -> None:
    """Against a plain model: what is ready, what retires, no key twice."""
    registry = AdapterRegistry(CONFIG, "base")
    registry._reader = lambda name, path, scaling: lambda: AdapterWeights(name, "none")  # type: ignore[method-assign]
    ready: dict[str, AdapterKey] = {}
    retired: list[AdapterKey] = []
    seen: set[AdapterKey] = set()
    for call, name in calls:
        if call in "lr":
            if call == "l" and name in ready:
                with pytest.raises(UserError):
                    registry.load(name, "x")
                continue
            registry.load(name, "x", replace=call == "r")
            (result,) = registry.wait()
            assert result.key is not None and result.key not in seen
            seen.add(result.key)
            retired += [ready[name]] if name in ready else []
            ready[name] = result.key
        elif call == "u" and name in ready:
            retired.append(ready.pop(name))
            assert registry.unload(name) == retired[-1]
        elif call == "b" and retired:
            registry.released(retired.pop(0))
        registry.check_integrity()
        assert sorted(registry.retiring()) == sorted(retired)
        assert {info.name: AdapterKey(info.uid, info.version) for info in registry.infos()} == ready
    registry.close()


def test_an_adapter_with_mlps_of_its_own_is_noted(tmp_path: Path) -> None:
    registry = AdapterRegistry(CONFIG, "base", extra_mlps_note="runs without graphs")
    with_mlps = random_adapter(CONFIG, seed=2, experts=False, extra=1)
    write(tmp_path / "extra", {**linear_keys(with_mlps), **extra_keys(with_mlps)}, lora_config())
    registry.load("extra", str(tmp_path / "extra"))
    registry.load("plain", str(adapter(tmp_path / "plain", seed=1)))
    notes = {r.name: r.info.warnings for r in registry.wait() if r.info}
    registry.close()
    assert notes == {"extra": ["runs without graphs"], "plain": []}
