"""Experts on both sides give what the CPU alone gives, while experts move and adapters come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import UserError
from engine.experts.base import ExpertBuffers
from engine.experts.bridge.backend import CudaBridge
from engine.experts.gpu import products
from engine.experts.hybrid.backend import HybridExperts
from engine.experts.native import NativeExperts
from native import _native
from testing.bridge import HostBridge
from testing.models.shapes import config
from tests.gpu.test_experts_gpu import fill
from tests.native.expert_layers import BF16, F32, E, H, I, K, Layer, batch, distinct, error, expected, lora, touched

pytestmark = pytest.mark.gpu
CONFIG = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)
DTYPE = BF16 if torch.cuda.is_available() else F32  # the interpreter has no bf16
BOUND = 0.012 if DTYPE == BF16 else 2e-6
PLAIN = ("BF16" if DTYPE == BF16 else "F32",)
CODED = ("IQ4_XS", "MXFP4", "F8_E4M3")
EXPERT_VALUES = 3 * H * I * DTYPE.itemsize


def make(device: torch.device, layers: list[Layer], expert_slots: int) -> HybridExperts:
    pool: Any = _native.WorkerPool([[0, 1]])
    bridge_of = CudaBridge if device.type == "cuda" else HostBridge
    bridge = bridge_of(NativeExperts(CONFIG, DTYPE, pool), CONFIG, device)
    made = HybridExperts(
        bridge, CONFIG, DTYPE, device, budget_bytes=expert_slots * EXPERT_VALUES + 5,
        max_rows=24, max_slots=4, max_rank=32,
    )  # fmt: skip
    for index, layer in enumerate(layers):
        made.load_layer(index, layer.store)
    return made


@pytest.mark.parametrize("alone", [0.0, 99.0], ids=["together", "choice by choice"])
@pytest.mark.parametrize("expert_slots,kinds", [(1, PLAIN), (6, PLAIN), (40, PLAIN), (6, CODED)])
def test_equals_the_cpu(
    kernel_device: torch.device,
    expert_slots: int,
    kinds: tuple[str, ...],
    alone: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CUDA_CHOICE_ROWS", "PLAIN_CHOICE_ROWS"):
        monkeypatch.setattr(products, name, alone)
    layers = [Layer(*kinds), Layer(*kinds)]
    bound = BOUND if kinds == PLAIN else 0.025  # the CPU's rows in int8
    hybrid = make(kernel_device, layers, expert_slots)
    there = ExpertBuffers.allocate(14, K, H, DTYPE, device=kernel_device)
    tasks = [hybrid.bind(layer, there) for layer in (0, 1)]
    adapters = {1: lora(4, 1, DTYPE), 2: lora(20, 2, DTYPE)}
    outs = [torch.zeros_like(there.out) for _ in tasks]

    def forward() -> None:
        for task, out in zip(tasks, outs, strict=True):
            hybrid.post(task)
            hybrid.wait(task)
            out.copy_(there.out)

    hybrid.begin_step(0, lora=True, eager=False)
    replay = forward
    if kernel_device.type == "cuda":
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        replay = graph.replay
    touched(hybrid)
    steps = 40 if kernel_device.type == "cuda" else 14
    for step in range(steps):
        if step == 4:
            for slot, adapter in adapters.items():
                hybrid.set_adapter(slot, dict.fromkeys((0, 1), adapter))
        b = batch(9, DTYPE, seed=step, slots=[0, 1, 2] if step >= 4 else None)
        there.slots.zero_()
        fill(there, b)
        hybrid.begin_step(9, lora=True, eager=False)
        replay()
        if kernel_device.type == "cuda":
            torch.cuda.synchronize()
        hybrid.check()
        assert touched(hybrid) == [distinct(b)] * 2, "each once, wherever it is computed"
        for layer, out in zip(layers, outs, strict=True):
            assert error(out[:9].cpu(), expected(layer, b, adapters)) < bound
    assert hybrid.mover.resident == min(expert_slots, 2 * E) or hybrid.mover.memory.lora_expert_slots > 0
    assert int(hybrid.mover.policy.average.gt(1e-3).sum()) > E
    hybrid.close()


def test_a_budget_for_no_expert_is_refused(kernel_device: torch.device) -> None:
    with pytest.raises(UserError, match="gpu-expert-memory"):
        make(kernel_device, [], 0)
