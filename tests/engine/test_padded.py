"""Padded decode steps give the same tokens as plain ones: the CPU half of what CUDA graphs rely on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import engine.launch.cpu as backends
from engine.architectures.registry import config_from_hf
from engine.config import bucket_sizes
from engine.errors import ExpertBackendError
from engine.experts.native import NativeExperts
from engine.linear.segments import TILE, Groups, max_tiles
from engine.messages import Failed, Finished
from native import available
from native.topology import make_pool
from testing.bridge import HostBridge
from testing.harness import Harness
from tests.engine.family import Family
from tests.engine.parity import BACKENDS, prompts


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"))


def test_bucket_sizes():
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(34) == [1, 2, 4, 8, 16, 24, 32, 34]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=80))
def test_segments_hold_every_adapter_token_once(slots):
    groups = Groups.of(np.array(slots))
    order, tiles = groups.order.tolist(), groups.tiles.tolist()
    assert sorted(order) == [i for i, slot in enumerate(slots) if slot]
    assert len(tiles) <= max_tiles(len(slots), 5)
    at = 0
    for slot, start, length in tiles:
        assert start == at and 1 <= length <= TILE
        assert all(slots[token] == slot for token in order[start : start + length])
        at += length
    assert at == len(order)
    members = {slot: tokens.tolist() for slot, tokens in groups.tokens(torch.device("cpu"))}
    assert members == {s: [i for i, slot in enumerate(slots) if slot == s] for s in set(slots) - {0}}


@BACKENDS
@pytest.mark.parametrize("overlap", [False, True])
def test_mixed_adapters(family, backend, overlap):
    """adapter-1 brings MLPs of its own, so that its steps are not padded; the others' are."""
    names = [None, "adapter-0", "adapter-2", None, "adapter-0"]
    asked = prompts(1, [3, 9, 20, 31, 14])
    for chosen in (names, [*names[:2], "adapter-1", *names[3:]]):
        engine = family.engine(
            max_num_batched_tokens=24, max_num_seqs=6, overlap=overlap, cuda_graphs="padded", **backend
        )
        padded = count(engine)
        got = engine.generate(asked, chosen, max_tokens=10)
        assert padded["steps"] > 0 or "adapter-1" in chosen
        engine.close()
        for name, prompt, tokens in zip(chosen, asked, got, strict=True):
            family.expect(name, prompt, tokens)


def test_launches_are_sized_by_the_step(family):
    """Not by the token budget: the rows of a prefill chunk, then those of the smallest padded size."""
    engine = family.engine(cuda_graphs="padded", max_num_batched_tokens=64, max_num_seqs=6)
    (buffers,) = engine.core.runner.model.expert_buffers
    assert buffers.max_rows == buffers.launch_rows == 64
    engine.submit(prompts(1, [20])[0], max_tokens=3)
    engine.core.step()
    assert buffers.launch_rows == 20
    engine.until(lambda: buffers.launch_rows != 20)
    assert buffers.launch_rows == 1
    engine.run()
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_sampling_penalties_and_logprobs(family, overlap):
    ways = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.2, "top_p": 0.7, "top_k": 20, "seed": 2},
        {"repetition_penalty": 1.4},
        {"logprobs": 2},
        {"frequency_penalty": 0.7, "logit_bias": {5: 1.5}},
        {},
    ]
    results = []
    for graphs in ("off", "padded"):
        engine = family.engine(max_num_seqs=7, overlap=overlap, cuda_graphs=graphs)
        padded = count(engine)
        rids = [engine.submit(p, max_tokens=9, **way) for p, way in zip(prompts(4, [6] * 6), ways, strict=True)]
        engine.run()
        assert (padded["steps"] > 0) == (graphs == "padded")
        results.append([(engine.results[rid].tokens, engine.results[rid].logprobs) for rid in rids])
        engine.close()
    for (tokens, logprobs), (plain_tokens, plain_logprobs) in zip(*results, strict=True):
        assert tokens == plain_tokens and len(logprobs) == len(plain_logprobs)
        for one, other in zip(logprobs, plain_logprobs, strict=True):
            assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted(family, overlap):
    engine = family.engine(
        kv_cache_tokens=96,
        max_model_len=80,
        max_num_seqs=4,
        overlap=overlap,
        cuda_graphs="padded",
        max_num_batched_tokens=32,
    )
    asked = prompts(3, [20, 25, 30, 35])
    got = engine.generate(asked, max_tokens=24)
    assert engine.core.scheduler.stats()["preemptions"] > 0
    for prompt, tokens in zip(asked, got, strict=True):
        family.expect(None, prompt, tokens)
    engine.close()


