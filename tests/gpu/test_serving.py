"""A whole engine on a GPU: equal to transformers, graphs equal to plain launches, adapters apart, faults contained."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rules as rules_folder
from benchmarks.accuracy.table import MIXES, Files, measure
from engine.config import EngineConfig
from engine.experts.base import ExpertBuffers
from engine.experts.bridge.backend import CudaBridge
from engine.experts.gpu.compute import GpuCompute
from engine.experts.streamed.backend import NEVER, StreamedExperts
from engine.launch import assemble
from engine.messages import Failed, Finished
from engine.ops.gpu import GpuOps
from scheduler.drafts import Drafter
from scheduler.plan import StepPlan
from testing.harness import Harness, greedy
from testing.models.tiny import FAMILIES, save_hf, tiny_model
from tests.engine.family import Family
from tests.engine.knowing import Knowing
from tests.engine.parity import CLEAR, prompts

pytestmark = pytest.mark.gpu
TIE = 0.5  # of logits with a spread of several units: bf16 may order such a pair either way
SHAPE = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
GPU = {"device": "cuda", "rules": None, "dtype": "bfloat16", "expert_backend": "native"}


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    """Adapter 1 has MLPs of its own."""
    return Family(tmp_path_factory.mktemp("family"), **SHAPE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(5, num_hidden_layers=3, **SHAPE), path)
    return path


def test_float32_reference_equals_transformers(tmp_path):
    model = tiny_model(3, num_hidden_layers=3, num_experts=16, num_experts_per_tok=4)
    save_hf(model, tmp_path)
    asked = prompts(3, [3, 17, 40, 9])
    for overlap in (False, True):
        engine = Harness(tmp_path, device="cuda", max_num_batched_tokens=32, overlap=overlap)
        assert engine.plan.placement.device == "cuda"
        got = engine.generate(asked, max_tokens=12)
        engine.close()
        for prompt, tokens in zip(asked, got, strict=True):
            expected, gap = greedy(model, prompt, 12, tokens)
            assert tokens == expected or gap < CLEAR


def test_float32_adapters_equal_merged_models(family):
    names = [None, "adapter-0", "adapter-1", "adapter-2"]
    asked = prompts(1, [3, 9, 20, 31])
    for linear in (None, "gpu"):
        engine = family.engine(device="cuda", linear_backend=linear, max_num_batched_tokens=24, max_num_seqs=6)
        for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
            family.expect(name, prompt, tokens)
        engine.close()


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_error_is_bounded(tmp_path_factory, name, mix, graphs):
    folder = tmp_path_factory.mktemp("files")
    runs = [
        measure(Files(folder, "BF16", seed, family=name), mix, seed, **GPU, cuda_graphs=graphs) for seed in (0, 1, 2)
    ]
    error, theirs = sum(r.error for r in runs), sum(r.transformers for r in runs)
    assert error <= 1.25 * theirs, f"{error / theirs:.2f} times transformers' error"


def agree(model: torch.nn.Module, prompt: list[int], one: list[int], other: list[int]) -> bool:
    """Equal up to a position where the float32 model's best two tokens are near one another."""
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            with torch.inference_mode():
                best = model(torch.tensor([prompt + one[:i]])).logits[0, -1].topk(2).values
            return float(best[0] - best[1]) < TIE
    return True


def serve(family: Family, names: list[str | None], **config) -> list[list[int]]:
    engine = family.engine(**(GPU | {"max_num_seqs": 6, "max_num_batched_tokens": 64} | config))
    runner = engine.core.runner
    if config.get("cuda_graphs", "auto") == "auto":
        assert any("CUDA graphs: 4 sizes up to 6 rows" in note for note in runner.notes), runner.notes
    each = list(dict.fromkeys(names))
    engine.generate([[1]] * len(each), each, max_tokens=1)  # adapters are in their slots: what meets in a step is known
    got = engine.generate(prompts(1, [3, 9, 20, 31, 14]), names, max_tokens=24)
    engine.close()
    return got


