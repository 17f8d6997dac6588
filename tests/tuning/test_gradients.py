"""Loss and gradients over the served weights equal those of transformers' model with PEFT, for each family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.lora.layer import LoraLayer
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from engine.architectures.names import StoredNames
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.rotation import Rotation
from engine.architectures.registry import config_from_hf
from engine.config import EngineConfig
from engine.errors import UserError
from engine.linear.gpu import GpuLinearBackend
from engine.linear.latent import TorchLatentUp
from engine.linear.native import NativeLinearBackend
from engine.memory.costs import (
    LOGIT_ROWS,
    kept_bytes,
    layers_kept,
    logits_bytes,
    training_bytes,
    training_row_bytes,
    training_run_bytes,
)
from engine.planning.placement import check_training
from engine.planning.plan import plan_engine
from engine.tuning import Batch, OpenRun, PublishRun
from engine.weights.store import WeightTensor
from testing.models.tiny import TRAINED, save_hf, tiny_model
from tests.architectures.test_glm4_moe_lite import SIZES
from tests.native.test_latent import ALL, POOL, halves, joined
from tests.training.models import ours
from tests.tuning.conftest import Tuning, sample, sampled
from training.layer import ExpertsLoraLayer
from training.loop.load import load_adapter
from training.loop.save import layer_of, module_name
from training.service import model, parts
from training.service.parts import TrainedLatentUp


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the names that a run gives its parameters."""
    found = {}
    for path, module in model.named_modules():
        name = module_name(path)
        if isinstance(module, ExpertsLoraLayer):
            for matrix, parameter in module.lora("default").named_parameters():
                found[f"model.layers.{layer_of(name)}.mlp.experts.{matrix}"] = parameter.grad
        elif isinstance(module, LoraLayer) and "default" in module.lora_A:
            name = StoredNames(DeltaNet.STORED).canonical(name)
            for half in ("A", "B"):
                found[f"{name}.lora_{half.lower()}"] = getattr(module, f"lora_{half}")["default"].weight.grad
    return found


def saved(family: str, folder: Path) -> None:
    if family == "glm4_moe_lite":
        torch.manual_seed(0)
        save_hf(Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**SIZES)), folder)
    else:
        save_hf(tiny_model(family=family), folder)


@pytest.mark.parametrize("family", [*TRAINED, "glm4_moe_lite"])
def test_gradients_are_those_of_peft(family: str, tmp_path: Path):
    saved(family, tmp_path)
    tuning = Tuning(tmp_path)
    tuning.ask(OpenRun(rank=4, alpha=8.0))
    adapter = tuning.engine.core.tuner._runs["run"].adapter
    with torch.no_grad():
        for name, parameter in adapter.parameters.items():
            if name.endswith("_b"):
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    texts = [sample(n, 9 + 65 * n) for n in range(3)]  # within gpt-oss' windows and a chunk of delta nets, and longer
    loss = tuning.ask(Batch(texts)).metrics["loss"]

    model = ours(tmp_path)
    load_adapter(model, adapter.weights("peft"))
    wanted = torch.zeros(())
    for text in texts:
        logits = model(torch.tensor([text.tokens])).logits[0]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(text.targets)[:, None])[:, 0]
        wanted = wanted - (chosen * torch.tensor(text.numbers["weights"])).sum()
    wanted.backward()
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-4)
    expected = gradients(model)
    assert set(expected) == set(adapter.parameters)
    size = sum(parameter.nbytes for parameter in adapter.parameters.values())
    assert training_run_bytes(tuning.engine.core.tuner._config, 4) == 4 * size
    for name, parameter in adapter.parameters.items():
        size = float(expected[name].abs().max()) + 1e-3
        assert float((parameter.grad - expected[name]).abs().max()) < 2e-3 * size, name
    sampled_as_trained(tuning)
    tuning.engine.close()


def test_they_are_the_same_whichever_layers_are_computed_again(tmp_path: Path, monkeypatch):
    """In a micro-batch of two parts, one of which only asks for numbers."""
    save_hf(tiny_model(family="qwen2_moe"), tmp_path)
    found = []
    for kept in (0, 1, 2):
        monkeypatch.setattr(model, "layers_kept", lambda *_, kept=kept: kept)
        tuning = Tuning(tmp_path)
        for run, learn in (("run", True), ("other", False)):
            tuning.ask(OpenRun(rank=4, alpha=8.0), run)
            tuning.send(Batch([sample(n, 9 + n) for n in range(2)], learn=learn), run)
        tuning.ask(Batch([sample(5)]))
        runs = tuning.engine.core.tuner._runs
        unasked = [parameter.grad for parameter in runs["other"].adapter.parameters.values()]
        assert not any(gradient is not None and gradient.any() for gradient in unasked)
        found.append({name: parameter.grad.clone() for name, parameter in runs["run"].adapter.parameters.items()})
        tuning.engine.close()
    assert all(torch.equal(found[0][name], each[name]) for each in found[1:] for name in found[0])
    assert any(gradient.abs().max() > 0 for gradient in found[0].values())


