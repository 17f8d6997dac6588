"""What the families' readers of GGUF metadata share. Torch-free.

Where the metadata is silent, what llama.cpp does holds: the head is tied when there is no `output.weight`, and every
end-of-turn token the vocabulary marks as control ends a generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.numbers import SIGMOID_EPSILON, Numbers, check_numbers, checked, extra_layer, extra_mtp
from engine.architectures.parts.mlp import Router
from engine.architectures.parts.rotation import RopeScaling, Rotation
from engine.errors import ModelFileError, shown
from engine.files.gguf.header import GGUFArray

_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|return|>", "<|call|>")
_CONTROL = 3  # tokenizer.ggml.token_type
_GATING = "expert_gating_func"
_SOFTMAX, _SIGMOID = 1, 2
PARTIAL_ROTATION, FIRST_DENSE, EXTRA_LAYERS = (
    "rope.dimension_count",
    "leading_dense_block_count",
    "nextn_predict_layers",
)
SIGMOID_KEYS = (_GATING, "expert_weights_scale", "expert_group_count")


@dataclass(frozen=True)
class GGUFModel:
    """What a GGUF file says of its model: `tensors` are names and C-order shapes, `types` the types that occur, `where`
    begins messages. Keys of the architecture are read without their prefix, through `fields`."""

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]
    types: Collection[str]
    where: str

    @property
    def attention_bias(self) -> bool:
        return "blk.0.attn_q.bias" in self.tensors

    @cached_property
    def fields(self) -> Fields:
        return Fields(_own(self.metadata, self.architecture), f"{self.where}: {self.architecture}", ".")


def config_of_gguf(
    file: GGUFModel,
    *,
    architecture: str,
    norm_topk_prob: bool,
    layers: Callable[[Numbers], tuple[LayerSpec, ...]],
    shared_expert: bool = False,
    divided: bool = True,
    reads: Collection[str] = (),
) -> ModelConfig:
    """`layers`: what the family makes of the numbers. `norm_topk_prob` holds where the file has no
    `expert_weights_norm`; `divided`: where the experts' width is not stored, `feed_forward_length` is that of a token's
    experts together, otherwise of each. `reads`: keys that mean something in the family (`PARTIAL_ROTATION`,
    `FIRST_DENSE`, `EXTRA_LAYERS`, those that `layers` reads), and may otherwise have one value alone. Raises
    ModelFileError."""
    fields, tensors, where = file.fields, file.tensors, file.where
    _refuse_unsupported(fields, shared_expert, reads)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelFileError(f"{where}: tensor token_embd.weight is missing or not two-dimensional", "model")
    vocab, positions = embedding[0], fields.integer("context_length")
    numbers = check_numbers(_numbers(file, norm_topk_prob, positions, divided, reads), where)
    extra = fields.integer(EXTRA_LAYERS, 0, least=0)
    tokenizer = Fields(file.metadata, where)
    made = layers(numbers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=numbers.hidden_size,
        layers=made,
        rms_norm_eps=float32(fields.number("attention.layer_norm_rms_epsilon")),
        max_position_embeddings=positions,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=tokenizer.token("tokenizer.ggml.bos_token_id", vocab),
        eos_token_ids=_end_tokens(tokenizer, vocab),
        dtype="float32" if set(file.types) == {"F32"} else "bfloat16",
        left_out=tuple(extra_layer(numbers.num_hidden_layers + layer) for layer in range(extra)),
        mtp=extra_mtp(made) if extra else None,
    )


def sigmoid_router(file: GGUFModel, numbers: Numbers, epsilon: float = SIGMOID_EPSILON) -> Router:
    """Of a file whose experts are chosen by sigmoids, with a bias and perhaps groups. What `config_of_gguf` is told to
    read is `SIGMOID_KEYS`. `epsilon` is added to the sum of weights."""
    fields = file.fields
    if fields.integer(_GATING, _SIGMOID) != _SIGMOID:
        raise fields.error(_GATING, f"is {fields.get(_GATING)}; allowed is {_SIGMOID} (sigmoid)")
    router = Router(
        score="sigmoid",
        normalise=epsilon if numbers.norm_topk_prob else None,
        scale=float32(fields.number("expert_weights_scale", 0.0, above=-1e-9)) or 1.0,
        bias=True,
        groups=fields.integer("expert_group_count", 1, least=0) or 1,
        top_groups=fields.integer("expert_group_used_count", 1, least=0) or 1,
        group_score="top2",
    )
    return checked(router, numbers, file.where)


def _numbers(file: GGUFModel, norm_topk_prob: bool, positions: int, divided: bool, reads: Collection[str]) -> Numbers:
    fields, tensors = file.fields, file.tensors
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    count, used = fields.integer("block_count"), fields.integer("expert_used_count")
    extra = fields.integer(EXTRA_LAYERS, 0, least=0)
    if extra >= count:
        raise fields.error(EXTRA_LAYERS, f"is {extra} of {count} layers")
    count -= extra
    forward = fields.integer("feed_forward_length", 0, least=0)
    inner = fields.integer("expert_feed_forward_length", forward // used if divided else forward)
    head = fields.integer("attention.key_length", hidden // heads)
    for name in {"attention.value_length", PARTIAL_ROTATION} - set(reads):
        if fields.integer(name, head) != head:
            raise fields.error(name, f"is {fields.get(name)}; it must equal the head size {head}")
    rotated = fields.integer(PARTIAL_ROTATION, head)
    if rotated > head or rotated % 2:
        raise fields.error(PARTIAL_ROTATION, f"is {rotated}; allowed is an even number to the head size {head}")
    theta = float32(fields.number("rope.freq_base", 10000.0))
    stored = min(count, len(tensors))  # more layers than tensors are refused later, by name
    dense = {layer for layer in range(stored) if f"blk.{layer}.ffn_gate.weight" in tensors}
    if FIRST_DENSE in reads and (first := fields.integer(FIRST_DENSE, 0, least=0)) != len(dense):
        raise fields.error(FIRST_DENSE, f"is {first}, and {len(dense)} layers have tensors of a dense MLP")
    return Numbers(
        hidden_size=hidden,
        num_hidden_layers=count,
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head,
        rotation=Rotation(rotated, theta, positions, _rope_scaling(fields, positions)),
        num_experts=fields.integer("expert_count"),
        num_experts_per_tok=used,
        moe_intermediate_size=inner,
        intermediate_size=forward or inner,
        norm_topk_prob=fields.boolean("expert_weights_norm", norm_topk_prob),
        sparse=tuple(layer not in dense for layer in range(count)),
    )


def _own(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The architecture's keys without their prefix. A per-layer array of equal values counts as the value."""
    own: dict[str, Any] = {}
    for key, value in metadata.items():
        if not key.startswith(f"{architecture}."):
            continue
        if isinstance(value, GGUFArray) and not value.holds_strings and len(value):
            numbers = value.numpy()
            value = value[0] if (numbers == numbers[0]).all() else f"an array of {len(value)} differing values"
        own[key.removeprefix(f"{architecture}.")] = value
    return own


