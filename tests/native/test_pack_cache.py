"""Packed weights on disk: the second start reads them, and no bad file is ever believed."""

from __future__ import annotations

import gc
import logging
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.experts.native import NativeExperts
from engine.launch.shared import pack_cache
from engine.linear.native import NativeLinearBackend
from engine.weights.ahead import read_ahead
from engine.weights.open import open_model
from engine.weights.pack_cache import HEADER_BYTES, PackCache, model_folder
from native import _native
from testing.harness import Harness
from testing.models.gguf_writer import save_gguf
from testing.models.shapes import config
from testing.models.tiny import save_hf, tiny_model
from tests.native.expert_layers import BF16, E, H, I, K, Layer, batch, run
from tests.native.test_linear import draw, tensor


@pytest.fixture(scope="module")
def pool() -> Any:
    return _native.WorkerPool([[0, 1]])


SIZES = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)


def load(
    pool: Any, layer: Layer, folder: Path | None, source_id: str = "", *, maps: bool = False, **options: Any
) -> torch.Tensor:
    """What a freshly loaded backend computes."""
    cache = None if folder is None else PackCache(folder, source_id, _native.MappedFiles() if maps else None)
    experts = NativeExperts(SIZES, BF16, pool, cache=cache, **options)
    experts.load_layer(0, layer.store)
    return run(experts, experts.bind(0, batch(4, BF16)))


def packed(folder: Path) -> Path:
    (path,) = folder.iterdir()
    assert path.name == "layer-000.ktpack"
    return path


