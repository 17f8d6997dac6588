"""CPU experts in a CUDA stream's order: captured once, replayed with any rows; failures and time-outs release it."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.errors import ExpertBackendError
from engine.experts.base import ExpertBuffers, ExpertTask
from engine.experts.bridge.backend import CudaBridge
from engine.experts.native import NativeExperts
from native.topology import make_pool
from testing.models.shapes import config
from tests.native.expert_layers import BF16, E, H, I, K, Layer, batch, distinct, error, expected, touched

pytestmark = pytest.mark.gpu
SIZES = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, num_hidden_layers=4)
LAYERS = 4


@pytest.fixture(scope="module")
def pool() -> Any:
    return make_pool()


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [Layer("BF16") for _ in range(LAYERS)]


@pytest.fixture
def bridge(pool: Any, layers: list[Layer]) -> Iterator[CudaBridge]:
    made = CudaBridge(NativeExperts(SIZES, BF16, pool), SIZES, torch.device("cuda"), timeout_s=2.0)
    for index, layer in enumerate(layers):
        made.load_layer(index, layer.store)
    yield made
    torch.cuda.synchronize()
    made.close()


def run(bridge: CudaBridge, tasks: list[ExpertTask], outs: list[torch.Tensor]) -> None:
    for task, out in zip(tasks, outs, strict=True):
        bridge.post(task)
        bridge.wait(task)
        out.copy_(task.buffers.out)


def captured(bridge: CudaBridge, tasks: list[ExpertTask]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    outs = [torch.zeros_like(task.buffers.out) for task in tasks]
    bridge.begin_step(1, lora=False, eager=True)
    run(bridge, tasks, outs)  # compiles the kernels
    torch.cuda.synchronize()
    bridge.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(bridge, tasks, outs)
    return graph, outs


def replay(bridge: CudaBridge, graph: torch.cuda.CUDAGraph) -> None:
    bridge.begin_step(1, lora=False, eager=False)
    graph.replay()
    torch.cuda.synchronize()
    bridge.check()


def fill(there: ExpertBuffers, b: ExpertBuffers) -> None:
    for name in ("bsz", "ids", "weights", "slots", "hidden"):
        getattr(there, name).copy_(getattr(b, name))


def test_a_graph_serves_any_rows_without_growth(bridge: CudaBridge, layers: list[Layer]) -> None:
    there = ExpertBuffers.allocate(34, K, H, BF16, device=torch.device("cuda"))
    tasks = [bridge.bind(layer, there) for layer in range(LAYERS)]
    graph, outs = captured(bridge, tasks)
    before, _ = None, touched(bridge)
    for number in range(1200):
        if number % 100 == 0:
            rows = (number // 100 * 7) % 33
            b = batch(32, BF16, seed=number)
            b.bsz[0] = rows
            there.hidden.zero_()
            for name in ("bsz", "ids", "weights", "slots", "hidden"):
                mine = getattr(b, name)
                getattr(there, name)[: len(mine)].copy_(mine)
            if number == 200:
                before = (threading.active_count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        replay(bridge, graph)
        assert touched(bridge) == [distinct(there)] * LAYERS
        if number % 100 == 0 and rows:
            for layer, out in zip(layers, outs, strict=True):
                assert error(out[:rows].cpu(), expected(layer, b, {})) < 0.008
    assert before is not None
    assert threading.active_count() <= before[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1] < 32 * 1024  # KiB


def test_a_failure_releases_the_stream(bridge: CudaBridge, layers: list[Layer]) -> None:
    there = ExpertBuffers.allocate(8, K, H, BF16, device=torch.device("cuda"))
    b = batch(6, BF16)
    fill(there, b)
    graph, outs = captured(bridge, [bridge.bind(0, there)])
    there.ids[0, 0] = E
    with pytest.raises(ExpertBackendError, match=f"layer 0: ids: {E}; allowed are -1 to {E - 1}"):
        replay(bridge, graph)
    assert not outs[0][:6].any()
    fill(there, b)
    replay(bridge, graph)
    assert error(outs[0][:6].cpu(), expected(layers[0], b, {})) < 0.008


def test_a_time_out_releases_the_stream(pool: Any, layers: list[Layer]) -> None:
    bridge = CudaBridge(NativeExperts(SIZES, BF16, pool), SIZES, torch.device("cuda"), timeout_s=0.05)
    bridge.load_layer(0, layers[0].store)
    there = ExpertBuffers.allocate(8, K, H, BF16, device=torch.device("cuda"))
    b = batch(6, BF16)
    fill(there, b)
    task = bridge.bind(0, there)
    graph, outs = captured(bridge, [task])
    task.handle.counter[0] += 16 * 8  # the stream now waits for a number whose posts the pool has not seen
    bridge.begin_step(1, lora=False, eager=False)
    bridge.wait(task)
    torch.cuda.synchronize()
    with pytest.raises(ExpertBackendError, match="did not answer in time"):
        bridge.check()
    replay(bridge, graph)  # numbers only grow: the next post is served
    assert error(outs[0][:6].cpu(), expected(layers[0], b, {})) < 0.008
    bridge.close()


def test_another_stream_and_many_buffer_sets(pool: Any) -> None:
    """No rows count, so only the handshake itself runs."""
    side = torch.cuda.Stream()
    bridge = CudaBridge(NativeExperts(SIZES, BF16, pool), SIZES, torch.device("cuda"))
    bridge.load_layer(0, Layer("BF16").store)
    sets = [ExpertBuffers.allocate(rows, K, H, BF16, device=torch.device("cuda")) for rows in range(1, 40)]
    torch.cuda.synchronize()
    for _ in range(20):
        bridge.begin_step(1, lora=False, eager=True)
        for buffers in sets:
            task = bridge.bind(0, buffers)
            bridge.post(task, side.cuda_stream)
            bridge.wait(task, side.cuda_stream)
        side.synchronize()
        bridge.check()
    bridge.close()
