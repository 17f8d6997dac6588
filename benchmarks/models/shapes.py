"""The shapes that GGUF files of random weights have, and the tensors of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGML

from benchmarks.models.configs import (
    DEEPSEEK_V2_LITE,
    GLM_4_7_FLASH,
    GPT_OSS_20B,
    MIXTRAL_8X7B,
    QWEN3_5_35B_A3B,
)
from engine.architectures.config import ModelConfig
from engine.architectures.parts.mla import Latent
from engine.architectures.registry import architecture_of, config_from_hf
from engine.weights.layout import expert_shape, gguf_expert_name, tensors

Stored = tuple[str, tuple[int, ...], GGML]
VOCABULARY = 32000  # of every shape: the tables are small beside the layers, as they are in a whole model


@dataclass(frozen=True)
class Shape:
    """What of the model's config the benchmarks vary; the default is Qwen3-30B-A3B but for layers and vocabulary.
    `family`: GGUF's name of it. `described`: the config.json of another family, of which the other fields tell little.
    """

    layers: int = 8
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    top_k: int = 8
    intermediate: int = 768
    vocabulary: int = VOCABULARY
    context: int = 40960
    family: str = "qwen3moe"
    described: tuple[tuple[str, Any], ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.described) | {"num_hidden_layers": self.layers, "vocab_size": self.vocabulary}


def described_shape(config: dict[str, Any]) -> Shape:
    """That of a config.json, but for the vocabulary."""
    known = config_from_hf(config)
    return Shape(
        layers=known.num_hidden_layers,
        hidden=known.hidden_size,
        experts=known.num_experts,
        top_k=known.num_experts_per_tok,
        intermediate=known.moe_intermediate_size,
        context=known.max_position_embeddings,
        family=architecture_of(known).gguf,
        described=tuple(config.items()),
    )


SHAPES: dict[str, Shape] = {
    "qwen3-30b-a3b": Shape(),
    "qwen3.5-35b-a3b": described_shape(QWEN3_5_35B_A3B),
    "deepseek-v2-lite": described_shape(DEEPSEEK_V2_LITE),
    "glm-4.7-flash": described_shape(GLM_4_7_FLASH),
    "gpt-oss-20b": described_shape(GPT_OSS_20B),
    "mixtral-8x7b": described_shape(MIXTRAL_8X7B),
}


def tensor_types(shape: Shape, mix: str) -> Iterator[Stored]:
    """Name, shape (slowest first) and stored type of every tensor, in file order. `mix`: one of make.TYPES, or the name
    of a GGUF type, which all matrices but routers then have; gpt-oss' MXFP4 is of its experts, its others are Q8_0."""
    plain = GGML.Q4_K if mix == "Q4_K_M" else GGML[mix]
    better = GGML.Q6_K if mix == "Q4_K_M" else plain
    found = _described_tensors(config_from_hf(shape.config)) if shape.described else _qwen3_tensors(shape)
    for name, dims in found:
        part = name.split(".")[-2]
        if len(dims) == 1 or name.endswith(".bias") or part in ("ffn_gate_inp", "ssm_conv1d"):
            yield name, dims, GGML.F32
            continue
        type = better if name == "output.weight" else plain
        if part in ("attn_v", "ffn_down", "ffn_down_exps", "ffn_down_shexp"):
            type = better if _has_more_bits(int(name.split(".")[1]), shape.layers) else plain
        if mix == "MXFP4" and "_exps" not in part:
            type = GGML.Q8_0
        yield name, dims, _that_fits(type, dims[-1])


def _has_more_bits(layer: int, layers: int) -> bool:
    """In llama.cpp's mix: the first and last eighth, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _that_fits(type: GGML, width: int) -> GGML:
    """What llama.cpp takes for rows that do not divide into blocks of 256."""
    if width % GGML_QUANT_SIZES[type][0] == 0:
        return type
    return {GGML.Q4_K: GGML.Q5_0, GGML.Q6_K: GGML.Q8_0}.get(type, type)


def _qwen3_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    q, kv, h = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    experts, inner = shape.experts, shape.intermediate
    yield "token_embd.weight", (shape.vocabulary, h)
    for i in range(shape.layers):
        for name, dims in (
            ("attn_norm", (h,)),
            ("attn_q", (q, h)),
            ("attn_k", (kv, h)),
            ("attn_v", (kv, h)),
            ("attn_output", (h, q)),
            ("attn_q_norm", (shape.head_dim,)),
            ("attn_k_norm", (shape.head_dim,)),
            ("ffn_norm", (h,)),
            ("ffn_gate_inp", (experts, h)),
            ("ffn_gate_exps", (experts, inner, h)),
            ("ffn_up_exps", (experts, inner, h)),
            ("ffn_down_exps", (experts, h, inner)),
        ):
            yield f"blk.{i}.{name}.weight", dims
    yield "output_norm.weight", (h,)
    yield "output.weight", (shape.vocabulary, h)


def _described_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """As llama.cpp's converter writes them: latent keys and values apart, vectors where there is one row."""
    for tensor in tensors(config).values():
        name, dims = tensor.gguf, tensor.shape
        if name.endswith("attn_kv_b.weight"):
            latent = config.layers[int(name.split(".")[1])].attention
            assert isinstance(latent, Latent)
            yield name.replace("kv_b", "k_b"), (latent.heads, latent.kv_rank, latent.nope_dim)
            yield name.replace("kv_b", "v_b"), (latent.heads, latent.value_dim, latent.kv_rank)
        elif name.endswith("ssm_conv1d.weight"):
            yield name, (dims[0], dims[-1])
        else:
            yield name, dims[1:] if len(dims) == 2 and dims[0] == 1 else dims
    for layer in config.sparse_layers:
        for part in ("gate", "up", "down"):
            yield gguf_expert_name(layer, part), (config.num_experts, *expert_shape(config, part))
