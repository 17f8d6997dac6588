"""Experts without rows in a step: stepped as stacked parameters are, or skipped as stock PEFT's AdamW skips them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from testing.models.tiny import save_hf, tiny_model
from tests.training.models import Expert, copy_lora, losses, ours, plain
from tests.training.test_resume import goes_on
from training.config import TrainConfig
from training.experts.base import ExpertLora
from training.kernels import expert_maker
from training.loop.optimizer import SkippingAdamW, expert_loras
from training.run import train


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=6), st.sampled_from([0.0, 0.1]), st.integers(0, 99))
def test_an_expert_is_what_a_parameter_of_its_own_is(chosen, decay, seed):
    """Against torch's AdamW with a parameter for each expert, whose gradient is None where it has no rows."""
    torch.manual_seed(seed)
    lora = ExpertLora(5, 2, 8, 4, 1.0)
    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": decay}
    optimizer = SkippingAdamW(lora.parameters(), [lora], **settings)
    alone = {
        (name, e): torch.nn.Parameter(matrix[e].detach().clone())
        for name, matrix in lora.named_parameters()
        for e in range(5)
    }
    other = torch.optim.AdamW(alone.values(), **settings)
    for experts in chosen:
        lora.note(torch.tensor([*experts, -1]))
        for name, matrix in lora.named_parameters():
            matrix.grad = torch.zeros_like(matrix)
            for e in range(5):
                alone[name, e].grad = None
                if e in experts:
                    matrix.grad[e] = torch.randn(matrix.shape[1:])
                    alone[name, e].grad = matrix.grad[e].clone()
        optimizer.step()
        other.step()
        assert not lora.chosen.any()
    for name, matrix in lora.named_parameters():
        for e in range(5):
            torch.testing.assert_close(matrix[e], alone[name, e], rtol=1e-6, atol=1e-7)


def _called(model: nn.Module) -> set[nn.Module]:
    """Gets the experts that have rows."""
    called: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, Expert):
            module.register_forward_pre_hook(lambda expert, args: called.add(expert) if len(args[0]) else None)
    return called


def _drop_idle(model: nn.Module, called: set[nn.Module]) -> None:
    """As in transformers 4, where experts without rows are not called, and have no gradient."""
    for module in model.modules():
        if isinstance(module, Expert) and module not in called:
            for parameter in module.parameters():
                parameter.grad = None
    called.clear()


def test_fifteen_steps_are_those_of_stock_peft(tmp_path):
    """32 experts and six tokens a step, so that most experts have none."""
    base = tiny_model(num_experts=32)
    save_hf(base, tmp_path)
    model = ours(tmp_path, expert_maker(TrainConfig(kt_num_threads=1)))
    stock = plain(base)
    copy_lora(model, stock)
    settings = {"lr": 5e-3, "weight_decay": 0.01, "eps": 1e-6}
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (model, stock)]
    optimizers = SkippingAdamW(trained[0], expert_loras(model), **settings), torch.optim.AdamW(trained[1], **settings)
    found: list[list[float]] = [[], []]
    called = _called(stock)
    generator = torch.Generator().manual_seed(1)
    for _ in range(15):
        ids = torch.randint(2, 128, (1, 6), generator=generator)
        for each, optimizer, seen in zip((model, stock), optimizers, found, strict=True):
            loss = each(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            _drop_idle(each, called)
            optimizer.step()
            seen.append(float(loss))
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) < 2e-5


@pytest.mark.parametrize("several", [False, True])
def test_either_way_trains_and_they_differ(config, several):
    config = replace(config, save_strategy="no", max_steps=4, per_device_train_batch_size=1, weight_decay=0.1)
    found = []
    for way in ("step", "skip"):
        each = replace(config, idle_experts=way, output_dir=f"{config.output_dir}-{way}")
        output = each.output
        if several:
            each, output = replace(each, adapters=(replace(each, adapter_name="a"),)), output / "a"
        train(each)
        found.append(losses(output))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6) and found[0] != found[1]


def test_a_stopped_run_that_skips_goes_on_bit_for_bit(config):
    goes_on(replace(config, idle_experts="skip", max_steps=4, per_device_train_batch_size=1), 2)
