"""Packed experts on disk: the second start reads them, and no bad file is ever believed."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.experts.native import NativeExperts
from engine.experts.pack_cache import HEADER_BYTES
from native import _native
from tests.native.shapes import config
from tests.native.test_experts import BF16, E, H, I, K, Layer, batch, run


@pytest.fixture(scope="module")
def pool() -> Any:
    return _native.WorkerPool([[0, 1]])


SIZES = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)


def load(pool: Any, layer: Layer, folder: Path | None, **options: Any) -> torch.Tensor:
    """What a freshly loaded backend computes."""
    experts = NativeExperts(SIZES, BF16, pool, cache_dir=folder, **options)
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
        assert "packing anew" in caplog.text
        caplog.clear()
        load(pool, changed, tmp_path, **options)
        assert "packing anew" not in caplog.text
    two = _native.WorkerPool([[0], [1]])  # two NUMA nodes lay the weights out otherwise
    caplog.clear()
    assert torch.equal(load(two, other, tmp_path), load(pool, other, None))
    assert "packing anew" in caplog.text


def test_no_damage_goes_unseen(pool: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
        assert torch.equal(load(pool, layer, tmp_path), expected)
        assert "packing anew" in caplog.text, kind
        assert path.read_bytes() == good


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
