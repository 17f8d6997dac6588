"""Experts with biases and the clamped activation on a GPU: every kernel against float64, in graphs, beside a CPU, and
streamed there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ExpertBackendError, ModelFileError
from engine.experts.base import ExpertBackend, ExpertBuffers
from engine.experts.bridge.backend import CudaBridge
from engine.experts.gpu import products, widened
from engine.experts.gpu.backend import GpuExperts
from engine.experts.gpu.layout import Elementwise, Sizes
from engine.experts.hybrid.backend import HybridExperts
from engine.experts.native import NativeExperts
from engine.experts.streamed.backend import StreamedExperts
from native import _native
from testing.bridge import HostBridge
from testing.models.shapes import config
from tests.gpu.test_experts_gpu import fill
from tests.native.expert_layers import BF16, F32, E, K, Layer, batch, distinct, error, expected, lora, touched

GPU = torch.cuda.is_available()
DTYPE = BF16 if GPU else F32  # the interpreter has no bf16
PLAIN = "BF16" if GPU else "F32"
LIKE_GPT_OSS: dict[str, Any] = {"biased": True, "limit": 0.5, "alpha": 1.702}  # which some gates and ups exceed
H, I = 192, 96  # noqa: E741 - as gpt-oss' no multiple of 128: tiles of 64 values, and half a tile
ROUNDED = 0.03  # rows in int8

pytestmark = pytest.mark.gpu


def bound_of(kind: str, *, integers: bool = False) -> float:
    if integers and kind != PLAIN:
        return ROUNDED
    return (0.01 if kind == PLAIN else 0.015) if GPU else 4e-6


def sizes_of(hidden: int = H, inner: int = I, layers: int = 1) -> Any:
    return config(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=E, num_experts_per_tok=K, num_hidden_layers=layers
    )


def made(layer: Layer, rows: int, device: torch.device) -> tuple[GpuExperts, ExpertBuffers]:
    experts = GpuExperts(
        sizes_of(layer.hidden, layer.inner), DTYPE, device, max_rows=rows + 2, max_slots=3, max_rank=20
    )
    experts.load_layer(0, layer.store)
    return experts, ExpertBuffers.allocate(rows + 2, K, layer.hidden, DTYPE, device=device)


def run(experts: ExpertBackend, there: ExpertBuffers, b: ExpertBuffers, lora: bool) -> torch.Tensor:
    rows = int(b.bsz)
    fill(there, b)
    there.ids[rows:] = 0  # padding rows hold what is valid elsewhere
    there.out.fill_(7)
    task = experts.bind(0, there)
    experts.begin_step(rows, lora=lora, eager=False)
    experts.post(task)
    experts.wait(task)
    experts.check()
    assert (there.out[rows:] == 7).all(), "padding rows were written"
    return there.out[:rows].cpu()


WAYS = {  # of computing: names of products, and the patches that choose it
    "choices": {"CHOICE_ROWS": 99.0, "CUDA_CHOICE_ROWS": 99.0, "PLAIN_CHOICE_ROWS": 99.0},
    "rows": {
        "CHOICE_ROWS": 0.0,
        "CUDA_CHOICE_ROWS": 0.0,
        "PLAIN_CHOICE_ROWS": 0.0,
        "VECTOR_ROWS": 99.0,
        "BYTE_VECTOR_ROWS": 99.0,
    },
    "blocks": {
        "CHOICE_ROWS": 0.0,
        "CUDA_CHOICE_ROWS": 0.0,
        "PLAIN_CHOICE_ROWS": 0.0,
        "VECTOR_ROWS": 0.0,
        "BYTE_VECTOR_ROWS": 0.0,
    },
    "widened": {
        "CHOICE_ROWS": 0.0,
        "CUDA_CHOICE_ROWS": 0.0,
        "PLAIN_CHOICE_ROWS": 0.0,
        "VECTOR_ROWS": 0.0,
        "BYTE_VECTOR_ROWS": 0.0,
    },
}


def choose(way: str, patch: pytest.MonkeyPatch) -> None:
    for name, value in WAYS[way].items():
        patch.setattr(products, name, value)
    if way == "choices":
        patch.setattr(products, "INTEGERS", (DTYPE,))
    if way == "widened":
        patch.setattr(widened, "ROWS", 0)
        patch.setattr(widened, "SCRATCH_BYTES", 3 * 2 * H * I * DTYPE.itemsize)  # three experts at a time


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [PLAIN, "MXFP4"])
def test_right_by_every_kernel(
    kind: str, way: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without adapters in one batch, of which one row has none, and one choice is nobody's."""
    choose(way, monkeypatch)
    layer, rows = Layer(kind, hidden=H, inner=I, **LIKE_GPT_OSS), 2 if way == "choices" else 5
    experts, there = made(layer, rows, kernel_device)
    adapters = {1: lora(4, 11, DTYPE, H, I), 2: lora(20, 12, DTYPE, H, I)}
    adapters[2].gate_b[3] = adapters[2].up_b[3] = adapters[2].down_b[3] = 0
    for slot, adapter in adapters.items():
        experts.set_adapter(slot, {0: adapter})
    for slots in (None, [0, 1, 2]):
        b = batch(rows, DTYPE, slots=slots, hidden=H)
        b.ids[0, 1] = -1
        got = run(experts, there, b, slots is not None)
        integers = way == "choices" or (GPU and way == "rows")
        found, bound = error(got, expected(layer, b, adapters)), bound_of(kind, integers=integers)
        assert found < bound, f"{kind} by {way}, adapters {slots}: {found:.2e}"
        assert touched(experts)[0] == distinct(b)


