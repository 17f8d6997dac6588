"""The modules of a model, by name and class: what rules are matched against."""

from __future__ import annotations

from collections.abc import Sequence

_QWEN3 = "transformers.models.qwen3_moe.modeling_qwen3_moe."

# canonical class -> its kind. Operators state the kinds that they can replace.
KINDS: dict[str, str] = {
    "Qwen3MoeModel": "model",
    "Qwen3MoeDecoderLayer": "layer",
    "Qwen3MoeAttention": "attention",
    "Qwen3MoeSparseMoeBlock": "moe_block",
    "Qwen3MoeExperts": "experts",
    "Qwen3MoeMLP": "mlp",
    "Qwen3MoeRMSNorm": "norm",
    "Qwen3MoeRotaryEmbedding": "rope",
    "Linear": "linear",
    "Embedding": "embedding",
}
ANY_CLASS = "Module"

# Classes whose instances KTransformers meets in its Qwen3MoE under another name: it borrows Qwen2MoE's rotary class,
# and its experts are a ModuleList.
_ALIASES = {"Qwen2MoeRotaryEmbedding": "Qwen3MoeRotaryEmbedding", "ModuleList": "Qwen3MoeExperts"}
_PREFIXES = ("", "torch.nn.", _QWEN3, "ktransformers.models.modeling_qwen3_moe.")
_BORROWED = "ktransformers.models.modeling_qwen2_moe.Qwen2MoeRotaryEmbedding"


def canonical_class(path: str) -> str | None:
    """The canonical name of a module class given by path or by its last word; None if the model has no such class."""
    if path == _BORROWED:
        return _ALIASES["Qwen2MoeRotaryEmbedding"]
    prefix, _, word = path.rpartition(".")
    if (f"{prefix}." if prefix else "") not in _PREFIXES:
        return None
    word = _ALIASES.get(word, word)
    return word if word in KINDS or word == ANY_CLASS else None


def qwen3moe_modules(num_layers: int, sparse_layers: Sequence[int]) -> list[tuple[str, str]]:
    """(name, class) of every module of a Qwen3MoE that a rule may place, parents before children."""
    sparse = set(sparse_layers)
    modules = [("model", "Qwen3MoeModel"), ("model.embed_tokens", "Embedding")]
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        modules += [(at, "Qwen3MoeDecoderLayer"), (f"{at}.self_attn", "Qwen3MoeAttention")]
        modules += [(f"{at}.self_attn.{p}_proj", "Linear") for p in "qkvo"]
        modules += [(f"{at}.self_attn.{p}_norm", "Qwen3MoeRMSNorm") for p in "qk"]
        if layer in sparse:
            modules += [(f"{at}.mlp", "Qwen3MoeSparseMoeBlock"), (f"{at}.mlp.gate", "Linear")]
            modules += [(f"{at}.mlp.experts", "Qwen3MoeExperts")]
        else:
            modules += [(f"{at}.mlp", "Qwen3MoeMLP")]
            modules += [(f"{at}.mlp.{p}_proj", "Linear") for p in ("gate", "up", "down")]
        modules += [(f"{at}.{n}_layernorm", "Qwen3MoeRMSNorm") for n in ("input", "post_attention")]
    modules += [("model.norm", "Qwen3MoeRMSNorm"), ("model.rotary_emb", "Qwen3MoeRotaryEmbedding")]
    return [*modules, ("lm_head", "Linear")]
