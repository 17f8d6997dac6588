"""Native experts against float64, every format and instruction set, with many adapters in one batch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError, ExpertBackendError, UserError
from engine.experts.base import ExpertBuffers
from engine.experts.native import NativeExperts
from engine.experts.reference import ReferenceExperts
from native import _native
from testing.models.shapes import config
from tests.native.blocks import QUANTISED
from tests.native.expert_layers import (
    BF16,
    F32,
    E,
    K,
    Layer,
    batch,
    distinct,
    error,
    expected,
    lora,
    make,
    run,
    touched,
)
from tests.native.isas import ISAS


@pytest.fixture(scope="module")
def pool() -> object:
    return _native.WorkerPool([[0, 1]])


# Q6_K's scales are random bytes here, its products therefore large; the relative error counts.
BOUNDS = {"F32": 2e-6, "F16": 0.004, "BF16": 0.004} | dict.fromkeys(QUANTISED, 0.025)
MIXES = [(kind, "", "") for kind in [*QUANTISED, "BF16", "F16", "F32"]] + [
    ("Q4_K", "", "Q6_K"), ("Q8_0", "Q4_0", "Q5_1"), ("BF16", "", "Q8_0"), ("Q4_K", "", "BF16"),
]  # fmt: skip


@pytest.mark.parametrize("gate,up,down", MIXES)
def test_right_with_and_without_adapters(pool: object, gate: str, up: str, down: str) -> None:
    """On every instruction set: what is right is computed once."""
    layer = Layer(gate, up, down)
    dtype = F32 if gate == "F32" else BF16
    adapters = {1: lora(4, 11), 2: lora(16, 12), 5: lora(9, 13, F32)}
    bound = max(BOUNDS[kind] for kind in (gate, up or gate, down or gate))
    batches = [batch(13, dtype, slots=slots) for slots in (None, [0, 1, 2, 5])]
    for b in batches:
        b.ids[3, 1] = -1
        b.ids[4] = -1
        b.ids[5, 1] = b.ids[5, 0]  # the same expert twice
    wanted = [expected(layer, b, adapters) for b in batches]
    for isa in ISAS:
        experts = make(pool, layer, dtype, isa)
        for slot, adapter in adapters.items():
            experts.set_adapter(slot, {0: adapter})
        if gate == "F32":
            plain = batch(9, F32)
            assert error(run(experts, experts.bind(0, plain)), expected(layer, plain, {})) < bound, isa
        for b, want in zip(batches, wanted, strict=True):
            got = run(experts, experts.bind(0, b))
            assert error(got, want) < bound + (0.001 if dtype == BF16 else 0), isa
            assert not got[4].any(), isa


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_K", "Q6_K"])
def test_a_row_does_not_see_its_neighbours(pool: object, kind: str, isa: str) -> None:
    experts = make(pool, Layer(kind), BF16, isa, deterministic=True)
    for slot in (1, 2, 3):
        experts.set_adapter(slot, {0: lora(4 * slot, slot)})
    big = batch(150, BF16, slots=[0, 1, 2, 3, 0])
    big.ids[40:] = torch.tensor([2, 5, 7])  # skewed: two of three experts take most rows
    together = run(experts, experts.bind(0, big))
    again = run(experts, experts.bind(0, big))
    assert torch.equal(together, again)
    one = batch(1, BF16)
    task = experts.bind(0, one)
    for row in [0, 1, 7, 39, 40, 99, 149]:
        for name in ("hidden", "ids", "weights", "slots"):
            getattr(one, name)[0] = getattr(big, name)[row]
        assert torch.equal(run(experts, task)[0], together[row])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kinds", [("Q8_0",), ("Q4_K", "", "Q6_K"), ("Q4_0", "", "BF16"), ("Q5_0", "Q8_0", "Q4_1")])
def test_many_rows(pool: object, kinds: tuple[str, ...], isa: str) -> None:
    """Unless deterministic, experts with many rows may round otherwise, at least as well, and the same every time."""
    layer = Layer(*kinds)
    exact, fast = (make(pool, layer, BF16, isa, deterministic=d) for d in (True, False))
    elsewhere = make(_native.WorkerPool([[0], [1]]), layer, BF16, isa)
    adapters = {slot: lora(4 * slot, slot) for slot in (1, 2)}
    for experts in (exact, fast, elsewhere):
        for slot, adapter in adapters.items():
            experts.set_adapter(slot, {0: adapter})
    b = batch(150, BF16, slots=[0, 1, 2, 0])
    b.ids[60:150] = torch.tensor([2, 5, 7])
    b.ids[70, 1] = -1
    want = expected(layer, b, adapters)
    errors = [error(got, want) for got in (run(e, e.bind(0, b)) for e in (exact, fast))]
    assert errors[1] < min(0.025, 1.1 * errors[0])
    got = run(fast, fast.bind(0, b))
    assert torch.equal(got, run(elsewhere, elsewhere.bind(0, b)))
    few = batch(5, BF16, slots=[0, 1])
    assert torch.equal(run(fast, fast.bind(0, few)), run(exact, exact.bind(0, few)))
    b.hidden[70:] = 100  # the other rows' values never show
    assert torch.equal(run(fast, fast.bind(0, b))[:70], got[:70])


@pytest.fixture(scope="module")
def small(pool: object) -> tuple[NativeExperts, ReferenceExperts]:
    """A small layer in both, with adapters in slots 1 and 2."""
    layer = Layer("F32", hidden=32, inner=32)
    native, reference = make(pool, layer, F32), ReferenceExperts(F32, torch.device("cpu"))
    reference.load_layer(0, layer.store)
    for slot in (1, 2):
        for backend in (native, reference):
            backend.set_adapter(slot, {0: lora(4 * slot, slot, F32, 32, 32)})
    return native, reference


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 7, 40]), st.integers(0, 3), st.integers(0, 10**6)), min_size=1, max_size=4
    )
)
def test_distinct_experts_are_those_of_the_true_rows(
    small: tuple[NativeExperts, ReferenceExperts], calls: list[tuple[int, int, int]]
) -> None:
    """Of any routing, with adapters mixed, choices that are skipped, an expert twice in a row, and padding rows."""
    native, reference = small
    for rows, experts, seed in calls:
        g = torch.Generator().manual_seed(seed)
        b = batch(rows, F32, seed, slots=[0, 1, 2], hidden=32)
        b.ids[:rows] = torch.randint(-1, 1 + 2 * experts, (rows, K), generator=g)
        run(native, native.bind(0, b))
        reference.post(reference.bind(0, b))
        assert touched(native) == [distinct(b), 0]
        assert touched(reference) == [distinct(b)]


def test_an_expert_counts_once_in_a_call_that_is_computed_in_parts(
    small: tuple[NativeExperts, ReferenceExperts],
) -> None:
    """And one that is chosen in the last part alone counts too."""
    b = batch(9000, F32, hidden=32)
    b.ids[:9000] = torch.tensor([0, 3, 5])
    b.ids[8999, 0] = 7
    run(small[0], small[0].bind(0, b))
    assert touched(small[0]) == [4, 0]


def test_a_call_that_is_refused_counts_nothing(small: tuple[NativeExperts, ReferenceExperts]) -> None:
    b = batch(4, F32, hidden=32)
    b.ids[3, 0] = E
    with pytest.raises(ExpertBackendError, match="ids: 8"):
        run(small[0], small[0].bind(0, b))
    assert touched(small[0]) == [0, 0]


def test_down_in_slices(pool: object) -> None:
    """So many rows that y is computed by slices of columns."""
    layer = Layer("Q4_0", hidden=1024, inner=32)
    b = batch(6000, F32, hidden=1024)
    keep = [0, 3000, 5999]
    few = dataclasses.replace(b, bsz=torch.tensor([len(keep)], dtype=torch.int32))
    for name in ("hidden", "ids", "weights", "slots"):
        setattr(few, name, getattr(b, name)[keep])
    for workers in (pool, _native.WorkerPool([[0], [1], [0]])):
        for deterministic in (False, True):
            experts = make(workers, layer, F32, deterministic=deterministic)
            got = run(experts, experts.bind(0, b))
            assert error(got[keep], expected(layer, few, {})) < 0.03
            if deterministic:
                assert torch.equal(got[0], run(experts, experts.bind(0, few_rows(b, 1)))[0])


def few_rows(b: ExpertBuffers, rows: int) -> ExpertBuffers:
    return dataclasses.replace(b, bsz=torch.tensor([rows], dtype=torch.int32), out=torch.full_like(b.out, 7))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_shards_do_not_show(pool: object, threads: int) -> None:
    layer = Layer("Q4_K", "", "Q6_K")
    one = make(pool, layer, BF16)
    groups = [list(range(threads))] if threads < 5 else [[0, 1], [0], [1, 0]]
    other = make(_native.WorkerPool(groups), layer, BF16)
    for experts in (one, other):
        experts.set_adapter(1, {0: lora(8, 4)})
    b = batch(20, BF16, slots=[0, 1])
    assert torch.equal(run(one, one.bind(0, b)), run(other, other.bind(0, b)))


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_instruction_sets_agree(pool: object, kind: str, isa: str) -> None:
    layer = Layer(kind)
    b = batch(6, F32)
    outs = [run(experts, experts.bind(0, b)) for experts in (make(pool, layer, F32, i) for i in ("avx2", isa))]
    assert error(outs[0], outs[1].double()) < 1e-4


def test_one_task_serves_any_number_of_rows(pool: object) -> None:
    layer = Layer("Q8_0")
    experts = make(pool, layer, BF16)
    b = batch(30, BF16)
    task = experts.bind(0, b)
    for rows in [30, 0, 1, 17, 30, 2]:
        b.bsz[0] = rows
        b.out[:] = 7
        b.ids[:30].copy_(batch(30, BF16, seed=rows).ids[:30])
        assert error(run(experts, task), expected(layer, b, {})) < 0.025 if rows else run(experts, task).numel() == 0


def test_more_rows_than_a_chunk(pool: object) -> None:
    layer = Layer("Q4_0", hidden=32, inner=64)
    experts = make(pool, layer, F32)
    b = batch(1100, F32, hidden=32)
    got = run(experts, experts.bind(0, b))
    keep = [0, 500, 1023, 1024, 1099]
    few = dataclasses.replace(b, bsz=torch.tensor([len(keep)], dtype=torch.int32))
    for name in ("hidden", "ids", "weights", "slots"):
        setattr(few, name, getattr(b, name)[keep])
    assert error(got[keep], expected(layer, few, {})) < 0.03


@pytest.mark.parametrize("hidden,inner", [(32, 32), (96, 32), (64, 160), (2048, 96)])
def test_any_multiple_of_32(pool: object, hidden: int, inner: int) -> None:
    for kind in ("BF16", "Q8_0", "Q4_1"):
        layer = Layer(kind, hidden=hidden, inner=inner)
        experts = make(pool, layer, BF16)
        adapters = {1: lora(3, 5, hidden=hidden, inner=inner)}
        experts.set_adapter(1, {0: adapters[1]})
        b = batch(5, BF16, slots=[0, 1], hidden=hidden)
        assert error(run(experts, experts.bind(0, b)), expected(layer, b, adapters)) < BOUNDS[kind] + 0.003


@pytest.mark.parametrize("hidden,inner,what", [(64, 48, "expert intermediate size: 48"), (80, 64, "hidden size: 80")])
def test_other_sizes_are_refused(pool: object, hidden: int, inner: int, what: str) -> None:
    with pytest.raises(UserError, match=f"{what}; it must be a multiple of 32"):
        make(pool, Layer("BF16", hidden=hidden, inner=inner), BF16)


@pytest.mark.parametrize("quantise,bound", [("int8", 0.025), ("int4", 0.2)])
def test_plain_weights_are_quantised_on_request(pool: object, quantise: str, bound: float) -> None:
    layer = Layer("F32")
    experts = make(pool, layer, BF16, quantise=quantise)
    plain = make(pool, layer, F32)
    assert experts.num_bytes < plain.num_bytes * (0.27 if quantise == "int8" else 0.16)
    b = batch(4, BF16)
    assert error(run(experts, experts.bind(0, b)), expected(layer, b, {})) < bound


def test_adapters_come_and_go(pool: object) -> None:
    layer = Layer("Q8_0")
    experts = make(pool, layer, BF16)
    b = batch(6, BF16, slots=[1])
    task = experts.bind(0, b)
    base = run(experts, task)
    first, second = lora(4, 1), lora(20, 2)
    for adapter in (first, second):
        experts.set_adapter(1, {0: adapter})
        assert error(run(experts, task), expected(layer, b, {1: adapter})) < 0.025
    experts.set_adapter(1, {3: first})  # has nothing for this layer
    assert torch.equal(run(experts, task), base)
    experts.set_adapter(1, {0: second})
    experts.set_adapter(1, None)
    assert torch.equal(run(experts, task), base)


def test_an_expert_whose_b_is_zero_equals_the_base(pool: object) -> None:
    experts = make(pool, Layer("Q8_0"), BF16)
    b = batch(6, BF16, slots=[1])
    task = experts.bind(0, b)
    base = run(experts, task)
    adapter = lora(4, 1)
    for t in (adapter.gate_b, adapter.up_b, adapter.down_b):
        t.zero_()
    experts.set_adapter(1, {0: adapter})
    assert torch.equal(run(experts, task), base)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, 13, 40])
def test_base_weights_are_read_once_per_expert_whatever_the_number_of_adapters(
    pool: object, rows: int, deterministic: bool, isa: str
) -> None:
    """At most 40 rows meet an expert, which is one work item's rows on every instruction set."""
    experts = make(pool, Layer("Q8_0"), BF16, isa, deterministic=deterministic)
    for count in range(8):
        if count:
            experts.set_adapter(count, {0: lora(4, count)})
        b = batch(rows, BF16, slots=list(range(count + 1)))
        before = experts.weight_bytes_read
        run(experts, experts.bind(0, b))
        distinct = len(b.ids[:rows].unique())
        assert experts.weight_bytes_read - before == distinct * experts.num_bytes // E