@pytest.mark.parametrize("names", [[None] * 5, [None, "adapter-0", "adapter-2", None, "adapter-0"]])
@pytest.mark.parametrize("experts", ["native", "gpu", "hybrid"])
def test_graphs_equal_plain_launches(family, names, experts):
    """Exactly: the same kernels on the same padded batches. Overlap changes which requests meet in a batch; when a hot
    expert arrives on the GPU, and with it the kernel that computes it, depends on its copy's time."""
    asked = prompts(1, [3, 9, 20, 31, 14])
    by_overlap = []
    for overlap in (False, True):
        config = {"overlap": overlap, "expert_backend": experts}
        if experts == "hybrid":
            config["gpu_expert_memory"] = str(5 * 3 * 128 * 64 * 2)  # five of 24 experts
        runs = [serve(family, names, cuda_graphs=g, **config) for g in ("auto", "padded")]
        if experts == "hybrid":
            for name, prompt, graphs, plain in zip(names, asked, *runs, strict=True):
                assert agree(family.merged[name], prompt, graphs, plain)
        else:
            assert runs[0] == runs[1]
        by_overlap.append(runs[0])
    for name, prompt, off, on in zip(names, asked, *by_overlap, strict=True):
        assert agree(family.merged[name], prompt, off, on)
        assert agree(family.merged[name], prompt, greedy(family.merged[name], prompt, 24)[0], on)


@pytest.mark.parametrize("experts", ["native", "gpu"])
def test_drafts_are_rows_of_a_graph(family, monkeypatch, experts):
    """Beside adapters, with and without steps launched ahead."""
    names, asked = [None, "adapter-0", "adapter-2"], prompts(1, [3, 9, 20])
    wanted = [greedy(family.merged[name], prompt, 24)[0] for name, prompt in zip(names, asked, strict=True)]
    texts = [prompt + tokens for prompt, tokens in zip(asked, wanted, strict=True)]
    for overlap in (False, True):
        config = {"max_num_seqs": 4, "expert_backend": experts, "speculate": "ngram:4:always", "overlap": overlap}
        engine = family.engine(**(GPU | config))
        engine.core.scheduler._core.drafter = Drafter(Knowing(texts, 2), 4, always=True)
        padded, steps = engine.runner.padded, []
        launch = padded.launch
        monkeypatch.setattr(
            padded, "launch", lambda arrays, launch=launch, steps=steps: (steps.append(arrays), launch(arrays))[1]
        )
        got = engine.generate(asked, names, max_tokens=24)
        engine.close()
        assert any(not arrays.single for arrays in steps)
        for name, prompt, one, other in zip(names, asked, wanted, got, strict=True):
            assert agree(family.merged[name], prompt, one, other)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_base_weights_are_read_once_per_expert_and_step(family, monkeypatch, count):
    """Whatever the number of adapters, counted by the kernels' own tables. 16 rows of an expert fit one block."""
    seen: list[tuple[int, int]] = []
    original = GpuCompute.run

    def run(self: GpuCompute, b: ExpertBuffers, *tables: Any, **options: Any) -> None:
        original(self, b, *tables, **options)
        seen.append((self.weight_passes(), len(b.ids[: int(b.bsz)].unique())))

    monkeypatch.setattr(GpuCompute, "run", run)
    engine = family.engine(
        **GPU | {"expert_backend": "gpu"}, cuda_graphs="off", max_num_batched_tokens=16, max_num_seqs=8
    )
    seen.clear()
    names = list(family.paths)[:count]
    engine.generate(prompts(4, [16, 7, 20, 11]), [names[i % count] if i and count else None for i in range(4)])
    engine.close()
    assert len(seen) > 8
    assert all(passes == distinct for passes, distinct in seen)


