"""What the families' readers of config.json share, in the spelling of transformers 4 or 5. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.architectures.config import LayerSpec, LeftOut, ModelConfig, Mtp
from engine.architectures.fields import Fields
from engine.architectures.numbers import SIGMOID_EPSILON, Numbers, check_numbers, checked, extra_layer
from engine.architectures.parts.mlp import Router
from engine.architectures.parts.rotation import RopeScaling, Rotation
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
_ROPE_OF_IMAGES = {"mrope_section", "mrope_interleaved"}  # text has one position in all sections
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
    moe_intermediate_size: int | None  # None: experts are `intermediate_size` wide
    vocab_size: int = 151936
    num_hidden_layers: int = 24
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    norm_topk_prob: bool = False
    partial_rotary_factor: float | None = None  # None: heads are rotated whole, whatever the file says
    linear_layers: bool = False  # `layer_types` may name layers of linear attention
    first_dense: int | None = None  # of first_k_dense_replace; None: the family has no such field


def config_of_hf(
    fields: Fields,
    generation: Fields,
    defaults: Defaults,
    *,
    architecture: str,
    layers: Callable[[Numbers], tuple[LayerSpec, ...]],
    left_out: tuple[LeftOut, ...] = (),
    norms_minus_one: bool = False,
    mtp: Callable[[tuple[LayerSpec, ...]], Mtp] | None = None,
) -> ModelConfig:
    """`fields` is config.json, `generation` generation_config.json; `layers`: what the family makes of the numbers;
    `left_out`: what its files hold besides, and of that `mtp` the layer of multi-token prediction, by the model's own.
    Raises ModelFileError."""
    _refuse_unsupported(fields, defaults)
    vocab = fields.integer("vocab_size", defaults.vocab_size)
    positions = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
    eos = generation.tokens("eos_token_id", vocab)
    bos = generation.token("bos_token_id", vocab)
    numbers = check_numbers(_numbers(fields, defaults, positions), fields.where)
    made = layers(numbers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=numbers.hidden_size,
        layers=made,
        rms_norm_eps=fields.number("rms_norm_eps", defaults.rms_norm_eps),
        max_position_embeddings=positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        bos_token_id=fields.token("bos_token_id", vocab) if bos is None else bos,
        eos_token_ids=(fields.tokens("eos_token_id", vocab) or ()) if eos is None else eos,
        dtype=_dtype(fields),
        quantisation=read_quantisation(fields),
        left_out=left_out,
        norms_minus_one=norms_minus_one,
        mtp=mtp(made) if mtp is not None else None,
    )


def sigmoid_router(fields: Fields, numbers: Numbers) -> Router:
    """Of DeepSeek-V3's kind: a bias and groups choose, the weights of those chosen are scaled."""
    router = Router(
        score="sigmoid",
        normalise=SIGMOID_EPSILON if numbers.norm_topk_prob else None,
        scale=fields.number("routed_scaling_factor", 1.0),
        bias=True,
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        group_score="top2",
    )
    return checked(router, numbers, fields.where)


def extra_layers(fields: Fields, count: int, name: str, default: int) -> tuple[LeftOut, ...]:
    """Layers behind the model's own, for predicting several tokens at once; `name` of the field with their number."""
    extra = fields.integer(name, default, least=0)
    return tuple(extra_layer(layer) for layer in range(count, count + extra))


