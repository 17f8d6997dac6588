"""What the engine has to know about a model family. Torch-free.

A family is one `Architecture` in a file of its own, listed in `registry.py`. Everything else asks the record or the
`ModelConfig` that it reads, never the family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.architectures.config import ModelConfig
from engine.architectures.fields import Fields
from engine.architectures.gguf import GGUFModel
from rules import Family

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """A module of one layer. Its weight is `model.layers.N.<name>.weight` here and in safetensors and
    `blk.N.<gguf>.weight` in GGUF. Containers have none; routed experts have names of their own
    (`engine.weights.layout`)."""

    name: str
    kind: str  # "attention", "moe_block", "experts", "mlp", "norm", "linear": what rules may replace (`rules.Family`)
    gguf: str = ""
    shape: Shape = ()  # of the weight in C order, [out, in] of a projection; () if there is none
    bias: bool = False


@dataclass(frozen=True)
class Architecture:
    """One model family."""

    name: str  # `model_type` of config.json
    model_class: str  # of `architectures` in config.json
    gguf: str  # `general.architecture`
    read_hf: Callable[[Fields, Fields], ModelConfig]  # config.json, generation_config.json; raises ModelFileError
    read_gguf: Callable[[GGUFModel], ModelConfig]  # raises ModelFileError
    modules: Callable[[ModelConfig, int], Iterator[Module]]  # of a layer, parents before children
    lora_targets: tuple[str, ...]  # modules of a layer that an adapter may change, besides routed experts
    rules: Family  # its module classes, as rules and KTransformers name them

    def module_classes(self, config: ModelConfig) -> list[tuple[str, str]]:
        """(name, class) of every module that a rule may place, parents before children."""
        of = self.rules.class_of
        placed = [("model", of("model")), ("model.embed_tokens", of("embedding"))]
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}"
            placed.append((at, of("layer")))
            placed += [(f"{at}.{module.name}", of(module.kind)) for module in self.modules(config, layer)]
        return [*placed, ("model.norm", of("norm")), ("model.rotary_emb", of("rope")), ("lm_head", of("linear"))]


def decoder_layer(config: ModelConfig, layer: int, *, output_bias: bool) -> Iterator[Module]:
    """A layer of attention and a SwiGLU MLP, dense or of routed and shared experts. `config.attention_bias` is that of
    q, k and v, and with `output_bias` of o too."""
    hidden = config.hidden_size
    yield from _attention(config, output_bias)
    yield from _moe(config) if config.is_sparse(layer) else _mlp("mlp", "", hidden, config.intermediate_size)
    yield Module("input_layernorm", "norm", "attn_norm", (hidden,))
    yield Module("post_attention_layernorm", "norm", "ffn_norm", (hidden,))


def _attention(config: ModelConfig, output_bias: bool) -> Iterator[Module]:
    hidden, head = config.hidden_size, config.head_dim
    q, kv, bias = config.num_attention_heads * head, config.num_key_value_heads * head, config.attention_bias
    yield Module("self_attn", "attention")
    yield Module("self_attn.q_proj", "linear", "attn_q", (q, hidden), bias)
    yield Module("self_attn.k_proj", "linear", "attn_k", (kv, hidden), bias)
    yield Module("self_attn.v_proj", "linear", "attn_v", (kv, hidden), bias)
    yield Module("self_attn.o_proj", "linear", "attn_output", (hidden, q), bias and output_bias)
    if config.qk_norm:
        yield Module("self_attn.q_norm", "norm", "attn_q_norm", (head,))
        yield Module("self_attn.k_norm", "norm", "attn_k_norm", (head,))


def _moe(config: ModelConfig) -> Iterator[Module]:
    hidden, shared = config.hidden_size, config.shared_expert_intermediate_size
    yield Module("mlp", "moe_block")
    yield Module("mlp.gate", "linear", "ffn_gate_inp", (config.num_experts, hidden))
    yield Module("mlp.experts", "experts")
    if shared:
        yield from _mlp("mlp.shared_expert", "_shexp", hidden, shared)
        yield Module("mlp.shared_expert_gate", "linear", "ffn_gate_inp_shexp", (1, hidden))


def _mlp(name: str, suffix: str, hidden: int, inner: int) -> Iterator[Module]:
    yield Module(name, "mlp")
    yield Module(f"{name}.gate_proj", "linear", f"ffn_gate{suffix}", (inner, hidden))
    yield Module(f"{name}.up_proj", "linear", f"ffn_up{suffix}", (inner, hidden))
    yield Module(f"{name}.down_proj", "linear", f"ffn_down{suffix}", (hidden, inner))


ATTENTION_TARGETS = tuple(f"self_attn.{part}_proj" for part in "qkvo")
MLP_TARGETS = tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
SHARED_EXPERT_TARGETS = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down"))
