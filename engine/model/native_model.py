"""The model where attention, projections and row operations are all native: few calls a step."""

from __future__ import annotations

import time
from typing import Any

import torch

from engine.attention.base import BatchLayout
from engine.errors import EngineError, UserError
from engine.experts.base import ExpertBuffers
from engine.linear.base import LoraBatch
from engine.model.layers import Layer, Observer, SparseMlp, Trace
from engine.model.native_decoder import NativeDecoder
from engine.model.native_ops import NativeOps
from engine.model.qwen3_moe import Qwen3Moe


class NativeQwen3Moe(Qwen3Moe):
    """A step is three native calls: the attention's plan, the embedding, all layers. Where experts, dense MLPs or the
    head are not native, or an adapter brings MLPs of its own, a layer is two calls (the attention half, the experts).
    What is observed goes the plain way. The bits are the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.ops, NativeOps) or len(self.expert_buffers) > 1:
            raise UserError("the native model needs native operations and one set of expert buffers")
        dtype = self.dtype
        buffers = self.expert_buffers or [ExpertBuffers.allocate(1, 1, self.config.hidden_size, dtype)]
        self._decoder = NativeDecoder(self.config, self.ops, self.layers, buffers[0], dtype)
        self._one_call = self._decoder.complete(self.final_norm, self.lm_head)

    def runs_in_one_call(self, lora: LoraBatch | None) -> bool:
        """Whether a step with these adapters needs nothing between its layers."""
        extra = self.slots_with_extra_mlps
        return self._one_call and (lora is None or not extra or not any(slot in extra for slot, _ in lora.groups))

    def run(
        self,
        ids: torch.Tensor,
        batch: BatchLayout,
        lora: LoraBatch | None,
        bsz: torch.Tensor | None = None,
        trace: Trace | None = None,
        observe: Observer | None = None,
    ) -> torch.Tensor:
        if bsz is not None or observe is not None or not self.runs_in_one_call(lora):
            return super().run(ids, batch, lora, bsz, trace, observe)
        return self._decoder.run(self.embedding(ids).to(self.dtype), batch, lora, None, False, trace)[0]

    def greedy_rows(
        self,
        ids: torch.Tensor,
        batch: BatchLayout,
        lora: LoraBatch | None,
        keep: torch.Tensor | None,
        trace: Trace | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.runs_in_one_call(lora):
            return super().greedy_rows(ids, batch, lora, keep, trace)
        self.plan(batch)
        hidden, chosen = self._decoder.run(self.embedding(ids).to(self.dtype), batch, lora, keep, True, trace)
        if chosen is None:
            raise EngineError("likeliest tokens were asked for")
        return hidden, chosen

    def run_layer(
        self,
        index: int,
        layer: Layer,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        batch: BatchLayout,
        lora: LoraBatch | None,
        trace: Trace | None = None,
        observe: Observer | None = None,
    ) -> torch.Tensor:
        if observe is not None:
            return super().run_layer(index, layer, residual, delta, batch, lora, trace, observe)
        return self._mlp(layer, self._decoder.attend(index, residual, delta, batch, lora), lora, trace)

    def forward_rows(
        self,
        ids: torch.Tensor,
        batch: BatchLayout,
        lora: LoraBatch | None,
        keep: torch.Tensor,
        trace: Trace | None = None,
    ) -> torch.Tensor:
        """Behind the last attention nobody reads the other rows: the last MLP runs on `keep` alone."""
        self.plan(batch)
        if self.runs_in_one_call(lora):
            return self._decoder.run(self.embedding(ids).to(self.dtype), batch, lora, keep, False, trace)[0]
        self.begin(ids.shape[0], lora)
        residual = self.embedding(ids).to(self.dtype)
        delta: torch.Tensor | None = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers[:last]):
            delta = self.run_layer(index, layer, residual, delta, batch, lora, trace)
        layer = self.layers[last]
        x, residual = self._decoder.attend(last, residual, delta, batch, lora)[keep], residual[keep]
        kept = None if lora is None else lora.rows(keep)
        if isinstance(layer.mlp, SparseMlp):
            b, n = layer.mlp.task.buffers, keep.shape[0]
            b.hidden[:n], b.ids[:n], b.weights[:n] = x, b.ids[keep], b.weights[keep]
            self.begin(n, kept)
        return self.ops.add_rms_norm(residual, self._mlp(layer, x, kept, trace), self.final_norm)

    def _mlp(self, layer: Layer, x: torch.Tensor, lora: LoraBatch | None, trace: Trace | None) -> torch.Tensor:
        """What the MLP adds. For a sparse one, hidden states, ids and weights are in the experts' buffers already."""
        mlp = layer.mlp
        if not isinstance(mlp, SparseMlp):
            return mlp.down(self.ops.silu_mul(mlp.gate(x, lora), mlp.up(x, lora)), lora)
        n, buffers = x.shape[0], mlp.task.buffers
        started = time.perf_counter()
        mlp.backend.post(mlp.task)
        extra = self._extra(mlp, x, lora)
        mlp.backend.wait(mlp.task)
        if trace is not None:
            trace.experts_s += time.perf_counter() - started
            trace.ids.append(buffers.ids[:n].clone())
        out = buffers.out[:n]
        return out if extra is None else out + extra
