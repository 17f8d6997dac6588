"""Chunks streamed through the GPU give what the CPU gives, adapters included; the threshold lies at the crossing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.experts.base import ExpertBuffers
from engine.experts.bridge.backend import CudaBridge
from engine.experts.hybrid.backend import HybridExperts
from engine.experts.native import NativeExperts
from engine.experts.streamed.backend import NEVER, StreamedExperts
from engine.experts.streamed.threshold import threshold
from native import _native
from testing.bridge import HostBridge
from testing.models.shapes import config
from tests.gpu.test_experts_gpu import fill
from tests.native.expert_layers import BF16, F32, E, H, I, K, Layer, batch, distinct, error, expected, lora, touched

LAYERS = 3
CONFIG = config(
    hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, num_hidden_layers=LAYERS
)  # fmt: skip
DTYPE = BF16 if torch.cuda.is_available() else F32  # the interpreter has no bf16
BOUND = 0.012 if DTYPE == BF16 else 2e-6
PLAIN = ("BF16" if DTYPE == BF16 else "F32",)
CODED = ("IQ4_XS", "MXFP4", "F8_E4M3")


def make(device: torch.device, layers: list[Layer], hybrid: bool, limit: int | None) -> StreamedExperts:
    pool: Any = _native.WorkerPool([[0, 1]])
    sizes: dict[str, int] = {"max_rows": 40, "max_slots": 4, "max_rank": 32}
    bridge_of = CudaBridge if device.type == "cuda" else HostBridge
    inner: Any = bridge_of(NativeExperts(CONFIG, DTYPE, pool), CONFIG, device)
    if hybrid:
        budget = 7 * 3 * H * I * DTYPE.itemsize
        inner = HybridExperts(inner, CONFIG, DTYPE, device, budget_bytes=budget, **sizes)
    made = StreamedExperts(inner, CONFIG, DTYPE, device, threshold=limit, **sizes)
    for index, layer in enumerate(layers):
        made.load_layer(index, layer.store)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("hybrid,kinds", [(False, PLAIN), (True, PLAIN), (False, CODED)])
def test_equals_the_cpu(kernel_device: torch.device, hybrid: bool, kinds: tuple[str, ...]) -> None:
    layers = [Layer(*kinds) for _ in range(LAYERS)]
    bound = BOUND if kinds == PLAIN else 0.025  # the CPU's rows in int8
    streamed = make(kernel_device, layers, hybrid, 6)
    there = ExpertBuffers.allocate(32, K, H, DTYPE, device=kernel_device)
    tasks = [streamed.bind(layer, there) for layer in range(LAYERS)]
    adapters = {1: lora(4, 1, DTYPE), 3: lora(20, 2, DTYPE)}
    for step, (rows, slots) in enumerate([(30, None), (3, None), (30, [0, 1, 3]), (30, [1]), (4, [3]), (30, [3])]):
        if step == 2:
            for slot, adapter in adapters.items():
                streamed.set_adapter(slot, dict.fromkeys(range(LAYERS), adapter))
        if step == 5:
            adapters[3] = lora(9, 7, DTYPE)
            streamed.set_adapter(3, dict.fromkeys(range(LAYERS), adapters[3]))
        b = batch(30, DTYPE, seed=step, slots=slots)
        b.bsz[0] = rows
        fill(there, b)
        streamed.begin_step(rows, lora=slots is not None, eager=True)
        streamed.prefetch()
        outs = []
        for task in tasks:
            streamed.post(task)
            streamed.wait(task)
            outs.append(there.out[:rows].clone())
        if kernel_device.type == "cuda":
            torch.cuda.synchronize()
        streamed.check()
        assert touched(streamed) == [distinct(b)] * LAYERS
        for number, (layer, out) in enumerate(zip(layers, outs, strict=True)):
            found = error(out.cpu(), expected(layer, b, adapters))
            assert found < bound, (step, number)
    streamed.close()


@pytest.mark.gpu
def test_measures_a_threshold(kernel_device: torch.device) -> None:
    streamed = make(kernel_device, [Layer("BF16" if DTYPE == BF16 else "F32")] * LAYERS, False, None)
    streamed.bind(0, ExpertBuffers.allocate(8, K, H, DTYPE, device=kernel_device))
    streamed.begin_step(0, lora=False, eager=False)
    wanted = threshold(streamed.measured["cpu_s"], streamed.measured["streamed_s"])
    assert streamed.threshold == (NEVER if wanted is None else wanted)
    streamed.close()
    with pytest.raises(EngineError, match="prefill_threshold 0"):
        make(kernel_device, [], False, 0)


def test_threshold_by_hand() -> None:
    assert threshold({64: 1.0, 128: 3.0}, 2.0) == 96
    assert threshold({64: 3.0, 128: 4.0}, 2.0) == 64
    assert threshold({64: 1.0, 128: 1.5}, 2.0) == 192  # beyond what was measured
    assert threshold({64: 1.0, 128: 1.0}, 2.0) is None
    assert threshold({64: 1.0}, 2.0) is None
    assert threshold({}, 2.0) is None


@given(fixed=st.integers(0, 100), each=st.integers(1, 20), streamed=st.integers(1, 4000))
def test_threshold_of_a_line(fixed: int, each: int, streamed: int) -> None:
    rows = threshold({n: float(fixed + each * n) for n in (16, 64, 256)}, float(streamed))
    assert rows is not None
    if rows > 16:
        assert fixed + each * rows >= streamed > fixed + each * (rows - 1)
