"""Forward and backward of experts with biases and the clamped activation on the native kernels, against autograd of
torch and of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.experts.native import NativeExperts
from engine.weights.open import open_model
from native import _native
from testing.models.shapes import config
from testing.models.tiny import save_hf, tiny_model
from tests.native.expert_layers import BF16, F32, E, Layer
from tests.native.isas import ISAS
from tests.training.expert_layers import Step, assert_within, errors, run
from training.experts.base import ExpertLora
from training.experts.native import trainable_layers
from training.experts.reference import ReferenceExperts

POOL = _native.WorkerPool([[0], [1]])
HIDDEN, INNER = 64, 96


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "forward", "gradients"), [("F32", 1e-5, 2e-5), ("BF16", 0.006, 0.02)])
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 60),
    ranks=st.lists(st.integers(1, 32), max_size=2),
    limit=st.sampled_from([None, 0.5, 1.5, 7.0]),
    alpha=st.sampled_from([0.5, 1.702, 3.0]),
    keep=st.booleans(),
    seed=st.integers(0, 999),
)
def test_gradients_of_drawn_layers(
    kind: str,
    forward: float,
    gradients: float,
    isa: str,
    rows: int,
    ranks: list[int],
    limit: float | None,
    alpha: float,
    keep: bool,
    seed: int,
) -> None:
    if kind == "BF16" and limit is not None:
        limit = 7.0  # far from these values: at a corner of the clamp rounding decides whether there is a gradient
    layer = Layer(kind, hidden=HIDDEN, inner=INNER, biased=True, limit=limit, alpha=alpha)
    sizes = config(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=E, num_experts_per_tok=3)
    dtype = F32 if kind == "F32" else BF16
    held = NativeExperts(sizes, dtype, POOL, isa=isa)
    held.load_layer(0, layer.store)
    native, reference = trainable_layers(held, sizes, keep=keep)[0], ReferenceExperts.from_store(layer.store)
    torch.manual_seed(seed)
    loras = {slot: ExpertLora(E, rank, HIDDEN, INNER, 0.5) for slot, rank in enumerate(ranks, 1)}
    for lora in loras.values():
        for b in lora.matrices()[3:]:
            torch.nn.init.normal_(b, std=lora.rank**-0.5)
    step = Step.draw(rows, 3, native, [0, *loras], dtype, seed)
    assert_within(errors(run(native, step, loras), run(reference, step, loras), step), forward, gradients)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_gradients_equal_transformers(tmp_path: Path, limit: float, isa: str) -> None:
    model = tiny_model(3, family="gpt_oss", swiglu_limit=limit)
    save_hf(model, tmp_path)
    source = open_model(str(tmp_path))
    held = NativeExperts(source.config, F32, POOL, isa=isa)
    held.load_layer(1, source.experts(1))
    native = trainable_layers(held, source.config)[1]
    step = Step.draw(40, 2, native, [0], F32, seed=1)
    step.ids[-1, -1] = 3  # transformers skips none
    hidden, weights = (t.clone().requires_grad_() for t in (step.hidden, step.weights))
    out = model.model.layers[1].mlp.experts(hidden, step.ids, weights)
    out.backward(step.grad_out)
    assert hidden.grad is not None and weights.grad is not None
    want = {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad}
    assert_within(errors(run(native, step, {}), want, step), 1e-5, 2e-5)
