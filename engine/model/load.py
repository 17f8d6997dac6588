"""Build a model from its files and a placement: every tensor goes to the backend that its rule names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.mlp import Dense, Sparse
from engine.architectures.parts.rotation import Rotation
from engine.attention.base import AttentionBackend, CacheBackend
from engine.attention.delta import DeltaBackend, DeltaVectors
from engine.errors import EngineError
from engine.experts.base import ExpertBackend, ExpertBuffers
from engine.linear.base import Adapted, Linear, LinearBackend, LoraBatch
from engine.linear.embedding import Embedding, TableEmbedding
from engine.model.attention import Attention, GroupedQueryAttention
from engine.model.causal_lm import CausalLM
from engine.model.delta import DeltaNetAttention
from engine.model.latent import LatentAttention
from engine.model.layer import Layer
from engine.model.mlp import DenseMlp, SharedExpert, SparseMlp
from engine.model.mtp import MtpLayer
from engine.ops.base import Ops
from engine.ops.rope import Rope
from engine.ranks.group import ALONE, Group
from engine.weights.layout import EMBED, HEAD
from engine.weights.pack_cache import PackCache
from engine.weights.store import WeightSource
from engine.weights.tiled.packer import Packer

if TYPE_CHECKING:
    from native import _native

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class Backends:
    """What computes what. Layers may share a backend object; they usually all do."""

    ops: Ops
    linear: Callable[[str], LinearBackend]  # by module name
    router: LinearBackend  # float32, whatever the rest runs in
    rope: Callable[[Rotation], Rope]
    attention: Callable[[int], CacheBackend]  # by layer
    experts: Callable[[int], ExpertBackend]  # by layer
    dtype: torch.dtype  # of activations
    device: torch.device
    packs_bf16: bool = False  # bf16 weights stay so, whatever activations are
    cache: PackCache | None = None  # of packed weights
    pool: _native.WorkerPool | None = None  # its workers spin while a step runs
    spare_cpus: list[int] = field(default_factory=list)  # for all threads but a pool's own, if that is a matter
    packer: Packer | None = None  # brings weights into the GPU's memory; what it needs for that goes after loading


class Loader:
    """Loads one layer after another; `max_rows` is the largest step in tokens."""

    def __init__(self, source: WeightSource, backends: Backends, max_rows: int, group: Group = ALONE) -> None:
        self.source = source
        self.group = group
        self.backends = backends
        self.linears: dict[str, Adapted] = {}
        self.projections: dict[str, Linear] = {}
        self._max_rows = max_rows
        self._buffers: dict[str, ExpertBuffers] = {}

    def model(self, progress: Progress) -> CausalLM:
        config = self.source.config
        layers, count = [], len(config.layers)
        for index in range(config.num_hidden_layers):
            progress("Loading layers", index, count)
            layers.append(self.layer(index))
        adapted = dict(self.linears)  # the layer behind them has no adapters
        mtp = self.mtp(config.num_hidden_layers) if config.predicts else None
        progress("Loading layers", count, count)
        head = self.head()
        embedding = self.embedding(head)
        final_norm = self.vector("model.norm.weight")
        self.source.check_unchanged()
        if self.backends.packer is not None:
            self.backends.packer.release()
        return CausalLM(
            config=config,
            ops=self.backends.ops,
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            lm_head=head,
            linears=adapted,
            group=self.group,
            mtp=mtp,
        )

    def layer(self, index: int) -> Layer:
        name, spec = f"model.layers.{index}", self.source.config.layers[index]
        return Layer(
            index=index,
            input_norm=self.vector(f"{name}.input_layernorm.weight"),
            attention=self._attention(index, spec.attention),
            post_norm=self.vector(f"{name}.post_attention_layernorm.weight"),
            mlp=self._sparse(index, spec.mlp) if isinstance(spec.mlp, Sparse) else self._dense(index, spec.mlp),
        )

    def mtp(self, index: int) -> MtpLayer:
        name = f"model.layers.{index}"
        return MtpLayer(
            embedding_norm=self.vector(f"{name}.enorm.weight"),
            hidden_norm=self.vector(f"{name}.hnorm.weight"),
            projection=self.linear(f"{name}.eh_proj"),
            layer=self.layer(index),
            norm=self.vector(f"{name}.shared_head.norm.weight"),
        )

    def head(self) -> Linear:
        """A head that is stored is used, whatever the configuration says of tying."""
        stored = HEAD if self.source.has(HEAD) else EMBED
        return self.backends.linear("lm_head").load("lm_head", self.source.tensor(stored), None)

    def linear(self, name: str, backend: LinearBackend | None = None) -> Linear:
        bias = self.source.tensor(f"{name}.bias") if self.source.has(f"{name}.bias") else None
        made = (backend or self.backends.linear(name)).load(name, self.source.tensor(f"{name}.weight"), bias)
        self.linears[name] = self.projections[name] = made
        return made

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, in the activations' dtype."""
        return self.source.tensor(name).dequantise(self.backends.dtype).to(self.backends.device)

    def _float32(self, name: str) -> torch.Tensor:
        return self.source.tensor(name).dequantise(torch.float32).to(self.backends.device)

    def embedding(self, head: Linear) -> Embedding:
        """In the form of the head's backend if that has one; else a table in the activations' dtype, or narrower where
        nothing is lost by it."""
        tensor, backends = self.source.tensor(EMBED), self.backends
        tied = None if self.source.has(HEAD) else head
        made = backends.linear("lm_head").embedding("model.embed_tokens", tensor, tied)
        if made is not None:
            return made
        dtype = torch.bfloat16 if tensor.type == "BF16" and backends.packs_bf16 else backends.dtype
        packer = backends.packer
        table = tensor.dequantise(dtype).to(backends.device) if packer is None else packer.dense(tensor, dtype)
        return TableEmbedding(table, backends.ops.embed)

    def buffers(self, backend: ExpertBackend) -> ExpertBuffers:
        """One set for all layers whose experts are in the same memory."""
        device, place = self.backends.device, backend.buffers_on
        if place not in self._buffers:
            self._buffers[place] = ExpertBuffers.allocate(
                self._max_rows,
                max(self.source.config.num_experts_per_tok, 1),
                self.source.config.hidden_size,
                self.backends.dtype,
                pin=place == "cpu" and device.type == "cuda",
                device=device if place == "cuda" else None,
            )
        return self._buffers[place]

    def _join(self, names: list[str]) -> Callable[[torch.Tensor, LoraBatch | None], list[torch.Tensor]] | None:
        """Projections of one input in one call, if one backend has them all."""
        backends = [self.backends.linear(name) for name in names]
        if any(backend is not backends[0] for backend in backends):
            return None
        return backends[0].join([self.projections[name] for name in names])

    def _attention(self, layer: int, spec: GroupedQuery | Latent | DeltaNet) -> Attention:
        if isinstance(spec, DeltaNet):
            return self._delta(layer, spec)
        return self._latent(layer, spec) if isinstance(spec, Latent) else self._grouped_query(layer, spec)

    def _paged(self, layer: int) -> AttentionBackend:
        backend = self.backends.attention(layer)
        if not isinstance(backend, AttentionBackend):
            raise EngineError(f"layer {layer}: {type(backend).__name__} computes no attention over keys and values")
        return backend

    def _delta(self, layer: int, spec: DeltaNet) -> DeltaNetAttention:
        name, router, backend = f"model.layers.{layer}.self_attn", self.backends.router, self.backends.attention(layer)
        if not isinstance(backend, DeltaBackend):
            raise EngineError(f"layer {layer}: {type(backend).__name__} keeps no states of a delta net")
        wide, gates = ("qkvz",) if spec.fused else ("qkv", "z"), ("ba",) if spec.fused_gates else ("b", "a")
        return DeltaNetAttention(
            layer=layer,
            wide=[self.linear(f"{name}.{part}_proj") for part in wide],
            gates=[self.linear(f"{name}.in_proj_{part}", router) for part in gates],
            out=self.linear(f"{name}.out_proj"),
            vectors=DeltaVectors(
                conv=self._float32(f"{name}.conv1d.weight").reshape(spec.channels, spec.kernel).T.contiguous(),
                decay=self._float32(f"{name}.decay"),
                dt_bias=self._float32(f"{name}.dt_bias"),
                norm=self._float32(f"{name}.norm.weight"),
                norm_eps=self.source.config.rms_norm_eps,
            ),
            backend=backend,
        )

    def _latent(self, layer: int, spec: Latent) -> LatentAttention:
        name = f"model.layers.{layer}.self_attn"
        ranked, up = spec.q_rank is not None, f"{name}.kv_b_proj"
        weight = self.source.tensor(f"{up}.weight")
        kv_b = self.linears[up] = self.backends.linear(up).latent_up(up, weight, spec.heads, spec.nope_dim)
        return LatentAttention(
            spec=spec,
            layer=layer,
            q_a=self.linear(f"{name}.q_a_proj") if ranked else None,
            q_a_norm=self.vector(f"{name}.q_a_layernorm.weight") if ranked else None,
            q=self.linear(f"{name}.q_b_proj" if ranked else f"{name}.q_proj"),
            kv_a=self.linear(f"{name}.kv_a_proj_with_mqa"),
            kv_a_norm=self.vector(f"{name}.kv_a_layernorm.weight"),
            kv_b=kv_b,
            o=self.linear(f"{name}.o_proj"),
            rope=self.backends.rope(spec.rotation),
            backend=self._paged(layer),
        )

    def _grouped_query(self, layer: int, spec: GroupedQuery) -> GroupedQueryAttention:
        name, normed = f"model.layers.{layer}.self_attn", spec.qk_norm != "none"
        q, k, v, o = (self.linear(f"{name}.{part}_proj") for part in "qkvo")
        backend = self._paged(layer)
        sinks = self._float32(f"model.layers.{layer}.{spec.SINKS}") if spec.sinks else None
        if sinks is not None:
            backend.set_sinks(layer, sinks)
        return GroupedQueryAttention(
            spec=spec,
            layer=layer,
            q=q,
            k=k,
            v=v,
            o=o,
            q_norm=self.vector(f"{name}.q_norm.weight") if normed else None,
            k_norm=self.vector(f"{name}.k_norm.weight") if normed else None,
            norm_eps=self.source.config.rms_norm_eps,
            rope=self.backends.rope(spec.rotation),
            backend=backend,
            sinks=sinks,
            joined=self._join([f"{name}.{part}_proj" for part in "qkv"]),
            group=self.group,
        )

    def _dense(self, layer: int, spec: Dense) -> DenseMlp:
        name = f"model.layers.{layer}.{spec.name}"
        return DenseMlp(*(self.linear(f"{name}.{part}_proj") for part in ("gate", "up", "down")))

    def _sparse(self, layer: int, spec: Sparse) -> SparseMlp:
        name, backend = f"model.layers.{layer}.mlp", self.backends.experts(layer)
        backend.load_layer(layer, self.source.experts(layer))
        task = backend.bind(layer, self.buffers(backend))
        gate = self.linear(f"{name}.gate", self.backends.router)
        bias = self._float32(f"model.layers.{layer}.{spec.bias_name}") if spec.router.bias else None
        shared = None
        if spec.shared is not None:
            own = self.linear(f"{name}.shared_expert_gate", self.backends.router) if spec.shared.gated else None
            shared = SharedExpert(self._dense(layer, spec.shared.mlp), own)
        return SparseMlp(layer, spec.router, gate, backend, task, bias, shared, spec.held)
