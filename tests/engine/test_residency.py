"""More adapters than fit: requests get the tokens that they get where all are resident."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.lora.budget import AdapterSize
from engine.lora.version import Residency
from engine.messages import AdapterMoved, Finished, LoadAdapter, Refused, Reply
from native import available
from testing.harness import Harness
from tests.engine.family import Family
from tests.engine.parity import prompts

COUNT, SLOTS = 4, 2
NAMES: list[str | None] = [None, *(f"adapter-{i}" for i in range(COUNT))]
PROMPTS = prompts(11, [5, 18, 33])
MOST = 6  # tokens


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("residency"), count=COUNT, num_hidden_layers=2, num_experts=4)


@pytest.fixture(scope="module", params=["reference", "native"])
def rules(request) -> str | None:
    if request.param == "native" and not available()[0]:
        pytest.skip("the native kernels are not built here")
    return "reference" if request.param == "reference" else None


class Tight:
    """An engine whose host memory holds the largest adapter and little beside, and what one with room answered."""

    def __init__(self, family: Family, rules: str | None) -> None:
        roomy = family.engine(rules=rules)
        names = [name for name in NAMES for _ in PROMPTS]
        answers = roomy.generate(PROMPTS * len(NAMES), names, max_tokens=MOST)
        self.expected = {(name, i % len(PROMPTS)): answers[i] for i, name in enumerate(names)}
        adapters, budget = roomy.core.adapters, roomy.plan.adapter_budget
        held = [adapters.weights(adapters.resolve(name)) for name in family.paths]
        sizes = [AdapterSize(each.num_bytes, each.slot_bytes(budget.element_bytes)) for each in held]
        copies = sorted((size.slot for size in sizes), reverse=True)[:SLOTS]
        roomy.close()
        self.limit = max(size.read for size in sizes) * 3 // 2 + sum(copies)
        self.engine = family.engine(
            rules=rules, max_adapter_slots=SLOTS, adapter_memory=str(self.limit), kv_cache_tokens=256, max_num_seqs=4
        )


@pytest.fixture(scope="module")
def tight(family: Family, rules: str | None) -> Iterator[Tight]:
    made = Tight(family, rules)
    yield made
    made.engine.close()


Asked = st.tuples(
    st.integers(0, COUNT), st.integers(0, len(PROMPTS) - 1), st.integers(1, MOST), st.integers(0, 3), st.booleans()
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(Asked, min_size=3, max_size=12), pinned=st.sampled_from([None, "adapter-1"]))
def test_any_traffic_gets_the_tokens_of_an_engine_with_room(
    family: Family, tight: Tight, asked: list[tuple[int, int, int, int, bool]], pinned: str | None
) -> None:
    """Each step checks the integrity of blocks, slots and host memory; requests come while others run."""
    engine = tight.engine
    before = engine.core.stats()
    wanted = {}
    for which, prompt, most, steps, cancelled in asked:
        name = NAMES[which]
        rid = engine.submit(PROMPTS[prompt], name, max_tokens=most, tenant=f"t{which % 2}")
        wanted[rid] = tight.expected[name, prompt][:most]
        for _ in range(steps):
            engine.core.step()
        if cancelled and engine.results[rid].end is None:
            engine.core._end(engine.core.scheduler.abort(rid, "client"))
            del wanted[rid]
    engine.run()
    for rid, tokens in wanted.items():
        assert isinstance(engine.results[rid].end, Finished) and engine.results[rid].tokens == tokens
    after = engine.core.stats()
    assert after["adapter_host_bytes"] <= tight.limit
    assert after["adapters_known"] == COUNT and after["adapter_queries"] - before["adapter_queries"] == sum(
        1 for which, *_ in asked if which
    )


def test_where_adapters_are_is_told(tight: Tight) -> None:
    engine = tight.engine
    before = engine.core.stats()
    for name in (*NAMES[1:], "adapter-0"):
        engine.generate([PROMPTS[0]], [name], max_tokens=1)
    after = engine.core.stats()
    assert after["adapter_reads_again"] - before["adapter_reads_again"] >= COUNT - 1 - SLOTS
    assert (
        after["adapter_evictions"] > before["adapter_evictions"] and after["adapter_load_s"] > before["adapter_load_s"]
    )
    engine.generate([PROMPTS[0]], ["adapter-0"], max_tokens=1)
    assert engine.core.stats()["adapter_hits"] == after["adapter_hits"] + 1
    told = {m.name: m.residency for m in engine.messages if isinstance(m, AdapterMoved)}
    assert told == {name: engine.core.adapters.residency(name).value for name in NAMES[1:]}
    assert told["adapter-0"] == "slot" and "disk" in told.values()


def test_a_folder_that_vanished_ends_its_requests_alone(family: Family, tmp_path: Path) -> None:
    engine = Harness(family.model_path, max_adapter_slots=1)
    sizes = []
    for name in ("adapter-0", "adapter-1"):
        engine.adapter(name, family.paths[name])
        weights = engine.core.adapters.weights(engine.core.adapters.resolve(name))
        sizes.append(AdapterSize(weights.num_bytes, weights.slot_bytes(4)))
    engine.close()
    limit = max(size.read for size in sizes) + max(size.slot for size in sizes)
    engine = Harness(family.model_path, max_adapter_slots=1, adapter_memory=str(limit))
    moved = tmp_path / "moved"
    for name in ("adapter-0", "adapter-1"):
        engine.adapter(name, family.paths[name])
    assert engine.core.adapters.residency("adapter-0") is Residency.DISK
    family.paths["adapter-0"].rename(moved)
    lost = [engine.submit(PROMPTS[0], "adapter-0") for _ in range(2)]
    kept = engine.submit(PROMPTS[0], "adapter-1", max_tokens=4)
    engine.run()
    for rid in lost:
        end = engine.results[rid].end
        assert isinstance(end, Refused) and (end.status, end.code) == (503, "adapter_failed")
        assert "adapter 'adapter-0'" in end.message and str(family.paths["adapter-0"]) in end.message
    assert isinstance(engine.results[kept].end, Finished)
    moved.rename(family.paths["adapter-0"])
    family.expect("adapter-0", PROMPTS[0], engine.generate([PROMPTS[0]], ["adapter-0"], max_tokens=4)[0])
    engine.core.handle(LoadAdapter(call_id=1, name="x", path=str(family.paths["adapter-2"]), pinned=True))
    engine.until(lambda: any(isinstance(message, Reply) for message in engine.messages))
    (reply,) = [message for message in engine.messages if isinstance(message, Reply)]
    assert not reply.ok and "would never fit" in str(reply.error)
    engine.close()
