"""Which tensors a Qwen3MoE of a given configuration has, by their Hugging Face names, and how GGUF calls them.

Torch-free. Shapes are C order, [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.model_config import ModelConfig

Shape = tuple[int, ...]

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_WHOLE = {EMBED: "token_embd.weight", NORM: "output_norm.weight", HEAD: "output.weight"}


def dense_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor but the routed experts, and its shape. A tied head has no tensor of its own."""
    hidden = config.hidden_size
    tensors: dict[str, Shape] = {EMBED: (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_tensors(config, layer)}
    tensors[NORM] = (hidden,)
    if not config.tie_word_embeddings:
        tensors[HEAD] = (config.vocab_size, hidden)
    return tensors


def _layer_tensors(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, head = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    yield "input_layernorm.weight", (hidden,)
    for name, out, inner in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
        yield f"self_attn.{name}_proj.weight", (out, inner)
        if config.attention_bias:
            yield f"self_attn.{name}_proj.bias", (out,)
    yield "self_attn.q_norm.weight", (head,)
    yield "self_attn.k_norm.weight", (head,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.is_sparse(layer):
        yield "mlp.gate.weight", (config.num_experts, hidden)
    else:
        yield "mlp.gate_proj.weight", (config.intermediate_size, hidden)
        yield "mlp.up_proj.weight", (config.intermediate_size, hidden)
        yield "mlp.down_proj.weight", (hidden, config.intermediate_size)


def expert_shape(config: ModelConfig, projection: str) -> Shape:
    """[out, in] of one expert's "gate", "up", "down", or of "gate_up" (gate's rows, then up's)."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    return {"gate": (inner, hidden), "up": (inner, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}[
        projection
    ]


def gguf_name(name: str) -> str:
    """What GGUF calls a tensor: `model.layers.3.self_attn.q_proj.weight` is `blk.3.attn_q.weight`."""
    if name in _GGUF_WHOLE:
        return _GGUF_WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_PARTS[part]}.{suffix}"


def gguf_expert_name(layer: int, projection: str) -> str:
    """`blk.3.ffn_gate_exps.weight`: all experts of a layer's "gate", "up", "down" or "gate_up"."""
    return f"blk.{layer}.ffn_{projection}_exps.weight"
