"""The class names of KTransformers' files for Qwen, file by file: each is known and places modules."""

from __future__ import annotations

import pytest

from engine.architectures.base import Architecture
from engine.architectures.qwen2_moe import QWEN2_MOE
from engine.architectures.qwen3_moe import QWEN3_MOE
from engine.architectures.registry import config_from_hf
from rules import Machine, RulesError, place
from rules.rule_set import parse_rule_set
from testing.models.tiny import tiny_model

GPU = Machine(gpu=True, native=True, kt=True, flashinfer=True, gpu_count=2)
OURS, THEIRS = "ktransformers.operators.", "ktransformers.models.modeling_"
ROPE = (f"{THEIRS}qwen2_moe.Qwen2MoeRotaryEmbedding", f"{OURS}RoPE.RotaryEmbedding")
LINEAR, DEFAULT = ("torch.nn.Linear", f"{OURS}linear.KTransformersLinear"), ("name: ^model.embed_tokens", "default")
MODEL = ("name: ^model$", f"{OURS}models.KQwen2MoeModel")


def block(family: str, replaced: str) -> tuple[str, str]:
    return f"{THEIRS}{family}.{replaced.split('.K')[1].removesuffix('V2')}", f"{OURS}{replaced}"


Q2 = [ROPE, LINEAR, MODEL, DEFAULT]
Q2_SERVE = [
    *Q2,
    block("qwen2_moe", "experts.KQwen2MoeSparseMoeBlockV2"),
    ("name: self_attn$", f"{OURS}balance_serve_attention.KQwen2MoeAttention"),
    block("qwen2_moe", "layernorm.KQwen2MoeRMSNorm"),
    block("qwen2_moe", "mlp.KQwen2MoeMLP"),
]
Q3_SERVE = [
    *Q2,
    block("qwen3_moe", "experts.KQwen3MoeSparseMoeBlockV2"),
    ("name: self_attn$", f"{OURS}balance_serve_attention.KQwen3MoeAttention"),
    block("qwen3_moe", "layernorm.KQwen3MoeRMSNorm"),
    (f"{THEIRS}qwen3_moe.Qwen3MoeMLP", f"{OURS}mlp.KQwen2MoeMLP"),
]
Q3_SFT = [
    *Q2,
    (f"{THEIRS}qwen3_moe.Qwen3MoeSparseMoeBlock", f"{OURS}experts.KQwen3MoeSparseMoeBlock"),
    ("name: self_attn$", f"{OURS}attention.KQwen3MoeAttention"),
    ("name: rotary_emb$", f"{OURS}RoPE.KQwen3MoeRotaryEmbedding"),
    ("name: ^model$", f"{OURS}models.KQwen3MoeModel"),
]
FILES = {
    "Qwen2-57B-A14B-Instruct": (QWEN2_MOE, [*Q2, block("qwen2_moe", "experts.KQwen2MoeSparseMoeBlock")]),
    "Qwen2-57B-A14B-Instruct-multi-gpu": (QWEN2_MOE, [*Q2, block("qwen2_moe", "experts.KQwen2MoeSparseMoeBlock")]),
    "Qwen2-serve": (QWEN2_MOE, Q2_SERVE),
    "Qwen2-serve-amx": (QWEN2_MOE, Q2_SERVE),
    "Qwen3Moe-serve": (QWEN3_MOE, Q3_SERVE),
    "Qwen3Moe-serve-amx": (QWEN3_MOE, Q3_SERVE),
    "Qwen3Moe-sft-amx": (QWEN3_MOE, Q3_SFT),
}


def written(pairs: list[tuple[str, str]], device: str = "cuda") -> bytes:
    rules = []
    for match, replace in pairs:
        how = match if match.startswith("name: ") else f"class: {match}"
        rules.append(
            f"- match: {{{how}}}\n  replace:\n    class: {replace}\n"
            f"    kwargs: {{generate_device: {device}, prefill_device: {device}}}\n"
        )
    return "".join(rules).encode()


def modules(family: Architecture) -> list[tuple[str, str]]:
    return family.module_classes(config_from_hf(tiny_model(family=family.name, mlp_only_layers=[1]).config.to_dict()))


@pytest.mark.parametrize("file", FILES)
def test_every_class_is_known_and_placed(file: str) -> None:
    family, pairs = FILES[file]
    for index, pair in enumerate(pairs):  # alone, so that no rule before it takes its modules
        text = written([pair])
        if ".models.K" in pair[1]:
            devices, own = b"generate_device: cuda, prefill_device: cuda", b"per_layer_prefill_intput_threshold: 0"
            text = text.replace(devices, own)
        choices = place(parse_rule_set(text, file, family=family.rules), modules(family), GPU)
        assert any(choice.rule_index == 0 for choice in choices.values()), (index, pair)


@pytest.mark.parametrize("device", ["xpu", "npu"])
def test_files_for_other_hardware_are_refused_by_their_device(device: str) -> None:
    with pytest.raises(RulesError, match=f"'{device}' is not a device"):
        parse_rule_set(written([LINEAR], device), "x.yaml", family=QWEN3_MOE.rules)
