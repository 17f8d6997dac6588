"""A layer of experts in any format, its adapters and batches, and what they give in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from engine.architectures.parts.mlp import Activation
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import TouchedExperts, needed
from engine.experts.native import NativeExperts
from engine.lora.adapter import ExpertLora
from engine.weights.store import ExpertStore, WeightTensor
from testing.models.shapes import config
from tests.native.blocks import QUANTISED, random_blocks, values_of

E, H, I, K = 8, 256, 512, 3  # noqa: E741
BF16, F32 = torch.bfloat16, torch.float32


def tensor(kind: str, name: str, n: int, k: int, seed: int, experts: int = E) -> tuple[WeightTensor, torch.Tensor]:
    """[experts, n, k] in a GGML type and its values, of magnitude about 1/sqrt(k)."""
    if kind in QUANTISED:
        data = np.concatenate([random_blocks(kind, n, k, seed + e) for e in range(experts)])
        values = torch.from_numpy(values_of(kind, data).reshape(experts, n, k))
    else:
        values = torch.randn(experts, n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5
        stored = values.to({"BF16": BF16, "F32": F32, "F16": torch.float16}[kind])
        values, data = stored.float(), stored.view(torch.uint8).numpy()
    return WeightTensor(name, (experts, n, k), kind, data.reshape(-1)), values


class Layer:
    """A store and the same weights and biases as float64. `limit`: of the clamped activation; None: SiLU."""

    def __init__(
        self,
        gate: str,
        up: str = "",
        down: str = "",
        hidden: int = H,
        inner: int = I,
        *,
        biased: bool = False,
        limit: float | None = None,
        alpha: float = 1.0,
    ) -> None:
        made = [
            tensor(gate, "gate", inner, hidden, 1),
            tensor(up or gate, "up", inner, hidden, 100),
            tensor(down or gate, "down", hidden, inner, 200),
        ]
        names = {"gate": inner, "up": inner, "down": hidden} if biased else {}
        biases = {name: tensor("F32", f"{name}_bias", width, 1, 300 + width) for name, width in names.items()}
        self.activation = Activation(limit, alpha)
        self.store = ExpertStore(
            0,
            *(weight for weight, _ in made),
            activation=self.activation,
            biases={name: dataclasses.replace(bias, shape=bias.shape[:2]) for name, (bias, _) in biases.items()},
        )
        self.biases = {name: values[..., 0].double() for name, (_, values) in biases.items()}
        self.gate, self.up, self.down = (values.double() for _, values in made)
        self.hidden, self.inner = hidden, inner

    def product(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Of float64 x with one expert's projection, and its bias."""
        y: torch.Tensor = getattr(self, name)[expert] @ x
        return y + self.biases[name][expert] if self.biases else y

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        limit, alpha = self.activation.limit, self.activation.alpha
        if limit is None:
            return torch.nn.functional.silu(gate) * up
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


def lora(rank: int, seed: int, dtype: torch.dtype = BF16, hidden: int = H, inner: int = I) -> ExpertLora:
    g = torch.Generator().manual_seed(seed)

    def t(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) / shape[-1] ** 0.5).to(dtype)

    return ExpertLora(
        t(E, rank, hidden), t(E, inner, rank), t(E, rank, hidden), t(E, inner, rank),
        t(E, rank, inner), t(E, hidden, rank),
        0.5, 1.5, 2.0,
    )  # fmt: skip


def batch(
    rows: int, dtype: torch.dtype, seed: int = 0, slots: list[int] | None = None, hidden: int = H
) -> ExpertBuffers:
    g = torch.Generator().manual_seed(seed)
    b = ExpertBuffers.allocate(rows + 2, K, hidden, dtype)  # two padding rows that must not be touched
    b.hidden[:] = torch.randn(rows + 2, hidden, generator=g).to(dtype)
    b.ids[:rows] = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(rows)]) if rows else b.ids[:0]
    b.ids[rows:] = 10**6
    b.weights[:] = torch.rand(rows + 2, K, generator=g)
    if slots:
        b.slots[:rows] = torch.tensor([slots[i % len(slots)] for i in range(rows)], dtype=torch.int32)
    b.bsz[0] = rows
    b.out[:] = 7
    return b


def distinct(b: ExpertBuffers) -> int:
    """Of the experts that the true rows have chosen."""
    ids = b.ids[: int(b.bsz)]
    return torch.unique(ids[ids >= 0]).numel()


def touched(backend: ExpertBackend) -> list[int]:
    """What it has counted since the last call, by layer."""
    counts = needed(backend, TouchedExperts).counts
    seen: list[int] = counts.tolist()
    counts.zero_()
    return seen


def put(there: ExpertBuffers, here: ExpertBuffers) -> None:
    """A batch into buffers that a graph reads, which have at least its rows. `out` becomes 7."""
    for name in ("bsz", "ids", "weights", "slots", "hidden"):
        to, values = getattr(there, name), getattr(here, name)
        to[: len(values)].copy_(values)
    there.ids[int(here.bsz) :] = 0
    there.out.fill_(7)


def expected(layer: Layer, b: ExpertBuffers, adapters: dict[int, ExpertLora]) -> torch.Tensor:
    """float64, row by row."""
    rows = int(b.bsz)
    out = torch.zeros(rows, layer.hidden, dtype=torch.float64)
    for r in range(rows):
        x = b.hidden[r].double()
        adapter = adapters.get(int(b.slots[r]))
        for e, w in zip(b.ids[r].tolist(), b.weights[r].tolist(), strict=True):
            if e < 0:
                continue
            gate, up = layer.product("gate", e, x), layer.product("up", e, x)
            if adapter is not None:
                gate += adapter.gate_scale * (adapter.gate_b[e].double() @ (adapter.gate_a[e].double() @ x))
                up += adapter.up_scale * (adapter.up_b[e].double() @ (adapter.up_a[e].double() @ x))
            h = layer.activate(gate, up)
            y = layer.product("down", e, h)
            if adapter is not None:
                y += adapter.down_scale * (adapter.down_b[e].double() @ (adapter.down_a[e].double() @ h))
            out[r] += w * y
    return out


def run(experts: NativeExperts, task: ExpertTask) -> torch.Tensor:
    experts.post(task)
    experts.wait(task)
    b = task.buffers
    rows = int(b.bsz)
    assert (b.out[rows:] == 7).all(), "padding rows were written"
    return b.out[:rows].clone()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().mean() / want.abs().mean())


def make(pool: object, layer: Layer, dtype: torch.dtype, isa: str = "", **settings: Any) -> NativeExperts:
    sizes = config(hidden_size=layer.hidden, moe_intermediate_size=layer.inner, num_experts=E, num_experts_per_tok=K)
    experts = NativeExperts(sizes, dtype, pool, isa=isa, **settings)
    experts.load_layer(0, layer.store)
    return experts
