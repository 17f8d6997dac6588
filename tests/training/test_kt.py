"""KTransformers' calls: any family of the registry computes and learns as transformers' own model does."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import training
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import tiny_model
from training import (
    KTAMXBackwardError,
    KTAMXConfigError,
    KTAMXError,
    KTAMXForwardError,
    KTAMXModelNotSupportedError,
    MOEAMXFunction,
    init_cpu_infer,
    load_kt_model,
    wrap_moe_layers_with_amx,
)
from training.config import TrainConfig
from training.experts.base import ExpertLora
from training.kt.families import FAMILIES
from training.kt.wrapper import LORA_NAMES

CONFIG = TrainConfig(lora_rank=3, lora_alpha=6.0, kt_num_threads=1)
IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
_DEEPSEEK = {
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS = {
    "qwen3_moe": _QWEN,
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "use_qk_norm": True},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_SMALL, **MODELS[family]}))
    return model.float().eval()


class Plain(nn.Module):
    """An experts module of transformers with LoRA written out, for autograd."""

    def __init__(self, experts: nn.Module, lora: ExpertLora) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.lora = experts.gate_up_proj, experts.down_proj, lora

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        m, s = self.lora, self.lora.scaling
        for e in range(len(self.down_proj)):
            rows, choice = torch.where(ids == e)
            x = hidden[rows]
            gate, up = (x @ self.gate_up_proj[e].T).chunk(2, dim=-1)
            gate = gate + s * x @ m.gate_lora_a[e].T @ m.gate_lora_b[e].T
            up = up + s * x @ m.up_lora_a[e].T @ m.up_lora_b[e].T
            h = nn.functional.silu(gate) * up
            y = h @ self.down_proj[e].T + s * h @ m.down_lora_a[e].T @ m.down_lora_b[e].T
            out = out.index_add(0, rows, y * weights[rows, choice, None].to(y.dtype))
        return out


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_autograds(family):
    """LoRA's, and those of all that lies before the experts: embedding, attention, router, shared experts."""
    plain, model = model_of(family), model_of(family)
    wrappers = wrap_moe_layers_with_amx(model, CONFIG, CONFIG)
    assert len(wrappers) == len(model._kt_wrappers) == (1 if family.startswith(("deepseek", "glm")) else 2)
    generator = torch.Generator().manual_seed(2)
    for wrapper in wrappers:
        for parameter in wrapper.lora_params.values():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        wrapper.update_lora_pointers()
        block = plain.model.layers[wrapper.layer_idx].mlp
        lora = ExpertLora(*wrapper.lora_params["gate_lora_a"].shape, block.experts.down_proj.shape[2], 2.0)
        lora.load_state_dict(wrapper.lora_params)
        block.experts = Plain(block.experts, lora)
    losses = [each(input_ids=IDS, labels=IDS).loss for each in (plain, model)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    want = {
        name: p.grad
        for name, p in plain.named_parameters()
        if ".experts.gate_up" not in name and ".experts.down" not in name
    }
    got = {name.replace("lora_experts.default.", "lora."): p.grad for name, p in model.named_parameters()}
    assert want.keys() == got.keys() and sum("_lora_" in name for name in got) == 6 * len(wrappers)
    for name, grad in want.items():
        if grad is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_attributes_are_upstreams():
    model = model_of("qwen3_moe")
    pool = init_cpu_infer(CONFIG)
    wrappers = wrap_moe_layers_with_amx(model, CONFIG, CONFIG, pool)
    assert model._kt_cpu_infer is pool and sorted(model._kt_moe_lora_params) == [0, 1]
    shapes = {name: tuple(p.shape) for name, p in model._kt_moe_lora_params[0].items()}
    e, r, h, i = 4, 3, 32, 64
    wanted = ((e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r))
    assert shapes == dict(zip(LORA_NAMES, wanted, strict=True))
    bound = 1 / h**0.5  # kaiming_uniform with a = sqrt 5
    first = wrappers[0]
    assert (first.hidden_size, first.router_type, first.shared_experts) == (h, "linear", None)
    assert first.cpu_infer is pool and first.router is first.gate and first.original_moe.experts is first.experts
    assert (first.moe_config.expert_num, first.moe_config.intermediate_size) == (e, i)
    gate = first.lora_params["gate_lora_a"]
    assert 0.9 * bound < gate.abs().max() <= bound and not wrappers[0].lora_params["gate_lora_b"].any()


def test_what_is_refused_says_what_to_do():
    dense = AutoConfig.for_model("llama", **_SMALL)
    with pytest.raises(KTAMXModelNotSupportedError, match="model_type is llama; supported are qwen3_moe, "):
        load_kt_model(dense, replace(CONFIG, model_name_or_path="x"))
    with pytest.raises(KTAMXModelNotSupportedError, match="model_type is llama"):
        wrap_moe_layers_with_amx(AutoModelForCausalLM.from_config(dense))
    with pytest.raises(KTAMXConfigError, match="model_name_or_path is missing"):
        load_kt_model(None, None)
    model = model_of("mixtral")
    with pytest.raises(KTAMXConfigError, match="lora_rank is -1: allowed is 1 to 512"):
        wrap_moe_layers_with_amx(model, CONFIG, replace(CONFIG, lora_rank=-1))
    (wrapper, _) = wrap_moe_layers_with_amx(model, CONFIG, CONFIG)
    lora = wrapper.lora
    args = (torch.randn(5, 32), torch.full((5, 2), 9), torch.ones(5, 2), wrapper.moe_amx, lora)
    with pytest.raises(KTAMXForwardError, match="ids: 9 to 9; allowed are -1 to 3"):
        MOEAMXFunction.apply(*args, *lora.matrices())
    out = wrapper(torch.randn(1, 5, 32))
    out.sum().backward(retain_graph=True)
    with pytest.raises(KTAMXBackwardError, match="a second backward pass"):
        out.sum().backward()
    lora.up_lora_a.data = lora.up_lora_a.data.double()
    with pytest.raises(KTAMXConfigError, match=r"layer 0: slot 1: a LoRA matrix is torch.float64"):
        wrapper.update_lora_pointers()
    assert all(issubclass(getattr(training, name), KTAMXError) for name in training.__all__ if name.endswith("Error"))


@pytest.mark.parametrize(
    ("model_args", "finetuning_args", "match"),
    [
        ({"kt_backend": "AMXInt4"}, {}, r"model_args.kt_backend: .*allowed is auto, AMXBF16, AMXInt8"),
        ({"kt_num_gpu_experts": 2}, {}, "no expert stays on the GPU"),
        ({"kt_cpu_activation": "none"}, {}, "allowed is retain, recompute"),
        ({}, {"lora_rank": "x"}, r"finetuning_args.lora_rank: .*a whole number is expected"),
        ({}, {"lora_rank": 0}, "allowed is 1 to 512"),
        ({}, {"lora_dropout": 0.1}, "no dropout; set it to 0"),
    ],
)
def test_arguments_are_checked_as_settings_are(model_args, finetuning_args, match):
    with pytest.raises(KTAMXConfigError, match=match):
        wrap_moe_layers_with_amx(model_of("mixtral"), SimpleNamespace(**model_args), SimpleNamespace(**finetuning_args))


def test_alpha_is_twice_the_rank_and_nothing_is_wrapped_twice():
    model, arguments = model_of("mixtral"), SimpleNamespace(kt_num_threads=1, kt_optimize_rule=None)
    (wrapper, _) = wrap_moe_layers_with_amx(model, arguments, SimpleNamespace(lora_rank=5, lora_alpha=None))
    assert wrapper.lora.scaling == 2.0
    with pytest.raises(KTAMXConfigError, match="layer 0 is wrapped already"):
        wrap_moe_layers_with_amx(model, arguments)


def test_gguf_files_and_a_folder_of_another_family(tmp_path):
    for family in ("qwen3_moe", "mixtral"):
        save_gguf(tiny_model(family=family), tmp_path / "m.gguf", "F32", "F32")
        model = load_kt_model(None, replace(CONFIG, model_name_or_path=str(tmp_path / "m.gguf")), CONFIG)
        torch.testing.assert_close(model(IDS).logits, tiny_model(family=family)(IDS).logits, rtol=1e-4, atol=1e-4)
    other = model_of("deepseek_v3")
    want = other(IDS).logits
    other.save_pretrained(tmp_path / "v3")
    model = load_kt_model(None, replace(CONFIG, model_name_or_path=str(tmp_path / "v3")), CONFIG)
    torch.testing.assert_close(model(IDS).logits, want, rtol=1e-5, atol=1e-5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 6 and all("_lora_" in name for name in trained)


def test_fifty_models_leave_no_memory():
    def one() -> None:
        model = model_of("qwen3_moe")
        wrap_moe_layers_with_amx(model, CONFIG, CONFIG)
        model(input_ids=IDS, labels=IDS).loss.backward()

    for _ in range(5):
        one()
    gc.collect()
    before = psutil.Process().memory_info().rss
    for _ in range(25):  # of two wrappers each
        one()
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 8 << 20