@pytest.mark.parametrize("experts", ["gpu", "hybrid"])
def test_a_graph_launches_for_its_own_rows(family, monkeypatch, experts):
    """Whatever the token budget, which the buffers are made for."""
    seen: set[int] = set()
    original = GpuCompute.run

    def run(self: GpuCompute, b: ExpertBuffers, *tables: Any, **options: Any) -> None:
        assert b.max_rows == 512
        seen.add(b.launch_rows)
        original(self, b, *tables, **options)

    monkeypatch.setattr(GpuCompute, "run", run)
    monkeypatch.setattr(StreamedExperts, "measure", lambda self: NEVER)  # it brings batches of its own,
    monkeypatch.setattr(assemble, "warm_up", lambda *_, **__: None)  # and so do these prompts,
    monkeypatch.setattr(assemble, "first_figures", lambda *_: ())  # and these
    engine = family.engine(**GPU | {"expert_backend": experts}, max_num_batched_tokens=512, max_num_seqs=6)
    engine.close()
    assert seen == {1, 2, 4, 6}


@pytest.mark.parametrize("experts", ["native", "gpu", "hybrid"])
def test_a_shared_expert_beside_experts_anywhere(tmp_path_factory, experts):
    """With adapters on it and on its gate; graphs exactly as plain launches where experts stay where they are."""
    family = Family(tmp_path_factory.mktemp("shared"), family="qwen2_moe", **SHAPE)
    names, asked = [None, "adapter-0", "adapter-2", None, "adapter-0"], prompts(1, [3, 9, 20, 31, 14])
    config = {"expert_backend": experts}
    if experts == "hybrid":
        config["gpu_expert_memory"] = str(5 * 3 * 128 * 64 * 2)
    graphs, plain = (serve(family, names, cuda_graphs=g, **config) for g in ("auto", "padded"))
    assert experts == "hybrid" or graphs == plain
    for name, prompt, tokens in zip(names, asked, graphs, strict=True):
        assert agree(family.merged[name], prompt, greedy(family.merged[name], prompt, 24)[0], tokens)


def test_adapters_do_not_touch_one_another(family):
    names = [None, "adapter-0", "adapter-1", "adapter-2", None]
    asked = prompts(1, [3, 9, 20, 31, 14])
    engine = family.engine(**GPU, max_num_seqs=6)
    together = engine.generate(asked, names, max_tokens=16)
    for name, prompt, tokens in zip(names, asked, together, strict=True):
        alone = engine.generate([prompt], [name], max_tokens=16)[0]
        assert agree(family.merged[name], prompt, alone, tokens)
    engine.close()


def test_streamed_prefill_equals_merged_models(family, tmp_path):
    """Chunks of 16 rows and more are computed on the GPU from streamed experts, the rest on the CPU."""
    rules = tmp_path / "streamed.yaml"
    shipped = Path(rules_folder.__file__).parent / "gpu-cpu-experts.yaml"
    rules.write_text(shipped.read_text().replace("prefill_threshold: auto", "prefill_threshold: 16"))
    names = [None, "adapter-0", "adapter-1", "adapter-2", None]
    asked = prompts(1, [40, 30, 20, 50, 3])
    engine = family.engine(**(GPU | {"rules": str(rules)}), max_num_seqs=6, max_num_batched_tokens=64)
    backend = engine.core.runner.model.expert_backends[0]
    assert isinstance(backend, StreamedExperts) and backend.threshold == 16
    got = engine.generate(asked, names, max_tokens=12)
    engine.close()
    for name, prompt, tokens in zip(names, asked, got, strict=True):
        assert agree(family.merged[name], prompt, greedy(family.merged[name], prompt, 12)[0], tokens)


def test_check_agrees_on_a_gpu(folder):
    from engine.diagnostics.check import check_model
    from engine.launch.backends import make_backends
    from engine.planning.plan import plan_engine

    settings = {"kv_cache_tokens": 64, "max_num_seqs": 1, "max_num_batched_tokens": 32, "expert_backend": "native"}
    plan = plan_engine(EngineConfig(model=str(folder), **settings))
    plan = plan.without_streaming()
    assert plan.placement.device == "cuda"
    lines: list[str] = []
    assert check_model(plan.source, make_backends(plan), prompts(1, [32])[0], lines.append) is None, lines