def _numbers(fields: Fields, defaults: Defaults, positions: int) -> Numbers:
    hidden = fields.integer("hidden_size", defaults.hidden_size)
    heads = fields.integer("num_attention_heads", defaults.num_attention_heads)
    if fields.get("head_dim") is None and defaults.head_dim is None and hidden % heads:
        raise fields.error("head_dim", f"is missing and hidden_size {hidden} is not a multiple of {heads} heads")
    head = fields.integer("head_dim", defaults.head_dim or hidden // heads)
    experts = _num_experts(fields, defaults.num_experts)
    forward = fields.integer("intermediate_size", defaults.intermediate_size)
    own = defaults.moe_intermediate_size  # None: experts are as wide as dense layers
    return Numbers(
        hidden_size=hidden,
        num_hidden_layers=fields.integer("num_hidden_layers", defaults.num_hidden_layers),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", defaults.num_key_value_heads),
        head_dim=head,
        rotation=_rotation(fields, head, positions, defaults),
        num_experts=experts,
        num_experts_per_tok=fields.integer("num_experts_per_tok", defaults.num_experts_per_tok),
        moe_intermediate_size=forward if own is None else fields.integer("moe_intermediate_size", own),
        intermediate_size=forward,
        norm_topk_prob=fields.boolean("norm_topk_prob", defaults.norm_topk_prob),
        sparse=_sparse(fields, defaults, experts),
    )


def _sparse(fields: Fields, defaults: Defaults, experts: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, but for those in `mlp_only_layers`; or every layer behind
    the first `first_k_dense_replace`; or every layer of a family whose experts are as wide as dense layers would be."""
    count = fields.integer("num_hidden_layers", defaults.num_hidden_layers)
    if defaults.first_dense is not None:
        first = fields.integer("first_k_dense_replace", defaults.first_dense, least=0)
        return tuple(bool(experts) and layer >= first for layer in range(count))
    if defaults.moe_intermediate_size is None:
        return (bool(experts),) * count
    step, dense = fields.integer("decoder_sparse_step", 1), _layers(fields)
    for layer in dense:
        if not 0 <= layer < count:
            raise fields.error("mlp_only_layers", f"names layer {layer}; layers are 0 to {count - 1}")
    return tuple(bool(experts) and layer not in dense and (layer + 1) % step == 0 for layer in range(count))


def _refuse_unsupported(fields: Fields, defaults: Defaults) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", f"is {shown(fields.get('hidden_act'))}; only 'silu' can be served")
    window = fields.values.get("sliding_window", 4096)
    if fields.boolean("use_sliding_window", False) and window is not None:
        raise fields.error(
            "use_sliding_window", f"is true with a window of {shown(window)}; sliding windows cannot be served"
        )
    kinds, allowed = fields.get("layer_types", []), ["full_attention"]
    allowed += ["linear_attention"] if defaults.linear_layers else []
    if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
        raise fields.error(
            "layer_types", f"is {shown(kinds)}; only lists of {' and '.join(map(repr, allowed))} can be served"
        )


def _num_experts(fields: Fields, default: int) -> int:
    """transformers 4 wrote num_experts, 5 writes num_local_experts; some families say n_routed_experts."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    name = next((name for name in names if fields.get(name) is not None), names[0])
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


def _rotation(fields: Fields, head: int, positions: int, defaults: Defaults) -> Rotation:
    """From rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    values = fields.get(name, {})
    if not isinstance(values, Mapping):
        raise fields.error(name, f"is {shown(values)}; allowed is an object")
    rope = Fields(values, f"{fields.where}: {name}")
    unknown = set(values) - _ROPE_KEYS - _ROPE_EXTRA - (_ROPE_OF_IMAGES if defaults.linear_layers else set())
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ("default", "linear", "dynamic", "yarn"):
        raise rope.error("rope_type", f"is {shown(kind)}; allowed are default, linear, dynamic and yarn")
    if unknown:
        raise rope.error(shown(min(unknown)), "is not known")
    dim = _rotated(fields, rope, head, defaults.partial_rotary_factor)
    theta = rope.number("rope_theta", fields.get("rope_theta", defaults.rope_theta))
    if kind == "default":
        return Rotation(dim, theta, positions)
    original = rope.get("original_max_position_embeddings")
    if kind == "yarn":
        original = rope.integer("original_max_position_embeddings", positions)
        factor = rope.number("factor", positions / original)
    else:
        factor = rope.number("factor")
    attention = rope.get("attention_factor")
    scaling = RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=None if attention is None else rope.number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        extra={key: values[key] for key in sorted(_ROPE_EXTRA & set(values)) if values[key] is not None},
    )
    return Rotation(dim, theta, positions, scaling)


def _rotated(fields: Fields, rope: Fields, head: int, default: float | None) -> int:
    """How many values of a head are rotated. `default`: of the factor; None: only 1 is known."""
    partial = rope.number("partial_rotary_factor", fields.get("partial_rotary_factor", default or 1.0))
    if default is None and partial != 1.0:
        raise rope.error("partial_rotary_factor", f"is {partial}; only 1 can be served")
    if partial == 1.0:
        return head
    dim = int(head * partial)
    if partial > 1.0 or dim % 2 or not dim:
        raise rope.error("partial_rotary_factor", f"is {partial}: {dim} of {head} values; allowed is an even number")
    return dim
