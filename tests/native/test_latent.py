"""Latent attention on the kernels: paged attention over latents, and their projection to keys and values by heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.architectures.parts.mla import Latent
from engine.architectures.parts.rotation import Rotation
from engine.attention.latent import ReferenceLatentAttention
from engine.attention.native import NativeAttention
from engine.errors import UserError
from engine.linear import native as native_linear
from engine.linear.base import LoraBatch
from engine.linear.latent import TorchLatentUp
from engine.linear.native import NativeLatentUp, NativeLinearBackend
from engine.lora.adapter import LoraPair
from engine.ops.base import TorchOps
from engine.ops.native import NativeOps
from engine.ops.rope import Rope
from engine.ranks.shard import Shard, by_outputs
from engine.weights.latent import latent_halves
from engine.weights.packed import packed_format
from engine.weights.store import JoinedTensor, WeightTensor
from native import _native
from tests.native.batches import batch_of
from tests.native.blocks import QUANTISED, values_of_block
from tests.native.isas import ISAS
from tests.native.test_attention import Kernels, each_kernel
from tests.native.test_linear import tensor as stored

BF16, F32 = torch.bfloat16, torch.float32
POOL = _native.WorkerPool([[0, 1, 2]])
each_isa = pytest.mark.parametrize("isa", ISAS)
TOLERANCE = {F32: 1e-5, BF16: 2e-2}
SHAPES = [(32, 32, 32), (128, 128, 512), (96, 64, 160)]  # nope, value, latents


def near(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    assert got.shape == want.shape and torch.isfinite(got).all()
    error = (got.float() - want.float()).abs().mean() / want.float().abs().mean()
    assert error < limit, float(error)


# ---- attention


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(new tokens, context)."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        context = draw(st.sampled_from([1, 2, 15, 16, 17, 33, 255, 256, 257, 300]))
        found.append((draw(st.sampled_from([1, min(3, context), context])), context))
    return found


@each_kernel
@pytest.mark.parametrize(("dtype", "kv"), [(F32, F32), (F32, BF16), (BF16, BF16)], ids=str)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    rows=rows(), heads=st.sampled_from([1, 3, 16, 128]), sizes=st.sampled_from([(512, 64), (32, 32), (96, 16)]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_attention_over_latents(kernels: Kernels, dtype, kv, rows, heads, sizes, seed) -> None:
    """Contexts are written in a step of their own; blocks hold whatever others have left there."""
    rank, rope = sizes
    rows = rows[:1] if heads == 128 else rows  # the reference takes most of the time
    part = Latent(heads, None, rank, 32, 32, Rotation(rope, 1e4, 4096))
    blocks, generator = 128, torch.Generator().manual_seed(seed)
    products = "" if kv == F32 else kernels.products
    native = NativeAttention(part, [0, 1], blocks, dtype, POOL, kernels.isa, kv_dtype=kv, products=products)
    reference = ReferenceLatentAttention(part, [0, 1], blocks, F32, torch.device("cpu"))
    memory = native.host_planes()[0]
    noise = torch.randn(memory.size // kv.itemsize, generator=generator).to(kv)
    memory[:] = noise.view(torch.uint8).numpy().reshape(memory.shape)
    limit = TOLERANCE[dtype if kv == dtype else kv]
    # Tables of both steps have the rows' blocks: the longer contexts' come first.
    whole = batch_of([(1, context) for _, context in rows])
    for step in (1, 2):
        wanted = [(c - n, c - n) for n, c in rows] if step == 1 else rows
        kept = [i for i, (n, _) in enumerate(wanted) if n > 0]
        if not kept:
            continue
        batch = batch_of([wanted[i] for i in kept])
        batch.block_tables = [whole.block_tables[i] for i in kept]
        tokens, at = batch.num_tokens, []
        for r in range(len(kept)):
            new = batch.row_starts[r + 1] - batch.row_starts[r]
            positions = range(batch.context_lens[r] - new, batch.context_lens[r])
            at += [batch.block_tables[r][p // 16] * 16 + p % 16 for p in positions]
        batch.slot_mapping = torch.tensor(at)
        q = torch.randn(tokens, heads, part.width, generator=generator).to(dtype)
        k = torch.randn(tokens, 1, part.width, generator=generator).to(kv).to(dtype)
        outs = []
        for backend in (native, reference):
            backend.plan(batch)
            values = (q, k, k[..., :rank])
            given_values = values if backend is native else tuple(t.float() for t in values)
            outs.append(backend.forward(1, *given_values))
        near(*outs, limit)
    assert native.kv_bytes_per_token == 2 * part.width * kv.itemsize
    assert native.cache_bytes == blocks * 16 * native.kv_bytes_per_token


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_rank": 48}, "kv_lora_rank 48 is not a multiple of 32"),
        ({"nope_dim": 16}, "qk_nope_head_dim 16 is not"),
        ({"value_dim": 40}, "v_head_dim 40 is not"),
        ({"kv_rank": 576}, r"kv_lora_rank \+ qk_rope_head_dim is 608; the kernels take up to 576"),
        ({"rotation": Rotation(24, 1e4, 64)}, "qk_rope_head_dim 24 is not a multiple of 16"),
    ],
)
def test_sizes_that_the_kernels_do_not_take(change: dict, said: str) -> None:
    part = replace(Latent(2, None, 64, 32, 32, Rotation(32, 1e4, 64)), **change)
    with pytest.raises(UserError, match=said):
        NativeAttention(part, [0], 8, F32, POOL)


# ---- projections by heads


@st.composite
def batches(draw: st.DrawFn) -> list[int]:
    """Slots of the tokens."""
    tokens = draw(st.sampled_from([1, 2, 5, 17, 97, 200]))
    return draw(st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=tokens, max_size=tokens))


@each_isa
@pytest.mark.parametrize(("dtype", "plain"), [(F32, F32), (F32, BF16), (BF16, BF16)], ids=str)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    slots=batches(), heads=st.sampled_from([1, 2, 5]), shape=st.sampled_from(SHAPES),
    ranks=st.tuples(st.integers(1, 40), st.integers(1, 16)), seed=st.integers(0, 1000),
)  # fmt: skip
def test_projections_by_heads(isa: str, dtype, plain, slots, heads, shape, ranks, seed) -> None:
    """Slot 3 has no adapter."""
    nope, value, rank = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) / size[-1] ** 0.5

    weight = normal(heads * (nope + value), rank).to(plain).float()
    stored = WeightTensor("kv_b", tuple(weight.shape), "F32", weight.view(torch.uint8).flatten().numpy())
    native = NativeLinearBackend(dtype, POOL, isa, plain=plain).latent_up("kv_b", stored, heads, nope)
    reference = TorchLatentUp(weight.view(heads, -1, rank), nope)
    for slot, r in enumerate(ranks, 1):
        a, b = (t.to(plain) for t in (normal(r, rank), normal(heads * (nope + value), r)))
        for up in (native, reference):
            up.set_adapter(slot, LoraPair(a, b, 0.5 * slot))
    rows = torch.tensor(slots, dtype=torch.int32)
    groups = [(slot, torch.where(rows == slot)[0]) for slot in (1, 2, 3)]
    lora = LoraBatch(rows, [(slot, found) for slot, found in groups if found.numel()])
    q, mixed = (torch.randn(len(slots), heads, n, generator=generator).to(dtype) for n in (nope + 8, rank))
    q = q[..., :nope]  # heads a stride apart
    limit = TOLERANCE[plain]
    for batch in (None, lora):
        near(native.absorb(q, batch), reference.absorb(q.float(), batch), limit)
        near(native.values(mixed, batch), reference.values(mixed.float(), batch), limit)
    for slot in (1, 2):
        native.set_adapter(slot, None)
    assert torch.equal(native.absorb(q, lora), native.absorb(q, None))
    alone = torch.cat([native.values(mixed[i : i + 1], None) for i in range(len(slots))])
    assert torch.equal(alone, native.values(mixed, None))


# ---- the same in the file's blocks

FLOATS = ["F32", "F16", "BF16"]
ALL = [*FLOATS, *QUANTISED]
COMMON = ["Q8_0", "Q4_K", "Q6_K", "Q5_0"]  # in files of these models
INT8 = 0.02  # mean|d| / mean|ref| that rounding activations to int8 costs, at most


@st.composite
def halves(draw: st.DrawFn, types: list[str]) -> tuple[str, str, int, int, int]:
    """Types of keys and values; nope, value and latents, whole blocks."""
    keys, values = draw(st.sampled_from(types)), draw(st.sampled_from(types))
    nope = draw(st.sampled_from([n for n in (32, 96, 128, 192, 256) if n % block_of(keys) == 0]))
    rank = draw(st.sampled_from([n for n in (32, 160, 256, 512) if n % block_of(values) == 0]))
    return keys, values, nope, draw(st.sampled_from([16, 64, 256])), rank


def block_of(kind: str) -> int:
    return 1 if kind in FLOATS else values_of_block(kind)


def joined(heads: int, of: tuple[str, str, int, int, int], seed: int) -> tuple[JoinedTensor, torch.Tensor]:
    """kv_b of which a file has halves, and its values float32 [heads, nope + value, latents]."""
    keys, values, nope, value, rank = of
    generator = torch.Generator().manual_seed(seed)
    k, k_exact = stored(torch.randn(heads * rank, nope, generator=generator), keys)
    v, v_exact = stored(torch.randn(heads * value, rank, generator=generator), values)
    exact = torch.cat((k_exact.view(heads, rank, nope).transpose(1, 2), v_exact.view(heads, value, rank)), 1)
    parts = replace(k, shape=(heads, rank, nope)), replace(v, shape=(heads, value, rank))
    flat = exact.reshape(-1, rank).contiguous()
    return JoinedTensor("kv_b", tuple(flat.shape), "F32", flat.view(torch.uint8).flatten().numpy(), *parts), exact


def check_products(
    up: NativeLatentUp, reference: TorchLatentUp, slots: list[int], dtype: torch.dtype, limits: tuple[float, float]
) -> None:
    """`limits`: of keys' and of values' products. Slots 1 and 2 have adapters."""
    heads, nope, rank = up._heads, up._nope, up._rank
    generator = torch.Generator().manual_seed(len(slots))
    for slot in (1, 2):
        a = torch.randn(3 * slot, rank, generator=generator) / rank**0.5
        b = torch.randn(heads * (nope + up._value), 3 * slot, generator=generator) / 3
        for each in (up, reference):
            each.set_adapter(slot, LoraPair(a.to(BF16), b.to(BF16), 0.5))
    rows = torch.tensor(slots, dtype=torch.int32)
    lora = LoraBatch(rows, [(s, torch.where(rows == s)[0]) for s in (1, 2) if (rows == s).any()])
    q, mixed = (torch.randn(len(slots), heads, n, generator=generator).to(dtype) for n in (nope, rank))
    for batch in (None, lora):
        near(up.absorb(q, batch), reference.absorb(q.float(), batch), limits[0])
        near(up.values(mixed, batch), reference.values(mixed.float(), batch), limits[1])


def limit_of(kind: str, dtype: torch.dtype, plain: torch.dtype) -> float:
    if kind not in FLOATS:
        return INT8
    return TOLERANCE[F32 if dtype == plain == F32 else BF16]


@each_isa
@pytest.mark.parametrize(("dtype", "plain"), [(F32, F32), (F32, BF16), (BF16, BF16)], ids=str)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    slots=batches(), heads=st.sampled_from([1, 2, 5]), of=st.one_of(halves(ALL), halves(COMMON)),
    deterministic=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_halves_in_the_files_blocks(isa: str, dtype, plain, slots, heads, of, deterministic: bool, seed) -> None:
    weight, exact = joined(heads, of, seed)
    backend = NativeLinearBackend(dtype, POOL, isa, plain=plain, deterministic=deterministic)
    up = backend.latent_up("kv_b", weight, heads, of[2])
    assert isinstance(up, NativeLatentUp)
    for half, kind in zip(up.halves, of[:2], strict=True):
        assert half.format == packed_format(kind, "bf16" if plain == BF16 else "f32")
    limits = limit_of(of[0], dtype, plain), limit_of(of[1], dtype, plain)
    check_products(up, TorchLatentUp(exact, of[2]), slots, dtype, limits)


@each_isa
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    slots=batches(), heads=st.sampled_from([1, 2, 5]), kind=st.sampled_from(ALL),
    nope=st.sampled_from([32, 96]), value=st.sampled_from([16, 64]),
)  # fmt: skip
@pytest.mark.parametrize("plain", [F32, BF16], ids=str)
def test_one_tensor_in_blocks(isa: str, plain, slots, heads, kind: str, nope: int, value: int) -> None:
    """Blocks lie along the latents: values keep them, keys are held as unquantised weights are."""
    rank = 256
    weight, exact = stored(torch.randn(heads * (nope + value), rank, generator=torch.Generator().manual_seed(1)), kind)
    up = NativeLinearBackend(plain, POOL, isa).latent_up("kv_b", weight, heads, nope)
    assert isinstance(up, NativeLatentUp)
    form = "bf16" if plain == BF16 else "f32"
    wanted = packed_format(kind, form)
    assert [half.format for half in up.halves] == [wanted if kind in FLOATS else form, wanted]
    limits = limit_of("F32", plain, plain), limit_of(kind, plain, plain)
    check_products(up, TorchLatentUp(exact.view(heads, -1, rank), nope), slots, plain, limits)


@each_isa
@pytest.mark.parametrize("kind", ALL)
def test_a_row_of_blocks_does_not_see_its_neighbours(isa: str, kind: str) -> None:
    weight, _ = joined(3, (kind, kind, 256, 48, 256), 1)
    up = NativeLinearBackend(F32, POOL, isa, deterministic=True).latent_up("kv_b", weight, 3, 256)
    x = torch.randn(200, 3, 256, generator=torch.Generator().manual_seed(2))
    for product in (up.absorb, up.values):
        alone = torch.cat([product(x[i : i + 1], None) for i in range(200)])
        for begin, end in ((0, 200), (0, 2), (3, 14), (10, 26), (40, 57), (99, 196)):
            assert torch.equal(product(x[begin:end], None), alone[begin:end])


@each_isa
@pytest.mark.parametrize("groups", [[[0], [0]], [[0, 1], [0]], [[0]] * 3, [[0]] * 7])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(heads=st.sampled_from([1, 3, 7]), of=halves(COMMON), tokens=st.sampled_from([0, 1, 5, 16, 17, 130]))
def test_shards_and_threads_change_no_bit(isa: str, groups, heads: int, of, tokens: int) -> None:
    weight, _ = joined(heads, of, 3)
    x = torch.randn(tokens, heads, max(of[2], of[4]), generator=torch.Generator().manual_seed(4))
    made = [
        NativeLinearBackend(F32, pool, isa).latent_up("kv_b", weight, heads, of[2])
        for pool in (_native.WorkerPool(groups), POOL, _native.WorkerPool([[0]]))
    ]
    absorbed = [up.absorb(x[..., : of[2]], None) for up in made]
    values = [up.values(x[..., : of[4]], None) for up in made]
    for got in (absorbed, values):
        assert torch.equal(got[0], got[2]) and torch.equal(got[1], got[2])


@pytest.mark.parametrize("plain", [F32, BF16], ids=str)
@pytest.mark.parametrize("quantise", [None, "int8", "int4"])
@settings(max_examples=20, deadline=None)
@given(of=halves(ALL), whole=st.booleans())
def test_what_a_plan_states_of_them_is_held(plain, quantise, of, whole: bool) -> None:
    weight: WeightTensor = joined(4, of, 1)[0]
    if whole:
        weight = stored(torch.randn(4 * (of[2] + of[3]), of[4]), of[1])[0]
    up = NativeLinearBackend(F32, POOL, plain=plain, quantise=quantise).latent_up("kv_b", weight, 4, of[2])
    assert isinstance(up, NativeLatentUp)
    parts = latent_halves(weight, 4, of[2])
    stated = sum(native_linear.weight_bytes(part, plain.itemsize, quantise) for part in parts)
    assert up.num_bytes <= stated <= up.num_bytes + 8192


@settings(max_examples=40, deadline=None)
@given(heads=st.sampled_from([1, 2, 4]), of=halves(ALL), seed=st.integers(0, 99), ranks=st.data())
def test_halves_have_the_files_values(heads: int, of, seed: int, ranks: st.DataObject) -> None:
    """Of one tensor and of two, and of the heads that a rank of several has."""
    keys, values, nope, value, rank = of
    size = ranks.draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
    each, mine = heads // size, ranks.draw(st.integers(0, size - 1))
    whole, whole_exact = stored(torch.randn(heads * (nope + value), rank), values)
    halved, halved_exact = joined(heads, of, seed)
    for weight, exact in ((whole, whole_exact.view(heads, -1, rank)), (halved, halved_exact)):
        held = Shard(mine, size).span(heads)
        part = by_outputs(weight, Shard(mine, size).span(weight.shape[0]))
        assert torch.equal(part.dequantise().view(each, -1, rank), exact[held])
        for half, wanted in zip(
            latent_halves(part, each, nope), (exact[held, :nope].transpose(1, 2), exact[held, nope:]), strict=True
        ):
            assert half.shape == (wanted.shape[0] * wanted.shape[1], wanted.shape[2])
            assert torch.equal(half.dequantise().view(wanted.shape), wanted)
    assert [half.type for half in latent_halves(halved, heads, nope)] == [keys, values]


# ---- rotation


@each_isa
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(tokens=st.sampled_from([0, 1, 3, 70]), heads=st.integers(1, 5), dim=st.sampled_from([2, 6, 32, 64]))
def test_rotation_has_torchs_bits(isa: str, dtype, interleaved: bool, tokens: int, heads: int, dim: int) -> None:
    rope = Rope(Rotation(dim, 1e4, 512), 512, torch.device("cpu"))
    x = torch.randn(tokens, heads, dim + 3).to(dtype)[..., 3:]
    positions = torch.randint(0, 512, (tokens,))
    outs = [ops.rotate(x, rope, positions, interleaved) for ops in (NativeOps(1e-6, POOL, isa), TorchOps(1e-6))]
    assert torch.equal(*outs)
