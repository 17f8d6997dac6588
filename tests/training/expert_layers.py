"""Layers of experts in any packed format, steps over them, and how far two results are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from engine.experts.capabilities import PackedWeights
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.source import PackedSource
from engine.experts.streamed.layers import LayerStream
from native import _native
from tests.native.blocks import SCALES, size_of_block
from tests.native.expert_layers import tensor
from training.experts.base import ExpertLora, TrainableExperts
from training.experts.native import NativeTrainableExperts
from training.experts.reference import ReferenceExperts
from training.experts.streamed.experts import StreamedTrainableExperts, Streams

PROJECTIONS = ("gate", "up", "down")
Blocks = npt.NDArray[np.uint8]


class PackedLayer:
    """Random experts of GGML types, packed in the formats that hold those without loss, or as `format`."""

    def __init__(
        self, pool: Any, kinds: Sequence[str], experts: int, hidden: int, inner: int, format: str = ""
    ) -> None:
        """kinds: of gate, up, down."""
        self.experts, self.hidden, self.inner = experts, hidden, inner
        formats = [format or _native.format_of(kind) for kind in kinds]
        self.packed = _native.ExpertLayer(experts, hidden, inner, formats, pool.groups)
        self.pool = pool
        for p, (name, kind) in enumerate(zip(PROJECTIONS, kinds, strict=True)):
            weight, values = tensor(kind, name, *self._shape(p), 10 * p + 1, experts)
            rows = moderate(kind, weight.data, values).reshape(experts, -1)
            self.packed.load(pool, p, kind, 0, [rows[e].ctypes.data for e in range(experts)])

    def _shape(self, projection: int) -> tuple[int, int]:
        return (self.hidden, self.inner) if projection == 2 else (self.inner, self.hidden)

    def reference(self) -> ReferenceExperts:
        """Over the values that the packed weights stand for."""
        values = [torch.empty(self.experts, *self._shape(p)) for p in range(3)]
        for p in range(3):
            for e in range(self.experts):
                self.packed.dequantise(p, e, values[p][e].data_ptr())
        return ReferenceExperts(*values)

    def native(self, isa: str = "", keep: bool = True) -> NativeTrainableExperts:
        return NativeTrainableExperts(
            self.packed,
            _native.ExpertTrainer(self.pool, isa),
            num_experts=self.experts,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            keep=keep,
        )

    def streamed(
        self, device: str = "cpu", keep: bool = True, dtype: torch.dtype = torch.float32, threshold: int = 1
    ) -> StreamedTrainableExperts:
        """`dtype`: of hidden states, in which the weights are streamed."""
        place, sizes = torch.device(device), Sizes(self.experts, 1, self.hidden, self.inner)
        source = PackedSource(PackedWeights({0: self.packed}), sizes, place)
        source.add(0)
        stream = LayerStream(source, (0,), sizes, dtype, place, plain=True)
        streams = Streams(stream, (0,), sizes, dtype, place, threshold)
        return StreamedTrainableExperts(self.native(keep=keep), streams, 0, keep=keep)

    def lora(self, rank: int, scaling: float = 0.5) -> ExpertLora:
        """With a B that is not zero."""
        lora = ExpertLora(self.experts, rank, self.hidden, self.inner, scaling)
        for b in lora.matrices()[3:]:
            torch.nn.init.normal_(b, std=rank**-0.5)
        return lora


def moderate(kind: str, data: Blocks, values: torch.Tensor) -> Blocks:
    """Blocks whose values, [.., n, k], are of magnitude 1/sqrt(k), where silu neither vanishes nor is linear."""
    if kind not in SCALES:
        return data
    power = -round(math.log2(float(values.double().square().mean().sqrt()) * values.shape[-1] ** 0.5))
    blocks = data.reshape(-1, size_of_block(kind)[1]).copy()
    if kind == "MXFP4":
        blocks[:, 0] += np.uint8(power % 256)
    if kind == "F8_E4M3":
        blocks[:, :4] = np.ldexp(blocks[:, :4].copy().view(np.float32), power).view(np.uint8)
    for offset in SCALES[kind]:
        scales = np.ldexp(blocks[:, offset : offset + 2].copy().view(np.float16), power)
        blocks[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks


@dataclass
class Step:
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor
    grad_out: torch.Tensor

    @classmethod
    def draw(
        cls,
        rows: int,
        top_k: int,
        layer: PackedLayer | TrainableExperts,
        slots: list[int],
        dtype: torch.dtype,
        seed: int,
    ) -> Step:
        """One choice is skipped, and one in four rows has the same first expert."""
        g = torch.Generator().manual_seed(seed)
        if isinstance(layer, PackedLayer):
            experts, width = layer.experts, layer.hidden
        else:
            experts, width = layer.num_experts, layer.hidden_size
        ids = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(rows)])
        ids[::4, 0] = 0
        if rows > 1:
            ids[-1, -1] = -1
        return cls(
            torch.randn(rows, width, generator=g).to(dtype),
            ids,
            torch.rand(rows, top_k, generator=g) + 0.1,
            torch.tensor([slots[i % len(slots)] for i in range(rows)], dtype=torch.int32),
            torch.randn(rows, width, generator=g).to(dtype),
        )


def run(experts: TrainableExperts, step: Step, loras: dict[int, ExpertLora]) -> dict[str, torch.Tensor]:
    """The output and every gradient, by name."""
    device = experts.device(len(step.hidden))
    hidden, weights = (t.to(device, copy=True).requires_grad_() for t in (step.hidden, step.weights))
    for lora in loras.values():
        lora.zero_grad()
    out = experts.forward(hidden, step.ids.to(device), weights, step.slots, loras)
    out.backward(step.grad_out.to(device))
    assert hidden.grad is not None and weights.grad is not None
    found = {"out": out.detach().cpu(), "hidden": hidden.grad.cpu(), "weights": weights.grad.cpu()}
    for slot, lora in loras.items():
        for name, matrix in lora.named_parameters():
            found[f"{slot} {name}"] = torch.zeros_like(matrix) if matrix.grad is None else matrix.grad.clone()
            found[f"{slot} {name}"] = found[f"{slot} {name}"].cpu()
    return found


def errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], step: Step) -> dict[str, float]:
    """mean|d| / mean|ref| of each. A router's weight has the gradient <grad_out, y>, which may happen to be near zero
    where there are only a few: what such a product of random vectors comes to is the least that counts."""
    size_of_y = want["out"].float().norm(dim=1) / step.weights.norm(dim=1)
    least = float((step.grad_out.float().norm(dim=1) * size_of_y).mean()) / step.hidden.shape[1] ** 0.5
    result = {}
    for name, ref in want.items():
        size = float(ref.double().abs().mean())
        if name == "weights":
            size = max(size, least)
        difference = float((got[name].double() - ref.double()).abs().mean())
        result[name] = difference / size if size else difference
    return result


BATCHES: dict[str, Any] = {  # drawn, for hypothesis' `given`
    "rows": st.one_of(st.integers(1, 40), st.just(300)),
    "top_k": st.integers(1, 8),
    "ranks": st.lists(st.integers(1, 64), max_size=3),
    "keep": st.booleans(),
    "seed": st.integers(0, 999),
}


def assert_within(found: dict[str, float], forward: float, gradients: float) -> None:
    assert all(e <= (forward if name == "out" else gradients) for name, e in found.items()), found
