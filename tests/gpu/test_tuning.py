"""Training beside serving on a GPU: as on the CPU, and what sampling says of its own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.tuning import Batch, CloseRun, LoadRun, OpenRun, OptimStep, PublishRun, SaveRun
from testing.models.tiny import TRAINED, save_hf, tiny_model
from tests.tuning.conftest import Tuning, sample, sampled

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
GPU = {"device": "cuda", "expert_backend": None, "attention_backend": None, "linear_backend": None}
EXACT = {**GPU, "dtype": "float32", "attention_backend": "reference", "linear_backend": "gpu"}


def trained(tuning: Tuning, steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the masters on the CPU at the end."""
    tuning.ask(OpenRun(rank=4, alpha=8.0, seed=3), "run")
    losses = []
    for step in range(steps):
        tuning.ask(Batch([sample(2 * step + n, 9 + n) for n in range(2)]))
        losses.append(tuning.ask(Batch([sample(50)], learn=False)).metrics["loss"])
        tuning.ask(OptimStep(1e-2))
    adapter = tuning.engine.core.tuner._runs["run"].adapter
    assert {p.device.type for name, p in adapter.parameters.items() if ".experts." in name} <= {"cpu"}
    assert {p.device.type for p in adapter.parameters.values()} >= {tuning.engine.runner.model.device.type}
    return losses, {name: parameter.detach().cpu().clone() for name, parameter in adapter.parameters.items()}


@pytest.mark.parametrize("family", TRAINED)
def test_float32_trains_as_on_the_cpu(family: str, tmp_path: Path):
    """Losses, matrices and a state's file, of every family that can be trained."""
    save_hf(tiny_model(family=family), tmp_path / "model")
    found = []
    for settings in ({"dtype": "float32"}, EXACT):
        tuning = Tuning(tmp_path / "model", **settings)
        found.append(trained(tuning))
        tuning.ask(SaveRun(str(tmp_path / "state"), None))
        tuning.ask(LoadRun(str(tmp_path / "state")))
        tuning.ask(CloseRun())
        tuning.engine.close()
    (losses, masters), (others, matrices) = found
    np.testing.assert_allclose(others, losses, rtol=2e-3)
    assert losses[-1] != losses[0]
    for name, matrix in masters.items():
        torch.testing.assert_close(
            matrices[name], matrix, rtol=0.02, atol=2e-3, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("experts", ["none", "2"])
def test_bf16_samples_what_it_has_learnt(experts: str, tmp_path: Path):
    """By the kernels that serve, in graphs, hot experts on the GPU or none; log-probabilities of the base within
    rounding, and streams that run beside."""
    save_hf(tiny_model(5, **SHAPE), tmp_path)
    settings: dict[str, Any] = {**GPU, "dtype": "bfloat16", "gpu_experts": experts}
    tuning = Tuning(tmp_path, **settings)
    tuning.ask(OpenRun(rank=8, alpha=16.0), "run")
    rid = tuning.engine.submit(sample(9).tokens[:6], None, max_tokens=200, ignore_eos=True)
    for _ in range(60):
        tuning.ask(Batch([sample(0)]))
        tuning.ask(OptimStep(1e-2))
    tuning.ask(PublishRun("live"))
    tuning.engine.run()
    assert len(tuning.engine.results[rid].tokens) == 200
    text = sample(0)
    assert tuning.engine.generate([text.tokens[:6]], ["live"], max_tokens=6)[0] == text.targets[5:11]
    found, wanted = sampled(tuning, "live")
    np.testing.assert_allclose(found, wanted, atol=0.15)
    tuning.engine.close()


def test_quantised_weights_train(tmp_path: Path):
    """Projections in tiles, experts in int8."""
    save_hf(tiny_model(5, **SHAPE), tmp_path)
    tuning = Tuning(tmp_path, **{**GPU, "dtype": "bfloat16", "gpu_experts": "none", "quantise": "int8"})
    losses, _ = trained(tuning, 8)
    assert losses[-1] != losses[0] and all(np.isfinite(losses))
    tuning.engine.close()