@given(most=st.integers(1, 1 << 20), part=st.floats(0, 1), memory=st.integers(0, 1 << 40))
def test_what_layers_keep_is_in_the_memory_plan(most: int, part: float, memory: int):
    """Whatever the size of a micro-batch and of a device's memory."""
    config = config_from_hf(tiny_model().config.to_dict())
    tokens, row = max(1, int(part * most)), training_row_bytes(config)
    rest = most * (config.num_hidden_layers * config.hidden_size * 4 + 2 * row) + logits_bytes(config, LOGIT_ROWS)
    kept = kept_bytes(memory)
    assert layers_kept(config, tokens, kept) * tokens * row <= training_bytes(config, most, kept) - rest


@given(of=halves(ALL), heads=st.integers(1, 4), tokens=st.integers(1, 5))
def test_gradients_meet_the_file_s_latent_keys_and_values(of: tuple[str, str, int, int, int], heads: int, tokens: int):
    """What sampling multiplies with, blocks too, float32."""
    _, _, nope, value, rank = of
    weight, exact = joined(heads, of, 1)
    up = NativeLinearBackend(torch.float32, POOL).latent_up("kv_b", weight, heads, nope)
    spec = Latent(heads, None, rank, nope, value, Rotation(32, 1e4, 64))
    trained = TrainedLatentUp("kv_b", up, spec, POOL)
    generator = torch.Generator().manual_seed(2)
    absorbed, values = (torch.randn(tokens, heads, size, generator=generator) for size in (rank, value))
    wanted = torch.einsum("thr,hnr->thn", absorbed, exact[:, :nope])
    torch.testing.assert_close(trained.back(0, absorbed), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    wanted = torch.einsum("thv,hvr->thr", values, exact[:, nope:])
    torch.testing.assert_close(trained.back(1, values), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def sampled_as_trained(tuning: Tuning) -> None:
    """What sampling says of its own tokens is what training says of them."""
    tuning.ask(PublishRun("live"))
    found, wanted = sampled(tuning, "live")
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "field,value", [("tensor_parallel", 2), ("expert_backend", "reference"), ("linear_backend", "reference")]
)
def test_what_cannot_be_trained_over_is_refused_by_the_plan(tmp_path: Path, field: str, value: object):
    save_hf(tiny_model(), tmp_path)
    plan = plan_engine(EngineConfig(str(tmp_path)))
    with pytest.raises(UserError, match=f"leave --{field.replace('_', '-')} out") as caught:
        if field == "tensor_parallel":  # which a CPU has not
            check_training(replace(plan.config, tensor_parallel=2), plan.placement)
        else:
            plan_engine(EngineConfig(str(tmp_path), fine_tuning=True, **{field: value}))
    assert caught.value.field == "fine_tuning"


@pytest.mark.parametrize("joined", [False, True])
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), rows=st.integers(1, 5), chunk=st.integers(1, 400))
def test_gradients_meet_a_gpu_s_projections(joined: bool, sizes: list[int], rows: int, chunk: int):
    """Dense ones, alone or side by side, some of their rows at a time."""
    generator = torch.Generator().manual_seed(rows)
    backend = GpuLinearBackend(torch.float32, torch.device("cpu"), 1, 8)
    weights = [torch.randn(64 * size, 48, generator=generator) for size in sizes]
    given = [WeightTensor("w", tuple(w.shape), "F32", w.view(torch.uint8).flatten().numpy()) for w in weights]
    linears = [backend.load("w", weight, None) for weight in given]
    if joined:
        backend.join(linears)
    with mock.patch.object(parts, "_GPU_CHUNK", chunk):
        for linear, weight in zip(linears, weights, strict=True):
            trained = parts.TrainedLinear(linear.name, linear, POOL)
            grad = torch.randn(rows, len(weight), generator=generator)
            torch.testing.assert_close(trained.back(grad), grad @ weight, rtol=1e-4, atol=1e-3)


@given(heads=st.integers(1, 4), nope=st.integers(1, 9), value=st.integers(1, 9), tokens=st.integers(1, 5))
def test_gradients_meet_latent_keys_and_values_in_torch(heads: int, nope: int, value: int, tokens: int):
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(heads, nope + value, 16, generator=generator)
    spec = Latent(heads, None, 16, nope, value, Rotation(32, 1e4, 64))
    trained = TrainedLatentUp("kv_b", TorchLatentUp(weight, nope), spec, POOL)
    for half, given_size in ((0, nope), (1, 16)):
        x = torch.randn(tokens, heads, given_size, generator=generator, requires_grad=True)
        dense = torch.einsum("thn,hnr->thr", x, weight[:, :nope]) if half == 0 else None
        dense = torch.einsum("thr,hvr->thv", x, weight[:, nope:]) if dense is None else dense
        grad = torch.randn(dense.shape, generator=generator)
        torch.testing.assert_close(trained.product(half, x.detach()), dense.detach(), rtol=1e-4, atol=1e-4)
        wanted = torch.autograd.grad(dense, x, grad)[0]
        torch.testing.assert_close(trained.back(half, grad), wanted, rtol=1e-4, atol=1e-4)