def test_an_error_ends_the_step_only(family, monkeypatch):
    engine = family.engine(cuda_graphs="padded")
    model = engine.core.runner.model
    calls = {"begin": 0, "check": 0}
    begin = model.begin_step

    def counted(*args, **kwargs):
        calls["begin"] += 1
        begin(*args, **kwargs)

    def failing():
        calls["check"] += 1
        if calls["check"] == 3:
            raise ExpertBackendError("the pool did not answer")

    monkeypatch.setattr(model, "begin_step", counted)
    monkeypatch.setattr(model, "check", failing)
    doomed = engine.submit(prompts(1, [5])[0], max_tokens=10)
    engine.run()
    end = engine.results[doomed].end
    assert isinstance(end, Failed) and "the pool did not answer" in end.message
    after = engine.submit(prompts(1, [5])[0], max_tokens=3)
    engine.run()
    assert isinstance(engine.results[after].end, Finished)
    assert calls["begin"] == calls["check"]
    engine.close()


def count(engine: Harness) -> dict[str, int]:
    """Counts padded steps from now on."""
    padded, counts = engine.core.runner.padded, {"steps": 0}
    if padded is not None:
        launch = padded.launch

        def counted(*args, **kwargs):
            counts["steps"] += 1
            return launch(*args, **kwargs)

        padded.launch = counted
    return counts


@pytest.mark.skipif(not available()[0], reason=f"no native kernels: {available()[1]}")
@pytest.mark.parametrize("overlap", [False, True])
def test_the_native_pool_behind_the_bridge(family, monkeypatch, overlap):
    """The real poller thread and words; the caller plays the stream's part."""
    model, made = config_from_hf(family.base.config.to_dict()), []

    def bridge(dtype: torch.dtype, device: torch.device) -> HostBridge:
        made.append(HostBridge(NativeExperts(model, dtype, make_pool(1)), model, device))
        return made[-1]

    monkeypatch.setattr(backends, "ReferenceExperts", bridge)
    engine = family.engine(overlap=overlap, cuda_graphs="padded", max_num_seqs=6, max_num_batched_tokens=24)
    padded, names, asked = count(engine), [None, "adapter-0", "adapter-2", None], prompts(1, [3, 9, 20, 31])
    got = engine.generate(asked, names, max_tokens=8)
    assert padded["steps"] > 0
    for name, prompt, tokens in zip(names, asked, got, strict=True):
        family.expect(name, prompt, tokens)
    # An error in a layer's task fails the step, and the next request is served.
    post, spoil = made[0].post, [True]

    def spoilt(task: Any, stream: Any = None) -> None:
        if spoil[0]:
            task.buffers.ids.fill_(1 << 20)
        post(task, stream)

    monkeypatch.setattr(made[0], "post", spoilt)
    doomed = engine.submit(prompts(3, [4])[0], max_tokens=6)
    engine.run()
    end = engine.results[doomed].end
    assert isinstance(end, Failed) and "ids" in end.message
    spoil[0] = False
    after = engine.submit(prompts(3, [4])[0], max_tokens=4)
    engine.run()
    assert isinstance(engine.results[after].end, Finished)
    engine.close()