def test_sampling_ways_in_one_batch(folder):
    ways = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.2, "top_p": 0.7, "top_k": 20, "seed": 2},
        {"temperature": 0.9, "min_p": 0.05, "seed": 3},
        {"repetition_penalty": 1.4},
        {"logprobs": 2},
        {"frequency_penalty": 0.7, "logit_bias": {5: 1.5}},
    ]
    results = []
    for graphs in ("auto", "padded"):
        engine = Harness(folder, **GPU, cuda_graphs=graphs, max_num_seqs=6)
        rids = [engine.submit(p, max_tokens=20, **way) for p, way in zip(prompts(4, [6] * 6), ways, strict=True)]
        engine.run()
        results.append([engine.results[rid].tokens for rid in rids])
        assert len(engine.results[rids[4]].logprobs) == 20
        engine.close()
    assert results[0] == results[1]


def test_a_step_is_launched_before_the_last_one_is_read(folder, monkeypatch):
    engine = Harness(folder, **GPU, max_num_seqs=2)
    runner, events = engine.core.runner, []
    for name in ("launch_forward", "tokens"):
        original = getattr(runner, name)

        def noted(argument, *rest, name=name, original=original):
            events.append((name, argument.step if isinstance(argument, StepPlan) else argument.plan.step))
            return original(argument, *rest)

        monkeypatch.setattr(runner, name, noted)
    engine.generate(prompts(1, [4]), max_tokens=8)
    engine.close()
    places = {event: i for i, event in enumerate(events)}
    steps = sorted(step for name, step in places if name == "launch_forward")
    assert len(steps) >= 8
    assert all(places["launch_forward", n + 1] < places["tokens", n] for n in steps[:-1])


