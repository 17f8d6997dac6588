"""What is trained is what is served: the trainer's evaluation logits are the server's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.memory.limits import Memory
from engine.messages import Finished
from testing.harness import Harness
from testing.models.tiny import STATEFUL, TRAINED, save_hf, tiny_model
from tests.training.conftest import save_chat_model
from tests.training.models import draw_b, ours, within_kimi
from training import run
from training.config import TrainConfig, load_config
from training.kernels import expert_maker
from training.loop.save import save_adapter
from training.memory.plan import plan_training

CONFIG = TrainConfig(kt_num_threads=1)
IDS = torch.randint(2, 128, (1, 21), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def evaluated(model) -> dict[str | None, torch.Tensor]:
    """Log-probabilities [length, vocabulary] of a PEFT model with its adapter, and without."""
    found = {"a": model(IDS).logits[0].log_softmax(-1)}
    with model.disable_adapter():
        found[None] = model(IDS).logits[0].log_softmax(-1)
    return found


def expect_served(want: dict[str | None, torch.Tensor], model: Path, adapter: Path) -> None:
    """Base and adapter in one batch, float32."""
    harness = Harness(model)
    harness.adapter("a", adapter)
    requests = {name: harness.submit(IDS[0].tolist(), name, max_tokens=1, prompt_logprobs=5) for name in (None, "a")}
    harness.run()
    for name, request in requests.items():
        result = harness.results[request]
        assert isinstance(result.end, Finished), result.end
        for position, found in enumerate(result.prompt_logprobs[1:]):
            for token in (found.chosen, *found.top):
                assert abs(token.logprob - float(want[name][position, token.token])) < 2e-5
    harness.close()


@pytest.mark.parametrize(
    ("family", "form"),
    [*((family, "peft") for family in TRAINED), *((family, "kt-fused") for family in TRAINED if family != "gpt_oss")],
)
def test_evaluation_logits_are_those_of_the_server(tmp_path, family, form):
    save_hf(tiny_model(family=family), tmp_path / "model")
    model = draw_b(ours(tmp_path / "model", expert_maker(CONFIG)))
    save_adapter(model, tmp_path / "adapter", form)
    want = evaluated(model)
    assert (want["a"] - want[None]).abs().mean() > 0.05
    expect_served(want, tmp_path / "model", tmp_path / "adapter")


def test_the_language_model_of_kimi_is_trained_and_served(tmp_path):
    save_hf(tiny_model(family="deepseek_v3"), tmp_path / "model")
    within_kimi(tmp_path / "model")
    model = draw_b(ours(tmp_path / "model", expert_maker(CONFIG)))
    save_adapter(model, tmp_path / "adapter", "peft")
    want = evaluated(model)
    assert (want["a"] - want[None]).abs().mean() > 0.05
    expect_served(want, tmp_path / "model", tmp_path / "adapter")


def test_two_steps_of_mixtral_are_served(config, tmp_path, monkeypatch):
    """Planned and trained by its own names for projections; the files have its own names for modules."""
    folder = save_chat_model(tmp_path / "model", family="mixtral")
    given = [f"model_name_or_path={folder}", "lora_target=q_proj,w1,w2,w3", "max_steps=2", "save_strategy=no"]
    (tmp_path / "c.yaml").write_text(
        f"dataset: {config.dataset[0]}\noutput_dir: {tmp_path / 'out'}\nlora_rank: 4\nlearning_rate: 0.02\n"
        "cutoff_len: 64\ndevice: cpu\nplot_loss: false\n"
    )
    config = load_config(tmp_path / "c.yaml", given)
    assert plan_training(config, Memory("CPU", 1 << 50, 1 << 50)).items
    want = {}
    monkeypatch.setattr(run, "save_adapter", lambda m, *a, **k: (want.update(evaluated(m)), save_adapter(m, *a, **k)))
    run.train(config)
    assert (want["a"] - want[None]).abs().mean() > 0.01
    with safe_open(tmp_path / "out/adapter_model.safetensors", "pt") as file:
        keys = set(file.keys())
    at = "base_model.model.model.layers.1"
    modules = ["self_attn.q_proj", *(f"block_sparse_moe.experts.7.w{n}" for n in (1, 2, 3))]
    assert {f"{at}.{module}.lora_{half}.weight" for module in modules for half in "AB"} <= keys
    assert all("q_proj" in key or "block_sparse_moe.experts" in key for key in keys)
    expect_served(want, folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "packing"), [*((family, False) for family in STATEFUL), ("gpt_oss", False), ("gpt_oss", True)]
)
def test_two_steps_are_served_and_gone_on_with(config, tmp_path, monkeypatch, family, packing):
    """Rows of several lengths, so that padding lies beside states, and rows longer than windows."""
    folder = save_chat_model(tmp_path / "model", family=family)
    (tmp_path / "c.yaml").write_text(
        f"model_name_or_path: {folder}\ndataset: {config.dataset[0]}\nlora_rank: 4\nlearning_rate: 0.02\n"
        "cutoff_len: 64\ndevice: cpu\nplot_loss: false\nmax_steps: 2\nsave_strategy: 'no'\n"
        f"per_device_train_batch_size: 2\npacking: {str(packing).lower()}\n"
    )
    want = {}
    monkeypatch.setattr(run, "save_adapter", lambda m, *a, **k: (want.update(evaluated(m)), save_adapter(m, *a, **k)))
    for given in (
        [f"output_dir={tmp_path / 'out'}"],
        [f"output_dir={tmp_path / 'more'}", f"adapter_name_or_path={tmp_path / 'out'}"],
    ):
        run.train(load_config(tmp_path / "c.yaml", given))
        assert (want["a"] - want[None]).abs().mean() > 0.01
        expect_served(want, folder, Path(given[0].partition("=")[2]))
    with safe_open(tmp_path / "out/adapter_model.safetensors", "pt") as file:
        keys = set(file.keys())
    if family in STATEFUL:
        assert any("linear_attn.in_proj" in key for key in keys) and any("linear_attn.out_proj" in key for key in keys)
    else:
        assert any(".experts.base_layer.lora_A" in key for key in keys)
