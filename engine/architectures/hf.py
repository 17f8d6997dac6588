"""What the families' readers of config.json share, in the spelling of transformers 4 or 5. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.architectures.config import ModelConfig, RopeScaling
from engine.architectures.fields import Fields, check_config
from engine.architectures.quantisation import read_quantisation
from engine.errors import shown

_ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "partial_rotary_factor",
}
_ROPE_EXTRA = {"mscale", "mscale_all_dim", "truncate"}
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Defaults:
    """What absent fields mean, by family: transformers' defaults."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int


def config_of_hf(
    fields: Fields,
    generation: Fields,
    defaults: Defaults,
    *,
    architecture: str,
    attention_bias: bool,
    qk_norm: bool,
    shared_expert_intermediate_size: int = 0,
) -> ModelConfig:
    """`fields` is config.json, `generation` generation_config.json. Raises ModelFileError."""
    _refuse_unsupported(fields)
    vocab = fields.integer("vocab_size", 151936)
    hidden = fields.integer("hidden_size", defaults.hidden_size)
    heads = fields.integer("num_attention_heads", defaults.num_attention_heads)
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error("head_dim", f"is missing and hidden_size {hidden} is not a multiple of {heads} heads")
    positions = fields.integer("max_position_embeddings", 32768)
    theta, scaling = _rope(fields, positions)
    eos = generation.tokens("eos_token_id", vocab)
    bos = generation.token("bos_token_id", vocab)
    result = ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=fields.integer("num_hidden_layers", 24),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", defaults.num_key_value_heads),
        head_dim=fields.integer("head_dim", hidden // heads),
        num_experts=_num_experts(fields, defaults.num_experts),
        num_experts_per_tok=fields.integer("num_experts_per_tok", defaults.num_experts_per_tok),
        moe_intermediate_size=fields.integer("moe_intermediate_size", defaults.moe_intermediate_size),
        intermediate_size=fields.integer("intermediate_size", defaults.intermediate_size),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
        attention_bias=attention_bias,
        qk_norm=qk_norm,
        shared_expert_intermediate_size=shared_expert_intermediate_size,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        decoder_sparse_step=fields.integer("decoder_sparse_step", 1),
        mlp_only_layers=_layers(fields),
        bos_token_id=fields.token("bos_token_id", vocab) if bos is None else bos,
        eos_token_ids=(fields.tokens("eos_token_id", vocab) or ()) if eos is None else eos,
        dtype=_dtype(fields),
        quantisation=read_quantisation(fields),
    )
    return check_config(result, fields.where)


def _refuse_unsupported(fields: Fields) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", f"is {shown(fields.get('hidden_act'))}; only 'silu' can be served")
    window = fields.values.get("sliding_window", 4096)
    if fields.boolean("use_sliding_window", False) and window is not None:
        raise fields.error(
            "use_sliding_window", f"is true with a window of {shown(window)}; sliding windows cannot be served"
        )
    kinds = fields.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise fields.error("layer_types", f"is {shown(kinds)}; only lists of 'full_attention' can be served")


def _num_experts(fields: Fields, default: int) -> int:
    """transformers 4 wrote num_experts, 5 writes num_local_experts."""
    name = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
    return fields.integer(name, default, least=0)


def _layers(fields: Fields) -> tuple[int, ...]:
    layers = fields.get("mlp_only_layers", [])
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise fields.error("mlp_only_layers", f"is {shown(layers)}; allowed is a list of layer numbers")
    return tuple(sorted(set(layers)))


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "bfloat16")).removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.error("dtype", f"is {shown(name)}; allowed are {', '.join(_DTYPES)}")
    return name


def _rope(fields: Fields, positions: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    values = fields.get(name, {})
    if not isinstance(values, Mapping):
        raise fields.error(name, f"is {shown(values)}; allowed is an object")
    rope = Fields(values, f"{fields.where}: {name}")
    unknown = set(values) - _ROPE_KEYS - _ROPE_EXTRA
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ("default", "linear", "dynamic", "yarn"):
        raise rope.error("rope_type", f"is {shown(kind)}; allowed are default, linear, dynamic and yarn")
    if unknown:
        raise rope.error(shown(min(unknown)), "is not known")
    partial = rope.number("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise rope.error("partial_rotary_factor", f"is {partial}; only 1 can be served")
    theta = rope.number("rope_theta", fields.get("rope_theta", 10000.0))
    if kind == "default":
        return theta, None
    original = rope.get("original_max_position_embeddings")
    if kind == "yarn":
        original = rope.integer("original_max_position_embeddings", positions)
        factor = rope.number("factor", positions / original)
    else:
        factor = rope.number("factor")
    attention = rope.get("attention_factor")
    return theta, RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=None if attention is None else rope.number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        extra={key: values[key] for key in sorted(_ROPE_EXTRA & set(values)) if values[key] is not None},
    )
