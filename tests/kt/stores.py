"""Random experts as stores of any GGML type, and what they compute in plain float32."""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np
import torch
import torch.nn.functional as F

from engine.architectures.config import ModelConfig
from engine.experts.base import ExpertBuffers
from engine.weights.store import ExpertStore, WeightTensor
from testing.models.shapes import config as any_config


class Blocks(NamedTuple):
    """How to make random blocks of a K-quant whose weights have mean 0: where float16 d lies and how large it is for
    weights near 1, where dmin lies and its ratio to d, and the bytes that hold the sub-blocks' scales and minima."""

    d: int
    size: float
    dmin: int = -1
    ratio: float = 0.0
    scales: tuple[int, bytes] = (0, b"")


K_QUANTS = {
    "Q2_K": Blocks(80, 0.1, 82, 1.5, (0, b"\x88" * 16)),  # every scale 8, every minimum 8, quants 0 to 3
    "Q3_K": Blocks(108, 0.01),
    "Q4_K": Blocks(0, 0.006, 2, 7.5, (4, b"\xa0" * 8 + b"\0" * 4)),  # every scale and minimum 32, quants 0 to 15
    "Q5_K": Blocks(0, 0.003, 2, 15.5, (4, b"\xa0" * 8 + b"\0" * 4)),
    "Q6_K": Blocks(208, 0.001),
}


def config(hidden: int, inter: int, experts: int = 8, top_k: int = 2) -> ModelConfig:
    return any_config(
        num_hidden_layers=32,
        hidden_size=hidden,
        moe_intermediate_size=inter,
        num_experts=experts,
        num_experts_per_tok=top_k,
    )


def encode(values: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """float32 -> the bytes of a type; for K-quants random blocks instead, since gguf only decodes those."""
    if kind == "BF16":
        return torch.from_numpy(values).bfloat16().view(torch.uint8).numpy().reshape(-1)
    if kind in K_QUANTS:
        form = K_QUANTS[kind]
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        blocks = rng.integers(0, 256, (values.size // block, size), dtype=np.uint8)
        d = (rng.uniform(0.5, 1.5, len(blocks)) * form.size / values.shape[-1] ** 0.5).astype(np.float16)
        blocks[:, form.d : form.d + 2] = d.view(np.uint8).reshape(-1, 2)
        if form.dmin >= 0:
            dmin = (d.astype(np.float32) * form.ratio).astype(np.float16)
            blocks[:, form.dmin : form.dmin + 2] = dmin.view(np.uint8).reshape(-1, 2)
            at, constant = form.scales
            blocks[:, at : at + len(constant)] = np.frombuffer(constant, np.uint8)
        return blocks.reshape(-1)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).reshape(-1).view(np.uint8)


def make_store(c: ModelConfig, kinds: tuple[str, str, str], layer: int = 0, seed: int = 0, split: bool = False):  # type: ignore[no-untyped-def]
    """An ExpertStore with gate, up, down of these types; `split` holds every expert apart."""
    rng = np.random.default_rng(seed + 100 * layer)
    e, i, h = c.num_experts, c.moe_intermediate_size, c.hidden_size
    held = []
    for name, shape, kind in zip(("gate", "up", "down"), ((e, i, h), (e, i, h), (e, h, i)), kinds, strict=True):
        values = (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        whole = WeightTensor(f"blk.{layer}.ffn_{name}_exps.weight", shape, kind, encode(values, kind, rng))
        held.append([whole[n] for n in range(e)] if split else whole)
    return ExpertStore(layer, *held)


def fill(b: ExpertBuffers, c: ModelConfig, rows: int, seed: int, skip: float = 0.0) -> None:
    """Random inputs for `rows` rows, distinct experts in a row, some choices left out (-1)."""
    g = torch.Generator().manual_seed(seed)
    b.bsz[0] = rows
    b.hidden.copy_(torch.randn(b.hidden.shape, generator=g))
    b.ids.copy_(torch.rand(b.max_rows, c.num_experts, generator=g).argsort(dim=1)[:, : c.num_experts_per_tok])
    b.ids[torch.rand(b.ids.shape, generator=g) < skip] = -1
    b.weights.copy_(torch.rand(b.weights.shape, generator=g) + 0.1)
    b.out.fill_(7.0)


def expected(store: ExpertStore, b: ExpertBuffers, rows: int) -> torch.Tensor:
    """float32 [rows, H], row by row and choice by choice."""
    gate, up, down = (store.stacked(p, torch.float32) for p in ("gate", "up", "down"))
    x = b.hidden[:rows].float()
    out = torch.zeros(x.shape)
    for row in range(rows):
        for weight, e in zip(b.weights[row], b.ids[row].tolist(), strict=True):
            if e >= 0:
                out[row] += weight * (down[e] @ (F.silu(gate[e] @ x[row]) * (up[e] @ x[row])))
    return out


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """mean |difference| / mean |reference|; plain mean where the reference is zero."""
    scale = want.abs().mean()
    return float((got.float() - want).abs().mean() / (scale if scale > 0 else 1.0))