def test_the_second_start_reads_the_file(pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer("Q4_K", "", "Q6_K")
    folder = tmp_path / "made" / "when needed"
    plain = load(pool, layer, None)
    first = load(pool, layer, folder, source_id="a")
    written = packed(folder).stat()
    monkeypatch.setattr(NativeExperts, "_source", None)  # packing would call it
    second = load(pool, layer, folder, source_id="a")
    assert torch.equal(first, plain)
    assert torch.equal(second, plain)
    assert packed(folder).stat().st_mtime_ns == written.st_mtime_ns


def test_a_stale_file_is_rebuilt(pool: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer, other = Layer("Q8_0"), Layer("Q8_0")
    data = other.store.down.data.copy()  # type: ignore[union-attr]
    data[:: 4096 // 16] ^= 1
    object.__setattr__(other.store, "down", type(other.store.down)("down", (E, H, I), "Q8_0", data))
    load(pool, layer, tmp_path, source_id="a")
    changes: list[tuple[Layer, dict[str, Any]]] = [
        (other, {"source_id": "a"}),
        (other, {"source_id": "b"}),
        (Layer("Q8_0", "Q4_0"), {"source_id": "b"}),
        (Layer("BF16"), {"source_id": "b"}),
        (Layer("BF16"), {"source_id": "b", "quantise": "int8"}),
    ]
    for changed, options in changes:
        caplog.clear()
        assert torch.equal(load(pool, changed, tmp_path, **options), load(pool, changed, None, **options))
        assert "packing again" in caplog.text
        caplog.clear()
        load(pool, changed, tmp_path, **options)
        assert "packing again" not in caplog.text
    two = _native.WorkerPool([[0], [1]])  # two NUMA nodes lay the weights out otherwise
    caplog.clear()
    assert torch.equal(load(two, other, tmp_path), load(pool, other, None))
    assert "packing again" in caplog.text


@pytest.mark.parametrize("maps", [False, True])
def test_no_damage_goes_unseen(pool: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, maps: bool) -> None:
    layer = Layer("Q4_0")
    expected = load(pool, layer, tmp_path)
    path = packed(tmp_path)
    good = path.read_bytes()
    rng = random.Random(0)

    def damaged(kind: int) -> bytes:
        at = rng.randrange(len(good)) if kind % 2 else rng.randrange(400)
        if kind % 5 == 0:
            return good[: rng.randrange(len(good))]
        if kind % 5 == 1:
            return good + b"\0" * rng.randrange(1, 100)
        if kind % 5 == 2:
            return rng.randbytes(rng.randrange(2 * HEADER_BYTES))
        return good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :]

    for kind in range(60):
        bad = damaged(kind)
        path.write_bytes(bad)
        caplog.clear()
        assert torch.equal(load(pool, layer, tmp_path, maps=maps), expected)
        assert "packing again" in caplog.text, kind
        assert path.read_bytes() == good


class Mapped:
    """Experts of one layer whose packed file is mapped. `first`: by the start that packs them."""

    def __init__(self, pool: Any, folder: Path, type: str = "Q4_0", *, first: bool = False) -> None:
        layer = Layer(type)
        self.expected = load(pool, layer, None if first else folder)
        self.files = _native.MappedFiles()
        self.experts = NativeExperts(SIZES, BF16, pool, cache=PackCache(folder, mapped=self.files))
        self.experts.load_layer(0, layer.store)
        self.path = packed(folder)
        self.task = self.experts.bind(0, batch(4, BF16))

    def check(self) -> None:
        assert torch.equal(run(self.experts, self.task), self.expected)

    @property
    def lines(self) -> str:
        """What the system says of the mapping; "": there is none."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        return "\n".join(line for line in maps if str(self.path) in line)


@pytest.mark.parametrize("first", [True, False])
def test_a_mapped_file_is_not_copied(pool: Any, tmp_path: Path, first: bool) -> None:
    mapped = Mapped(pool, tmp_path, first=first)
    assert "r--s" in mapped.lines
    mapped.check()
    mapped.path.unlink()  # what is mapped stays
    mapped.check()
    del mapped.task, mapped.experts
    gc.collect()
    assert not mapped.lines


@pytest.mark.parametrize("change", ["shorten", "write", "empty"])
def test_whoever_changes_a_mapped_file_waits_until_it_was_copied(
    pool: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str
) -> None:
    mapped = Mapped(pool, tmp_path)
    size = mapped.path.stat().st_size
    program = {
        "shorten": "import os, sys; os.truncate(sys.argv[1], 4096)",
        "write": "import sys; file = open(sys.argv[1], 'r+b'); file.seek(4096); file.write(b'x' * 5000)",
        "empty": "import sys; open(sys.argv[1], 'wb').close()",
    }[change]
    with subprocess.Popen([sys.executable, "-c", program, str(mapped.path)]) as other:
        while other.poll() is None:
            mapped.check()
    assert other.returncode == 0
    assert mapped.path.stat().st_size == {"shorten": 4096, "write": size, "empty": 0}[change]
    assert not mapped.lines
    for _ in range(3):
        mapped.check()
    assert f"opens {mapped.path} for writing: its weights were copied" in capfd.readouterr().err


def test_what_was_packed_is_kept_where_its_file_cannot_be_read_back(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = PackCache.write

    def damaged(self: PackCache, key: Any, *about: Any) -> bool:
        done = written(self, key, *about)
        with self.path(key.name).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        return done

    monkeypatch.setattr(PackCache, "write", damaged)
    mapped = Mapped(pool, tmp_path, first=True)
    assert "its checksum" in caplog.text and not mapped.lines
    mapped.check()


def test_a_file_that_is_open_for_writing_is_copied(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(pool, Layer("Q4_0"), tmp_path)
    with packed(tmp_path).open("r+b"), caplog.at_level(logging.DEBUG):
        monkeypatch.setattr(PackCache, "write", None)  # packing would call it
        mapped = Mapped(pool, tmp_path)
        assert not mapped.lines and "copied, not mapped" in caplog.text
        mapped.check()


def test_mapped_files_are_copied_once_the_model_is_loaded(pool: Any, tmp_path: Path) -> None:
    """While they are computed with."""
    mapped = Mapped(pool, tmp_path)
    mapped.files.own()
    while mapped.lines:
        mapped.check()
    mapped.path.write_bytes(b"")  # nobody is waited for
    mapped.check()


def ahead_of(folder: Path, **settings: Any) -> Any:
    made = read_ahead(EngineConfig(model=str(folder / "m.gguf"), device="cpu", cpu_threads=2, **settings))
    if made is not None:
        made.drop()
    return made


def test_what_is_read_ahead_is_what_the_engine_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_gguf(tiny_model(5), tmp_path / "m.gguf", "Q8_0", "Q8_0")
    settings = {"rules": None, "dtype": "auto", "pack_cache": "auto", "device": "cpu"}
    prompts = [[5, 6, 7, 8], [9, 9, 2]]
    assert ahead_of(tmp_path) is None  # nothing is there yet
    first = Harness(tmp_path / "m.gguf", **settings)
    expected = first.generate(prompts)
    first.close()
    assert ahead_of(tmp_path, pack_cache="off") is None
    packed_folder = next((tmp_path / ".ktserve").iterdir())
    files = sorted(packed_folder.iterdir())
    good = {path: path.read_bytes() for path in files}
    rng = random.Random(3)
    for kind in range(8):
        path = rng.choice(files)
        content = good[path]
        at = rng.randrange(len(content))
        flipped = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        path.write_bytes((content, flipped, content[:at], content + b"x")[kind % 4])
        mapped = read_ahead(EngineConfig(model=str(tmp_path / "m.gguf"), device="cpu", cpu_threads=2))
        assert mapped is not None
        caplog.clear()
        engine = Harness(tmp_path / "m.gguf", mapped=mapped, **settings)
        assert engine.generate(prompts) == expected
        assert ("packing again" in caplog.text) is bool(kind % 4)
        assert path.read_bytes() == good[path]
        engine.close()
    (tmp_path / ".ktserve" / "m-0123456789ab").mkdir()
    (tmp_path / ".ktserve" / "m-0123456789ab" / files[0].name).write_bytes(b"")
    assert ahead_of(tmp_path) is None  # of which of the two is not known before the model is open


def test_two_nodes_memory_is_not_mapped(tmp_path: Path) -> None:
    """A file's pages are wherever they were first read."""
    mapped = Mapped(_native.WorkerPool([[0], [1]]), tmp_path)
    assert not mapped.lines
    mapped.check()


def test_a_folder_that_cannot_be_written_costs_only_the_cache(
    pool: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = Layer("Q4_0")
    (tmp_path / "file").write_text("in the way")
    got = load(pool, layer, tmp_path / "file" / "cache")
    assert "not cached" in caplog.text
    assert torch.equal(got, load(pool, layer, None))


def test_nothing_is_left_behind_or_half_written(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "replace", full)
        load(pool, Layer("Q4_0"), tmp_path)
    assert "No space left" in caplog.text
    assert os.listdir(tmp_path) == []


def test_a_file_that_the_system_will_not_take(pool: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel's own refusal in the middle of a file, as of a full disk."""
    layer = Layer("Q8_0")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    try:
        got = load(pool, layer, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "not cached" in caplog.text and "File too large" in caplog.text
    assert os.listdir(tmp_path) == []
    assert torch.equal(got, load(pool, layer, None))


def projection(pool: Any, cache: PackCache | None, type: str = "Q8_0", seed: int = 1, **options: Any) -> Any:
    weight, _ = tensor(draw(200, 256, seed=seed), type)
    bias, _ = tensor(draw(200, seed=2), "F32")
    return NativeLinearBackend(BF16, pool, cache=cache, **options).load("model.o_proj", weight, bias)


def test_projections_are_read_back(pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(5, 256, seed=3).to(BF16)
    for type in ("Q8_0", "Q4_K", "Q6_K", "BF16", "F16", "Q2_K", "IQ4_NL", "IQ2_S", "INT4_G128", "F8_E4M3", "IQ1_S"):
        cache = PackCache(tmp_path / type, "a")
        expected = projection(pool, None, type)(x, None)
        assert torch.equal(projection(pool, cache, type)(x, None), expected)
        assert os.listdir(tmp_path / type) == ["model.o_proj.ktpack"]
        with monkeypatch.context() as patch:
            patch.setattr(NativeLinearBackend, "_source", None)  # packing would call it
            assert torch.equal(projection(pool, cache, type)(x, None), expected)
        assert "B read" in cache.report()[0]


@pytest.mark.parametrize("maps", [False, True])
def test_a_stale_or_damaged_projection_is_rebuilt(
    pool: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, maps: bool
) -> None:
    x = draw(5, 256, seed=3).to(BF16)
    cache = PackCache(tmp_path, "a", _native.MappedFiles() if maps else None)
    projection(pool, cache)
    path = tmp_path / "model.o_proj.ktpack"
    good = path.read_bytes()
    rng = random.Random(1)
    for kind in range(20):
        at = rng.randrange(HEADER_BYTES, len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << kind % 8]) + good[at + 1 :] if kind % 4 else good[:at])
        caplog.clear()
        assert torch.equal(projection(pool, cache)(x, None), projection(pool, None)(x, None))
        assert "packing again" in caplog.text and path.read_bytes() == good
    nodes = _native.WorkerPool([[0], [1]])
    changes: list[tuple[Any, PackCache, str, int, dict[str, Any]]] = [
        (pool, cache, "Q8_0", 9, {}),  # other values
        (pool, PackCache(tmp_path, "b"), "Q8_0", 9, {}),  # other files
        (pool, cache, "Q4_0", 9, {}),
        (pool, cache, "BF16", 9, {}),
        (pool, cache, "BF16", 9, {"quantise": "int8"}),
        (nodes, cache, "BF16", 9, {"quantise": "int8"}),
    ]
    for workers, held, type, seed, options in changes:
        caplog.clear()
        started = PackCache(tmp_path, held.identity)
        made = projection(workers, started, type, seed, **options)
        assert caplog.text.count("packing again") == 1
        with caplog.at_level(logging.WARNING):
            projection(workers, started, "Q4_1", seed)  # said once a start
        assert caplog.text.count("packing again") == 1
        projection(workers, started, type, seed, **options)
        assert torch.equal(made(x, None), projection(pool, None, type, seed, **options)(x, None))


def test_every_model_has_a_folder_of_its_own(tmp_path: Path) -> None:
    roots = [tmp_path / "one", tmp_path / "two" / "m.gguf"]
    save_hf(tiny_model(1), roots[0])
    roots[1].parent.mkdir()
    save_gguf(tiny_model(2), roots[1])
    shared = tmp_path / "cache"
    settings = [EngineConfig(model=str(root), pack_cache=str(shared)) for root in roots]
    found = [pack_cache(s, open_model(s.model)) for s in settings]
    first, second = (cache.folder for cache in found if cache is not None)
    assert first.parent == second.parent == shared and first != second
    assert first.name.startswith("one-") and second.name.startswith("m-")
    beside = pack_cache(EngineConfig(model=settings[1].model), open_model(settings[1].model))
    assert beside is not None and beside.folder == roots[1].parent / ".ktserve" / second.name
    assert pack_cache(EngineConfig(model=settings[1].model, pack_cache="off"), open_model(settings[1].model)) is None
    os.utime(roots[1])
    again = pack_cache(settings[1], open_model(settings[1].model))
    assert again is not None and again.folder != second  # other files, another folder
    assert model_folder(shared, "../a b/é", "x").parent == shared


def test_other_folders_are_named_and_kept(pool: Any, tmp_path: Path) -> None:
    old, new = PackCache(tmp_path / "m-old", "a"), PackCache(tmp_path / "m-new", "b")
    projection(pool, old)
    assert len(old.report()) == 1
    projection(pool, new)
    assert "m-old" in new.report()[1] and (tmp_path / "m-old" / "model.o_proj.ktpack").exists()


def test_a_folder_that_is_none_is_said_once(pool: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = PackCache(tmp_path / "file")
    for seed in (1, 2, 3):
        projection(pool, cache, seed=seed)
    assert caplog.text.count("packing again") == 1 and caplog.text.count("are not cached") == 1


def test_a_full_disk_is_said_once_and_costs_only_the_cache(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    cache = PackCache(tmp_path / "m")
    for seed in (1, 2, 3):
        projection(pool, cache, seed=seed)
    assert caplog.text.count("No space left") == 1
    assert sum("No space left" in line for line in cache.report()) == 1
    assert os.listdir(tmp_path / "m") == []


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_engine_starts_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tied: bool
) -> None:
    save_gguf(tiny_model(5, tie_word_embeddings=tied), tmp_path / "m.gguf", "Q8_0", "Q8_0")
    prompts = [[5, 6, 7, 8], [9, 9, 2]]

    def start(where: str) -> tuple[list[list[int]], list[str]]:
        engine = Harness(tmp_path / "m.gguf", rules=None, dtype="auto", pack_cache=where)
        tokens, notes = engine.generate(prompts), engine.core.runner.notes
        assert engine.progress == [("Loading layers", i, 2) for i in range(3)]
        engine.close()
        return tokens, notes

    plain, _ = start("off")
    first, notes = start("auto")
    assert first == plain and "0 B read" in notes[0]
    files = {path.name for path in (tmp_path / ".ktserve").glob("m-*/*")}
    assert {"layer-000.ktpack", "model.layers.1.mlp.gate.ktpack", "lm_head.ktpack"} < files
    assert ("model.embed_tokens.ktpack" in files) is not tied  # a tied head is one copy
    monkeypatch.setattr(NativeLinearBackend, "_source", None)
    monkeypatch.setattr(NativeExperts, "_source", None)
    second, notes = start("auto")
    assert second == plain and "0 B packed" in notes[0]
    assert capfd.readouterr().out == ""


def test_an_engine_starts_where_nothing_can_be_written(tmp_path: Path) -> None:
    save_gguf(tiny_model(5), tmp_path / "m.gguf", "Q8_0", "Q8_0")
    (tmp_path / ".ktserve").write_text("in the way")
    engine = Harness(tmp_path / "m.gguf", rules=None, dtype="auto", pack_cache="auto")
    assert sum("are not cached" in note and "--pack-cache" in note for note in engine.core.runner.notes) == 1
    assert engine.generate([[1, 2, 3]])
    engine.close()
