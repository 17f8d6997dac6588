"""A decode step as two half-batches in turn: one is on this device while the CPU pool works on the other's experts.

    this device    attention A0 | attention B0 | attention A1 | attention B1 | ...
    CPU pool                    | experts A0   | experts B0   | experts A1   | ...

Both halves read an expert that rows of both chose, so this is not always faster: engine/ping_pong.py decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import BatchLayout
from engine.errors import ExpertBackendError
from engine.experts.base import ExpertTask
from engine.linear.base import LoraBatch
from engine.model.layers import SparseMlp, Trace
from engine.model.qwen3_moe import Qwen3Moe


@dataclass(frozen=True)
class PartBatch:
    """The rows of a step, or half of them (`batch.part` says which). `bsz` int32 [1]: how many of the rows count."""

    ids: torch.Tensor
    batch: BatchLayout
    lora: LoraBatch | None
    bsz: torch.Tensor
    trace: Trace | None = None


@dataclass
class _Flow:
    """A half-batch between two layers. `delta`: still to be added; `waits_for`: experts that will write it."""

    residual: torch.Tensor
    delta: torch.Tensor | None = None
    waits_for: tuple[SparseMlp, ExpertTask] | None = None


def run_halves(model: Qwen3Moe, halves: Sequence[PartBatch]) -> list[torch.Tensor]:
    """The device's part of a planned step, given as two half-batches: the final hidden states [T, H] of each.

    Adapters with MLPs of their own are not served here.
    """
    flows = []
    for half in halves:
        model.begin(half.ids.shape[0], half.lora, half.bsz, half.batch.part)
        flows.append(_Flow(model.embedding(half.ids).to(model.dtype)))
    for index, layer in enumerate(model.layers):
        for half, flow in zip(halves, flows, strict=True):
            _collect(model, flow, half.trace)
            x = model.ops.add_rms_norm(flow.residual, flow.delta, layer.input_norm)
            delta = model.attend(index, layer, x, half.batch, half.lora)
            if isinstance(layer.mlp, SparseMlp):
                task = layer.mlp.second if half.batch.part else layer.mlp.task
                if task is None:
                    raise ExpertBackendError("half-batches need a second buffer set")
                model.post_experts(index, layer, layer.mlp, task, flow.residual, delta, half.lora)
                flow.waits_for = layer.mlp, task
            else:
                flow.delta = model.dense(layer, layer.mlp, flow.residual, delta, half.lora)
    for half, flow in zip(halves, flows, strict=True):
        _collect(model, flow, half.trace)
    return [model.ops.add_rms_norm(flow.residual, flow.delta, model.final_norm) for flow in flows]


def _collect(model: Qwen3Moe, flow: _Flow, trace: Trace | None) -> None:
    """Wait for the experts that a half-batch was posted to."""
    if flow.waits_for is not None:
        mlp, task = flow.waits_for
        flow.delta = model.wait_experts(mlp, task, flow.residual.shape[0], trace)
        flow.waits_for = None


def joined(hidden: Sequence[torch.Tensor], first_rows: torch.Tensor) -> torch.Tensor:
    """The first half's `first_rows` (int32 [1]) rows that count, the second half's behind them, padding last."""
    first, last = hidden
    out = torch.cat([first, last])
    places = first_rows.long() + torch.arange(last.shape[0], device=last.device)
    return out.index_copy_(0, places, last)
