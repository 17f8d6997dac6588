"""Two half-batches in turn on a GPU: the tokens of whole steps, one graph each, errors contained."""

from __future__ import annotations

import pytest
import torch

from engine.graphs import PaddedDecode
from engine.messages import Failed, Finished
from engine.model.gpu_ops import GpuOps
from engine.ping_pong import Measured, Work
from engine.ping_pong_measure import measure
from tests.engine.harness import Harness
from tests.engine.test_lora_serving import Family
from tests.engine.test_parity import prompts
from tests.gpu.test_serving import GPU, SHAPE, agree

pytestmark = pytest.mark.gpu
NAMES = [None, "adapter-0", "adapter-2", None, "adapter-0"]
LENGTHS = [3, 9, 20, 31, 14]


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), **SHAPE)


def engine_of(family: Family, **config) -> Harness:
    return family.engine(**(GPU | {"max_num_seqs": 6, "max_num_batched_tokens": 64, "ping_pong": "on"} | config))


def padded_of(engine: Harness) -> PaddedDecode:
    padded = engine.core.runner.padded
    assert padded is not None
    return padded


@pytest.mark.parametrize("names", [[None] * 5, NAMES])
@pytest.mark.parametrize("experts", ["native", "hybrid"])
def test_tokens_are_those_of_whole_steps(family, names, experts):
    """Exactly those of the same halves without graphs; near ties apart, those of whole steps."""
    asked, runs = prompts(1, LENGTHS), []
    config = {"expert_backend": experts}
    if experts == "hybrid":
        config["gpu_expert_memory"] = str(5 * 3 * 128 * 64 * 2)  # five of 24 experts
    for graphs, mode in (("auto", "on"), ("padded", "on"), ("auto", "off")):
        engine = engine_of(family, cuda_graphs=graphs, ping_pong=mode, **config)
        said = any("half-batches for steps of 2, 4, 6 rows" in note for note in engine.core.runner.notes)
        assert said == (mode == "on"), engine.core.runner.notes
        runs.append(engine.generate(asked, names, max_tokens=24))
        engine.close()
    for name, prompt, halves, plain, whole in zip(names, asked, *runs, strict=True):
        assert halves == plain or agree(family.merged[name], prompt, halves, plain)
        assert agree(family.merged[name], prompt, whole, halves)


class EveryThird:
    """Changes between halves and whole steps while steps are in flight."""

    learns = True

    def __init__(self) -> None:
        self.calls, self.seen = 0, []

    def halves(self, work: Work) -> bool:
        self.calls += 1
        return self.calls % 3 > 0

    def observe(self, work: Work, halves: bool, seconds: float) -> None:
        self.seen.append((work.rows, halves, seconds))


def test_ways_change_from_step_to_step(family):
    engine = engine_of(family)
    padded, chooser = padded_of(engine), EveryThird()
    padded.chooser = chooser
    asked = prompts(1, LENGTHS)
    got = engine.generate(asked, NAMES, max_tokens=24)
    engine.close()
    assert {halves for _, halves, _ in chooser.seen} == {False, True}
    assert all(0 < seconds < 1 for _, _, seconds in chooser.seen)
    whole = engine_of(family, ping_pong="off")
    for name, prompt, one, other in zip(NAMES, asked, whole.generate(asked, NAMES, max_tokens=24), got, strict=True):
        assert agree(family.merged[name], prompt, one, other)
    whole.close()


def test_costs_are_measured_and_auto_serves(family):
    engine = engine_of(family, ping_pong="auto")
    runner, padded = engine.core.runner, padded_of(engine)
    assert any(note.startswith("ping-pong: ") for note in runner.notes), runner.notes
    with runner.computing():
        costs = measure(padded, engine.blueprint.num_blocks, engine.blueprint.max_model_len)
    assert 0 < costs.gpu_s(1, 0, False) < 0.01 and 0 < costs.pool_s.at(2) < 0.01 and costs.read_s >= 0
    padded.halve(padded.buckets)
    padded.chooser = Measured(costs)
    with runner.computing():
        padded.capture(lambda *_: None, halves=True)
    asked = prompts(1, LENGTHS)
    got = engine.generate(asked, NAMES, max_tokens=24)
    engine.close()
    whole = engine_of(family, ping_pong="off")
    for name, prompt, one, other in zip(NAMES, asked, whole.generate(asked, NAMES, max_tokens=24), got, strict=True):
        assert agree(family.merged[name], prompt, one, other)
    whole.close()


def test_a_step_in_halves_is_one_graph_launch_and_takes_no_memory(family):
    from torch.profiler import ProfilerActivity, profile

    engine = engine_of(family, max_num_seqs=4, kv_cache_tokens=4096)
    for prompt in prompts(1, [4, 5, 6]):
        engine.submit(prompt, max_tokens=400)
    for _ in range(10):
        engine.core.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(20):
            engine.core.step()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    assert names.count("cudaGraphLaunch") == 20
    assert not any(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)
    for _ in range(300):
        engine.core.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    engine.run()
    engine.close()


def test_an_error_in_one_half_fails_its_step_only(family, monkeypatch):
    engine = engine_of(family, cuda_graphs="padded", max_num_seqs=2)
    ops, calls = engine.core.runner.model.ops, 0
    assert isinstance(ops, GpuOps)
    original = ops.route_into

    def spoilt(logits, normalise, weights, ids):
        nonlocal calls
        original(logits, normalise, weights, ids)
        calls += 1
        if calls == 14:
            ids.fill_(1 << 20)

    monkeypatch.setattr(ops, "route_into", spoilt)
    doomed = [engine.submit(prompt, max_tokens=20) for prompt in prompts(1, [4, 5])]
    engine.run()
    assert all(isinstance(engine.results[rid].end, Failed) for rid in doomed)
    assert "ids" in engine.results[doomed[0]].end.message
    after = [engine.submit(prompt, max_tokens=6) for prompt in prompts(2, [5, 4])]
    engine.run()
    assert all(isinstance(engine.results[rid].end, Finished) for rid in after)
    engine.close()