def test_a_decode_step_is_one_graph_launch(folder):
    from torch.profiler import ProfilerActivity, profile

    engine = Harness(folder, **GPU, max_num_seqs=4)
    for prompt in prompts(1, [4, 5, 6]):
        engine.submit(prompt, max_tokens=60)
    for _ in range(10):
        engine.core.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(20):
            engine.core.step()
        torch.cuda.synchronize()
    calls: dict[str, int] = {}
    for event in seen.events():
        calls[event.name] = calls.get(event.name, 0) + 1
    launches = sum(n for name, n in calls.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    assert calls.get("cudaGraphLaunch", 0) == 20, calls
    assert launches == 0, calls
    engine.run()
    engine.close()


def test_a_thousand_replays_take_no_memory_and_no_threads(tmp_path):
    save_hf(tiny_model(5, max_position_embeddings=2048, **SHAPE), tmp_path)
    engine = Harness(tmp_path, **GPU, max_num_seqs=4, kv_cache_tokens=8192)
    rids = [engine.submit(p, max_tokens=1200) for p in prompts(1, [4, 5, 6, 7])]
    before = None
    for number in range(1150):
        engine.core.step()
        if number in (100, 1149):
            torch.cuda.synchronize()
            now = (torch.cuda.memory_allocated(), len(os.listdir("/proc/self/task")), threading.active_count())
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if before is None:
                before, size = now, grown
            else:
                assert now[1] <= before[1] and now[2] <= before[2] and now[0] - before[0] < 1 << 20
                assert grown - size < 32 << 10  # KiB
    assert all(len(engine.results[rid].tokens) > 1000 for rid in rids)
    engine.run()
    engine.close()


@pytest.mark.parametrize("graphs", ["auto", "padded"])
def test_an_error_in_the_pool_fails_its_step_only(folder, monkeypatch, graphs):
    """The ids of a step are spoilt on the GPU (in a graph, too: by a number that it reads): the pool refuses them, and
    its stream is released."""
    original, spoil = GpuOps.norm_route, torch.zeros(1, dtype=torch.int64, device="cuda")

    def spoilt(self, residual, delta, weight, gate, router, out, adapters):
        done = original(self, residual, delta, weight, gate, router, out, adapters)
        out[2].add_(spoil)
        return done

    monkeypatch.setattr(GpuOps, "norm_route", spoilt)
    engine = Harness(folder, **GPU, cuda_graphs=graphs, max_num_seqs=2)
    doomed = engine.submit(prompts(1, [4])[0], max_tokens=20)
    engine.until(lambda: len(engine.results[doomed].tokens) >= 3)
    assert engine.results[doomed].end is None and engine.results[doomed].tokens
    spoil.fill_(1 << 20)
    engine.until(lambda: engine.results[doomed].end)
    spoil.zero_()
    end = engine.results[doomed].end
    assert isinstance(end, Failed) and "ExpertBackendError" in end.message and "ids" in end.message
    engine.run()
    after = engine.submit(prompts(2, [5])[0], max_tokens=6)
    engine.run()
    assert isinstance(engine.results[after].end, Finished)
    engine.close()


def test_a_pool_that_does_not_answer_fails_its_step_only(folder, monkeypatch):
    """One post never reaches the pool: its wait ends with the time-out, and the next request is served."""
    monkeypatch.setitem(CudaBridge.__init__.__kwdefaults__, "timeout_s", 2.0)
    original, calls = CudaBridge.post_part, 0

    def lost(self, task, hot, stream=None):
        nonlocal calls
        calls += 1
        if calls == 5:
            task.handle.counter[0] += min(64, task.buffers.max_rows)  # as if every program had posted
        else:
            original(self, task, hot, stream)

    engine = Harness(folder, **GPU, cuda_graphs="padded", max_num_seqs=2)
    monkeypatch.setattr(CudaBridge, "post_part", lost)
    doomed = engine.submit(prompts(1, [4])[0], max_tokens=20)
    engine.run()
    end = engine.results[doomed].end
    assert isinstance(end, Failed) and "did not answer in time" in end.message
    after = engine.submit(prompts(2, [5])[0], max_tokens=6)
    engine.run()
    assert isinstance(engine.results[after].end, Finished)
    engine.close()


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_an_fp8_cache_is_bounded(tmp_path_factory, graphs):
    """Against float32: its error, and how much larger it is than a bf16 cache's."""
    folder = tmp_path_factory.mktemp("files")
    error = {}
    for kind in ("auto", "fp8"):
        settings = {**GPU, "cuda_graphs": graphs, "kv_cache_dtype": kind}
        error[kind] = sum(measure(Files(folder, "BF16", s), "decode", s, **settings).error for s in (0, 1, 2)) / 3
    print(error)
    assert error["fp8"] < 0.12 and error["fp8"] < 6 * error["auto"], error


def test_an_fp8_cache_halves_its_memory_and_graphs_equal_plain_launches(family):
    names = [None, "adapter-0", "adapter-2", None, "adapter-0"]
    runs = [serve(family, names, cuda_graphs=g, kv_cache_dtype="fp8", overlap=False) for g in ("auto", "padded")]
    assert runs[0] == runs[1]
    engine = family.engine(**GPU, kv_cache_dtype="fp8")
    (attention,) = engine.core.runner.model.attention_backends
    assert attention.kv_bytes_per_token == engine.plan.source.config.kv_bytes_per_token(1)
    assert any("prefill attention: flashinfer fa2" in note for note in engine.core.runner.notes)
    engine.close()


def test_experts_on_kt_follow_the_stream(tmp_path):
    """kt_kernel may be missing here; then there is nothing to test."""
    from benchmarks.accuracy.table import measure_apart
    from engine.experts.kt.process import kt_available

    ready, why = kt_available()
    if not ready:
        pytest.skip(why)
    runs = [measure_apart("BF16", "decode", seed, GPU | {"expert_backend": "kt"}) for seed in range(2)]
    error, theirs = sum(r.error for r in runs), sum(r.transformers for r in runs)
    assert error <= 1.25 * theirs, f"{error / theirs:.2f} times transformers' error"
