"""What a model is: its layers as data, and the numbers around them; `engine.architectures` reads it from files.
Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from engine.architectures.names import AS_HERE, StoredNames
from engine.architectures.parts.base import Module, Vector
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.mlp import Dense, Sparse
from engine.architectures.parts.rotation import Rotation


@dataclass(frozen=True)
class Quantisation:
    """How safetensors hold quantised weights: `method` "fp8", "gptq", "awq", "mxfp4", or what compressed-tensors calls
    "pack-quantized" (int4) or "float-quantized" (e4m3)."""

    method: str
    group: int  # values of a row that share a scale; -1: all
    rows: int = 1  # rows that share it; -1: all
    zeros_minus_one: bool = False  # zero points are stored so


@dataclass(frozen=True)
class LeftOut:
    """A part of a model's files that nothing here uses. `prefix`: its tensors' names in safetensors begin so, `gguf`:
    in GGUF, where there is one."""

    what: str
    prefix: str
    gguf: str = ""


@dataclass(frozen=True)
class LayerSpec:
    """norm -> attention -> norm -> MLP, each pair added to the residual stream. `post_norm_gguf`: the second norm's
    name in GGUF. `predicts`: a layer of multi-token prediction, whose input is a projection of the next token's
    embedding and the hidden state, each normalised, and whose output has a norm of its own (`Mtp`)."""

    attention: GroupedQuery | Latent | DeltaNet
    mlp: Dense | Sparse
    post_norm_gguf: str = "ffn_norm"
    predicts: bool = False

    def modules(self, hidden: int) -> Iterator[Module]:
        """Parents before children."""
        if self.predicts:
            yield Module("eh_proj", "linear", "nextn.eh_proj", (hidden, 2 * hidden))
            yield Module("enorm", "norm", "nextn.enorm", (hidden,))
            yield Module("hnorm", "norm", "nextn.hnorm", (hidden,))
            yield Module("shared_head.norm", "norm", "nextn.shared_head_norm", (hidden,))
        yield from self.attention.modules(hidden)
        yield from self.mlp.modules(hidden)
        yield Module("input_layernorm", "norm", "attn_norm", (hidden,))
        yield Module("post_attention_layernorm", "norm", self.post_norm_gguf, (hidden,))

    def vectors(self, hidden: int) -> Iterator[Vector]:
        yield from self.attention.vectors(hidden)
        yield from self.mlp.vectors(hidden)


@dataclass(frozen=True)
class Mtp:
    """A layer of multi-token prediction that files hold behind the model's own: from a position's hidden state and the
    token after it to a guess at the token after that, by the model's embedding and head. `part`: its tensors, left out
    unless it is used; `names`: what safetensors call its modules, beside what the family does; `copies`: tensors of it
    that are the model's own once more."""

    layer: LayerSpec
    part: LeftOut
    names: StoredNames = AS_HERE
    copies: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. Sparse layers are alike in all but, perhaps, their attention. `mtp`: a layer that files may hold
    besides; `with_mtp` has it behind the others, where it has weights, experts and a cache as they have."""

    architecture: str  # the name of its record in `engine.architectures`
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]  # the model's own, and of `with_mtp` the one that predicts
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str = "bfloat16"
    quantisation: Quantisation | None = None  # of the folder's safetensors
    left_out: tuple[LeftOut, ...] = ()
    norms_minus_one: bool = False  # safetensors store the weights of norms less 1 (GGUF does not)
    mtp: Mtp | None = None

    @property
    def num_hidden_layers(self) -> int:
        """The model's own."""
        return len(self.layers) - self.predicts

    @property
    def predicts(self) -> bool:
        """Whether the last layer is one of multi-token prediction, behind the model's own."""
        return self.layers[-1].predicts

    @property
    def with_mtp(self) -> ModelConfig:
        """The same with the layer of multi-token prediction. ValueError if there is none."""
        if self.mtp is None or self.predicts:
            raise ValueError(f"{self.architecture}: no layer of multi-token prediction to add")
        left_out = (*(part for part in self.left_out if part != self.mtp.part), *self.mtp.copies)
        return replace(self, layers=(*self.layers, self.mtp.layer), left_out=left_out)

    @property
    def without_mtp(self) -> ModelConfig:
        """The model's own layers alone."""
        return replace(self, layers=self.layers[: self.num_hidden_layers]) if self.predicts else self

    @cached_property
    def experts(self) -> Sparse | None:
        """The MLP of every sparse layer."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, Sparse)), None)

    @cached_property
    def sparse_layers(self) -> list[int]:
        return [index for index, layer in enumerate(self.layers) if isinstance(layer.mlp, Sparse)]

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has routed experts; otherwise its MLP is dense."""
        return isinstance(self.layers[layer].mlp, Sparse)

    @property
    def num_experts(self) -> int:
        """Of a layer; those of this rank, where ranks have some each."""
        if self.experts is None:
            return 0
        return self.experts.experts if self.experts.held is None else len(self.experts.held)

    @property
    def num_experts_per_tok(self) -> int:
        return self.experts.top_k if self.experts else 0

    @property
    def moe_intermediate_size(self) -> int:
        return self.experts.intermediate if self.experts else 0

    @property
    def stretched_positions(self) -> int:
        """Positions that the scaling of rotations reaches."""
        return min(rotation.stretched_positions for rotation in self.rotations)

    @property
    def of_safetensors(self) -> ModelConfig:
        """The same with layers whose projections are as safetensors and adapters have them."""
        return self._with_nets(lambda net: net.of_safetensors)

    @property
    def of_gguf(self) -> ModelConfig:
        """The same with layers whose projections are as llama.cpp writes them."""
        return self._with_nets(lambda net: net.of_gguf)

    def _with_nets(self, form: Callable[[DeltaNet], DeltaNet]) -> ModelConfig:
        layers = tuple(
            replace(layer, attention=form(layer.attention)) if isinstance(layer.attention, DeltaNet) else layer
            for layer in self.layers
        )
        return self if layers == self.layers else replace(self, layers=layers)

    @cached_property
    def delta_nets(self) -> list[DeltaNet]:
        """The distinct ones."""
        return list(dict.fromkeys(x.attention for x in self.layers if isinstance(x.attention, DeltaNet)))

    @cached_property
    def paged_attention(self) -> list[GroupedQuery | Latent]:
        """Of those layers that keep something of each position, in their order: all, where there are no states."""
        return [layer.attention for layer in self.layers if not isinstance(layer.attention, DeltaNet)]

    @cached_property
    def rotations(self) -> list[Rotation]:
        """Those that occur, in order of first use."""
        return list(dict.fromkeys(spec.rotation for spec in self.paged_attention))

    @cached_property
    def state_bytes(self) -> int:
        """What all layers keep of each sequence, whatever its length; 0: keys and values are all there is."""
        return sum(layer.attention.cache.state_bytes for layer in self.layers)

    @cached_property
    def kept_bytes(self) -> int:
        """What all layers keep beside a state of each draft, which is put into it once it is known to be right."""
        return sum(layer.attention.cache.kept_bytes for layer in self.layers)

    @property
    def expert_params_per_token(self) -> int:
        """Parameters of routed experts that one token reads, all layers."""
        return len(self.sparse_layers) * self.num_experts_per_tok * 3 * self.hidden_size * self.moe_intermediate_size

    def modules(self, layer: int) -> list[Module]:
        """Of one layer, parents before children."""
        return list(self.layers[layer].modules(self.hidden_size))

    def kv_bytes_per_token(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """Of one position in all layers' caches. `scale_bytes`: of each vector beside its elements."""
        return sum(layer.attention.cache.position_bytes(element_bytes, scale_bytes) for layer in self.layers)

    def numbers(self) -> dict[str, float]:
        """Its sizes by the names of transformers' configurations: two files of one model agree on them."""
        first = self.layers[0]
        attentions = dict.fromkeys(layer.attention for layer in self.layers)
        found = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "rms_norm_eps": self.rms_norm_eps,
            **{name: value for attention in attentions for name, value in attention.numbers().items()},
        }
        return found | (self.experts.numbers() if self.experts else first.mlp.numbers())