@pytest.mark.parametrize("rows", [1, 13, 3000])  # 3000: computed in several parts
def test_choices_are_counted_by_expert(pool: object, rows: int) -> None:
    experts = make(pool, Layer("Q8_0"), BF16)
    total = torch.zeros(E, dtype=torch.int64)
    for _ in range(2):
        b = batch(rows, BF16)
        b.ids[0, 1] = -1
        run(experts, experts.bind(0, b))
        ids = b.ids[:rows]
        total += torch.bincount(ids[ids >= 0], minlength=E)
        assert experts.choices() == {0: total.tolist()}


def broken() -> Iterator[tuple[str, str, int]]:
    yield "bsz", "bsz: 9; allowed are 0 to 8", 9
    yield "bsz", "bsz: -1", -1
    yield "ids", "ids: 8; allowed are -1 to 7", 8
    yield "ids", "ids: -2", -2
    yield "slots", "slots: -1", -1


@pytest.mark.parametrize("name,message,value", list(broken()))
def test_a_bad_batch_is_refused_and_the_next_is_served(pool: object, name: str, message: str, value: int) -> None:
    experts = make(pool, Layer("Q8_0"), BF16)
    b = batch(6, BF16)
    task = experts.bind(0, b)
    good = run(experts, task)
    getattr(b, name).view(-1)[0] = value
    b.out[:] = 7
    with pytest.raises(ExpertBackendError, match=message):
        run(experts, task)
    assert (b.out == 7).all()
    fresh = batch(6, BF16)
    getattr(b, name).copy_(getattr(fresh, name))
    assert torch.equal(run(experts, task), good)


