"""Families that people ask for and that cannot be served: which part is missing. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_INDEX = "sparse attention over the positions that an indexer chooses"
_MROPE = "positions of images and a vision tower"
_LIGHTNING = "lightning attention"
_STATE = "state space layers"
# by `model_type` of config.json, and by `general.architecture` of GGUF
MISSING = {
    "deepseek_v32": _INDEX,
    "deepseek32": _INDEX,
    "glm_moe_dsa": _INDEX,
    "glm-dsa": _INDEX,
    "deepseek_v4": "attention over compressed positions, experts chosen by a hash of the token, hyper-connections",
    "deepseek4": "attention over compressed positions, experts chosen by a hash of the token, hyper-connections",
    "minimax_m3": _INDEX,
    "minimax_m3_sparse": _INDEX,
    "minimax-m3": _INDEX,
    "minimax": _LIGHTNING,
    "minimax_m1": _LIGHTNING,
    "minimax_text_01": _LIGHTNING,
    "kimi_linear": "the delta attention (KDA) of its linear layers",
    "kimi-linear": "the delta attention (KDA) of its linear layers",
    "qwen3_vl_moe": _MROPE,
    "qwen3vlmoe": _MROPE,
    "glm4v_moe": _MROPE,
    "llama4": "chunked attention and routing weights that multiply experts' inputs",
    "llama4_text": "chunked attention and routing weights that multiply experts' inputs",
    "ernie4_5_moe": "a bias added behind the softmax of its router, and rotated values that are neighbours",
    "ernie4_5-moe": "a bias added behind the softmax of its router, and rotated values that are neighbours",
    "hunyuan_v1_moe": "norms of queries and keys behind their rotation",
    "hunyuan-moe": "norms of queries and keys behind their rotation",
    "mimo_v2_flash": "heads whose values are narrower than their keys",
    "mimo2": "heads whose values are narrower than their keys",
    "step3p5": "a gate of each head, and other numbers of heads in layers with a window",
    "step3p7": "a gate of each head, and other numbers of heads in layers with a window",
    "step35": "a gate of each head, and other numbers of heads in layers with a window",
    "nemotron_h": _STATE,
    "nemotron_h_moe": _STATE,
    "jamba": _STATE,
    "granitemoehybrid": _STATE,
    "granitehybrid": _STATE,
}

# models without experts, under the same two kinds of names
DENSE = frozenset(
    {
        "llama", "mistral", "mistral3", "ministral3", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "gemma", "gemma2",
        "gemma3", "gemma3_text", "gemma3n", "phi", "phi3", "phi4", "glm", "glm4", "granite", "olmo2", "olmo3",
        "smollm3", "falcon", "falcon3", "cohere", "cohere2", "command-r", "exaone", "exaone4", "internlm2", "internlm3",
        "starcoder2", "stablelm", "gpt2", "gptneox", "gpt_neox", "seed_oss",
    }
)  # fmt: skip


def why_not(name: object, served: Sequence[str]) -> str:
    """The end of a refusal: the part that is missing, where it is known, and the nearest of the names that are
    served."""
    if not isinstance(name, str):
        return ""
    if name in DENSE:
        return "; this one is dense, a model without experts: llama.cpp or vLLM serve it"
    missing = f"; of this one {part} is missing" if (part := MISSING.get(name)) is not None else ""
    near = difflib.get_close_matches(name, served, n=1, cutoff=0.5)
    return missing + (f"; the nearest name is {near[0]}" if near else "")
