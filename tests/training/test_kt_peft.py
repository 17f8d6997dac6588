"""KTransformers' calls with stock PEFT: what is trainable stays so, is saved by every way there is, and loads back."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainingArguments

from testing.models.tiny import save_hf, tiny_model
from tests.training.models import draw_b
from tests.training.test_kt import CONFIG, IDS, model_of
from training import (
    KTAMXConfigError,
    get_kt_lora_params,
    load_kt_model,
    load_moe_lora_from_adapter,
    save_moe_lora_to_adapter,
    update_kt_lora_pointers,
)
from training.kt.families import FAMILIES
from training.loop.save import save_adapter

ATTENTION = {
    "deepseek_v2": ["q_a_proj", "q_b_proj", "o_proj"], "deepseek_v3": ["q_a_proj", "kv_b_proj", "o_proj"],
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3_moe":
        save_hf(tiny_model(), path)
    else:
        model_of(request.param).save_pretrained(path)
    return path


def loaded(folder: Path, **change: object) -> nn.Module:
    return load_kt_model(None, replace(CONFIG, model_name_or_path=str(folder), **change), replace(CONFIG, **change))


def targets(model: nn.Module) -> list[str]:
    return ATTENTION.get(type(model.config).model_type, ["q_proj", "v_proj"])


def adapted(folder: Path, name: str = "default", **lora: object) -> PeftModel:
    model = loaded(folder)
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=targets(model), **lora), name)


@pytest.mark.parametrize("name", ["default", "mine"])
def test_trainable_stays_trainable(folder, name):
    model = adapted(folder, name)
    experts = get_kt_lora_params(model)
    assert len(experts) == 6 * len(model._kt_wrappers)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert all(id(p) in trained for p in experts) and len(trained) > len(experts)
    draw_b(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in experts)
    update_kt_lora_pointers(model)
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, loaded(folder)(IDS).logits)


def _saved(how: str, model: PeftModel, out: Path) -> Path:
    if how == "save_pretrained":
        model.save_pretrained(out)
    elif how == "save_adapter":
        save_adapter(model, out)
    elif how == "save_moe_lora_to_adapter":
        save_moe_lora_to_adapter(model, out)
    else:
        arguments = TrainingArguments(
            output_dir=str(out), max_steps=1, use_cpu=True, report_to=[], learning_rate=0.0, disable_tqdm=True
        )
        rows = [{"input_ids": IDS[0], "labels": IDS[0]}]
        Trainer(model, arguments, train_dataset=rows).train()
        out = out / "checkpoint-1"
    return out


@pytest.mark.parametrize("how", ["save_pretrained", "save_adapter", "save_moe_lora_to_adapter", "checkpoint"])
@torch.no_grad()
def test_everything_is_saved_and_loads_back(folder, how, tmp_path):
    with torch.enable_grad():
        out = _saved(how, model := draw_b(adapted(folder)).eval(), tmp_path / "out")
    want = model(IDS).logits
    again = PeftModel.from_pretrained(loaded(folder), out, is_trainable=True).eval()
    torch.testing.assert_close(again(IDS).logits, want, rtol=1e-5, atol=1e-5)
    assert all(p.requires_grad for p in get_kt_lora_params(again))
    read = adapted(folder)
    load_moe_lora_from_adapter(read, out)
    for got, wanted in zip(get_kt_lora_params(read), get_kt_lora_params(model), strict=True):
        torch.testing.assert_close(got, wanted)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rank=st.integers(1, 5), alpha=st.sampled_from([1.0, 3.0, 6.0]), form=st.sampled_from(["peft", "kt-fused"]))
@torch.no_grad()
def test_an_adapter_of_another_rank_and_scale(rank, alpha, form, tmp_path):
    """Into a model of rank 5: the same outputs, or a reason."""
    save_hf(tiny_model(), tmp_path / "base")
    model = draw_b(loaded(tmp_path / "base", lora_rank=rank, lora_alpha=alpha))
    save_adapter(model, tmp_path / "out", form)
    larger = loaded(tmp_path / "base", lora_rank=5, lora_alpha=10.0)
    load_moe_lora_from_adapter(larger, tmp_path / "out")
    torch.testing.assert_close(larger(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    if rank > 1:
        with pytest.raises(KTAMXConfigError, match=r"_lora_a is .*; the model's is .*, of rank 1"):
            load_moe_lora_from_adapter(loaded(tmp_path / "base", lora_rank=1, lora_alpha=2.0), tmp_path / "out")


def test_folders_without_experts_are_refused(folder, tmp_path):
    model = loaded(folder)
    with pytest.raises(KTAMXConfigError, match="no LoRA on experts"):
        load_moe_lora_from_adapter(model, tmp_path)
    with pytest.raises(KTAMXConfigError, match="not wrapped"):
        load_moe_lora_from_adapter(nn.Linear(1, 1), tmp_path)


def test_several_adapters_have_experts_of_their_own_once_named(folder):
    """A second adapter does not take the first one's experts."""
    model = adapted(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_adapter("second", LoraConfig(r=2, target_modules=targets(model)))
    model.set_adapter("second")
    assert not any(p.requires_grad for p in get_kt_lora_params(model))
    model.set_adapter("default")
    assert all(p.requires_grad for p in get_kt_lora_params(model))


def test_trainer_resumes_from_its_checkpoint(folder, tmp_path):
    """Three steps in one go, and two of them in another process's place."""
    rows = [{"input_ids": IDS[i % 2], "labels": IDS[i % 2]} for i in range(6)]
    found = []
    for steps in ([3], [2, 3]):
        out = tmp_path / str(len(steps))
        for i, last in enumerate(steps):
            torch.manual_seed(0)
            model = adapted(folder)
            arguments = TrainingArguments(
                output_dir=str(out), max_steps=last, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
                learning_rate=1e-2, lr_scheduler_type="constant", per_device_train_batch_size=2,
            )  # fmt: skip
            Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=i > 0)
        found.append([parameter.detach() for parameter in get_kt_lora_params(model)])
    assert any(matrix.any() for matrix in found[0][1::2])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_without_peft_is_saved_whole_with_its_experts(folder, tmp_path):
    model = draw_b(loaded(folder))
    model.save_pretrained(tmp_path / "whole")
    again = loaded(folder)
    load_moe_lora_from_adapter(again, _saved("save_adapter", model, tmp_path / "out"))
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    names = load_file(tmp_path / "whole" / "model.safetensors")
    assert sum("lora_experts.default." in name for name in names) == len(get_kt_lora_params(model))


