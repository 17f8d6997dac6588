"""What a run's settings make of the experts' kernels."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine.errors import UserError
from engine.memory.items import Kind
from engine.weights.open import open_model
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.training.models import draw_b, ours
from training.config import TrainConfig
from training.kernels import expert_maker, threads_note, worker_pool
from training.memory.plan import plan_training

CONFIG = TrainConfig(model_name_or_path="", device="cpu", kt_num_threads=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    model = tiny_model(hidden_size=256, moe_intermediate_size=256)
    save_hf(model, root / "plain")
    save_gguf(model, root / "q8.gguf", "Q8_0", "F32")
    return {"plain": str(root / "plain"), "q8": str(root / "q8.gguf")}


def layers(path, dtype=torch.float32, **settings):
    notes = []
    made = expert_maker(replace(CONFIG, **settings), notes.append)(open_model(path), dtype)
    assert len(notes) == 1 and "kernels, 2 threads" in notes[0]
    return made, sum(layer.layer.num_bytes for layer in made.values())


def test_the_type_that_experts_are_held_in(models, tmp_path):
    """In kt_backend's words; the memory plan says what it takes."""
    sizes = []
    for name, settings in (
        ("plain", {}),
        ("plain", {"kt_backend": "AMXBF16"}),
        ("plain", {"kt_backend": "AMXInt8"}),
        ("q8", {}),
    ):
        _, size = layers(models[name], **settings)
        config = replace(CONFIG, model_name_or_path=models[name], **settings)
        planned = next(item.num_bytes for item in plan_training(config).items if item.kind is Kind.EXPERTS)
        assert 0.95 < size / planned < 1.05
        sizes.append(size)
    assert all(big > 1.7 * small for big, small in pairwise(sizes[:3])) and sizes[2] == sizes[3]
    _, bf16 = layers(models["plain"], torch.bfloat16)
    assert bf16 == sizes[1]


@pytest.mark.parametrize("kind", ["AMXBF16", "AMXInt8"])
def test_quantised_experts_stay_as_they_are(models, kind):
    with pytest.raises(UserError, match=f"kt_backend is {kind}, but the experts of layer 0 are Q8_0"):
        layers(models["q8"], kt_backend=kind)


def test_what_is_kept_for_the_backward_pass(models):
    assert all(layer.keep for layer in layers(models["plain"])[0].values())
    assert not any(layer.keep for layer in layers(models["plain"], kt_cpu_activation="recompute")[0].values())


def test_threads():
    cpus = len(os.sched_getaffinity(0))
    assert worker_pool(1, per_node=False).threads == worker_pool(1).threads == 1
    assert worker_pool(1, per_node=False).groups == 1
    assert worker_pool(cpus + 60).threads == cpus
    assert threads_note(cpus) is None and threads_note(cpus + 60) == (
        f"kt_num_threads: {cpus + 60} is lowered to {cpus}, the CPUs of this machine"
    )


@pytest.mark.parametrize("name", ["plain", "q8"])
def test_a_whole_model_computes_the_same_over_either_experts(models, name):
    """The kernels' and torch's, values and LoRA's gradients; in int8 within what its rounding gives."""
    ids = torch.randint(2, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    results = []
    for make in ({}, {"make": expert_maker(CONFIG)}):
        model = draw_b(ours(models[name], **make))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        results.append((loss.detach(), grads))
    (want, wanted), (got, found) = results
    limit = 1e-5 if name == "plain" else 0.05
    torch.testing.assert_close(got, want, rtol=limit, atol=0)
    for key, value in wanted.items():
        assert (found[key] - value).abs().mean() <= 3 * limit * value.abs().mean() + 1e-9, key
