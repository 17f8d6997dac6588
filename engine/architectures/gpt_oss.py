"""gpt-oss (20b, 120b): every other layer attends to a window; sinks; biases on all projections, routers and experts; a
SwiGLU with limits; experts in MXFP4, gate and up by turns. Defaults are those of transformers' GptOssConfig. Its router
takes a softmax over the chosen logits, which is that over all divided by the sum of the chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.architectures import gguf, hf
from engine.architectures.base import Architecture
from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.names import StoredNames
from engine.architectures.numbers import Numbers
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Activation, Router, Sparse
from engine.errors import shown
from rules import Family

_NAME, _GGUF = "gpt_oss", "gpt-oss"
_STORED = StoredNames((("mlp.router", "mlp.gate"),))
_DEFAULTS = hf.Defaults(
    vocab_size=201088,
    hidden_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    intermediate_size=2880,
    num_experts=128,
    num_experts_per_tok=4,
    moe_intermediate_size=None,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    head_dim=64,
)
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_WINDOW, _LIMIT, _ALPHA = 128, 7.0, 1.702
_KINDS = {"sliding_attention": True, "full_attention": False}
_SOFTMAX_OF_CHOSEN = 3  # expert_gating_func


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    count = fields.integer("num_hidden_layers", _DEFAULTS.num_hidden_layers)
    kinds = fields.get("layer_types", [list(_KINDS)[layer % 2] for layer in range(count)])
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in _KINDS for kind in kinds):
        raise fields.error("layer_types", f"is {shown(kinds)}; allowed are {count} of {' and '.join(_KINDS)}")
    window = fields.integer("sliding_window", _WINDOW)
    activation = Activation(fields.number("swiglu_limit", _LIMIT), fields.number("swiglu_alpha", _ALPHA))
    bias = fields.boolean("attention_bias", True)
    rope = {} if fields.get("rope_parameters") or fields.get("rope_scaling") else {"rope_parameters": _ROPE}
    common = {name: value for name, value in fields.values.items() if name != "layer_types"} | rope

    def layers(n: Numbers) -> tuple[LayerSpec, ...]:
        return _layers(n, [window if _KINDS[kind] else None for kind in kinds], activation, bias=bias)

    given = Fields(common, fields.where, fields.joint)
    return hf.config_of_hf(given, generation, _DEFAULTS, architecture=_NAME, layers=layers)


def _read_gguf(file: gguf.GGUFModel) -> ModelConfig:
    """llama.cpp knows which layers have a window, and the activation's numbers."""
    fields = file.fields
    window = fields.integer("attention.sliding_window", _WINDOW)
    if fields.get("expert_gating_func") not in (None, 0, _SOFTMAX_OF_CHOSEN):
        raise fields.error("expert_gating_func", f"is not {_SOFTMAX_OF_CHOSEN} (a softmax over the chosen experts)")

    def layers(n: Numbers) -> tuple[LayerSpec, ...]:
        if (scaling := n.rotation.scaling) is not None and scaling.kind == "yarn":
            n = replace(n, rotation=replace(n.rotation, scaling=replace(scaling, extra={"truncate": False})))
        windows = [None if layer % 2 else window for layer in range(n.num_hidden_layers)]
        return _layers(n, windows, Activation(_LIMIT, _ALPHA), bias=file.attention_bias)

    reads = ("attention.sliding_window", "expert_gating_func")
    return gguf.config_of_gguf(
        file, architecture=_NAME, norm_topk_prob=True, layers=layers, divided=False, reads=reads
    )  # fmt: skip


def _layers(
    n: Numbers, windows: list[int | None], activation: Activation, *, bias: bool
) -> tuple[LayerSpec, ...]:  # fmt: skip
    sparse = Sparse(
        n.num_experts, n.num_experts_per_tok, n.moe_intermediate_size, Router(), size="intermediate_size",
        activation=activation, gate_bias=True, expert_bias=True, interleaved=True,
    )  # fmt: skip
    attention = GroupedQuery(
        n.num_attention_heads, n.num_key_value_heads, n.head_dim, n.rotation,
        bias=bias, output_bias=bias, sinks=True,
    )  # fmt: skip
    return tuple(LayerSpec(replace(attention, window=window), sparse, "post_attention_norm") for window in windows)


def _own_fields(config: ModelConfig) -> dict[str, Any]:
    windows = [isinstance(layer.attention, GroupedQuery) and layer.attention.window for layer in config.layers]
    activation = config.experts.activation if config.experts is not None else Activation(_LIMIT, _ALPHA)
    return {
        "num_local_experts": config.num_experts,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "swiglu_limit": activation.limit,
        "swiglu_alpha": activation.alpha,
    }


GPT_OSS = Architecture(
    name=_NAME,
    model_class="GptOssForCausalLM",
    gguf=_GGUF,
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    lora_targets=(*GroupedQuery.TARGETS, *Sparse.TARGETS),
    stored_names=_STORED,
    own_fields=_own_fields,
    rules=Family(
        classes={
            "GptOssModel": "model",
            "GptOssDecoderLayer": "layer",
            "GptOssAttention": "attention",
            "GptOssMLP": "moe_block",
            "GptOssExperts": "experts",
            "GptOssRMSNorm": "norm",
            "GptOssRotaryEmbedding": "rope",
        },
        packages=("transformers.models.gpt_oss.modeling_gpt_oss",),
        stored_name=_STORED.stored,
    ),
)
