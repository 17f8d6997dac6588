"""The sizes that all families' files state, under one set of names. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.architectures.config import LayerSpec, LeftOut, Mtp
from engine.architectures.names import AS_HERE, StoredNames
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.mlp import Dense, Router, Sparse
from engine.architectures.parts.rotation import Rotation
from engine.errors import ModelFileError

SIGMOID_EPSILON = 1e-20  # what is added to the sum of sigmoid weights, in every family that adds something


@dataclass(frozen=True)
class Numbers:
    """What files of either kind say of a model, by the names of transformers' configurations. A family makes its layers
    of it."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotation: Rotation
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int  # of dense layers
    norm_topk_prob: bool
    sparse: tuple[bool, ...]  # by layer: whether it has routed experts

    def layers(
        self, attention: GroupedQuery | Latent, sparse: Sparse | None, post_norm_gguf: str = "ffn_norm"
    ) -> tuple[LayerSpec, ...]:
        """Layers of one attention, with `sparse` or a dense MLP."""
        dense = Dense(self.intermediate_size)
        mlps = (sparse if routed and sparse else dense for routed in self.sparse)
        return tuple(LayerSpec(attention, mlp, post_norm_gguf) for mlp in mlps)

    @property
    def router(self) -> Router:
        """A softmax over all experts, of which the largest are taken."""
        return Router(normalise=0.0 if self.norm_topk_prob else None)


def checked(router: Router, numbers: Numbers, where: str) -> Router:
    """ModelFileError if the experts cannot be routed so."""
    if numbers.num_experts and (problem := router.check(numbers.num_experts, numbers.num_experts_per_tok)):
        raise ModelFileError(f"{where}: {problem}", problem.partition(" ")[0])
    return router


def extra_layer(layer: int) -> LeftOut:
    """A layer behind the model's own, for predicting several tokens at once."""
    what = f"layer {layer} (multi-token prediction)"
    return LeftOut(what, f"model.layers.{layer}.", f"blk.{layer}.")


def mtp_of(
    layers: tuple[LayerSpec, ...],
    part: LeftOut,
    names: StoredNames = AS_HERE,
    copies: tuple[LeftOut, ...] = (),
) -> Mtp:
    """As the model's last layers are: of those with full attention and, if there are any, routed experts."""
    attention = next(layer.attention for layer in reversed(layers) if not isinstance(layer.attention, DeltaNet))
    last = next((layer for layer in reversed(layers) if isinstance(layer.mlp, Sparse)), layers[-1])
    return Mtp(replace(last, attention=attention, predicts=True), part, names, copies)


def extra_mtp(layers: tuple[LayerSpec, ...]) -> Mtp:
    """The first layer behind the model's own, of files that number it as they do those."""
    at, what = len(layers), "the layer of multi-token prediction's copy of"
    copies = (
        LeftOut(f"{what} the embedding", f"model.layers.{at}.embed_tokens.", f"blk.{at}.nextn.embed_tokens."),
        LeftOut(f"{what} the head", f"model.layers.{at}.shared_head.head.", f"blk.{at}.nextn.shared_head_head."),
    )
    return mtp_of(layers, extra_layer(at), copies=copies)


def check_numbers(numbers: Numbers, where: str) -> Numbers:
    """What must hold between them. Returns the numbers; ModelFileError names the field."""

    def refuse(name: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{where}: {name} {problem}", name)

    if numbers.num_attention_heads % numbers.num_key_value_heads:
        raise refuse(
            "num_attention_heads",
            f"is {numbers.num_attention_heads}, not a multiple of num_key_value_heads {numbers.num_key_value_heads}",
        )
    if numbers.head_dim % 2:
        raise refuse("head_dim", f"is {numbers.head_dim}; rotary embedding needs an even number")
    if numbers.num_experts and numbers.num_experts_per_tok > numbers.num_experts:
        raise refuse("num_experts_per_tok", f"is {numbers.num_experts_per_tok} of {numbers.num_experts} experts")
    return numbers