@torch.no_grad()
def test_peft_loads_an_adapter_of_another_rank_than_the_experts_began_with(folder, tmp_path):
    model = draw_b(adapted(folder)).eval()
    save_adapter(model, tmp_path / "out")
    again = PeftModel.from_pretrained(loaded(folder, lora_rank=5, lora_alpha=1.0), tmp_path / "out", is_trainable=True)
    assert all(wrapper.lora.rank == 3 for wrapper in again._kt_wrappers)
    torch.testing.assert_close(again.eval()(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", ["mlp.original_moe", "block_sparse_moe"])
def test_ktransformers_own_adapters_are_read(folder, block, tmp_path):
    """Their keys, with the names that Mixtral's experts had in transformers 4 below the second."""
    model = draw_b(loaded(folder))
    save_adapter(model, tmp_path / "out")
    path = tmp_path / "out" / "adapter_model.safetensors"
    older = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if block == "block_sparse_moe" else {}
    tensors = {}
    for key, tensor in load_file(path).items():
        key = key.replace("mlp.experts", f"{block}.experts")
        for name, old in older.items():
            key = key.replace(name, old)
        tensors[key] = tensor
    save_file(tensors, path)
    again = loaded(folder)
    load_moe_lora_from_adapter(again, tmp_path / "out")
    for got, want in zip(get_kt_lora_params(again), get_kt_lora_params(model), strict=True):
        torch.testing.assert_close(got, want)
