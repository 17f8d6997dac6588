"""The gpu backend against the reference: one task for any rows, adapters that come and go, typed refusals."""

from __future__ import annotations

import pytest
import torch

from engine.errors import AdapterError, EngineError, ExpertBackendError, UserError
from engine.experts.base import ExpertBackend, ExpertBuffers
from engine.experts.gpu.backend import GpuExperts
from engine.experts.reference import ReferenceExperts
from testing.models.shapes import config
from tests.native.expert_layers import BF16, F32, E, H, I, K, Layer, batch, distinct, lora, touched

SIZES = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)
DTYPE = BF16 if torch.cuda.is_available() else F32  # the interpreter has no bf16
BOUND = 0.01 if DTYPE == BF16 else 2e-6


def make(device: torch.device, layers: list[Layer]) -> tuple[GpuExperts, ReferenceExperts]:
    gpu = GpuExperts(SIZES, DTYPE, device, max_rows=20, max_slots=4, max_rank=32)
    reference = ReferenceExperts(F32, torch.device("cpu"))
    for index, layer in enumerate(layers):
        gpu.load_layer(index, layer.store)
        reference.load_layer(index, layer.store)
    return gpu, reference


def fill(to: ExpertBuffers, b: ExpertBuffers) -> None:
    for name in ("bsz", "ids", "weights", "slots", "hidden"):
        getattr(to, name)[: len(getattr(b, name))].copy_(getattr(b, name))


def compare(
    gpu: ExpertBackend, reference: ReferenceExperts, layer: int, there: ExpertBuffers, b: ExpertBuffers
) -> float:
    rows = int(b.bsz)
    fill(there, b)
    task = gpu.bind(layer, there)
    gpu.begin_step(rows, lora=bool(b.slots[:rows].any()), eager=True)
    gpu.post(task)
    gpu.wait(task)
    gpu.check()
    reference.post(reference.bind(layer, b))
    assert touched(gpu)[layer] == touched(reference)[layer] == distinct(b)
    want = b.out[:rows].float()
    return float((there.out[:rows].cpu().float() - want).abs().mean() / want.abs().mean())


@pytest.mark.gpu
def test_equals_the_reference_while_adapters_come_and_go(kernel_device: torch.device) -> None:
    gpu, reference = make(kernel_device, [Layer("BF16"), Layer("Q8_0")])
    there = ExpertBuffers.allocate(14, K, H, DTYPE, device=kernel_device)
    steps = [{}, {1: {0: lora(4, 1), 1: lora(20, 2)}}, {2: {1: lora(16, 3)}}, {1: None}]
    for changes in steps:
        for slot, layers in changes.items():
            gpu.set_adapter(slot, layers)
            reference.set_adapter(slot, layers)
        for layer in (0, 1):
            b = batch(12, DTYPE, slots=[0, 1, 2])
            assert compare(gpu, reference, layer, there, b) < BOUND


@pytest.mark.gpu
def test_misuse_is_refused(kernel_device: torch.device) -> None:
    gpu, _ = make(kernel_device, [Layer("BF16")])
    with pytest.raises(ExpertBackendError, match="layer 4"):
        gpu.bind(4, batch(1, DTYPE))
    with pytest.raises(ExpertBackendError, match="float16"):
        gpu.bind(0, ExpertBuffers.allocate(1, K, H, torch.float16, device=kernel_device))
    with pytest.raises(ExpertBackendError, match="slot 5"):
        gpu.set_adapter(5, {})
    with pytest.raises(AdapterError, match="rank 40"):
        gpu.set_adapter(1, {0: lora(40, 1)})
    with pytest.raises(ExpertBackendError, match="gate_a"):
        gpu.set_adapter(1, {0: lora(4, 1, hidden=128)})
    with pytest.raises(EngineError, match="float16"):
        GpuExperts(SIZES, torch.float16, kernel_device, max_rows=2, max_slots=1, max_rank=8)
    with pytest.raises(UserError, match="hidden_size 48"):
        GpuExperts(config(hidden_size=48), DTYPE, kernel_device, max_rows=2, max_slots=1, max_rank=8)
