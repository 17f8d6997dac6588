"""Decode steps as two half-batches give the tokens of whole ones; the pool works while the other half is computed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import engine.backends as backends
from engine import ping_pong_measure
from engine.experts.cuda_bridge import CudaBridge
from engine.experts.native import NativeExperts
from engine.experts.reference import ReferenceExperts
from engine.messages import Failed, Finished
from engine.model.halves import joined
from engine.ping_pong import Costs, Line, Measured
from native import available
from native.topology import make_pool
from tests.engine.harness import Harness
from tests.engine.test_lora_serving import Family
from tests.engine.test_parity import prompts

CPU = torch.device("cpu")
NAMES = [None, "adapter-0", "adapter-2", None, "adapter-0"]
LENGTHS = [3, 9, 20, 31, 14]
needs_native = pytest.mark.skipif(not available()[0], reason=f"no native kernels: {available()[1]}")


class PoolExperts(ReferenceExperts):
    """Computes on a thread of its own, in the order of the posts, as the CPU pool does; notes what it is told."""

    beside_stream = "all"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.told: list[tuple[str, int, int]] = []  # what, layer, rows of the buffer set
        self._running: dict[int, threading.Thread] = {}
        self._last: threading.Thread | None = None

    def post(self, task: Any, stream: Any = None) -> None:
        self.told.append(("post", task.layer, task.buffers.max_rows))
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            with torch.inference_mode():
                ReferenceExperts.post(self, task, stream)

        assert id(task.buffers) not in self._running, "a buffer set holds one task at a time"
        self._last = self._running[id(task.buffers)] = threading.Thread(target=run)
        self._last.start()

    def wait(self, task: Any, stream: Any = None) -> None:
        self.told.append(("wait", task.layer, task.buffers.max_rows))
        self._running.pop(id(task.buffers)).join()


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"))


def engine_of(family: Family, **config) -> Harness:
    settings = {"cuda_graphs": "padded", "ping_pong": "on", "max_num_seqs": 6, "max_num_batched_tokens": 24}
    return family.engine(**(settings | config))


def halved(engine: Harness) -> list[tuple[int, ...]]:
    """Row counts of the parts of each padded step from now on."""
    padded, seen = engine.core.runner.padded, []
    split = padded._parts

    def noted(*args: Any) -> Any:
        parts = split(*args)
        seen.append(tuple(len(part.plan.rows) for part in parts))
        return parts

    padded._parts = noted
    return seen


@pytest.mark.parametrize("overlap", [False, True])
def test_the_tokens_of_merged_models(family, monkeypatch, overlap):
    monkeypatch.setattr(backends, "ReferenceExperts", PoolExperts)
    engine = engine_of(family, overlap=overlap)
    assert "ping-pong: two half-batches for steps of 2, 4, 6 rows" in engine.core.runner.notes
    seen = halved(engine)
    asked = prompts(1, LENGTHS)
    got = engine.generate(asked, NAMES, max_tokens=10)
    assert (3, 2) in seen and all(len(rows) == 2 for rows in seen if sum(rows) > 1)
    assert all(rows[0] - rows[1] in (0, 1) for rows in seen if len(rows) == 2)
    engine.close()
    for name, prompt, tokens in zip(NAMES, asked, got, strict=True):
        family.expect(name, prompt, tokens)


@pytest.mark.parametrize("overlap", [False, True])
def test_sampling_and_logprobs_are_those_of_whole_steps(family, monkeypatch, overlap):
    monkeypatch.setattr(backends, "ReferenceExperts", PoolExperts)
    ways = [{"temperature": 0.8, "seed": 1}, {"logprobs": 2}, {"repetition_penalty": 1.4}, {}, {"top_k": 5, "seed": 4}]
    results = []
    for mode in ("off", "on"):
        engine = engine_of(family, overlap=overlap, ping_pong=mode)
        rids = [engine.submit(p, max_tokens=9, **way) for p, way in zip(prompts(4, [6] * 5), ways, strict=True)]
        engine.run()
        results.append([(engine.results[rid].tokens, engine.results[rid].logprobs) for rid in rids])
        engine.close()
    for (tokens, logprobs), (whole_tokens, whole_logprobs) in zip(*results, strict=True):
        assert tokens == whole_tokens
        for one, other in zip(logprobs, whole_logprobs, strict=True):
            assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)


def test_a_half_is_computed_while_the_pool_has_the_other(family, monkeypatch):
    """Layers 0 and 2 have experts. A and B are posted before A is waited for, and each set holds one task at a time."""
    monkeypatch.setattr(backends, "ReferenceExperts", PoolExperts)
    engine = engine_of(family, max_num_seqs=4)
    for prompt in prompts(1, [4, 4, 4]):
        engine.submit(prompt, max_tokens=8)
    seen = halved(engine)
    while (2, 1) not in seen:
        experts = engine.core.runner.model.expert_backends[0]
        experts.told.clear()
        engine.core.step()
    a, b = 24, 2  # rows that the buffer sets hold
    assert experts.told == [
        ("post", 0, a), ("post", 0, b), ("wait", 0, a), ("wait", 0, b),  # layer 1 is dense
        ("post", 2, a), ("post", 2, b), ("wait", 2, a), ("wait", 2, b),
    ]  # fmt: skip
    engine.run()
    engine.close()


def test_layers_with_experts_interleave(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "ReferenceExperts", PoolExperts)
    engine = engine_of(Family(tmp_path, count=0, num_hidden_layers=2, mlp_only_layers=[]), max_num_seqs=2)
    seen = halved(engine)
    for prompt in prompts(1, [4, 4]):
        engine.submit(prompt, max_tokens=4)
    while (1, 1) not in seen:
        experts = engine.core.runner.model.expert_backends[0]
        experts.told.clear()
        engine.core.step()
    order = [(what, layer, "AB"[rows == 1]) for what, layer, rows in experts.told]
    assert order == [
        ("post", 0, "A"), ("post", 0, "B"), ("wait", 0, "A"), ("post", 1, "A"),
        ("wait", 0, "B"), ("post", 1, "B"), ("wait", 1, "A"), ("wait", 1, "B"),
    ]  # fmt: skip
    engine.run()
    engine.close()


def test_steps_are_traced_row_by_row(family, monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "ReferenceExperts", PoolExperts)
    touched = []
    for mode in ("off", "on"):
        engine = engine_of(family, ping_pong=mode, profile_dir=str(tmp_path / mode))
        runner, ids = engine.core.runner, []
        launch = runner.padded.launch

        def noted(*args: Any, launch: Any = launch, ids: list[Any] = ids) -> Any:
            trace = launch(*args)
            ids.append([layer.clone() for layer in trace.ids])
            return trace

        monkeypatch.setattr(runner.padded, "launch", noted)
        engine.generate(prompts(1, LENGTHS), max_tokens=6)
        engine.close()
        touched.append(ids)
    for whole, halves in zip(*touched, strict=True):
        assert all(torch.equal(a.sort().values, b.sort().values) for a, b in zip(whole, halves, strict=True))


@needs_native
@pytest.mark.parametrize("overlap", [False, True])
def test_the_native_pool_behind_the_bridge(family, monkeypatch, overlap):
    """The real poller thread and words; the caller plays the stream's part."""
    model = family.base.config
    made = []

    def bridge(dtype: torch.dtype, device: torch.device) -> CudaBridge:
        config = engine_config(model)
        made.append(CudaBridge(NativeExperts(config, dtype, make_pool(1)), config, device))
        return made[-1]

    monkeypatch.setattr(backends, "ReferenceExperts", bridge)
    engine = engine_of(family, overlap=overlap)
    seen = halved(engine)
    asked = prompts(1, LENGTHS)
    got = engine.generate(asked, NAMES, max_tokens=8)
    assert (3, 2) in seen
    for name, prompt, tokens in zip(NAMES, asked, got, strict=True):
        family.expect(name, prompt, tokens)
    # An error in one half's task fails the step, and the next request is served.
    post, calls = made[0].post, []

    def spoilt(task: Any, stream: Any = None) -> None:
        calls.append(task)
        if task is engine.core.runner.model.layers[2].mlp.second and not engine.results["doomed"].end:
            task.buffers.ids.fill_(1 << 20)
        post(task, stream)

    monkeypatch.setattr(made[0], "post", spoilt)
    doomed = [engine.submit(p, max_tokens=6) for p in prompts(3, [4, 5])]
    engine.results["doomed"] = engine.results[doomed[1]]
    engine.run()
    assert all(isinstance(engine.results[rid].end, Failed) for rid in doomed)
    assert "ids" in engine.results[doomed[0]].end.message
    after = [engine.submit(p, max_tokens=4) for p in prompts(3, [4, 5])]
    engine.run()
    assert all(isinstance(engine.results[rid].end, Finished) for rid in after)
    engine.close()


