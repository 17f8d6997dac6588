"""Which tensors a model of a given configuration has, by their names here, and how GGUF calls them.

Torch-free. Shapes are C order, [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.architectures.config import ModelConfig
from engine.architectures.registry import architecture_of

Shape = tuple[int, ...]

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
GGUF_HEAD = "output.weight"
ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")  # modules computed in float32, whatever the rest is computed in


def dense_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor but the routed experts, and its shape. A tied head has no tensor of its own."""
    return {name: shape for name, _, shape in _tensors(config)}


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """What GGUF calls them: `model.layers.3.self_attn.q_proj.weight` is `blk.3.attn_q.weight`."""
    return {name: stored for name, stored, _ in _tensors(config)}


def _tensors(config: ModelConfig) -> Iterator[tuple[str, str, Shape]]:
    architecture, table = architecture_of(config), (config.vocab_size, config.hidden_size)
    yield EMBED, "token_embd.weight", table
    for layer in range(config.num_hidden_layers):
        for module in architecture.modules(config, layer):
            at, stored = f"model.layers.{layer}.{module.name}", f"blk.{layer}.{module.gguf}"
            if module.shape:
                yield f"{at}.weight", f"{stored}.weight", module.shape
            if module.bias:
                yield f"{at}.bias", f"{stored}.bias", module.shape[:1]
    yield NORM, "output_norm.weight", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield HEAD, GGUF_HEAD, table


def expert_shape(config: ModelConfig, projection: str) -> Shape:
    """[out, in] of one expert's "gate", "up", "down", or of "gate_up" (gate's rows, then up's)."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    return {"gate": (inner, hidden), "up": (inner, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}[
        projection
    ]


def gguf_expert_name(layer: int, projection: str) -> str:
    """`blk.3.ffn_gate_exps.weight`: all experts of a layer's "gate", "up", "down" or "gate_up"."""
    return f"blk.{layer}.ffn_{projection}_exps.weight"
