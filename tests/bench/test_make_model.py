"""The random models are valid files of sane numbers, and adapters the same deltas in both forms."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.cpu.engine import Needs
from benchmarks.models.make import TYPES, model_path, write_adapter, write_model
from benchmarks.models.shapes import SHAPES, Shape, described_shape, tensor_types
from engine.weights.open import open_model
from testing.harness import Harness
from tests.bench.shape import SHAPE

_ATTENTION = {"num_attention_heads": 4, "head_dim": 64, "num_key_value_heads": 2}
_LATENT = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 2}
_LARGE = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4,
    "shared_expert_intermediate_size": 256, "num_experts_per_tok": 2, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8, "q_lora_rank": 256,
}  # fmt: skip
OTHERS = {
    "qwen3.5-35b-a3b": _ATTENTION | _DELTA,
    "deepseek-v2-lite": _LATENT | {"num_key_value_heads": 4, "moe_intermediate_size": 96},
    "glm-4.7-flash": _LATENT | {"num_key_value_heads": 4},
    "gpt-oss-20b": _ATTENTION,
    "mixtral-8x7b": _ATTENTION,
}


def small(name: str) -> Shape:
    """A shape of SHAPES with what it has of _LARGE made small."""
    shape = SHAPES[name]
    less = {key: value for key, value in _LARGE.items() if shape.config.get(key) is not None}
    config = shape.config | less | OTHERS[name] | {"num_hidden_layers": SHAPE.layers}
    return replace(described_shape(config), vocabulary=SHAPE.vocabulary)


FILES = [
    *((SHAPE, mix) for mix in [*TYPES, "IQ3_XXS"]),  # one of those without a fill of their own
    *((small(name), mix) for name in OTHERS for mix in (["MXFP4"] if "gpt-oss" in name else []) + ["Q8_0", "Q4_K_M"]),
]


@pytest.fixture(
    scope="module", params=FILES, ids=lambda param: f"{dict(param[0].described).get('model_type', '')}-{param[1]}"
)
def model(request, tmp_path_factory):
    shape, mix = request.param
    path = model_path(tmp_path_factory.mktemp("random"), shape.layers, mix, shape.family)
    write_model(path, shape, mix)
    return shape, mix, path


def test_weights_have_the_types_and_the_spread_that_were_meant(model):
    shape, mix, path = model
    meant = {name: (dims, type) for name, dims, type in tensor_types(shape, mix)}
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert set(tensors) == set(meant)
    for name, tensor in tensors.items():
        dims, type = meant[name]
        assert tensor.tensor_type == type
        assert tuple(reversed(tensor.shape.tolist())) == dims
        if len(dims) > 1:
            values = gguf.quants.dequantize(tensor.data, type)
            deviation = 1.0 if name == "token_embd.weight" else dims[-1] ** -0.5
            kinds = gguf.GGMLQuantizationType
            low = 0.65 if type in (kinds.BF16, kinds.MXFP4) else 0.9  # one power of two for all
            assert low < values.std() / deviation < 1 / low, name
            assert abs(values.mean()) < 0.1 * deviation, name


def test_the_engine_loads_it_and_its_logits_are_those_of_a_model(model):
    _, _, path = model
    harness = Harness(path, rules=None, dtype="auto", pack_cache="off")
    try:
        prompt = [(37 * i) % 299 for i in range(64)]
        request = harness.submit(prompt, max_tokens=4, logprobs=5, prompt_logprobs=1)
        harness.run()
        result = harness.results[request]
        seen = [p.chosen.logprob for p in result.prompt_logprobs if p] + [p.chosen.logprob for p in result.logprobs]
    finally:
        harness.close()
    assert len(result.tokens) == 4
    assert np.isfinite(seen).all()
    assert 0.3 < np.std(seen) < 5  # tokens differ, none takes all


def test_the_bytes_that_a_step_needs_are_the_files(model):
    shape, mix, path = model
    needs, source = Needs(shape, mix), open_model(str(path), None)
    sparse = source.config.sparse_layers
    every = [shape.experts] * len(sparse)
    embedding = source.tensor("model.embed_tokens.weight").data.nbytes
    assert needs.step(every, 0) + embedding == source.num_bytes
    store = source.experts(sparse[0])
    expert = (store.num_bytes + sum(bias.num_bytes for bias in store.biases.values())) // shape.experts
    none = [0] * len(sparse)
    assert needs.step([1, *none[1:]], 7) - needs.step(none, 0) == expert + 7


def test_both_forms_of_an_adapter_hold_the_same_deltas(tmp_path):
    write_adapter(tmp_path / "a", SHAPE, rank=4)
    fused = load_file(tmp_path / "a" / "fused_expert_lora.safetensors")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert len(tensors) == len(fused) == SHAPE.layers * 6
    for layer in range(SHAPE.layers):
        for name in ("gate", "up", "down"):
            for side in "ab":
                ours = fused[f"layers.{layer}.experts.{name}_lora_{side}"]
                theirs = tensors[f"blk.{layer}.ffn_{name}_exps.weight.lora_{side}"]
                assert tuple(reversed(theirs.shape.tolist())) == tuple(ours.shape)
                assert np.array_equal(theirs.data.reshape(-1), ours.view(torch.uint8).numpy().reshape(-1))


def test_a_row_that_does_not_divide_into_blocks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ffn_down_exps"):
        write_model(tmp_path / "m.gguf", Shape(layers=1, hidden=256, intermediate=80, vocabulary=300), "Q4_K_M")
