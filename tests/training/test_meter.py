"""Operations that a run says it does are those that torch counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.weights.open import open_model
from testing.models.tiny import save_hf, tiny_model
from tests.training.models import draw_b, ours
from training.config import TrainConfig
from training.loop.meter import make_meter
from training.loop.progress import read_log
from training.model import checkpoint_layers
from training.run import train


@pytest.mark.parametrize("again", [False, True])
def test_a_step_is_what_torch_counts(tmp_path, again):
    """Rows of one token, so that there is nothing of attention that a causal mask would hide."""
    save_hf(tiny_model(), tmp_path)
    config = TrainConfig(model_name_or_path=str(tmp_path), lora_rank=4, kt_num_threads=1, gradient_checkpointing=again)
    meter = make_meter(open_model(str(tmp_path)).config, config, experts_only=False)
    model = draw_b(ours(tmp_path, attention="eager")).train()
    if again:
        checkpoint_layers(model)
    ids = torch.randint(2, 128, (24, 1), generator=torch.Generator().manual_seed(0))
    embedded = model.get_input_embeddings()(ids).requires_grad_()  # else the first layer has no gradient of its input
    with FlopCounterMode(display=False) as counted:
        model(inputs_embeds=embedded).logits.sum().backward()
    meter.count([1] * 24)
    assert meter.done == pytest.approx(counted.get_total_flops(), rel=1e-3)


def test_without_what_a_gpu_computes(tmp_path):
    save_hf(tiny_model(), tmp_path)
    model = open_model(str(tmp_path)).config
    config = TrainConfig(model_name_or_path=str(tmp_path), kt_num_threads=1)
    everything, experts = (make_meter(model, config, experts_only=only) for only in (False, True))
    assert 0 < experts.per_token < everything.per_token and 0 < experts.per_rank < everything.per_rank
    assert experts.per_pair == 0 < everything.per_pair
    more = make_meter(model, replace(config, kt_cpu_activation="recompute"), experts_only=True)
    assert more.per_token == pytest.approx(experts.per_token * (2 + 2 / 3) / 2)


def test_the_log_has_the_share_of_the_peak(config):
    train(replace(config, max_steps=2, save_strategy="no", packing=True))
    records = read_log(config.output / "log.jsonl")
    assert len(records) == 2 and all(0 < record["of_peak"] < 1.5 for record in records)