def engine_config(model: Any) -> Any:
    from engine.model_config import ModelConfig

    return ModelConfig.from_hf(model.to_dict())


def test_what_cannot_be_halved_is_said(family):
    for config, why in (
        ({}, "experts by ReferenceExperts do not run beside the stream"),
        ({"cuda_graphs": "off"}, "decode steps are not padded here"),
        ({"max_num_seqs": 1}, "steps have one row"),
    ):
        engine = engine_of(family, **config)
        assert f"ping-pong: off, {why}" in engine.core.runner.notes
        engine.close()
        quiet = engine_of(family, ping_pong="auto", **config)
        assert not any("ping-pong" in note for note in quiet.core.runner.notes)
        quiet.close()


def test_auto_prepares_the_sizes_that_can_pay(family, monkeypatch):
    """As on a GPU, where steps are captured; the measurement is a given here."""
    monkeypatch.setattr(backends, "ReferenceExperts", PoolExperts)
    engine = engine_of(family, ping_pong="auto", max_num_seqs=16)
    padded = engine.core.runner.padded
    captured: list[dict[str, Any]] = []
    monkeypatch.setattr(padded, "capture", lambda progress, **asked: captured.append(asked))
    for expert_s, note in (
        (1.0, "ping-pong: none, two half-batches would not be faster here"),
        (8e-5, "ping-pong: two half-batches for steps of 2, 4 rows, where it is faster"),
    ):
        pool = {float(n): expert_s * n for n in (2, 4, 8)}
        fixed = dict.fromkeys((False, True), Line({1: 1e-4, 16: 1e-4}))
        costs = Costs(layers=30, experts=8, top_k=2, fixed_s=fixed, read_s=1e-9, pool_s=Line(pool))
        monkeypatch.setattr(ping_pong_measure, "measure", lambda *_, costs=costs: costs)
        assert ping_pong_measure.enable(padded, "auto", True, 100, 512, lambda *_: None) == [note]
    assert captured == [{"halves": True}] and isinstance(padded.chooser, Measured)
    asked = prompts(1, LENGTHS)
    for name, prompt, tokens in zip(NAMES, asked, engine.generate(asked, NAMES, max_tokens=8), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()


def test_the_pool_is_measured_by_distinct_experts(family, monkeypatch):
    monkeypatch.setattr(backends, "ReferenceExperts", PoolExperts)
    engine = engine_of(family, max_num_seqs=4)
    with torch.inference_mode():
        found = ping_pong_measure._pool_s(engine.core.runner.model, [1, 2, 4])
    assert min(found) == 2 and all(2 <= distinct <= 8 and seconds > 0 for distinct, seconds in found.items())
    engine.close()


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_halves_are_joined_by_their_true_rows(upper, lower, data):
    first, last = torch.arange(upper)[:, None] + 100.0, torch.arange(lower)[:, None] + 200.0
    count = data.draw(st.integers(0, upper))
    out = joined([first, last], torch.tensor([count], dtype=torch.int32))
    assert out.shape == (upper + lower, 1)
    assert torch.equal(out[: count + lower], torch.cat([first[:count], last]))