def test_misuse_is_refused(pool: object) -> None:
    experts = make(pool, Layer("Q8_0"), BF16)
    with pytest.raises(ExpertBackendError, match="layer 4"):
        experts.bind(4, batch(1, BF16))
    with pytest.raises(ExpertBackendError, match="ids"):
        experts.bind(0, dataclasses.replace(batch(1, BF16), ids=torch.zeros(3, K, dtype=torch.int32)))
    with pytest.raises(ExpertBackendError, match="hidden is"):
        experts.bind(0, batch(1, torch.float16))
    task = experts.bind(0, batch(1, BF16))
    with pytest.raises(ExpertBackendError, match="wait without post"):
        experts.wait(task)
    with pytest.raises(ExpertBackendError, match="gate_a"):
        experts.set_adapter(1, {0: lora(4, 1, hidden=128)})
    with pytest.raises(EngineError, match="quantise"):
        NativeExperts(config(), BF16, pool, quantise="int2")
    with pytest.raises(UserError, match="sse"):
        NativeExperts(config(), BF16, pool, isa="sse")


def test_a_bad_activation_stays_in_its_row(pool: object) -> None:
    for kind in ("BF16", "Q8_0", "Q4_K"):
        experts = make(pool, Layer(kind), BF16)
        b = batch(5, BF16)
        task = experts.bind(0, b)
        clean = run(experts, task)
        b.hidden[2, 40] = float("nan")
        got = run(experts, task)
        assert torch.isnan(got[2]).all()
        keep = [0, 1, 3, 4]
        assert torch.equal(got[keep], clean[keep])


def test_adapters_arrive_while_others_compute(pool: object) -> None:
    """Slots are filled and emptied on another thread, ever higher ones: what a running batch uses stays as it is."""
    layer = Layer("BF16")
    experts = make(pool, layer, BF16)
    experts.set_adapter(1, {0: lora(4, 1)})
    task = experts.bind(0, batch(12, BF16, slots=[0, 1] * 6))
    want = run(experts, task)
    done = threading.Event()

    def fill() -> None:
        for slot in range(2, 300):
            experts.set_adapter(slot, {0: lora(2, slot)})
            experts.set_adapter(slot - 1 if slot > 2 else 2, None)
        done.set()

    thread = threading.Thread(target=fill)
    thread.start()
    runs = 0
    while not done.is_set() or runs < 50:
        assert torch.equal(run(experts, task), want)
        runs += 1
    thread.join()
