"""Which tensors a model of a given configuration has, by their names here, and how GGUF calls them.

Torch-free. Shapes are C order, [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.architectures.config import ModelConfig
from engine.architectures.parts.base import Module, Shape

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
GGUF_HEAD = "output.weight"


@dataclass(frozen=True)
class Tensor:
    """A tensor beside the routed experts. `module`: whose it is, None of what belongs to none."""

    name: str
    gguf: str
    shape: Shape
    module: Module | None = None
    negative_log: bool = False  # as `Vector` has it

    @property
    def is_norm(self) -> bool:
        """Whether it is the weight of a norm that is a module, or of the last one."""
        return self.name == NORM or (self.module is not None and self.module.kind == "norm")


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor but the routed experts, by name. A tied head has no tensor of its own."""
    return {tensor.name: tensor for tensor in _tensors(config)}


def _tensors(config: ModelConfig) -> Iterator[Tensor]:
    table = (config.vocab_size, config.hidden_size)
    yield Tensor(EMBED, "token_embd.weight", table)
    for index, layer in enumerate(config.layers):
        at, stored = f"model.layers.{index}", f"blk.{index}"
        for module in layer.modules(config.hidden_size):
            name, gguf = f"{at}.{module.name}", f"{stored}.{module.gguf}"
            if module.shape:
                yield Tensor(f"{name}.weight", f"{gguf}.weight", module.shape, module)
            if module.bias:
                yield Tensor(f"{name}.bias", f"{gguf}.bias", module.shape[:1], module)
        for vector in layer.vectors(config.hidden_size):
            name, gguf = f"{at}.{vector.name}", f"{stored}.{vector.gguf}"
            yield Tensor(name, gguf, vector.shape, negative_log=vector.negative_log)
    yield Tensor(NORM, "output_norm.weight", (config.hidden_size,))
    if not config.tie_word_embeddings:
        yield Tensor(HEAD, GGUF_HEAD, table)


def expert_shape(config: ModelConfig, projection: str) -> Shape:
    """[out, in] of one expert's "gate", "up", "down", or of "gate_up" (gate's rows, then up's)."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    return {"gate": (inner, hidden), "up": (inner, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}[
        projection
    ]


def gguf_expert_name(layer: int, projection: str) -> str:
    """`blk.3.ffn_gate_exps.weight`: all experts of a layer's "gate", "up", "down" or "gate_up"."""
    return f"blk.{layer}.ffn_{projection}_exps.weight"
