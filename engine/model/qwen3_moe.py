"""Qwen3MoE over a flat token batch: requests of any adapter, prefill chunks and decode rows side by side.

embed -> L x [norm, qkv, QK-norm, rope, paged attention, o, norm, router, experts | dense MLP] -> norm -> lm_head
"""

from __future__ import annotations

import time
from collections.abc import Collection

import torch
import torch.nn.functional as F

from engine.attention.base import BatchLayout
from engine.errors import ExpertBackendError
from engine.experts.base import ExpertBuffers, ExpertTask
from engine.linear.base import Linear, LoraBatch
from engine.linear.embedding import Embedding
from engine.lora.adapter import AdapterWeights, ExtraMlp
from engine.model.gpu_ops import GpuOps
from engine.model.layers import DenseMlp, Layer, Observer, SparseMlp, Trace
from engine.model.ops import Ops
from engine.model_config import ModelConfig


class Qwen3Moe:
    """Built by `engine.model.load`. `linears` maps module names to projections, for adapters."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Embedding,
        layers: list[Layer],
        final_norm: torch.Tensor,
        lm_head: Linear,
        linears: dict[str, Linear],
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.linears = linears
        self.device = embedding.device
        self.dtype = final_norm.dtype  # of activations; the embedding may be held otherwise
        self.slots_with_extra_mlps: set[int] = set()
        self.attention_backends = list({id(layer.attention): layer.attention for layer in layers}.values())
        sparse = [layer.mlp for layer in layers if isinstance(layer.mlp, SparseMlp)]
        self.expert_backends = list({id(mlp.backend): mlp.backend for mlp in sparse}.values())
        self.expert_buffers = list({id(mlp.task.buffers): mlp.task.buffers for mlp in sparse}.values())
        self._second_buffers: list[ExpertBuffers] = []

    def forward(
        self,
        ids: torch.Tensor,
        batch: BatchLayout,
        lora: LoraBatch | None,
        trace: Trace | None = None,
        observe: Observer | None = None,
    ) -> torch.Tensor:
        """ids int64 [T] -> hidden states after the final norm [T, H]."""
        self.plan(batch)
        return self.run(ids, batch, lora, None, trace, observe)

    def forward_rows(
        self,
        ids: torch.Tensor,
        batch: BatchLayout,
        lora: LoraBatch | None,
        keep: torch.Tensor,
        trace: Trace | None = None,
    ) -> torch.Tensor:
        """`forward` of a step of which only the rows `keep` (int64 [K]) are wanted: [K, H]. What the others would have
        been is nobody's business, so an implementation may leave out work that only they need."""
        return self.forward(ids, batch, lora, trace)[keep]

    def greedy_rows(
        self,
        ids: torch.Tensor,
        batch: BatchLayout,
        lora: LoraBatch | None,
        keep: torch.Tensor | None,
        trace: Trace | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward_rows` (`forward`, if `keep` is None), and the likeliest token of each of these rows, int64 [K]."""
        rows = (ids, batch, lora)
        hidden = self.forward(*rows, trace) if keep is None else self.forward_rows(*rows, keep, trace)
        return hidden, self.logits(hidden).argmax(dim=-1)

    def plan(self, batch: BatchLayout) -> None:
        """The host's part of a step."""
        for backend in self.attention_backends:
            backend.plan(batch)

    def run(
        self,
        ids: torch.Tensor,
        batch: BatchLayout,
        lora: LoraBatch | None,
        bsz: torch.Tensor | None = None,
        trace: Trace | None = None,
        observe: Observer | None = None,
    ) -> torch.Tensor:
        """The device's part of a planned step. `bsz` int32 [1]: how many of the rows count, if not all."""
        self.begin(ids.shape[0], lora, bsz)
        residual = self.embedding(ids).to(self.dtype)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            delta = self.run_layer(index, layer, residual, delta, batch, lora, trace, observe)
        return self.ops.add_rms_norm(residual, delta, self.final_norm)

    @torch.inference_mode(False)  # memory that is written to in and out of that mode
    def add_buffer_set(self, max_rows: int) -> None:
        """Give every layer's experts a second buffer set, so that two half-batches can be under way."""
        twins = {id(b): b.twin(max_rows) for b in self.expert_buffers}
        for layer in self.layers:
            if isinstance(mlp := layer.mlp, SparseMlp):
                mlp.second = mlp.backend.bind(mlp.task.layer, twins[id(mlp.task.buffers)])
        self._second_buffers = list(twins.values())

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        """Before a step is launched or captured: `ExpertBackend.begin_step` of all."""
        for backend in self.expert_backends:
            backend.begin_step(rows, lora=lora, eager=eager, slots=slots)

    def check(self) -> None:
        """Once for each begun step, when it has ended: raises the first of its experts' errors."""
        errors = []
        for backend in self.expert_backends:
            try:
                backend.check()
            except ExpertBackendError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def begin(self, rows: int, lora: LoraBatch | None, bsz: torch.Tensor | None = None, part: int = 0) -> None:
        """Tell the expert buffers what holds for all layers of a step: row count and adapter slots."""
        count = torch.full((1,), rows, dtype=torch.int32, device=self.device) if bsz is None else bsz
        slots = torch.zeros(rows, dtype=torch.int32, device=self.device) if lora is None else lora.slots
        for b in self._second_buffers if part else self.expert_buffers:
            # in stream order: the step before may still be reading them
            b.bsz.copy_(count, non_blocking=True)
            b.slots[:rows].copy_(slots, non_blocking=True)

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
        """Adds `delta` and the attention's part to `residual` in place; returns the MLP's part, still to be added."""
        x = self.ops.add_rms_norm(residual, delta, layer.input_norm)
        delta = self.attend(index, layer, x, batch, lora)
        if observe:
            observe(f"model.layers.{index}.self_attn", delta)
        if isinstance(layer.mlp, SparseMlp):
            delta = self._experts(index, layer, layer.mlp, residual, delta, lora, trace, observe)
        else:
            delta = self.dense(layer, layer.mlp, residual, delta, lora)
        if observe:
            observe(f"model.layers.{index}.mlp", delta)
        return delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> float32 [rows, V]."""
        return self.lm_head(hidden, None).float()

    def set_adapter(self, slot: int, adapter: AdapterWeights | None) -> None:
        """Make a slot hold an adapter, or nothing. No step in flight may use the slot. On a GPU it is there when this
        returns; what other threads launch meanwhile is not held up."""
        pairs = adapter.linears if adapter else {}
        for name, linear in self.linears.items():
            linear.set_adapter(slot, pairs.get(name))
        extra = adapter.extra_mlps if adapter else {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer.mlp, SparseMlp):
                layer.mlp.extra.pop(slot, None)
                if index in extra:
                    layer.mlp.extra[slot] = [_to(m, self.final_norm) for m in extra[index]]
        if extra:
            self.slots_with_extra_mlps.add(slot)
        else:
            self.slots_with_extra_mlps.discard(slot)
        for backend in self.expert_backends:
            backend.set_adapter(slot, adapter.experts if adapter else None)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        for backend in self.expert_backends:
            backend.close()

    def attend(
        self, index: int, layer: Layer, x: torch.Tensor, batch: BatchLayout, lora: LoraBatch | None
    ) -> torch.Tensor:
        heads, kv_heads, dim = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        q, k, v = (
            part.view(-1, count, dim)
            for part, count in zip(layer.qkv(x, lora), (heads, kv_heads, kv_heads), strict=True)
        )
        q, k = self.ops.qk_norm_rope(q, k, layer.q_norm, layer.k_norm, batch.positions)
        return layer.o(layer.attention.forward(index, q, k, v, batch.part).flatten(1), lora)

    def dense(
        self, layer: Layer, mlp: DenseMlp, residual: torch.Tensor, delta: torch.Tensor, lora: LoraBatch | None
    ) -> torch.Tensor:
        x = self.ops.add_rms_norm(residual, delta, layer.post_norm)
        return mlp.down(self.ops.silu_mul(mlp.gate(x, lora), mlp.up(x, lora)), lora)

    def _experts(
        self,
        index: int,
        layer: Layer,
        mlp: SparseMlp,
        residual: torch.Tensor,
        delta: torch.Tensor,
        lora: LoraBatch | None,
        trace: Trace | None,
        observe: Observer | None,
    ) -> torch.Tensor:
        started = time.perf_counter()
        x = self.post_experts(index, layer, mlp, mlp.task, residual, delta, lora, observe)
        extra = self._extra(mlp, x, lora)
        out = self.wait_experts(mlp, mlp.task, residual.shape[0], trace)
        if trace is not None:
            trace.experts_s += time.perf_counter() - started
        return out if extra is None else out + extra

    def post_experts(
        self,
        index: int,
        layer: Layer,
        mlp: SparseMlp,
        task: ExpertTask,
        residual: torch.Tensor,
        delta: torch.Tensor,
        lora: LoraBatch | None,
        observe: Observer | None = None,
    ) -> torch.Tensor:
        """Route the rows, fill the task's buffers and post it; returns the experts' input."""
        n, b, ops = residual.shape[0], task.buffers, self.ops
        top_k, normalise = self.config.num_experts_per_tok, self.config.norm_topk_prob
        if isinstance(ops, GpuOps) and b.hidden.device == residual.device:  # written where the experts read
            x = ops.add_rms_norm(residual, delta, layer.post_norm, b.hidden[:n])
            router_logits = mlp.router(x.float(), lora)
            ops.route_into(router_logits, normalise, b.weights[:n], b.ids[:n])
        else:
            x = ops.add_rms_norm(residual, delta, layer.post_norm)
            router_logits = mlp.router(x.float(), lora)
            weights, ids = ops.route(router_logits, top_k, normalise)
            for to, values in ((b.hidden, x), (b.ids, ids), (b.weights, weights)):
                to[:n].copy_(values, non_blocking=self._on_stream(mlp))
        if observe:
            observe(f"model.layers.{index}.mlp.gate", router_logits)
        mlp.backend.post(task, self._stream(mlp))
        return x

    def wait_experts(self, mlp: SparseMlp, task: ExpertTask, rows: int, trace: Trace | None) -> torch.Tensor:
        """What a posted task's experts make of its rows [rows, H]."""
        mlp.backend.wait(task, self._stream(mlp))
        if trace is not None:
            trace.ids.append(task.buffers.ids[:rows].clone())
        return task.buffers.out[:rows].to(self.device, non_blocking=self._on_stream(mlp))

    def _on_stream(self, mlp: SparseMlp) -> bool:
        return mlp.backend.follows_stream and self.device.type == "cuda"

    def _stream(self, mlp: SparseMlp) -> int | None:
        return torch.cuda.current_stream(self.device).cuda_stream if self._on_stream(mlp) else None

    def _extra(self, mlp: SparseMlp, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor | None:
        """The mean of an adapter's own dense MLPs, for its rows; None if no row has any."""
        if lora is None or not any(slot in mlp.extra for slot, _ in lora.groups):
            return None
        out = torch.zeros_like(x)
        for slot, rows in lora.groups:
            for m in mlp.extra.get(slot, []):
                h = x[rows]
                out[rows] += F.linear(F.silu(F.linear(h, m.gate)) * F.linear(h, m.up), m.down) / len(mlp.extra[slot])
        return out


def _to(mlp: ExtraMlp, like: torch.Tensor) -> ExtraMlp:
    return ExtraMlp(*(t.to(like.device, like.dtype) for t in (mlp.gate, mlp.up, mlp.down)))
