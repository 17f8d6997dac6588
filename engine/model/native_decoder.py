"""A step of the decoder as one native call, or, where a layer's experts are not native, one for each attention half."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from engine.attention.base import BatchLayout
from engine.attention.native import NativeAttention
from engine.errors import EngineError, ExpertBackendError, UserError
from engine.experts.base import ExpertBuffers
from engine.experts.native import NativeExperts
from engine.linear.base import Linear, LoraBatch
from engine.linear.native import NativeLinear
from engine.model.layers import Layer, SparseMlp, Trace
from engine.model.native_ops import NativeOps
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

    A sparse layer's hidden states, expert ids and weights are written straight into the experts' buffers. `run` does
    all layers, once `complete` has found their MLPs and the head to be native too.
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
        self._native: Any = importlib.import_module("native._native")
        self._kernel: Any = self._native.Decoder(
            ops.kernel,
            first.runner,
            attention.kernel,
            self._native.Rotation(self._rope.cos.data_ptr(), self._rope.sin.data_ptr(), self._rope.cos.shape[0]),
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
        self._weight_dtype = weight_dtype
        self._completed = False
        self._sparse = sum(isinstance(layer.mlp, SparseMlp) for layer in layers)
        self._top_k = config.num_experts_per_tok
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
        tokens, buffers = residual.shape[0], self._buffers
        sparse = isinstance(self._layers[index].mlp, SparseMlp)
        if delta is not None and (delta.shape != residual.shape or delta.dtype is not self._dtype):
            raise EngineError(f"delta: {delta.dtype} {tuple(delta.shape)}; wanted residual's {tuple(residual.shape)}")
        if sparse and tokens > buffers.max_rows:
            raise EngineError(f"{tokens} tokens; the experts' buffers hold {buffers.max_rows}")
        self._check(residual, batch)
        hidden = buffers.hidden[:tokens] if sparse else torch.empty_like(residual)
        try:
            self._kernel.attend(
                index,
                tokens,
                residual.data_ptr(),
                0 if delta is None else delta.data_ptr(),
                0 if delta is None else delta.stride(0),
                batch.positions.data_ptr(),
                _slots(lora, tokens),
                hidden.data_ptr(),
                buffers.ids.data_ptr(),
                buffers.weights.data_ptr(),
            )
        except ValueError as error:
            raise EngineError(f"layer {index}: {error}") from error
        return hidden

    def complete(self, final_norm: torch.Tensor, lm_head: Linear) -> bool:
        """Whether `run` can be called: every layer's MLP or experts and the head are native."""
        if not isinstance(lm_head, NativeLinear) or final_norm.dtype != self._weight_dtype:
            return False
        for index, layer in enumerate(self._layers):
            mlp = layer.mlp
            if isinstance(mlp, SparseMlp):
                if not isinstance(mlp.backend, NativeExperts) or mlp.task.buffers is not self._buffers:
                    return False
                self._kernel.set_experts(index, mlp.backend.native_task(mlp.task))
                continue
            linears = [linear.packed for linear in (mlp.gate, mlp.up, mlp.down) if isinstance(linear, NativeLinear)]
            if len(linears) < 3:
                return False
            self._kernel.set_dense(index, *linears)
        b = self._buffers
        tensors = (b.bsz, b.ids, b.weights, b.slots, b.hidden, b.out)
        self._held = (final_norm, lm_head)  # keeps their memory alive
        self._kernel.set_head(
            final_norm.data_ptr(), lm_head.packed, *(t.data_ptr() for t in tensors), b.max_rows if self._sparse else 0
        )
        self._completed = True
        return True

    def run(
        self,
        residual: torch.Tensor,
        batch: BatchLayout,
        lora: LoraBatch | None,
        keep: torch.Tensor | None,
        likeliest: bool,
        trace: Trace | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All layers over the embeddings `residual` [T, H], which are overwritten: the hidden states behind the final
        norm of the rows `keep` (int64 [K], rising; None for all), and with `likeliest` their likeliest tokens [K]."""
        if not self._completed:
            raise EngineError("the native decoder runs a step only if every part is native")
        tokens = residual.shape[0]
        self._check(residual, batch)
        if keep is not None and (keep.dim() != 1 or keep.dtype is not torch.int64 or not keep.is_contiguous()):
            raise EngineError(f"keep: {keep.dtype} {tuple(keep.shape)}; wanted contiguous int64 [K]")
        kept = tokens if keep is None else keep.shape[0]
        hidden = torch.empty((kept, self._hidden_size), dtype=self._dtype)
        chosen = torch.empty(kept, dtype=torch.int64) if likeliest else None
        sizes = [tokens] * self._sparse
        if sizes and isinstance(self._layers[-1].mlp, SparseMlp):
            sizes[-1] = kept
        seen = None if trace is None else torch.empty((sum(sizes), self._top_k), dtype=torch.int64)
        try:
            experts_s = self._kernel.run(
                tokens,
                residual.data_ptr(),
                batch.positions.data_ptr(),
                _slots(lora, tokens),
                0 if keep is None else keep.data_ptr(),
                kept,
                hidden.data_ptr(),
                0 if chosen is None else chosen.data_ptr(),
                0 if seen is None else seen.data_ptr(),
            )
        except self._native.ExpertsFailed as error:
            raise ExpertBackendError(str(error)) from error
        except ValueError as error:
            raise EngineError(f"native decoder: {error}") from error
        if trace is not None and seen is not None:
            trace.experts_s += experts_s
            trace.ids += torch.split(seen, sizes)
        return hidden, chosen

    def _check(self, residual: torch.Tensor, batch: BatchLayout) -> None:
        tokens, size = residual.shape
        if size != self._hidden_size or residual.dtype is not self._dtype or not residual.is_contiguous():
            raise EngineError(f"residual: {residual.dtype} {tuple(residual.shape)}; wanted {self._dtype} [T, {size}]")
        positions = batch.positions
        if positions.shape != (tokens,) or positions.dtype is not torch.int64 or not positions.is_contiguous():
            raise EngineError(f"positions: {positions.dtype} {tuple(positions.shape)}; wanted int64 [{tokens}]")


def _slots(lora: LoraBatch | None, tokens: int) -> int:
    """Address of the tokens' slots, 0 for a base-only batch."""
    if lora is None or not lora.groups:
        return 0
    slots = lora.slots
    if slots.shape != (tokens,) or slots.dtype is not torch.int32 or not slots.is_contiguous():
        raise EngineError(f"slots: {slots.dtype} {tuple(slots.shape)}; wanted contiguous int32 [{tokens}]")
    return int(slots.data_ptr())
