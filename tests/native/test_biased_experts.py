"""Native experts with biases and the clamped activation, against float64: formats, instruction sets, adapters, memory
nodes, and packed files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ExpertBackendError, ModelFileError
from engine.experts.native import NativeExperts
from engine.weights.pack_cache import PackCache
from native import _native
from tests.native.expert_layers import BF16, F32, E, Layer, batch, error, expected, lora, make, run
from tests.native.isas import ISAS

LIKE_GPT_OSS: dict[str, Any] = {"biased": True, "limit": 7.0, "alpha": 1.702}


@pytest.fixture(scope="module")
def pool() -> Any:
    return _native.WorkerPool([[0, 1]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 13, 150])
@pytest.mark.parametrize(("kind", "bound"), [("MXFP4", 0.02), ("Q8_0", 0.03), ("BF16", 0.006), ("F32", 2e-6)])
def test_with_and_without_adapters(pool: Any, kind: str, bound: float, rows: int, isa: str) -> None:
    """A limit that some gates and ups of these weights exceed, and others do not."""
    layer = Layer(kind, biased=True, limit=0.5, alpha=1.702)
    dtype = F32 if kind == "F32" else BF16
    experts, adapters = make(pool, layer, dtype, isa), {}
    for slot in (1, 2):
        adapters[slot] = lora(5 * slot, slot, dtype)
        experts.set_adapter(slot, {0: adapters[slot]})
    for slots in (None, [0, 1, 2]):
        b = batch(rows, dtype, slots=slots)
        if rows > 1:
            b.ids[0, 1] = -1
        assert error(run(experts, experts.bind(0, b)), expected(layer, b, adapters)) < bound


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    sizes = st.sampled_from([32, 64, 96, 160])
    return Layer(
        "F32",
        hidden=draw(sizes),
        inner=draw(sizes),
        biased=draw(st.booleans()),
        limit=draw(st.none() | st.floats(0.0625, 20, width=32)),
        alpha=draw(st.floats(-4, 4, width=32)),
    )


@given(layer=layers(), rows=st.integers(1, 40), seed=st.integers(0, 1000), isa=st.sampled_from(ISAS or ("",)))
def test_any_shape_limit_and_alpha(pool: Any, layer: Layer, rows: int, seed: int, isa: str) -> None:
    experts = make(pool, layer, F32, isa)
    adapters = {1: lora(3, seed, F32, layer.hidden, layer.inner)}
    experts.set_adapter(1, {0: adapters[1]})
    b = batch(rows, F32, seed, [0, 1], layer.hidden)
    assert error(run(experts, experts.bind(0, b)), expected(layer, b, adapters)) < 5e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["MXFP4", "BF16"])
def test_a_row_does_not_see_its_neighbours(pool: Any, kind: str, isa: str) -> None:
    layer = Layer(kind, **LIKE_GPT_OSS)
    experts = make(pool, layer, BF16, isa, deterministic=True)
    nodes = make(_native.WorkerPool([[0], [1], [0]]), layer, BF16, isa, deterministic=True)
    for each in (experts, nodes):
        each.set_adapter(1, {0: lora(4, 1)})
    big, one = batch(90, BF16, slots=[0, 1]), batch(1, BF16)
    together = run(experts, experts.bind(0, big))
    assert torch.equal(together, run(nodes, nodes.bind(0, big)))
    for row in (0, 1, 45, 89):
        for name in ("hidden", "ids", "weights", "slots"):
            getattr(one, name)[0] = getattr(big, name)[row]
        assert torch.equal(run(experts, experts.bind(0, one))[0], together[row])


@pytest.mark.parametrize("quantise", ["int8", "int4"])
def test_plain_weights_are_quantised_on_request(pool: Any, quantise: str) -> None:
    layer, b = Layer("F32", **LIKE_GPT_OSS), batch(7, BF16)
    experts = make(pool, layer, BF16, quantise=quantise)
    assert error(run(experts, experts.bind(0, b)), expected(layer, b, {})) < (0.02 if quantise == "int8" else 0.2)


def changed_bias(layer: Layer, name: str, **changes: Any) -> Layer:
    """A layer that differs in one value of a bias, or as `changes` say."""
    bias = layer.store.biases[name]
    data = np.asarray(bias.data).copy()
    data.view(np.float32)[-1] = changes.pop("value", 3.0)
    made = Layer("MXFP4", **LIKE_GPT_OSS)
    biases = {**layer.store.biases, name: dataclasses.replace(bias, data=data, **changes)}
    made.store = dataclasses.replace(layer.store, biases=biases)
    made.biases = {**layer.biases, name: layer.biases[name].clone()}
    made.biases[name][-1, -1] = 3.0
    return made


@pytest.mark.parametrize("groups", [1, 2])
def test_the_second_start_reads_biases_and_other_biases_are_packed_again(
    groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers, layer = _native.WorkerPool([[0]] * groups), Layer("MXFP4", **LIKE_GPT_OSS)

    def load(layer: Layer, folder: Path | None) -> torch.Tensor:
        cache = None if folder is None else PackCache(folder, "a")
        experts = make(workers, layer, BF16, cache=cache)
        return run(experts, experts.bind(0, batch(4, BF16)))

    plain = load(layer, None)
    assert torch.equal(load(layer, tmp_path), plain)
    with monkeypatch.context() as patch:
        patch.setattr(NativeExperts, "_source", None)  # packing would call these
        patch.setattr(NativeExperts, "_bias", None)
        assert torch.equal(load(layer, tmp_path), plain)
    assert not caplog.text
    for name in ("gate", "up", "down"):
        other, b = changed_bias(layer, name), batch(4, BF16)
        b.ids[:4, 0] = E - 1
        caplog.clear()
        experts = make(workers, other, BF16, cache=PackCache(tmp_path, "a"))
        assert "packing again" in caplog.text
        assert error(run(experts, experts.bind(0, b)), expected(other, b, {})) < 0.02
    without = Layer("MXFP4", limit=7.0, alpha=1.702)
    assert torch.equal(load(without, tmp_path), load(without, None))


def test_biases_that_cannot_be_taken_are_refused_by_name(pool: Any) -> None:
    layer = Layer("MXFP4", **LIKE_GPT_OSS)
    with pytest.raises(ModelFileError, match=r"up_bias: value \[7, 511\] of \[8, 512\] is not finite"):
        make(pool, changed_bias(layer, "up", value=np.inf), BF16)
    with pytest.raises(ExpertBackendError, match=r"down_bias is \(4, 512\); the model's down has biases \(8, 256\)"):
        make(pool, changed_bias(layer, "down", shape=(4, 512)), BF16)
