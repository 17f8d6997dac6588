"""A step of the decoder as one native call, or, where a layer's experts are not native, one for each attention half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.architectures.config import ModelConfig
from engine.attention.base import BatchLayout
from engine.attention.native import NativeAttention
from engine.attention.native_delta import NativeDeltaNet
from engine.errors import EngineError, ExpertBackendError
from engine.experts.base import ExpertBuffers
from engine.experts.capabilities import NativeTasks
from engine.linear.base import Linear, LoraBatch
from engine.linear.native import NativeLatentUp, NativeLinear, slots_address
from engine.model.attention import Attention, GroupedQueryAttention
from engine.model.delta import DeltaNetAttention
from engine.model.latent import LatentAttention
from engine.model.layer import Layer
from engine.model.mlp import DenseMlp, Mlp, SparseMlp
from engine.model.step import Trace
from engine.ops.base import Ops
from engine.ops.native import NativeOps, native_router

if TYPE_CHECKING:
    from native import _native


def all_native(layers: Sequence[Layer], ops: Ops) -> bool:
    """Whether NativeDecoder can run these layers: native attention, projections and routers throughout."""

    def native(layer: Layer) -> bool:
        held = layer.attention
        if not isinstance(held.backend, NativeAttention | NativeDeltaNet):
            return False
        linears = _projections(held)
        if not linears or (isinstance(held, LatentAttention) and not isinstance(held.kv_b, NativeLatentUp)):
            return False
        if isinstance(layer.mlp, SparseMlp):
            linears.append(layer.mlp.gate)
        return all(isinstance(each, NativeLinear) for each in linears)

    return isinstance(ops, NativeOps) and bool(layers) and all(native(layer) for layer in layers)


def _projections(held: Attention) -> list[Linear]:
    """Of an attention that has a native part; none of others."""
    if isinstance(held, DeltaNetAttention):
        return [*held.wide, *held.gates, held.out]
    if isinstance(held, GroupedQueryAttention):
        return [held.q, held.k, held.v, held.o]
    if isinstance(held, LatentAttention):
        return [*([] if held.q_a is None else [held.q_a]), held.q, held.kv_a, held.o]
    return []


class NativeDecoder:
    """`attend` equals a layer's calls in `CausalLM.forward` up to the MLP's output, bit for bit, in one native call.

    A sparse layer's hidden states, expert ids and weights are written straight into the experts' buffers. `run` does
    all layers, once `complete` has found their MLPs and the head to be native too.
    Raises EngineError if the layers are not all native (`all_native`).
    """

    def __init__(
        self, config: ModelConfig, ops: Ops, layers: Sequence[Layer], buffers: ExpertBuffers, dtype: torch.dtype
    ) -> None:
        first = next(iter(_projections(layers[0].attention)), None) if layers else None
        if not (all_native(layers, ops) and isinstance(ops, NativeOps) and isinstance(first, NativeLinear)):
            raise EngineError("the native decoder needs native attention, projections, routers and operations")
        from native import _native

        self._native = _native
        self._layers = list(layers)  # keeps the weights' memory alive
        self._buffers = buffers
        self._dtype = dtype
        self._weight_dtype = layers[0].input_norm.dtype
        self._hidden_size = config.hidden_size
        self._kernel = _native.Decoder(
            ops.kernel,
            first.runner,
            hidden=config.hidden_size,
            eps=config.rms_norm_eps,
            is_bf16=dtype == torch.bfloat16,
            weight_bf16=self._weight_dtype == torch.bfloat16,
        )
        self._sparse = [isinstance(layer.mlp, SparseMlp) for layer in layers]
        self._top_k = config.num_experts_per_tok
        self._mlps_native = True
        self._completed = False
        self._memory = _native.ExpertMemory(
            bsz=buffers.bsz.data_ptr(),
            ids=buffers.ids.data_ptr(),
            weights=buffers.weights.data_ptr(),
            slots=buffers.slots.data_ptr(),
            hidden=buffers.hidden.data_ptr(),
            out=buffers.out.data_ptr(),
            max_rows=buffers.max_rows,
        )
        for index, layer in enumerate(layers):
            self._check_norms(index, layer.input_norm, layer.post_norm)
            try:
                self._kernel.add_layer(
                    layer.input_norm.data_ptr(),
                    self._attention(layer),
                    layer.post_norm.data_ptr(),
                    self._mlp(layer.mlp),
                )
            except ValueError as error:
                raise EngineError(f"layer {index}: {error}") from error

    def _check_norms(self, layer: int, *norms: torch.Tensor | None) -> None:
        if any(t is not None and (t.dtype != self._weight_dtype or not t.is_contiguous()) for t in norms):
            raise EngineError(f"layer {layer}: norm weights must be contiguous and all {self._weight_dtype}")

    def _attention(self, layer: Layer) -> _native.AttentionPart:
        held = layer.attention
        if isinstance(held, DeltaNetAttention):
            return self._delta(layer, held)
        if not isinstance(held.backend, NativeAttention) or not isinstance(
            held, GroupedQueryAttention | LatentAttention
        ):
            raise EngineError(f"layer {layer.index}: the native decoder needs native attention and projections")
        backend, rope = held.backend, held.rope
        if backend.dtype != self._dtype:
            raise EngineError(f"the native decoder computes in {self._dtype}, its attention in {backend.dtype}")
        rotation = self._native.Rotation(rope.cos.data_ptr(), rope.sin.data_ptr(), rows=rope.cos.shape[0], dim=rope.dim)
        if isinstance(held, LatentAttention):
            return self._latent(layer, held, backend, rotation)
        return self._grouped_query(layer, held, backend, rotation)

    def _grouped_query(
        self, layer: Layer, held: GroupedQueryAttention, backend: NativeAttention, rotation: _native.Rotation
    ) -> _native.GroupedQueryPart:
        packed = _packed(held.q, held.k, held.v, held.o)
        if packed is None:
            raise EngineError(f"layer {layer.index}: the native decoder needs native projections")
        self._check_norms(layer.index, held.q_norm, held.k_norm)
        q, k, v, o = packed
        return self._native.GroupedQueryPart(
            backend.kernel,
            backend.places_of[layer.index],
            rotation,
            q=q,
            k=k,
            v=v,
            o=o,
            qk_norm=held.spec.qk_norm,
            q_norm=0 if held.q_norm is None else held.q_norm.data_ptr(),
            k_norm=0 if held.k_norm is None else held.k_norm.data_ptr(),
            gated=held.spec.gated,
        )

    def _delta(self, layer: Layer, held: DeltaNetAttention) -> _native.DeltaPart:
        backend, wide, gates, out = held.backend, _packed(*held.wide), _packed(*held.gates), _packed(held.out)
        if not isinstance(backend, NativeDeltaNet) or wide is None or gates is None or out is None:
            raise EngineError(f"layer {layer.index}: the native decoder needs native delta nets and projections")
        place, vectors = backend.places_of[layer.index], backend.vectors(held.vectors)
        return self._native.DeltaPart(backend.kernel, place, wide=wide, gates=gates, out=out[0], vectors=vectors)

    def _latent(
        self, layer: Layer, held: LatentAttention, backend: NativeAttention, rotation: _native.Rotation
    ) -> _native.LatentPart:
        packed = _packed(held.q, held.kv_a, held.o)
        ranked = None if held.q_a is None else _packed(held.q_a)
        if packed is None or (ranked is None) != (held.q_a is None) or not isinstance(held.kv_b, NativeLatentUp):
            raise EngineError(f"layer {layer.index}: the native decoder needs native projections")
        self._check_norms(layer.index, held.q_a_norm, held.kv_a_norm)
        q, kv_a, o = packed
        return self._native.LatentPart(
            backend.kernel,
            backend.places_of[layer.index],
            rotation,
            None if ranked is None else ranked[0],
            0 if held.q_a_norm is None else held.q_a_norm.data_ptr(),
            q,
            kv_a,
            held.kv_a_norm.data_ptr(),
            held.kv_b.kernel,
            o,
            held.spec.norm_eps,
            held.spec.interleaved,
        )

    def _mlp(self, mlp: Mlp) -> _native.MlpPart | None:
        """None, or without experts, where not all that it needs is native: then `complete` is false."""
        if isinstance(mlp, SparseMlp):
            return self._routed(mlp)
        part = self._dense(mlp) if isinstance(mlp, DenseMlp) else None
        self._mlps_native &= part is not None
        return part

    def _dense(self, mlp: DenseMlp) -> _native.DensePart | None:
        packed = _packed(mlp.gate, mlp.up, mlp.down)
        return None if packed is None else self._native.DensePart(*packed)

    def _routed(self, mlp: SparseMlp) -> _native.SparsePart:
        gate, tasks = mlp.gate, mlp.backend.capability(NativeTasks)
        if not isinstance(gate, NativeLinear):
            raise EngineError("the native decoder needs native routers")
        router = native_router(mlp.router, gate.out_features, self._top_k, mlp.bias)
        own = None if mlp.shared is None else mlp.shared.gate
        shared = None if mlp.shared is None else self._dense(mlp.shared.mlp)
        native = (shared is not None or mlp.shared is None) and (own is None or isinstance(own, NativeLinear))
        if tasks is None or mlp.task.buffers is not self._buffers or not native:
            self._mlps_native = False
            return self._native.SparsePart(gate.packed, router, self._memory, None)
        task, shared_gate = tasks.native_task(mlp.task), own.packed if isinstance(own, NativeLinear) else None
        return self._native.SparsePart(gate.packed, router, self._memory, task, shared=shared, shared_gate=shared_gate)

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
        sparse = self._sparse[index]
        if delta is not None and (delta.shape != residual.shape or delta.dtype is not self._dtype):
            raise EngineError(f"delta: {delta.dtype} {tuple(delta.shape)}; wanted residual's {tuple(residual.shape)}")
        if sparse and tokens > buffers.max_rows:
            raise EngineError(f"{tokens} tokens; the experts' buffers hold {buffers.max_rows}")
        self._check(residual, batch)
        hidden = buffers.hidden[:tokens] if sparse else torch.empty_like(residual)
        try:
            self._kernel.attend(
                index,
                tokens=tokens,
                residual=residual.data_ptr(),
                delta=0 if delta is None else delta.data_ptr(),
                delta_stride=0 if delta is None else delta.stride(0),
                positions=batch.positions.data_ptr(),
                slots=slots_address(lora, tokens),
                hidden=hidden.data_ptr(),
            )
        except ValueError as error:
            raise EngineError(f"layer {index}: {error}") from error
        return hidden

    def complete(self, final_norm: torch.Tensor, lm_head: Linear) -> bool:
        """Whether `run` can be called: every layer's MLP or experts and the head are native."""
        if not self._mlps_native or not isinstance(lm_head, NativeLinear) or final_norm.dtype != self._weight_dtype:
            return False
        self._held = (final_norm, lm_head)  # keeps their memory alive
        self._kernel.set_head(final_norm.data_ptr(), lm_head.packed)
        self._completed = True
        return True

    def run(
        self,
        residual: torch.Tensor,
        batch: BatchLayout,
        lora: LoraBatch | None,
        keep: torch.Tensor | None,
        *,
        greedy: bool,
        trace: Trace | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All layers over the embeddings `residual` [T, H], which are overwritten: the hidden states behind the final
        norm of the rows `keep` (int64 [K], rising; None for all), and with `greedy` their greedy tokens [K]."""
        if not self._completed:
            raise EngineError("the native decoder runs a step only if every part is native")
        tokens = residual.shape[0]
        self._check(residual, batch)
        if keep is not None and (keep.dim() != 1 or keep.dtype is not torch.int64 or not keep.is_contiguous()):
            raise EngineError(f"keep: {keep.dtype} {tuple(keep.shape)}; wanted contiguous int64 [K]")
        kept = tokens if keep is None else keep.shape[0]
        hidden = torch.empty((kept, self._hidden_size), dtype=self._dtype)
        chosen = torch.empty(kept, dtype=torch.int64) if greedy else None
        sizes = [tokens] * sum(self._sparse)
        if self._sparse[-1]:
            sizes[-1] = kept
        seen = None if trace is None else torch.empty((sum(sizes), self._top_k), dtype=torch.int64)
        try:
            experts_s = self._kernel.run(
                tokens=tokens,
                residual=residual.data_ptr(),
                positions=batch.positions.data_ptr(),
                slots=slots_address(lora, tokens),
                keep=0 if keep is None else keep.data_ptr(),
                kept=kept,
                hidden=hidden.data_ptr(),
                greedy=0 if chosen is None else chosen.data_ptr(),
                seen=0 if seen is None else seen.data_ptr(),
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


def _packed(*linears: Linear) -> list[_native.PackedLinear] | None:
    """What the kernels hold of these projections; None if one is not native."""
    packed = [linear.packed for linear in linears if isinstance(linear, NativeLinear)]
    return packed if len(packed) == len(linears) else None
