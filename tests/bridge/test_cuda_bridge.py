"""The bridge as an expert backend, with the caller in the stream's place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.errors import EngineError, ExpertBackendError
from engine.experts.base import ExpertBuffers, ExpertTask
from engine.experts.bridge.backend import CudaBridge
from engine.experts.capabilities import HotPart, NativeTasks, PackedWeights, PartialTasks
from engine.experts.hybrid.backend import HybridExperts
from engine.experts.native import NativeExperts
from engine.experts.reference import ReferenceExperts
from engine.experts.streamed.backend import StreamedExperts
from native import _native
from testing.bridge import HostBridge
from testing.models.shapes import config
from testing.waiting import comes_to_rest
from tests.native.expert_layers import BF16, E, H, I, K, Layer, batch, distinct, error, expected, lora, touched

CPU = torch.device("cpu")
SIZES = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, num_hidden_layers=4)


@pytest.fixture(scope="module")
def pool() -> Any:
    return _native.WorkerPool([[0, 1]])


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [Layer("Q8_0"), Layer("BF16"), Layer("Q4_K")]


@pytest.fixture
def bridge(pool: Any, layers: list[Layer]) -> Iterator[CudaBridge]:
    made = HostBridge(NativeExperts(SIZES, BF16, pool), SIZES, CPU)
    for index, layer in enumerate(layers):
        made.load_layer(index, layer.store)
    yield made
    made.close()


def step(bridge: CudaBridge, tasks: list[ExpertTask], hot: HotPart | None = None) -> list[torch.Tensor]:
    bridge.begin_step(int(tasks[0].buffers.bsz), lora=False, eager=False)
    outs = []
    for task in tasks:
        bridge.post_part(task, hot)
        bridge.wait_part(task, hot)
        outs.append(task.buffers.out[: int(task.buffers.bsz)].clone())
    bridge.check()
    return outs


def test_many_steps_of_any_number_of_rows(bridge: CudaBridge, layers: list[Layer]) -> None:
    b = batch(6, BF16)
    tasks = [bridge.bind(index, b) for index in range(len(layers))]
    assert tasks[0] is bridge.bind(0, b)
    wanted = expected(layers[0], b, {})
    for number in range(350):
        b.bsz[0] = rows = number % 7
        outs = step(bridge, tasks)
        assert [len(out) for out in outs] == [rows] * 3
        assert touched(bridge) == [distinct(b)] * 3 + [0]
        if rows:
            assert error(outs[0], wanted[:rows]) < 0.025
    assert (b.out[6:] == 7).all()


def test_adapters_pass_through(bridge: CudaBridge, layers: list[Layer]) -> None:
    adapters = {1: lora(8, 3), 2: lora(16, 4)}
    for slot, adapter in adapters.items():
        bridge.set_adapter(slot, dict.fromkeys(range(3), adapter))
    b = batch(7, BF16, slots=[0, 1, 2])
    for index, layer in enumerate(layers):
        (out,) = step(bridge, [bridge.bind(index, b)])
        assert error(out, expected(layer, b, adapters)) < 0.03


def test_the_gpus_own_experts_are_left_out_and_added(bridge: CudaBridge, layers: list[Layer]) -> None:
    b = batch(5, BF16)
    place = torch.full((1, E), -1, dtype=torch.int32)
    place[0, [1, 4, 6]] = torch.tensor([0, 1, 2], dtype=torch.int32)
    hot = HotPart(place, torch.zeros(E, dtype=torch.int32), torch.randn(7, H))
    (out,) = step(bridge, [bridge.bind(1, b)], hot)
    rest = batch(5, BF16)
    rest.ids[:5][torch.isin(rest.ids[:5], torch.tensor([1, 4, 6]))] = -1
    assert error(out, expected(layers[1], rest, {}) + hot.extra[:5].double()) < 0.01
    assert torch.equal(hot.uses, torch.bincount(b.ids[:5].flatten(), minlength=E).int())


def test_a_failure_is_raised_for_every_step_that_may_have_seen_it(bridge: CudaBridge) -> None:
    b = batch(4, BF16)
    task = bridge.bind(0, b)
    (good,) = step(bridge, [task])
    b.ids[0, 0] = E
    bridge.begin_step(4, lora=False, eager=False)
    bridge.post(task)
    bridge.wait(task)
    assert not b.out[:4].any()
    b.ids[0, 0] = batch(4, BF16).ids[0, 0]
    bridge.begin_step(4, lora=False, eager=False)  # launched before the failure is known
    bridge.post(task)
    bridge.wait(task)
    for _ in range(2):
        with pytest.raises(ExpertBackendError, match=f"layer 0: ids: {E}; allowed are -1 to {E - 1}"):
            bridge.check()
    assert torch.equal(step(bridge, [task])[0], good)


def test_it_costs_nothing_when_idle(bridge: CudaBridge) -> None:
    task = bridge.bind(0, batch(4, BF16))
    step(bridge, [task])
    comes_to_rest(0.05)
    step(bridge, [task])


def test_misuse_is_refused(bridge: CudaBridge, pool: Any) -> None:
    with pytest.raises(ExpertBackendError, match="layer 9"):
        bridge.bind(9, batch(1, BF16))
    with pytest.raises(ExpertBackendError, match="lie on cpu"):
        bridge.bind(0, ExpertBuffers.allocate(1, K, H, BF16, device=torch.device("meta")))
    with pytest.raises(EngineError, match="timeout_s"):
        HostBridge(NativeExperts(SIZES, BF16, pool), SIZES, CPU, timeout_s=0)


def test_what_a_backend_offers_holds_through_what_wraps_it(bridge: CudaBridge, pool: Any) -> None:
    """A bridge's tasks are not native ones, though those inside it are; the weights are the same."""
    native = NativeExperts(SIZES, BF16, pool)
    tasks = native.capability(NativeTasks)
    assert tasks is not None and tasks.pool is pool
    assert bridge.capability(NativeTasks) is None and bridge.capability(PartialTasks) is not None
    packed = bridge.capability(PackedWeights)
    assert packed is not None and sorted(packed.layers) == [0, 1, 2]
    reference = ReferenceExperts(BF16, CPU)
    with pytest.raises(ExpertBackendError, match="experts by ReferenceExperts offer no NativeTasks"):
        HostBridge(reference, SIZES, CPU)
    sizes = {"max_rows": 8, "max_slots": 1, "max_rank": 8}
    with pytest.raises(ExpertBackendError, match="offer no PartialTasks"):
        HybridExperts(native, SIZES, BF16, CPU, budget_bytes=1 << 30, **sizes)
    with pytest.raises(ExpertBackendError, match="offer no PackedWeights"):
        StreamedExperts(reference, SIZES, BF16, CPU, **sizes)
