"""A second model over the weights and the KV cache of a first one, for steps that are computed at the same time."""

from __future__ import annotations

from dataclasses import replace

from engine.attention.base import AttentionBackend, CacheBackend
from engine.errors import EngineError
from engine.experts.base import ExpertBackend, ExpertBuffers
from engine.model.attention import GroupedQueryAttention
from engine.model.causal_lm import CausalLM
from engine.model.layer import Layer
from engine.model.mlp import SparseMlp


def model_beside(model: CausalLM, experts: ExpertBackend, max_rows: int) -> CausalLM:
    """Whose routed experts are `experts`, for steps of up to `max_rows` rows; adapters are set on `model` alone.
    EngineError where its attention is for one step at a time."""
    twins = {id(backend): _beside(backend) for backend in model.attention_backends}
    config = model.config
    buffers = ExpertBuffers.allocate(
        max_rows,
        max(config.num_experts_per_tok, 1),
        config.hidden_size,
        model.dtype,
        device=model.device if experts.buffers_on == "cuda" else None,
    )

    def beside(layer: Layer) -> Layer:
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(attention, GroupedQueryAttention):
            raise EngineError(f"layer {layer.index}: {type(attention).__name__} computes one step at a time")
        if isinstance(mlp, SparseMlp):
            mlp = replace(mlp, backend=experts, task=experts.bind(layer.index, buffers))
        return replace(layer, attention=replace(attention, backend=twins[id(attention.backend)]), mlp=mlp)

    return CausalLM(
        config,
        model.ops.beside(),
        model.embedding,
        [beside(layer) for layer in model.layers],
        model.final_norm,
        model.lm_head,
        model.linears,
        model.group,
    )


def _beside(backend: CacheBackend) -> AttentionBackend:
    other = backend.beside()
    if not isinstance(other, AttentionBackend):
        raise EngineError(f"{type(backend).__name__} computes no attention over keys and values")
    return other
