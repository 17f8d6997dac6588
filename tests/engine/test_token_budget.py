"""The tokens of a step that a plan beside a GPU chooses: by the memory that steps take, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import STREAMED_BATCHED_TOKENS, EngineConfig
from engine.memory import plan as memory
from engine.memory.items import Item, Kind
from engine.memory.limits import Memory
from engine.memory.plan import MemoryPlan
from engine.planning import gpu_memory
from engine.planning import plan as build
from rules import Machine
from testing.models.tiny import save_hf, tiny_model

MACHINE = Machine(gpu=True, native=True, flashinfer=True, gpu_count=1)
LONG, SHORTER = STREAMED_BATCHED_TOKENS
GIB = 1 << 30
SHARE = 8  # steps longer than usual may take the eighth part of what is free
# what is fixed takes little
BARE: dict[str, Any] = {"prompt_lane": "off", "max_adapter_slots": 0, "cuda_graphs": "off"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers; each position of the KV cache takes 1 KiB, each token of a step 7.5 KiB."""
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=1 << 19,
    )
    save_hf(model, path)
    (path / "adapter").mkdir()
    (path / "adapter" / "adapter_model.safetensors").write_bytes(bytes(1000))
    return str(path)


@contextmanager
def machine(free: int) -> Iterator[pytest.MonkeyPatch]:
    """A GPU of so many free bytes, beside much memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "find_machine", lambda config, model: MACHINE)
        patch.setattr(build, "gpu_memory", lambda device: Memory("GPU 0", free, free))
        patch.setattr(build, "cpu_memory", lambda: Memory("CPU", 64 * GIB, 64 * GIB))
        yield patch


def planned(folder: str, free: int = 80 * GIB, **settings: Any) -> build.EnginePlan:
    with machine(free):
        return build.plan_engine(EngineConfig(model=folder, **settings))


def least(folder: str, rules: str) -> int:
    """Free bytes of which the longest steps may just take what they do."""
    plan = planned(folder, rules=rules, max_num_batched_tokens=LONG, kv_cache_tokens=512).memory
    return SHARE * plan.step_bytes(plan.devices[0])


@pytest.mark.parametrize("rules", ["gpu-cpu-experts", "hybrid"])
@pytest.mark.parametrize(
    "tokens", [512, SHORTER, SHORTER + 16, 32752, 32767, LONG, 32769, 32784, 163840, 10 * LONG, 327696]
)
def test_the_caches_size_is_no_steps(folder: str, rules: str, tokens: int) -> None:
    """Most of all where its tokens are a step's, or begin with their digits."""
    free = least(folder, rules)
    plan = planned(folder, free, rules=rules, kv_cache_tokens=tokens, **BARE)
    assert plan.placement.streams_prefill and plan.memory.kv_tokens == -(-tokens // 16) * 16
    assert plan.token_budget == LONG and not plan.memory.short
    assert planned(folder, free - 1, rules=rules, kv_cache_tokens=tokens, **BARE).token_budget == SHORTER


@given(tokens=st.integers(1, 1 << 19))
def test_no_size_of_the_cache_changes_steps_while_memory_lasts(folder: str, tokens: int) -> None:
    rules = "gpu-cpu-experts"
    plan = planned(folder, least(folder, rules), rules=rules, kv_cache_tokens=tokens, **BARE)
    assert plan.token_budget == LONG and not plan.memory.short


@given(
    free=st.integers(GIB, 8 * GIB),
    tokens=st.none() | st.sampled_from([SHORTER, LONG, 10 * LONG]) | st.integers(1, 1 << 20),
    rules=st.sampled_from(["gpu-cpu-experts", "hybrid"]),
)
def test_the_longest_steps_that_fit_are_taken(folder: str, free: int, tokens: int | None, rules: str) -> None:
    """Of those that leave nearly all memory to the rest, by what the items of each say."""
    settings: dict[str, Any] = {"rules": rules, "kv_cache_tokens": tokens}
    chosen = planned(folder, free, **settings)
    for budget in (LONG, SHORTER):
        tried = planned(folder, free, max_num_batched_tokens=budget, **settings).memory
        share = max(tried.step_bytes(device) / device.free_bytes for device in tried.devices)
        if not tried.short and share <= 1 / SHARE:
            assert chosen.token_budget == budget
            return
    assert chosen.token_budget <= 8192


def test_what_grows_with_a_step_is_stated_exactly(folder: str) -> None:
    """Each item's bytes differ between two budgets by what it states, beside scratch memory for chunks of rows, which
    is the same for both."""
    for rules in ("gpu-cpu-experts", "hybrid"):
        settings: dict[str, Any] = {"rules": rules, "kv_cache_tokens": 4096}
        if rules == "hybrid":
            settings["gpu_expert_memory"] = "1MiB"
        few, many = (planned(folder, max_num_batched_tokens=n, **settings).memory for n in (SHORTER, LONG))
        assert len(few.items) == len(many.items)
        for a, b in zip(few.items, many.items, strict=True):
            assert (a.device, a.kind) == (b.device, b.kind) and LONG * a.step_bytes == SHORTER * b.step_bytes
            assert b.num_bytes - a.num_bytes == b.step_bytes - a.step_bytes
            assert a.step_bytes == 0 or a.kind is Kind.STEP
        assert all(many.step_bytes(device) > 0 for device in many.devices)


def unlabelled(plan: MemoryPlan) -> MemoryPlan:
    return replace(plan, items=[replace(item, label="") for item in plan.items])


LABELS = st.sampled_from(
    ["", f" {LONG}", f"step buffers, {LONG} tokens", f"KV cache, {SHORTER} tokens", "adapters at start", "their LoRA"]
)


@given(
    labels=st.lists(LABELS | st.text(max_size=8), min_size=1, max_size=4),
    free=st.sampled_from([GIB, 2 * GIB, 3 * GIB, 5 * GIB]),
    tokens=st.none() | st.sampled_from([SHORTER, LONG, 10 * LONG]),
    backend=st.sampled_from([None, "native", "gpu", "hybrid"]),
    adapters=st.booleans(),
)
def test_labels_decide_nothing(
    folder: str, labels: list[str], free: int, tokens: int | None, backend: str | None, adapters: bool
) -> None:
    """A plan whose items are called otherwise is the same plan, with the same remedies."""
    config = EngineConfig(
        model=folder,
        kv_cache_tokens=tokens,
        expert_backend=backend,
        adapters=[f"a={folder}/adapter"] if adapters else [],
    )
    made = 0

    def renamed(device: str, kind: Kind, label: str, num_bytes: int, step_bytes: int = 0) -> Item:
        nonlocal made
        made += 1
        return Item(device, kind, labels[made % len(labels)], num_bytes, step_bytes)

    with machine(free) as patch:
        plain = build.plan_engine(config)
        for module in (build, memory, gpu_memory):
            patch.setattr(module, "Item", renamed)
        other = build.plan_engine(config)
    assert made and other.token_budget == plain.token_budget and other.hot_expert_bytes == plain.hot_expert_bytes
    assert unlabelled(other.memory) == unlabelled(plain.memory)
