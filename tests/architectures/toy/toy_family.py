"""A model family that nobody else has, as an installed package brings one: a norm over all queries and keys, half of
each head rotated, sigmoid routing with a bias and groups, an ungated shared expert, a dense first layer, and tensors
under names of its own."""

from __future__ import annotations

from engine.architectures.base import Architecture
from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel
from engine.architectures.names import StoredNames
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Dense, Router, SharedExpert, Sparse
from engine.architectures.parts.rotation import Rotation
from engine.errors import ModelFileError
from rules import Family, named_after


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    hidden, heads, dim = fields.integer("width"), fields.integer("heads"), fields.integer("head_width")
    positions, inner = fields.integer("positions"), fields.integer("expert_width")
    rotation = Rotation(dim // 2, fields.number("theta"), positions)
    attention = GroupedQuery(heads, fields.integer("kv_heads"), dim, rotation, qk_norm="whole")
    router = Router("sigmoid", normalise=1e-20, scale=2.5, bias=True, groups=4, top_groups=2, group_score="top2")
    shared = SharedExpert.of(2 * inner, gated=False)
    sparse = Sparse(fields.integer("experts"), fields.integer("chosen"), inner, router, shared)
    dense = LayerSpec(attention, Dense(fields.integer("dense_width")))
    layers = (dense, *[LayerSpec(attention, sparse)] * (fields.integer("depth") - 1))
    vocab = fields.integer("vocabulary")
    return ModelConfig(
        architecture="toy_moe",
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        rms_norm_eps=1e-5,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=fields.tokens("eos_token_id", vocab) or (),
        dtype="float32",
    )


def _read_gguf(file: GGUFModel) -> ModelConfig:
    raise ModelFileError(f"{file.where}: toy models are stored as safetensors alone", "model")


TOY = Architecture(
    name="toy_moe",
    model_class="ToyForCausalLM",
    gguf="toymoe",
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    lora_targets=(*GroupedQuery.TARGETS, *Sparse.TARGETS, *Dense.TARGETS, *SharedExpert.TARGETS[:3]),
    stored_names=StoredNames(
        (
            ("blocks.*", "model.layers.*"),
            *((f"mix.{part}", f"self_attn.{part}_proj") for part in "qkvo"),
            *((f"mix.{part}_gain", f"self_attn.{part}_norm") for part in "qk"),
        )
    ),
    rules=Family(classes=named_after("Toy"), packages=("toy_family",)),
)