def _refuse_unsupported(fields: Fields, shared_expert: bool, reads: Collection[str]) -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "attention.sliding_window": (0,),
        _GATING: (_SOFTMAX,),
        "expert_weights_scale": (0.0, 1.0),
        "expert_shared_count": (0, 1) if shared_expert else (0,),
        "expert_group_count": (0, 1),
        FIRST_DENSE: (0,),
        EXTRA_LAYERS: (0,),
        "rope.scaling.yarn_ext_factor": (1.0,),
        "rope.scaling.yarn_log_multiplier": (0.0,),
        "rope.scaling.alpha": (0.0,),
    }
    for name, values in allowed.items():
        value = fields.get(name)
        if name not in reads and value is not None and value not in values:
            raise fields.error(name, f"is {shown(value)}; allowed is {' or '.join(map(str, values))}")
    if not shared_expert and fields.get("expert_shared_feed_forward_length") not in (None, 0):
        raise fields.error("expert_shared_feed_forward_length", "is set, but this architecture has no shared expert")


def _rope_scaling(fields: Fields, positions: int) -> RopeScaling | None:
    """llama.cpp takes an absent type as linear and an absent or zero factor as 1. `attn_factor` multiplies yarn's own
    factor, and `yarn_attn_factor` replaces it: its converter makes it of attention_factor."""
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise fields.error("rope.scaling.type", f"is {shown(kind)}; allowed are none, linear and yarn")
    factor = fields.number("rope.scaling.factor", fields.get("rope.scale_linear", 0.0), above=-1e-9) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    extra, own = fields.number("rope.scaling.attn_factor", 1.0), fields.get("rope.scaling.yarn_attn_factor")
    whole = 0.1 * math.log(max(factor, 1.0)) + 1.0
    if own is not None:
        whole = float32(fields.number("rope.scaling.yarn_attn_factor"))
    attention = None if own is None and extra == 1.0 else extra * whole
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length", positions),
        attention_factor=attention,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _end_tokens(fields: Fields, vocab: int) -> tuple[int, ...]:
    """eos, eot and eom of the metadata, and the control tokens that a chat's turns end with."""
    named = (fields.token(f"tokenizer.ggml.{kind}_token_id", vocab) for kind in ("eos", "eot", "eom"))
    ends = [token for token in named if token is not None]
    texts, kinds = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    if isinstance(texts, GGUFArray) and isinstance(kinds, GGUFArray) and not kinds.holds_strings:
        control = np.flatnonzero(kinds.numpy()[: min(len(texts), vocab)] == _CONTROL)
        ends += [int(token) for token in control if texts[int(token)] in _END_TEXTS]
    return tuple(dict.fromkeys(ends))


def float32(value: float) -> float:
    """The shortest decimal that a stored float32 stands for: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))
