"""A finished adapter goes on: by PEFT's own call over a loaded model, and by a run's adapter_name_or_path."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from engine.errors import UserError
from tests.training.models import draw_b, losses, ours, reference
from training.config.fields import ATTENTION_TARGETS, EXPERT_TARGETS
from training.layer import ExpertsLoraLayer, lora_config, with_lora
from training.loop.save import save_adapter
from training.loop.trainer import checkpoints
from training.model import load_model
from training.plan import main as plan
from training.run import train

TARGETS = st.lists(st.sampled_from([*ATTENTION_TARGETS[:4], *EXPERT_TARGETS]), min_size=1, unique=True)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(targets=TARGETS, rank=st.sampled_from([1, 4, 7]), trainable=st.booleans(), low=st.booleans())
def test_stock_peft_loads_all_of_a_finished_adapter(targets, rank, trainable, low, chat_model, tmp_path):
    base = load_model(str(chat_model), reference)
    model = draw_b(with_lora(base, lora_config(base, tuple(targets), rank=rank, alpha=5.0)))
    save_adapter(model, tmp_path / "out")
    again = PeftModel.from_pretrained(
        load_model(str(chat_model), reference), tmp_path / "out", is_trainable=trainable, low_cpu_mem_usage=low
    )
    ids = torch.arange(24)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    trained = [name for name, parameter in again.named_parameters() if parameter.requires_grad]
    assert trainable == bool(trained)
    if trainable and set(targets) & set(EXPERT_TARGETS):
        again(input_ids=ids, labels=ids).loss.backward()
        assert any(p.grad.any() for name, p in again.named_parameters() if "lora_experts" in name and p.requires_grad)


def test_stock_configurations_reach_the_experts(chat_model):
    """Bare names, as anyone writes them."""
    base = load_model(str(chat_model), reference)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    model = with_lora(base, config)
    layers = [module for module in model.modules() if isinstance(module, ExpertsLoraLayer)]
    assert layers and all(layer.lora("default").rank == 3 for layer in layers)
    assert all(p.requires_grad for layer in layers for p in layer.lora("default").parameters())
    with pytest.raises(UserError, match="one rank and one alpha"):
        with_lora(load_model(str(chat_model), reference), LoraConfig(
            r=3, target_modules=["gate_proj", "up_proj"], rank_pattern={"up_proj": 5},
        ))  # fmt: skip


def test_an_adapter_of_another_model_is_refused(chat_model, tmp_path):
    save_adapter(ours(chat_model), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    key = next(key for key in tensors if ".experts.3." in key)
    layer = next(m for m in ours(chat_model).modules() if isinstance(m, ExpertsLoraLayer))
    state = {f"experts.{key.partition('.experts.')[2]}": torch.zeros(2, 5)}
    with pytest.raises(UserError, match="is \\(2, 5\\); the model has 8 experts of"):
        torch.nn.ModuleDict({"experts": layer}).load_state_dict(state, strict=False)


@pytest.mark.parametrize("form", ["peft", "kt-fused"])
def test_a_run_goes_on_with_an_adapter(config, form, tmp_path):
    """Its first loss is the adapter's, and rank, alpha and targets are."""
    first = replace(config, save_strategy="no", adapter_format=form, max_steps=4)
    folder = train(first).folders["default"]
    second = replace(
        first, adapter_name_or_path=str(folder), output_dir=str(tmp_path / "more"), lora_rank=2, lora_alpha=9.0,
        lora_target=("q_proj",), learning_rate=0.0, max_steps=1,
    )  # fmt: skip
    train(second)
    whole = replace(first, learning_rate=0.0, max_steps=1, output_dir=str(tmp_path / "new"))
    train(whole)
    assert losses(second.output)[0] < losses(whole.output)[0] - 0.05
    names = [p.name for p in Path(folder).iterdir() if p.suffix == ".safetensors"]
    for name in names:
        want, got = load_file(folder / name), load_file(second.output / name)
        assert set(want) == set(got)
        for key, tensor in want.items():
            torch.testing.assert_close(got[key], tensor, rtol=1e-6, atol=1e-7)


def test_an_adapter_that_is_none_is_refused(config):
    with pytest.raises(UserError, match="nowhere"):
        train(replace(config, adapter_name_or_path="/nowhere"))


def test_a_plan_is_that_of_the_adapters_rank(config, capsys, tmp_path):
    folder = train(replace(config, save_strategy="no", max_steps=1, lora_rank=7)).folders["default"]
    (tmp_path / "c.yaml").write_text(
        f"model_name_or_path: {config.model_name_or_path}\ndataset: {config.dataset[0]}\noutput_dir: {tmp_path}\n"
        "device: cpu\n"
    )
    plans = []
    for override in ("lora_rank=7", f"adapter_name_or_path={folder}", "lora_rank=200"):
        capsys.readouterr()
        assert plan([str(tmp_path / "c.yaml"), override]) == 0
        plans.append(re.sub(r"[\d.]+ GiB free", "", capsys.readouterr().out))  # changes from one call to the next
    assert plans[0] == plans[1] != plans[2]


def test_a_checkpoint_of_the_model_alone_is_no_place_to_resume(config):
    config = replace(config, save_only_model=True, max_steps=2, save_steps=1)
    train(config)
    checkpoint = checkpoints(config.output)[-1]
    assert not (checkpoint / "optimizer.pt").exists()
    with pytest.raises(UserError, match="has no state of the optimiser"):
        train(replace(config, resume_from_checkpoint="true", max_steps=3))