@settings(
    deadline=None,
    derandomize=True,
    max_examples=12 if GPU else 6,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    hidden=st.sampled_from([32, 64, 160]),
    inner=st.sampled_from([32, 96, 128]),
    biased=st.booleans(),
    limit=st.none() | st.sampled_from([0.0, 0.125, 0.5, 7.0]),
    alpha=st.sampled_from([-1.5, 0.0, 1.0, 1.702]),
    kind=st.sampled_from([PLAIN, "MXFP4"]),
    way=st.sampled_from(["choices", "rows", "blocks"]),
)
def test_of_any_shape_limit_and_alpha(
    kernel_device: torch.device, hidden: int, inner: int, biased: bool, limit: float | None, alpha: float, kind: str,
    way: str,
) -> None:  # fmt: skip
    layer = Layer(kind, hidden=hidden, inner=inner, biased=biased, limit=limit, alpha=alpha)
    experts, there = made(layer, 2, kernel_device)
    with pytest.MonkeyPatch.context() as patch:
        choose(way, patch)
        b = batch(2, DTYPE, hidden=hidden)
        got = run(experts, there, b, False)
    integers = way == "choices" or (GPU and way == "rows")
    assert error(got, expected(layer, b, {})) < (2 if integers else 1) * bound_of(kind, integers=integers)


def test_a_nan_stays_in_its_row(kernel_device: torch.device) -> None:
    """The limits do not make a number of it."""
    layer = Layer(PLAIN, hidden=H, inner=I, **LIKE_GPT_OSS)
    experts, there = made(layer, 3, kernel_device)
    for slots in (None, [1]):
        experts.set_adapter(1, {0: lora(4, 11, DTYPE, H, I)} if slots else None)
        b = batch(3, DTYPE, slots=slots, hidden=H)
        b.hidden[1, 5] = float("nan")
        got = run(experts, there, b, slots is not None)
        assert bool(got[1].isnan().all()) and bool(got[[0, 2]].isfinite().all())


def test_biases_that_cannot_be_are_refused() -> None:
    store = Layer("F32", hidden=H, inner=I, **LIKE_GPT_OSS).store
    sizes, cpu = Sizes(E, K, H, I), torch.device("cpu")
    held = Elementwise.of(store, sizes, cpu)
    assert held.num_bytes == Elementwise.planned_bytes(sizes)
    assert Elementwise.of(Layer("F32", hidden=H, inner=I).store, sizes, cpu) == Elementwise()
    with pytest.raises(ExpertBackendError, match=r"gate_bias is .*; the model's gate has biases \(8, 192\)"):
        Elementwise.of(store, Sizes(E, K, I, H), cpu)
    bad = np.full(E * I, np.nan, np.float32).view(np.uint8)
    spoilt = replace(store, biases={**store.biases, "up": replace(store.biases["up"], data=bad)})
    with pytest.raises(ModelFileError, match=r"up_bias: value .* is not finite"):
        Elementwise.of(spoilt, sizes, cpu)


