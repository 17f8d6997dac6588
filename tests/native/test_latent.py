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
from engine.linear.native import NativeLinearBackend
from engine.lora.adapter import LoraPair
from engine.ops.base import TorchOps
from engine.ops.native import NativeOps
from engine.ops.rope import Rope
from engine.weights.store import WeightTensor
from native import _native
from testing.models.block_types import encode
from tests.native.batches import batch_of
from tests.native.isas import ISAS
from tests.native.test_attention import Kernels, each_kernel

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
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=rows(), heads=st.sampled_from([1, 3, 16, 128]), sizes=st.sampled_from([(512, 64), (32, 32), (96, 16)]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_attention_over_latents(kernels: Kernels, dtype, kv, rows, heads, sizes, seed) -> None:
    """Contexts are written in a step of their own; blocks hold whatever others have left there."""
    rank, rope = sizes
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


@pytest.mark.parametrize("plain", [F32, BF16], ids=str)
def test_what_a_plan_states_of_them_is_held(plain) -> None:
    weight = torch.randn(4 * (96 + 64), 160)
    held = encode(weight, "Q8_0")[0]
    stored = WeightTensor("kv_b", tuple(weight.shape), "Q8_0", held.view("uint8").reshape(-1))
    up = NativeLinearBackend(F32, POOL, plain=plain).latent_up("kv_b", stored, 4, 96)
    stated = native_linear.weight_bytes(replace(stored, type="F32"), plain.itemsize, None)
    assert up.num_bytes <= stated <= up.num_bytes + 8192


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
