"""Files of `save_gguf` are read by llama.cpp itself and mean the same to it, to transformers and to our engine.

With KTSERVE_LLAMA, a folder with llama-server. llama.cpp knows DeepSeek-V2-Lite by its 27 layers: those of its files
here that have no q_lora_rank need a server whose `is_lite` (src/models/deepseek2.cpp) is true for them.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.client import StreamError
from benchmarks.peers.llamacpp import Flags, Peer
from testing.harness import Harness, full_logits, greedy
from testing.models.gguf_writer import GGUF_NAMES, save_gguf, tokenizer_metadata
from testing.models.tiny import ALIKE, FAMILIES, STATEFUL, tiny_model
from tests.engine.parity import CLEAR, prompts

LLAMA = os.environ.get("KTSERVE_LLAMA", "")
pytestmark = pytest.mark.skipif(not LLAMA, reason="KTSERVE_LLAMA names no folder with llama-server")

Case = tuple[dict[str, Any], dict[str, Any]]  # options of `tiny_model`, and of `save_gguf`
Answer = tuple[list[int], dict[int, float]]  # greedy tokens, and log-probabilities of the best first ones

DRAWS, VOCABULARY, TOKENS, TOP = 4, 320, 16, 10
END = VOCABULARY - 1
ASKED = prompts(5, [7, 61], VOCABULARY)
NEAR, NEAR_QUANTISED = 1e-3, 0.5  # of log-probabilities; llama.cpp rounds activations beside quantised weights
UNTIED = ("qwen2_moe", "minimax_m2", "gpt_oss")  # llama.cpp wants an output.weight of them
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
FUSED = (*LATENT, *STATEFUL)  # whose gate and up llama.cpp also reads from one tensor
WIDE_HEADS = ("minimax_m2", "qwen3_5_moe_text")  # as wide as rotary_dim, or as mrope's sections are together
EVERY = (*FAMILIES, *STATEFUL, *ALIKE)
THETA = {"rope_theta": 10000.0}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BOTH = {"mscale": 1.0, "mscale_all_dim": 1.0}
SQUARE = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}  # llama.cpp has one size of keys and values


def drawn(family: str, seed: int) -> Case:
    """Options of a family that llama.cpp computes as transformers does."""
    r = random.Random(f"{family} {seed}")
    heads = r.choice((2, 4) if family in ("qwen2_moe", "deepseek_v2") else (2, 4, 6))  # theirs divide the width
    options: dict[str, Any] = {
        "hidden_size": r.choice((64, 96)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // r.choice((1, 2)),
        "num_hidden_layers": r.choice((2, 3)),
        "num_experts": r.choice((8, 12)),
        "num_experts_per_tok": r.choice((1, 2, 3)),
        "rms_norm_eps": r.choice((1e-5, 1e-6)),
        "tie_word_embeddings": family not in UNTIED and r.random() < 0.4,
    }
    rope: dict[str, Any] = r.choice(({"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, YARN))
    if family == "gpt_oss":
        rope = {"rope_type": r.choice(("default", "linear")), "factor": 2.0}
        options["sliding_window"] = r.choice((8, 16, 128))
    elif family in LATENT:
        scale = r.choice((0.707, 1.0))
        rope = r.choice(({"rope_type": "default"}, YARN | {"mscale": scale, "mscale_all_dim": scale}))
        options |= _latent(family, r)
    elif family in STATEFUL:
        rope = rope | {"partial_rotary_factor": r.choice((0.25, 0.5, 1.0))}
        if family == "qwen3_5_moe_text":
            rope |= {"mrope_section": r.choice(([11, 11, 10], [2, 1, 1]))}
        options |= _stateful(r)
    elif family == "glm4_moe":
        rope = rope | {"partial_rotary_factor": r.choice((0.25, 0.5))}
        options |= {name: r.random() < 0.5 for name in ("use_qk_norm", "attention_bias", "norm_topk_prob")}
        options |= {"n_shared_experts": r.choice((1, 2)), "first_k_dense_replace": r.choice((0, 1))} | _groups(r)
    elif family == "minimax_m2":
        options["rotary_dim"] = r.choice((8, 16, 32))
    elif family == "qwen2_moe":
        options |= {"qkv_bias": r.random() < 0.5, "shared_expert_intermediate_size": r.choice((32, 96))}
    if family not in ("qwen2_moe", *LATENT):
        options["head_dim"] = 32 if family in WIDE_HEADS else r.choice((16, 32))
    options["rope_parameters"] = THETA | rope
    saved = {"early": family == "qwen3_next", "expanded": family in LATENT, "fused": family in FUSED}
    return options, {name: r.random() < 0.4 for name, may in saved.items() if may}


def _groups(r: random.Random) -> dict[str, Any]:
    groups = r.choice((1, 2, 4))
    return {"n_group": groups, "topk_group": max(1, groups // 2)}


def _latent(family: str, r: random.Random) -> dict[str, Any]:
    options = {
        "q_lora_rank": r.choice((None, 32, 64)),
        "kv_lora_rank": r.choice((32, 64)),
        "qk_nope_head_dim": r.choice((16, 32, 48)),
        "qk_rope_head_dim": r.choice((16, 32)),
        "v_head_dim": r.choice((32, 64)),
        "n_shared_experts": r.choice((1, 2)),
        "routed_scaling_factor": r.choice((1.0, 2.5)),
    }
    options |= {} if family == "glm4_moe_lite" else {"first_k_dense_replace": r.choice((0, 1, 2))}
    return options | ({"norm_topk_prob": r.random() < 0.5} | _groups(r) if family == "deepseek_v3" else {})


def _stateful(r: random.Random) -> dict[str, Any]:
    keys, size, count = r.choice((1, 2)), r.choice((16, 32)), r.choice((2, 4))
    kinds = r.sample(["full_attention"] + ["linear_attention"] * (count - 1), count)
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * r.choice((1, 2, 3)),
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": r.choice((3, 4)),
        "num_hidden_layers": count,
        "layer_types": kinds,
    }


def written(path: Path, family: str, case: Case, experts: str = "F32", dense: str = "F32") -> PreTrainedModel:
    options, saved = case
    vocabulary = options.get("vocab_size", VOCABULARY)
    model = tiny_model(5, family=family, **{"vocab_size": VOCABULARY, "eos_token_id": vocabulary - 1} | options)
    metadata = tokenizer_metadata(vocabulary) | saved.get("metadata", {})
    return save_gguf(model, path, experts, dense, **saved | {"metadata": metadata})


def theirs(path: Path) -> list[Answer]:
    body = {"n_predict": TOKENS, "temperature": 0, "ignore_eos": True, "n_probs": TOP, "return_tokens": True}
    found = []
    with Peer(Path(LLAMA)).server(path, Flags(1, flash=False, wide_cache=True), 1, 512, []) as url:
        for prompt in ASKED:
            data = json.dumps({"prompt": prompt, **body}).encode()
            request = Request(f"{url}/completion", data, {"Content-Type": "application/json"})
            with urlopen(request, timeout=60) as answer:
                said = json.load(answer)
            first = said["completion_probabilities"][0]["top_logprobs"]
            found.append((said["tokens"], {each["id"]: each["logprob"] for each in first}))
    return found


def ours(path: Path) -> list[Answer]:
    engine = Harness(path)
    rids = [engine.submit(prompt, max_tokens=TOKENS, logprobs=TOP) for prompt in ASKED]
    results = engine.run()
    engine.close()
    firsts = [results[rid].logprobs[0].top for rid in rids]
    return [(results[rid].tokens, {e.token: e.logprob for e in top}) for rid, top in zip(rids, firsts, strict=True)]


def agree(model: PreTrainedModel, answers: list[Answer]) -> bool:
    """With transformers, up to the token that ends an answer: llama.cpp would take another one."""
    for prompt, (tokens, first) in zip(ASKED, answers, strict=True):
        expected, gap = greedy(model, prompt, TOKENS)
        until = expected.index(END) if END in expected else TOKENS
        if tokens[:until] != expected[:until] and gap >= CLEAR:
            return False
        if furthest(model, prompt, first) > NEAR:
            return False
    return True


def both_agree(model: PreTrainedModel, path: Path) -> None:
    assert agree(model, theirs(path)), "llama.cpp"
    assert agree(model, ours(path)), "ours"


def furthest(model: PreTrainedModel, prompt: list[int], first: dict[int, float]) -> float:
    likely = torch.log_softmax(full_logits(model, prompt)[-1], -1)
    return max(abs(float(likely[token]) - logprob) for token, logprob in first.items())


@pytest.mark.parametrize("seed", range(DRAWS))
@pytest.mark.parametrize("family", EVERY)
def test_drawn(tmp_path, family, seed):
    path = tmp_path / "m.gguf"
    model = written(path, family, drawn(family, seed))
    both_agree(model, path)


def test_large_factor_of_yarn(tmp_path):
    rope = YARN | {"rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16}
    path = tmp_path / "m.gguf"
    model = written(path, "qwen3_moe", ({"rope_parameters": rope}, {}))
    both_agree(model, path)


def test_glm_flash_is_known_by_its_size(tmp_path):
    path, sizes = tmp_path / "m.gguf", {"num_hidden_layers": 47, "vocab_size": 154880}
    model = written(path, "glm4_moe_lite", (sizes, {"metadata": {"deepseek2.expert_gating_func": 0}}))
    both_agree(model, path)


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite", *STATEFUL])
def test_a_layer_that_predicts_second_tokens(tmp_path, family):
    """Such as the converter writes behind the others."""
    path, width = tmp_path / "m.gguf", 64
    shapes = {"eh_proj": (width, 2 * width), "enorm": (width,), "hnorm": (width,), "shared_head_norm": (width,)}
    more = {f"blk.3.nextn.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    options = {"hidden_size": width, "num_hidden_layers": 4}
    options |= SQUARE | {"layer_types": kinds} if family in STATEFUL else {}
    metadata = {f"{GGUF_NAMES[family]}.nextn_predict_layers": 1}
    model = written(path, family, (options, {"metadata": metadata, "more": more}))
    del model.model.layers[3]
    model.config.num_hidden_layers = 3
    both_agree(model, path)


# What llama.cpp refuses, or computes in another way than transformers, from a file that says what the model is.
OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"its {family} has no tied embeddings": (family, {"tie_word_embeddings": True}) for family in UNTIED},
    "its qwen3moe has no dense layers": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "its qwen3next has no dense layers": ("qwen3_next", {"mlp_only_layers": [0], **SQUARE}),
    "its qwen3moe has no biases of attention": ("qwen3_moe", {"attention_bias": True}),
    "its deepseek2 has no biases of attention": ("glm4_moe_lite", {"attention_bias": True}),
    "its delta nets have keys as wide as values": ("qwen3_next", {}),
    "its delta nets have keys as wide as values too": ("qwen3_5_moe_text", {}),
    "groups are chosen by two experts, not by the best": (
        "deepseek_v2",
        {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "yarn's bounds are whole numbers, whatever truncate says": (
        "gpt_oss",
        {"rope_parameters": YARN | {"truncate": False}},
    ),
    "yarn's betas are 32 and 1, whatever the file says": (
        "qwen3_moe",
        {"rope_parameters": YARN | {"beta_fast": 8, "beta_slow": 2}},
    ),
    "the same, latent": ("deepseek_v3", {"rope_parameters": YARN | BOTH | {"beta_fast": 8, "beta_slow": 2}}),
    "yarn's attention_factor is not read": ("qwen3_moe", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "yarn without mscale_all_dim scales queries": ("deepseek_v3", {"rope_parameters": YARN}),
    "linear scaling scales queries": (
        "deepseek_v2",
        {"rope_parameters": THETA | {"rope_type": "linear", "factor": 4.0}},
    ),
}


@pytest.mark.parametrize("why", OTHERWISE)
def test_otherwise_in_llama_cpp(tmp_path, why):
    family, options = OTHERWISE[why]
    path = tmp_path / "m.gguf"
    model = written(path, family, (options, {}))
    assert agree(model, ours(path))
    try:
        answers = theirs(path)
    except StreamError:
        return
    assert not agree(model, answers), "llama.cpp agrees by now: this belongs to the others"


@pytest.mark.parametrize(("family", "normalised"), [("qwen3_moe", False), ("qwen2_moe", True)])
def test_what_its_converter_does_not_write(tmp_path, family, normalised):
    """Whether the weights of chosen experts sum to 1: we take a file as llama.cpp does."""
    path = tmp_path / "m.gguf"
    written(path, family, ({"norm_topk_prob": normalised}, {}))
    for (tokens, first), (own, likely) in zip(theirs(path), ours(path), strict=True):
        assert tokens == own and first == pytest.approx(likely, abs=NEAR)


@pytest.mark.parametrize(("family", "experts"), [*((family, "Q8_0") for family in EVERY), ("gpt_oss", "MXFP4")])
def test_quantised(tmp_path, family, experts):
    path = tmp_path / "m.gguf"
    model = written(path, family, (SQUARE if family in STATEFUL else {}, {}), experts, "Q8_0")
    assert agree(model, ours(path))
    for prompt, (_, first) in zip(ASKED, theirs(path), strict=True):
        assert furthest(model, prompt, first) < NEAR_QUANTISED
        best = full_logits(model, prompt)[-1].log_softmax(-1)
        assert max(first, key=lambda token: first[token]) == int(best.argmax()) or near_tie(best)


def near_tie(likely: torch.Tensor) -> bool:
    two = likely.topk(2).values
    return float(two[0] - two[1]) < NEAR_QUANTISED