@pytest.mark.skipif(not GPU, reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("kind", [PLAIN, "MXFP4"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("most", [1, 16])
def test_a_graph_serves_fewer_rows(kind: str, adapted: bool, most: int) -> None:
    device, layer = torch.device("cuda"), Layer(kind, hidden=H, inner=I, **LIKE_GPT_OSS)
    experts, there = made(layer, most, device)
    adapters = {1: lora(4, 11, DTYPE, H, I), 2: lora(20, 12, DTYPE, H, I)} if adapted else {}
    for slot, adapter in adapters.items():
        experts.set_adapter(slot, {0: adapter})
    task = experts.bind(0, there)
    there.bsz.fill_(most)
    there.ids.fill_(0)
    experts.begin_step(most, lora=adapted, eager=False)
    experts.post(task)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.post(task)
        experts.wait(task)
    for rows in sorted({most, max(most // 3, 1), 1}):
        b = batch(rows, DTYPE, seed=rows, slots=[1, 0, 2] if adapted else None, hidden=H)
        there.slots.zero_()
        fill(there, b)
        there.out.fill_(7)
        graph.replay()
        found = error(there.out[:rows].cpu(), expected(layer, b, adapters))
        assert found < ROUNDED, f"{kind}, {rows} of {most} rows: {found:.2e}"
        assert (there.out[rows:] == 7).all()


def beside_a_cpu(layers: list[Layer], device: torch.device, hot: int, threshold: int | None) -> ExpertBackend:
    """`hot` experts on the GPU, the others on the CPU; steps from `threshold` rows on are streamed."""
    model, pool = sizes_of(layers=len(layers)), _native.WorkerPool([[0, 1]])
    sizes = {"max_rows": 40, "max_slots": 3, "max_rank": 20}
    bridge_of = CudaBridge if device.type == "cuda" else HostBridge
    backend: ExpertBackend = bridge_of(NativeExperts(model, DTYPE, pool), model, device)
    if hot:
        budget = hot * 3 * H * I * DTYPE.itemsize
        backend = HybridExperts(backend, model, DTYPE, device, budget_bytes=budget, **sizes)
    if threshold is not None:
        backend = StreamedExperts(backend, model, DTYPE, device, threshold=threshold, **sizes)
    for index, layer in enumerate(layers):
        backend.load_layer(index, layer.store)
    return backend


@pytest.mark.parametrize("kind", [PLAIN, "MXFP4"])
@pytest.mark.parametrize("hot,threshold", [(7, None), (0, 6), (7, 6)], ids=["hybrid", "streamed", "both"])
def test_beside_a_cpu(kind: str, hot: int, threshold: int | None, kernel_device: torch.device) -> None:
    """Each part adds the biases of its own experts. Steps of 3 and 12 rows: a streamed one between those that are
    not."""
    layers = [Layer(kind, hidden=H, inner=I, **LIKE_GPT_OSS), Layer(kind, hidden=H, inner=I, biased=True)]
    backend = beside_a_cpu(layers, kernel_device, hot, threshold)
    there = ExpertBuffers.allocate(14, K, H, DTYPE, device=kernel_device)
    tasks = [backend.bind(layer, there) for layer in (0, 1)]
    adapters = {1: lora(4, 1, DTYPE, H, I), 2: lora(20, 2, DTYPE, H, I)}
    for step in range(18):
        if step == 9:
            for slot, adapter in adapters.items():
                backend.set_adapter(slot, dict.fromkeys((0, 1), adapter))
        rows = 12 if step % 3 == 1 else 3
        b = batch(rows, DTYPE, seed=step, slots=[0, 1, 2] if step >= 9 else None, hidden=H)
        there.slots.zero_()
        fill(there, b)
        backend.begin_step(rows, lora=step >= 9, eager=True)
        backend.prefetch()
        outs = []
        for task in tasks:
            backend.post(task)
            backend.wait(task)
            outs.append(there.out[:rows].clone())
        if kernel_device.type == "cuda":
            torch.cuda.synchronize()
        backend.check()
        for number, (layer, out) in enumerate(zip(layers, outs, strict=True)):
            found = error(out.cpu(), expected(layer, b, adapters))
            assert found < (0.012 if kind == PLAIN and GPU else 4e-6 if kind == PLAIN else ROUNDED), (
                f"step {step}, layer {number}, {rows} rows: {found:.2e}"
            )
    backend.close()
