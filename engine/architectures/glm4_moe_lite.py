"""GLM-4.7-Flash: the layers of DeepSeek V3 in other sizes. Defaults are those of transformers' Glm4MoeLiteConfig.
llama.cpp keeps it as a `deepseek2`, known by its size, whose routers are sigmoid though the file does not say so."""

from __future__ import annotations

from engine.architectures.base import Architecture
from engine.architectures.config import ModelConfig
from engine.architectures.deepseek_v3 import DEEPSEEK_V3, SUM_EPS, router_of_gguf
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel
from engine.architectures.hf import Defaults, config_of_hf, extra_layers
from engine.architectures.latent import (
    TARGETS,
    checked_router,
    common_fields,
    latent_config_of_gguf,
    latent_fields,
    latent_layers,
    latent_sizes,
)
from engine.architectures.numbers import extra_mtp
from engine.architectures.parts.mlp import Router
from engine.errors import shown
from rules import Family, named_after

_NAME = "glm4_moe_lite"
_DEFAULTS = Defaults(
    vocab_size=154880,
    hidden_size=2048,
    num_hidden_layers=47,
    num_attention_heads=20,
    num_key_value_heads=20,
    intermediate_size=10240,
    num_experts=64,
    num_experts_per_tok=4,
    moe_intermediate_size=1536,
    max_position_embeddings=202752,
    rms_norm_eps=1e-5,
)
_GGUF_LAYERS, _GGUF_WORDS = (47, 48), 154880


def _read_hf(fields: Fields, generation: Fields) -> ModelConfig:
    router = Router(
        "sigmoid",
        normalise=SUM_EPS if fields.boolean("norm_topk_prob", True) else None,
        scale=fields.number("routed_scaling_factor", 1.8),
        bias=True,
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        group_score="top2",
    )
    interleaved = fields.boolean("rope_interleave", True)
    sizes = latent_sizes(fields, shared=1, interleaved=interleaved, q_rank=768, nope=192, value=256)
    router = checked_router(fields, router, _DEFAULTS)
    count = fields.integer("num_hidden_layers", _DEFAULTS.num_hidden_layers)
    extra = extra_layers(fields, count, "num_nextn_predict_layers", 0)
    return config_of_hf(
        common_fields(fields, _DEFAULTS, dense=_dense(fields, count)), generation, _DEFAULTS,
        architecture=_NAME, layers=lambda n: latent_layers(n, sizes, router),
        left_out=extra, mtp=extra_mtp if extra else None,
    )  # fmt: skip


def _dense(fields: Fields, count: int) -> int:
    """How many layers come before those with experts: the first, or what mlp_layer_types says."""
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        return 1
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (count - dense):
        raise fields.error(
            "mlp_layer_types", f"is {shown(kinds)}; allowed is 'dense' and then 'sparse', one for a layer"
        )
    return dense


def _of_gguf(file: GGUFModel) -> bool:
    embedding, layers = file.tensors.get("token_embd.weight", (0,)), file.fields.get("block_count")
    return embedding[0] == _GGUF_WORDS and layers in _GGUF_LAYERS


def _read_gguf(file: GGUFModel) -> ModelConfig:
    return latent_config_of_gguf(file, _NAME, router_of_gguf)


GLM4_MOE_LITE = Architecture(
    name=_NAME,
    model_class="Glm4MoeLiteForCausalLM",
    gguf=DEEPSEEK_V3.gguf,
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    of_gguf=_of_gguf,
    own_fields=latent_fields,
    lora_targets=TARGETS,
    rules=Family(
        classes={
            **{name: kind for name, kind in named_after("Glm4MoeLite").items() if kind != "moe_block"},
            "Glm4MoeLiteMoE": "moe_block",
            "Glm4MoeLiteTopkRouter": "router",
        },
        packages=("transformers.models.glm4_moe_lite.modeling_glm4_moe_lite",),
    ),
)
