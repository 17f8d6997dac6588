"""Base and adapters in one batch: equal to merged models, and to themselves alone."""

from __future__ import annotations

import json

import pytest

from engine.experts.native import NativeExperts
from engine.experts.reference import ReferenceExperts
from engine.messages import Finished, LoadAdapter, Refused, Reply, UnloadAdapter
from engine.model.mlp import SparseMlp
from testing.harness import Harness
from tests.engine.family import Family
from tests.engine.parity import BACKENDS, prompts
from tests.native.isas import ISAS


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"))


@BACKENDS
@pytest.mark.parametrize("budget", [16, 256])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_mixed_batch_equals_merged_models(family, backend, budget, overlap):
    names = [None, "adapter-0", "adapter-1", "adapter-2", None, "adapter-1"]
    asked = prompts(1, [3, 9, 20, 31, 14, 5])
    engine = family.engine(max_num_batched_tokens=budget, max_num_seqs=8, overlap=overlap, **backend)
    got = engine.generate(asked, names)
    for name, prompt, tokens in zip(names, asked, got, strict=True):
        family.expect(name, prompt, tokens)
    assert len({tuple(t) for t in got}) > 3
    engine.close()


@BACKENDS
def test_alone_and_in_company_the_tokens_are_the_same(family, backend):
    """Same prompt for everyone: only the adapter makes the difference, and neighbours make none."""
    prompt = prompts(2, [24])[0]
    names = [None, "adapter-0", "adapter-1", "adapter-2"]
    alone = []
    for name in names:
        engine = family.engine(**backend)
        alone += engine.generate([prompt], [name])
        engine.close()
    engine = family.engine(**backend)
    together = engine.generate([prompt] * 4, names)
    again = engine.generate([prompt] * 4, names)  # now from the prefix cache, each from its own
    assert together == alone == again
    assert len({tuple(t) for t in together}) == 4
    engine.close()


@BACKENDS
def test_more_adapters_than_slots(family, backend):
    engine = family.engine(max_adapter_slots=1, **backend)
    names = ["adapter-0", "adapter-1", "adapter-2", None] * 2
    asked = prompts(3, [7] * 8)
    for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()


@BACKENDS
@pytest.mark.parametrize("late", [False, True], ids=["loaded at start", "loaded meanwhile"])
def test_a_first_token_waits_for_no_other_adapters_end(family, backend, late):
    """The slot of an adapter that nobody uses is free for another; loading it stops nobody."""
    engine = Harness(family.model_path, max_adapter_slots=2, max_num_batched_tokens=32, **backend)
    names = ["adapter-0", "adapter-1"] if late else list(family.paths)
    for name in names:
        engine.adapter(name, family.paths[name])
    engine.generate([prompts(8, [5])[0]], ["adapter-0"], max_tokens=2)  # leaves its slot idle
    long = engine.submit(prompts(8, [20])[0], "adapter-1", max_tokens=300)
    engine.until(lambda: engine.results[long].tokens)
    if late:
        engine.adapter("adapter-2", family.paths["adapter-2"])
    asked = prompts(8, [20])[0]
    short = engine.submit(asked, "adapter-2", max_tokens=4)
    before = len(engine.results[long].tokens)
    engine.core.step()
    engine.core.adapters.wait()  # a thread's affair: not counted in steps
    for _ in range(2):
        engine.core.step()
    assert engine.results[short].tokens and engine.results[long].end is None
    assert len(engine.results[long].tokens) == before + 3  # one in every step
    engine.until(lambda: engine.results[short].end)
    family.expect("adapter-2", asked, engine.results[short].tokens)
    assert engine.results[long].end is None
    engine.close()


