"""The attention half of every layer as one native call: norms, projections, rotation, attention, routing."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from engine.attention.base import BatchLayout
from engine.attention.native import NativeAttention
from engine.errors import EngineError, UserError
from engine.experts.base import ExpertBuffers
from engine.linear.base import LoraBatch
from engine.linear.native import NativeLinear
from engine.model.native_ops import NativeOps
from engine.model.qwen3_moe import Layer, Observer, Qwen3Moe, SparseMlp, Trace
from engine.model_config import ModelConfig


def all_native(layers: Sequence[Layer], ops: object) -> bool:
    """Whether NativeDecoder can run these layers: one native attention, native projections and routers throughout."""

    def native(layer: Layer) -> bool:
        linears = [layer.q, layer.k, layer.v, layer.o]
        if isinstance(layer.mlp, SparseMlp):
            linears.append(layer.mlp.router)
        same = isinstance(layer.attention, NativeAttention) and layer.attention is layers[0].attention
        return same and all(isinstance(linear, NativeLinear) for linear in linears)

    return isinstance(ops, NativeOps) and bool(layers) and all(native(layer) for layer in layers)


class NativeDecoder:
    """`attend` equals the calls of `Qwen3Moe.run_layer` up to the experts, bit for bit, in one native call.

    A sparse layer's hidden states, expert ids and weights are written straight into the experts' buffers.
    Raises UserError if the layers are not all native (`all_native`).
    """

    def __init__(
        self, config: ModelConfig, ops: NativeOps, layers: Sequence[Layer], buffers: ExpertBuffers, dtype: torch.dtype
    ) -> None:
        if not all_native(layers, ops):
            raise UserError("the native decoder needs native attention, projections, routers and operations")
        attention, first = layers[0].attention, layers[0].q
        if not isinstance(attention, NativeAttention) or not isinstance(first, NativeLinear):
            raise UserError("the native decoder needs native attention and projections")
        if attention.dtype != dtype:
            raise UserError(f"the native decoder computes in {dtype}, its attention in {attention.dtype}")
        weight_dtype = layers[0].input_norm.dtype
        self._layers = list(layers)  # keeps the weights' memory alive
        self._buffers = buffers
        self._dtype = dtype
        self._rope = ops.rope
        self._hidden_size = config.hidden_size
        self._kernel: Any = importlib.import_module("native._native").Decoder(
            ops.kernel,
            first.runner,
            attention.kernel,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            config.rms_norm_eps,
            dtype == torch.bfloat16,
            weight_dtype == torch.bfloat16,
        )
        for index, layer in enumerate(layers):
            norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
            if any(t.dtype != weight_dtype or not t.is_contiguous() for t in norms):
                raise UserError(f"layer {index}: norm weights must be contiguous and all {weight_dtype}")
            router = layer.mlp.router if isinstance(layer.mlp, SparseMlp) else None
            linears = [layer.q, layer.k, layer.v, layer.o, router]
            packed = [linear.packed if isinstance(linear, NativeLinear) else None for linear in linears]
            try:
                self._kernel.add_layer(*(t.data_ptr() for t in norms), *packed)
            except ValueError as error:
                raise UserError(f"layer {index}: {error}") from error

    def attend(
        self,
        index: int,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        batch: BatchLayout,
        lora: LoraBatch | None,
    ) -> torch.Tensor:
        """Adds `delta` and the attention's part to residual [T, H] in place; returns the normalised [T, H] that the
        MLP reads: the buffers' `hidden` for a sparse layer, whose ids and weights are then filled too."""
        tokens, size = residual.shape
        rope, buffers = self._rope, self._buffers
        sparse = isinstance(self._layers[index].mlp, SparseMlp)
        if size != self._hidden_size or residual.dtype is not self._dtype or not residual.is_contiguous():
            raise EngineError(f"residual: {residual.dtype} {tuple(residual.shape)}; wanted {self._dtype} [T, {size}]")
        if delta is not None and (delta.shape != residual.shape or delta.dtype is not self._dtype):
            raise EngineError(f"delta: {delta.dtype} {tuple(delta.shape)}; wanted residual's {tuple(residual.shape)}")
        if sparse and tokens > buffers.max_rows:
            raise EngineError(f"{tokens} tokens; the experts' buffers hold {buffers.max_rows}")
        positions = batch.positions
        if positions.shape != (tokens,) or positions.dtype is not torch.int64 or not positions.is_contiguous():
            raise EngineError(f"positions: {positions.dtype} {tuple(positions.shape)}; wanted int64 [{tokens}]")
        hidden = buffers.hidden[:tokens] if sparse else torch.empty_like(residual)
        try:
            self._kernel.attend(
                index,
                tokens,
                residual.data_ptr(),
                0 if delta is None else delta.data_ptr(),
                0 if delta is None else delta.stride(0),
                rope.cos.data_ptr(),
                rope.sin.data_ptr(),
                rope.cos.shape[0],
                positions.data_ptr(),
                0 if lora is None or not lora.groups else lora.slots.data_ptr(),
                hidden.data_ptr(),
                buffers.ids.data_ptr(),
                buffers.weights.data_ptr(),
            )
        except ValueError as error:
            raise EngineError(f"layer {index}: {error}") from error
        return hidden


class NativeQwen3Moe(Qwen3Moe):
    """Two native calls a layer: the attention half, and the experts. What is observed goes the plain way, with the
    same bits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.ops, NativeOps) or len(self.expert_buffers) > 1:
            raise UserError("the native model needs native operations and one set of expert buffers")
        dtype = self.dtype
        buffers = self.expert_buffers or [ExpertBuffers.allocate(1, 1, self.config.hidden_size, dtype)]
        self._decoder = NativeDecoder(self.config, self.ops, self.layers, buffers[0], dtype)

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
