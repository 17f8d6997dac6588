"""Native forward and backward of experts with LoRA against torch's autograd, on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.experts.native import NativeExperts
from native import _native
from testing.models.shapes import config
from tests.native.blocks import QUANTISED
from tests.native.expert_layers import BF16, F32, E, H, I, K, Layer, batch
from tests.native.expert_layers import run as serve
from tests.native.isas import ISAS
from tests.training.expert_layers import BATCHES, PackedLayer, Step, assert_within, errors, run
from training.experts.base import ExpertLora, TrainableExperts
from training.experts.native import trainable_layers

POOL = _native.WorkerPool([[0], [1]])
PLAIN = {
    "f32": PackedLayer(POOL, ["F32"] * 3, 9, 96, 64, "f32"),
    "bf16": PackedLayer(POOL, ["BF16"] * 3, 9, 64, 160),
}
REFERENCES = {name: layer.reference() for name, layer in PLAIN.items()}
DRAWN = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Torch's own threads take longer to meet than the reference's small products do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name,forward,gradients", [("f32", 1e-5, 1e-5), ("bf16", 0.005, 0.01)])
@DRAWN
@example(rows=4200, top_k=2, ranks=[3], keep=True, seed=0)  # more than are computed at a time
@given(**BATCHES)
def test_drawn_shapes(
    name: str,
    forward: float,
    gradients: float,
    isa: str,
    rows: int,
    top_k: int,
    ranks: list[int],
    keep: bool,
    seed: int,
) -> None:
    layer = PLAIN[name]
    torch.manual_seed(seed)
    loras = {2 * i + 1: layer.lora(rank) for i, rank in enumerate(ranks)}
    step = Step.draw(rows, top_k, layer, [0, *loras], F32 if name == "f32" else BF16, seed)
    want = run(REFERENCES[name], step, loras)
    assert_within(errors(run(layer.native(isa, keep), step, loras), want, step), forward, gradients)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "kind,format", [("BF16", "i8"), ("BF16", "i4m"), ("F16", ""), *((kind, "") for kind in QUANTISED)]
)
@settings(DRAWN, max_examples=3)
@given(
    rows=st.integers(1, 70),
    ranks=st.lists(st.integers(1, 64), max_size=2),
    others=st.lists(st.sampled_from(["BF16", *QUANTISED]), min_size=2, max_size=2),
    keep=st.booleans(),
    seed=st.integers(0, 999),
)
def test_quantised_weights(
    kind: str, format: str, isa: str, rows: int, ranks: list[int], others: list[str], keep: bool, seed: int
) -> None:
    """Every format, in any projection, beside any others."""
    kinds = [kind] * 3 if format else [kind, *others][seed % 3 :] + [kind, *others][: seed % 3]
    layer = PackedLayer(POOL, kinds, 3, 256, 256, format)
    torch.manual_seed(seed)
    loras = {i + 1: layer.lora(rank) for i, rank in enumerate(ranks)}
    step = Step.draw(rows, 2, layer, [0, *loras], BF16, seed)
    found = errors(run(layer.native(isa, keep), step, loras), run(layer.reference(), step, loras), step)
    assert_within(found, 0.03, 0.05)


def test_finite_differences() -> None:
    layer = PLAIN["f32"]
    torch.manual_seed(2)
    lora = layer.lora(6)
    step = Step.draw(9, 3, layer, [0, 1], F32, 2)
    experts = layer.native()
    gradients = run(experts, step, {1: lora})
    wanted = {"hidden": step.hidden, "weights": step.weights, **{f"1 {n}": p.data for n, p in lora.named_parameters()}}
    for name, values in wanted.items():
        direction = torch.randn_like(values)

        def loss() -> float:
            with torch.no_grad():
                out = experts.forward(step.hidden, step.ids, step.weights, step.slots, {1: lora})
            return float((out.double() * step.grad_out).sum())

        eps = 1e-3 / float(direction.abs().mean())
        values.add_(direction, alpha=eps)
        above = loss()
        values.sub_(direction, alpha=2 * eps)
        below = loss()
        values.add_(direction, alpha=eps)
        slope = float((gradients[name].double() * direction).sum())
        scale = float(gradients[name].double().norm() * direction.norm()) / direction.numel() ** 0.5
        assert abs((above - below) / (2 * eps) - slope) < 0.01 * scale, name


def test_padding_touches_nothing() -> None:
    """Rows without a choice may hold anything; experts without rows get zeros."""
    layer = PLAIN["bf16"]
    torch.manual_seed(3)
    loras = {1: layer.lora(8)}
    step = Step.draw(20, 2, layer, [1], BF16, 3)
    step.ids[step.ids == 5] = 4
    alone = run(layer.native(), step, loras)
    more = torch.full((7, layer.hidden), torch.nan, dtype=BF16)
    padded = Step(
        torch.cat([step.hidden, more]),
        torch.cat([step.ids, torch.full((7, 2), -1)]),
        torch.cat([step.weights, torch.full((7, 2), torch.nan)]),
        torch.cat([step.slots, torch.ones(7, dtype=torch.int32)]),
        torch.cat([step.grad_out, more]),
    )
    got = run(layer.native(), padded, loras)
    for name, value in alone.items():
        assert torch.equal(got[name][: len(value)], value), name
        assert not got[name][len(value) :].any(), name
    assert not got["1 gate_lora_a"][5].any() and not got["1 down_lora_b"][5].any()


@pytest.mark.parametrize("isa", ISAS)
def test_same_bits(isa: str) -> None:
    """From run to run, for any number of threads and NUMA nodes, and whether gate and up were kept or not (float32)."""
    step: Any = None
    loras: Any = None
    results = []
    for groups in ([[0]], [[0, 1, 0]], [[0], [1]]):
        layer = PackedLayer(_native.WorkerPool(groups), ["F32"] * 3, 5, 256, 320, "f32")
        torch.manual_seed(4)
        loras, step = {1: layer.lora(7), 2: layer.lora(20)}, Step.draw(300, 2, layer, [0, 1, 2], F32, 4)
        results += [run(layer.native(isa, keep), step, loras) for keep in (True, False)]
    for other in results[1:]:
        assert all(torch.equal(other[name], value) for name, value in results[0].items())


@pytest.mark.parametrize("isa", ISAS)
@DRAWN
@given(rows=st.integers(1, 300), ranks=st.lists(st.integers(1, 64), min_size=2, max_size=8), seed=st.integers(0, 999))
def test_adapters_together_and_alone(isa: str, rows: int, ranks: list[int], seed: int) -> None:
    layer = PLAIN["f32"]
    torch.manual_seed(seed)
    loras = {i + 1: layer.lora(rank) for i, rank in enumerate(ranks)}
    step = Step.draw(rows, 3, layer, [0, *loras], F32, seed)
    together = run(layer.native(isa), step, loras)
    for slot in sorted({*step.slots.tolist()} - {0}):
        mine = step.slots == slot
        parts = (step.hidden, step.ids, step.weights, step.slots, step.grad_out)
        part = Step(*(tensor[mine] for tensor in parts))
        alone = run(layer.native(isa), part, {slot: loras[slot]})
        beside = {
            name: value[mine] if name in ("out", "hidden", "weights") else value for name, value in together.items()
        }
        assert_within(errors({name: beside[name] for name in alone}, alone, part), 1e-6, 1e-6)


def _forward(experts: TrainableExperts, step: Step, loras: dict[int, ExpertLora]) -> tuple[torch.Tensor, list[Any]]:
    """The output, and what has a gradient."""
    leaves = [step.hidden.clone().requires_grad_(), step.weights.clone().requires_grad_()]
    out = experts.forward(leaves[0], step.ids, leaves[1], step.slots, loras)
    return out, [*leaves, *(matrix for slot in set(step.slots.tolist()) - {0} for matrix in loras[slot].matrices())]


def _shifted(matrix: torch.Tensor, by: int) -> torch.Tensor:
    """The same values, `by` floats behind where memory of torch begins."""
    memory = torch.empty(matrix.numel() + by)
    return memory[by:].view(matrix.shape).copy_(matrix)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["f32", "bf16"])
@DRAWN
@given(
    rows=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    ranks=st.lists(st.integers(1, 64), min_size=1, max_size=3),
    keep=st.booleans(),
    shift=st.integers(0, 15),
    data=st.data(),
)
def test_steps_in_flight(
    name: str, isa: str, rows: list[int], ranks: list[int], keep: bool, shift: int, data: Any
) -> None:
    """Forwards of several batches over one trainer before their backwards, in any order, and LoRA anywhere in memory:
    the bits of each batch alone."""
    layer, dtype = PLAIN[name], F32 if name == "f32" else BF16
    torch.manual_seed(sum(rows))
    loras = {slot: layer.lora(rank) for slot, rank in enumerate(ranks, 1)}
    chosen = st.lists(st.integers(0, len(ranks)), min_size=1, unique=True)
    steps = [Step.draw(count, 2, layer, data.draw(chosen), dtype, i) for i, count in enumerate(rows)]
    experts = layer.native(isa, keep)
    want = []
    for step in steps:
        out, leaves = _forward(experts, step, loras)
        want.append([out, *torch.autograd.grad(out, leaves, step.grad_out)])
    for lora in loras.values():
        for matrix in lora.matrices():
            matrix.data = _shifted(matrix.data, shift)
    begun = [_forward(experts, step, loras) for step in steps]
    for i in data.draw(st.permutations(range(len(steps)))):
        out, leaves = begun[i]
        for got, wanted in zip([out, *torch.autograd.grad(out, leaves, steps[i].grad_out)], want[i], strict=True):
            assert torch.equal(got, wanted)


def test_as_served() -> None:
    """Over the packed memory of the serving backend: the same output within what bfloat16 gives."""
    layer = Layer("BF16")
    sizes = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)
    backend = NativeExperts(sizes, BF16, POOL)
    backend.load_layer(0, layer.store)
    experts = trainable_layers(backend, sizes)[0]
    b = batch(13, BF16)
    served = serve(backend, backend.bind(0, b))
    with torch.no_grad():
        trained = experts.forward(b.hidden[:13], b.ids[:13], b.weights[:13], b.slots[:13], {})
    assert torch.equal(served, trained)


def test_what_is_refused() -> None:
    layer = PLAIN["f32"]
    experts, lora = layer.native(), layer.lora(4)
    step = Step.draw(4, 2, layer, [0, 1], F32, 6)

    def refused(message: str, loras: Any = None, **changed: torch.Tensor) -> None:
        tensors = {name: getattr(step, name) for name in ("hidden", "ids", "weights", "slots")} | changed
        with pytest.raises(ValueError, match=message):
            experts.forward(**tensors, loras={1: lora} if loras is None else loras)

    refused("slots: 1 has no LoRA", {})
    refused("ids: .*; allowed are -1 to 8", ids=step.ids + 9 * (step.ids == step.ids[0, 0]))
    refused("hidden is torch.float64", hidden=step.hidden.double())
    refused(r"weights is torch.float64 \(4, 2\); needed is torch.float32", weights=step.weights.double())
    refused("slot 1: a LoRA matrix is", {1: PLAIN["bf16"].lora(4)})