def test_base_weights_are_read_once_per_expert_and_step(family, monkeypatch):
    passes: list[int] = []
    original = ReferenceExperts.base_product
    monkeypatch.setattr(
        ReferenceExperts, "base_product", lambda self, x, w: (passes.append(w.data_ptr()), original(self, x, w))[1]
    )
    engine = family.engine()
    for name in (None, "adapter-0", "adapter-1", "adapter-2"):
        engine.submit(prompts(4, [16])[0], name, max_tokens=2)
    counts = []

    def stepped() -> bool:
        counts.append((len(passes), len(set(passes))))
        passes.clear()
        return all(r.end for r in engine.results.values())

    engine.until(stepped)
    assert sum(total for total, _ in counts) > 0
    assert all(total == distinct for total, distinct in counts), "a base weight was read twice in a step"
    engine.close()


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_native_base_weights_are_read_once_per_expert_and_step(family, tmp_path, count, isa):
    """Whatever the number of adapters. Steps have fewer rows than a work item of one expert holds."""
    engine = family.engine(rules=None, isa=isa, max_num_batched_tokens=32, profile_dir=str(tmp_path))
    mlps = [layer.mlp for layer in engine.core.runner.model.layers if isinstance(layer.mlp, SparseMlp)]
    (experts,) = {mlp.backend for mlp in mlps}
    assert isinstance(experts, NativeExperts)
    before = experts.weight_bytes_read
    one = experts.num_bytes // (len(mlps) * family.base.config.num_experts)
    names = list(family.paths)[:count]
    engine.generate(prompts(3, [4] * count), names)  # they are in slots, so that they meet in a step
    engine.generate(prompts(4, [16, 7, 20, 11]), [names[i % count] if i and count else None for i in range(4)])
    read = experts.weight_bytes_read - before
    engine.close()
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert max(step["tokens"] for step in steps) > 16
    assert count == 0 or max(step["adapters"] for step in steps) > count - 1
    assert read == sum(sum(step["experts_touched"]) for step in steps) * one


@BACKENDS
def test_replace_while_requests_run(family, backend):
    """The old version serves those that have it; new requests get the new one; the old one is then let go."""
    engine = family.engine(**backend)
    prompt = prompts(5, [12])[0]
    old = engine.submit(prompt, "adapter-0", max_tokens=30)
    engine.until(lambda: engine.results[old].tokens)
    engine.core.handle(LoadAdapter(call_id=1, name="adapter-0", path=str(family.paths["adapter-1"]), replace=True))
    engine.until(lambda: any(isinstance(m, Reply) for m in engine.messages))
    reply = next(m for m in engine.messages if isinstance(m, Reply))
    assert reply.ok and reply.adapter is not None and reply.adapter.version == 2
    new = engine.submit(prompt, "adapter-0", max_tokens=8)
    engine.run()
    family.expect("adapter-0", prompt, engine.results[old].tokens)
    family.expect("adapter-1", prompt, engine.results[new].tokens)
    engine.core.step()
    adapters = engine.core.adapters
    assert adapters.stats()["adapter_host_bytes"] == sum(info.num_bytes for info in adapters.infos())
    engine.close()


def test_unload_and_unknown(family):
    engine = family.engine()
    running = engine.submit(prompts(6, [10])[0], "adapter-2", max_tokens=12)
    engine.until(lambda: engine.results[running].tokens)
    engine.core.handle(UnloadAdapter(call_id=2, name="adapter-2"))
    late = engine.submit([2, 3], "adapter-2")
    engine.run()
    assert isinstance(engine.results[running].end, Finished)
    refused = engine.results[late].end
    assert isinstance(refused, Refused) and refused.status == 404 and "adapter-1" in refused.message
    engine.core.handle(LoadAdapter(call_id=3, name="x", path="/nowhere"))
    engine.until(lambda: len([m for m in engine.messages if isinstance(m, Reply)]) == 2)
    last = [m for m in engine.messages if isinstance(m, Reply)][-1]
    assert not last.ok and last.status == 400 and "/nowhere" in str(last.error)
    engine.close()


def test_prefix_cache_keeps_tenants_and_adapters_apart(family):
    engine = family.engine()
    prompt = prompts(7, [48])[0]
    for tenant, name in (("a", None), ("b", None), ("a", "adapter-0"), ("a", None)):
        rid = engine.submit(prompt, name, tenant=tenant)
        engine.run()
        cached = engine.results[rid].end.cached_tokens
        assert cached == (47 if rid == "r3" else 0)
    engine.close()
