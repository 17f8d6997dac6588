"""Native paged attention against dense float32 attention, and what a row's bits may depend on: its sequence only."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.attention.native import NativeAttention
from native import _native
from testing.models.shapes import config
from tests.native.isas import ISAS

BF16, F32, I8 = torch.bfloat16, torch.float32, torch.int8
KINDS = [(BF16, BF16), (F32, F32), (F32, BF16), (F32, I8), (BF16, I8)]  # of rows and of the cache
IDS = ["bf16", "float32", "float32 over bf16", "float32 over int8", "bf16 over int8"]
POOL = _native.WorkerPool([[0, 1, 2]])


class Kernels(NamedTuple):
    isa: str = ""
    products: str = ""  # what a bf16 or int8 cache is multiplied as; "": what the CPU is faster with


AVX512 = [Kernels("avx512", "int16"), Kernels("avx512", "bfloat16")]
KERNELS = [kernels for isa in ISAS for kernels in (AVX512 if isa == "avx512" else [Kernels(isa)])]
each_kernel = pytest.mark.parametrize("kernels", KERNELS, ids=[" ".join(kernels).strip() for kernels in KERNELS])
# A float32 cache is multiplied as float32, and tiles leave it to AVX-512's kernel: of these one is enough.
each_kind = pytest.mark.parametrize(
    ("kernels", "dtype", "kv"),
    [
        pytest.param(kernels, *kind, id=f"{' '.join(kernels).strip()} {name}")
        for kernels in KERNELS
        for kind, name in zip(KINDS, IDS, strict=True)
        if kind[1] != F32 or kernels in (Kernels("avx2"), AVX512[0])
    ],
)


@dataclasses.dataclass
class Shape:
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    layers: int = 2
    window: int | None = None
    sinks: tuple[float, ...] = ()  # of each head; (): none

    def make(
        self, dtype: torch.dtype, kernels: Kernels, num_blocks: int = 256, kv: torch.dtype | None = None
    ) -> NativeAttention:
        model = config(
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
        )
        products = "" if (kv or dtype) == torch.float32 else kernels.products
        backend = NativeAttention(
            dataclasses.replace(model.layers[0].attention, window=self.window, sinks=bool(self.sinks)),
            range(self.layers),
            num_blocks,
            dtype,
            POOL,
            kernels.isa,
            kv_dtype=kv,
            products=products,
        )
        for layer in range(self.layers if self.sinks else 0):
            backend.set_sinks(layer, torch.tensor(self.sinks))
        return backend

    def reference(self, s: Sequence, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        q, k, v = (t.to(dtype).transpose(0, 1) for t in (s.q, s.k, s.v))
        seen = torch.ones(len(s.q), len(s.q), dtype=torch.bool).tril()
        if self.window is not None:
            seen = seen.triu(1 - self.window)
        if not self.sinks:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            return out.transpose(0, 1)
        grouped = q.unflatten(0, (self.kv_heads, -1))
        scores = (grouped @ k[:, None].mT / math.sqrt(self.head_dim)).masked_fill(~seen, -math.inf)
        sinks = torch.tensor(self.sinks, dtype=dtype).view(self.kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return (shares @ v[:, None]).flatten(0, 1).transpose(0, 1)


@dataclasses.dataclass
class Sequence:
    q: torch.Tensor  # [length, heads, head_dim]
    k: torch.Tensor
    v: torch.Tensor
    blocks: tuple[int, ...]


def draw_sequences(shape: Shape, lengths: list[int], dtype: torch.dtype, seed: int) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    free = random.Random(seed).sample(range(256), 256)
    sequences = []
    for n in lengths:
        q, k, v = (
            torch.randn(n, heads, shape.head_dim, generator=generator).to(dtype)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        sequences.append(Sequence(q, k, v, tuple(free.pop() for _ in range(-(-n // BLOCK_SIZE)))))
    return sequences


def step(backend: NativeAttention, layer: int, rows: list[tuple[Sequence, int, int]]) -> list[torch.Tensor]:
    """Run positions [start, end) of each sequence as one step."""
    starts = [0]
    for _, start, end in rows:
        starts.append(starts[-1] + end - start)
    positions = torch.cat([torch.arange(start, end) for _, start, end in rows])
    slots = torch.cat([torch.tensor([s.blocks[p // 16] * 16 + p % 16 for p in range(a, b)]) for s, a, b in rows])
    backend.plan(BatchLayout(starts, [end for _, _, end in rows], [s.blocks for s, _, _ in rows], positions, slots))
    q, k, v = (torch.cat([getattr(s, name)[a:b] for s, a, b in rows]) for name in "qkv")
    out = backend.forward(layer, q, k, v)
    return [out[starts[i] : starts[i + 1]] for i in range(len(rows))]


def whole(backend: NativeAttention, sequence: Sequence, cuts: list[int], layer: int = 0) -> torch.Tensor:
    """A sequence alone, in chunks that end at `cuts`."""
    ends = [*sorted({c for c in cuts if 0 < c < len(sequence.q)}), len(sequence.q)]
    return torch.cat([step(backend, layer, [(sequence, a, b)])[0] for a, b in zip([0, *ends], ends, strict=False)])


def assert_close(out: torch.Tensor, expected: torch.Tensor, kv: torch.dtype) -> None:
    if kv == torch.float32:
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=5e-6)
    else:
        error = (out.float() - expected).abs().mean() / expected.abs().mean()
        assert error < (0.012 if kv == I8 else 0.004), f"relative error {error:.5f}"


@each_kind
@settings(max_examples=12)
@given(data=st.data())
def test_equals_dense_attention(kernels: Kernels, dtype: torch.dtype, kv: torch.dtype, data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 3))
    group = data.draw(st.sampled_from([1, 2, 3, 5, 8, 40]))
    shape = Shape(kv_heads * group, kv_heads, 16 * data.draw(st.integers(1, 16)))
    shape.window = data.draw(st.sampled_from([None, 1, 15, 33, 128, 300, 1000]))
    sizes = st.floats(-5, 5) | st.sampled_from([-100.0, 15.0, -math.inf])
    shape.sinks = tuple(data.draw(st.just(()) | st.lists(sizes, min_size=shape.heads, max_size=shape.heads)))
    longest = min(600, 2**20 // (shape.heads * shape.head_dim))  # the dense reference takes most of the time
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    backend = shape.make(dtype, kernels, kv=kv)
    sequences = draw_sequences(shape, lengths, dtype, data.draw(st.integers(0, 2**20)))
    cuts = data.draw(st.lists(st.integers(1, 599), max_size=3))
    for sequence in sequences:
        assert_close(whole(backend, sequence, cuts, layer=1), shape.reference(sequence), kv)


@each_kind
@pytest.mark.parametrize(  # 96: a multiple of 32, which tiles take
    ("group", "head_dim", "window"), [(6, 80, None), (8, 96, None), (6, 48, 9), (8, 64, 100)]
)
def test_a_row_is_the_same_alone_in_a_batch_and_chunked(
    kernels: Kernels, dtype: torch.dtype, kv: torch.dtype, group: int, head_dim: int, window: int | None
) -> None:
    sinks = () if window is None else tuple(0.5 * n for n in range(2 * group))
    shape = Shape(heads=2 * group, kv_heads=2, head_dim=head_dim, window=window, sinks=sinks)
    sequences = draw_sequences(shape, [700, 257, 33, 256, 300], dtype, seed=3)
    alone = [whole(shape.make(dtype, kernels, kv=kv), s, []) for s in sequences]
    for s, expected in zip(sequences, alone, strict=True):  # prefill in odd chunks, then decode one by one
        cuts = [7, 20, 100, *range(len(s.q) - 12, len(s.q))]
        assert torch.equal(whole(shape.make(dtype, kernels, kv=kv), s, cuts), expected)
    together = shape.make(dtype, kernels, kv=kv)
    step(together, 0, [(s, 0, len(s.q) - 5) for s in sequences])
    mixed = step(together, 0, [(s, len(s.q) - 5, len(s.q) - i) for i, s in enumerate(sequences)])
    for i, (s, expected) in enumerate(zip(sequences, alone, strict=True)):
        assert torch.equal(mixed[i], expected[len(s.q) - 5 : len(s.q) - i])


@each_kernel
def test_repeats_bit_for_bit(kernels: Kernels) -> None:
    shape = Shape(heads=16, kv_heads=4, head_dim=128)
    sequences = draw_sequences(shape, [900, 530, 64, 1], torch.bfloat16, seed=5)
    rows = [(s, 0, len(s.q)) for s in sequences]
    backend = shape.make(torch.bfloat16, kernels)
    first = torch.cat(step(backend, 0, rows))
    for _ in range(8):
        assert torch.equal(torch.cat(step(backend, 0, rows)), first)


@each_kind
@settings(max_examples=15)
@given(old=st.integers(1, 64), new=st.integers(1, 64), cut=st.integers(1, 63))
def test_what_a_block_held_before_has_no_influence(
    kernels: Kernels, dtype: torch.dtype, kv: torch.dtype, old: int, new: int, cut: int
) -> None:
    shape = Shape(heads=4, kv_heads=1, head_dim=32)
    poison, sequence = draw_sequences(shape, [old, new], dtype, seed=old * 64 + new)
    poison.k[:], poison.v[:] = float("nan"), float("inf")
    poison.blocks = tuple(sequence.blocks[i % len(sequence.blocks)] for i in range(len(poison.blocks)))
    expected = whole(shape.make(dtype, kernels, kv=kv), sequence, [])
    used = shape.make(dtype, kernels, kv=kv)
    whole(used, poison, [])
    out = whole(used, sequence, [cut])
    assert torch.isfinite(out).all()
    assert torch.equal(out, expected)


@each_kind
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_reaches_its_own_sequence_only(kernels: Kernels, dtype: torch.dtype, kv: torch.dtype, name: str) -> None:
    shape = Shape()
    bad, good = draw_sequences(shape, [300, 300], dtype, seed=9)
    expected = whole(shape.make(dtype, kernels, kv=kv), good, [])
    getattr(bad, name)[280] = float("nan")
    out_bad, out_good = step(shape.make(dtype, kernels, kv=kv), 0, [(bad, 0, 300), (good, 0, 300)])
    assert torch.equal(out_good, expected)
    assert out_bad[280].isnan().all()
    if name != "q":
        assert out_bad[280:].isnan().all()
    assert torch.isfinite(out_bad[:256]).all()


@each_kind
@pytest.mark.parametrize("window", [40, 200])
def test_what_lies_before_a_window_is_not_read(
    kernels: Kernels, dtype: torch.dtype, kv: torch.dtype, window: int
) -> None:
    """Nor expanded, nor multiplied by zeros: blocks of NaN there change no bit."""
    shape = Shape(window=window)
    (s,) = draw_sequences(shape, [900], dtype, seed=13)
    expected = whole(shape.make(dtype, kernels, kv=kv), s, [])
    backend = shape.make(dtype, kernels, kv=kv)
    whole(backend, dataclasses.replace(s, q=s.q[:800]), [])
    unseen = (800 + 1 - window) // 32 * 2  # the blocks of a pair are read together
    for plane in backend.host_planes():
        plane[:, list(s.blocks[:unseen])] = 0xFF
    (out,) = step(backend, 0, [(s, 800, 801)])
    assert torch.equal(out, expected[800:801])
    (out,) = step(backend, 0, [(s, 801, 900)])
    assert torch.equal(out, expected[801:])


@each_kernel
@pytest.mark.parametrize("sinks", [(), (3e38, -3e38) * 4], ids=["no sinks", "sinks"])
def test_large_scores_do_not_overflow(kernels: Kernels, sinks: tuple[float, ...]) -> None:
    shape = Shape(sinks=sinks)
    (sequence,) = draw_sequences(shape, [520], torch.float32, seed=1)
    sequence.q *= 200
    out = whole(shape.make(torch.float32, kernels), sequence, [])
    torch.testing.assert_close(out, shape.reference(sequence), rtol=1e-3, atol=1e-3)


def test_a_bf16_cache_under_float32_rows() -> None:
    """Half the bytes; what is stored is rounded, what comes out is not."""
    shape = Shape()
    mixed, wide, half = shape.make(F32, Kernels(), kv=BF16), shape.make(F32, Kernels()), shape.make(BF16, Kernels())
    assert mixed.cache_bytes == half.cache_bytes == wide.cache_bytes // 2
    assert mixed.kv_bytes_per_token == half.kv_bytes_per_token == wide.kv_bytes_per_token // 2
    (s,) = draw_sequences(shape, [300], F32, seed=4)
    out = whole(mixed, s, [])
    assert out.dtype == F32 and not torch.equal(out, out.bfloat16().float())
    rounded = dataclasses.replace(s, k=s.k.bfloat16(), v=s.v.bfloat16())
    error = (out - shape.reference(rounded)).abs().mean() / out.abs().mean()
    assert error < 0.002, f"relative error {error:.5f}"
    first = dataclasses.replace(s, k=s.k.bfloat16().float(), v=s.v.bfloat16().float())
    assert torch.equal(whole(shape.make(F32, Kernels(), kv=BF16), first, []), out)


def rounded(t: torch.Tensor, kv: torch.dtype) -> torch.Tensor:
    """As a cache of `kv` holds it."""
    if kv == BF16:
        return t.bfloat16().float()
    scale = t.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale == 0, 0, (t / scale).round() * scale)


@each_kernel
def test_an_int8_cache_is_what_its_scales_say(kernels: Kernels) -> None:
    """Half of bfloat16's bytes and the scales; keys and values each as int8 under their own largest magnitude, however
    far those of positions and heads are apart."""
    shape = Shape(head_dim=128)
    small, half = shape.make(F32, kernels, kv=I8), shape.make(F32, kernels, kv=BF16)
    assert small.cache_bytes * 2 == half.cache_bytes * (128 + 4) // 128
    assert small.kv_bytes_per_token * 2 == half.kv_bytes_per_token * (128 + 4) // 128
    (s,) = draw_sequences(shape, [400], F32, seed=5)
    spread = torch.logspace(-3, 1, 400)[torch.randperm(400, generator=torch.Generator().manual_seed(1))]
    s.v *= spread[:, None, None]
    s.v[7] = 0

    expected = shape.reference(dataclasses.replace(s, k=rounded(s.k, I8), v=rounded(s.v, I8)))
    out = whole(small, s, [100, 101, 390])
    assert (out - expected).abs().mean() / expected.abs().mean() < 0.004  # what bf16 products round
    assert (out - shape.reference(s)).abs().mean() / shape.reference(s).abs().mean() < 0.012


@each_kernel
@pytest.mark.parametrize("head_dim", [32, 128, 224])
def test_what_is_rounded_of_float_rows(kernels: Kernels, head_dim: int) -> None:
    """Queries and probabilities are bf16 under bf16 dot products. Tiles take them as two bf16, of which 16 bits count.
    int16 products round all, to 11 to 15 bits and a sign."""
    shape = Shape(head_dim=head_dim)
    (s,) = draw_sequences(shape, [700], F32, seed=6)
    s.k, s.v = s.k.bfloat16().float(), s.v.bfloat16().float()
    backend, expected = shape.make(F32, kernels, kv=BF16), shape.reference(s)
    error = (whole(backend, s, [400]) - expected).abs().mean() / expected.abs().mean()
    if kernels.isa == "amx":
        assert error < 2e-5
    elif kernels.products == "bfloat16":
        assert 2e-4 < error < 4e-3
    else:
        assert error < 1e-3
    assert backend.kernel.products == ("bfloat16" if kernels.isa == "amx" else kernels.products or "int16")


@pytest.mark.parametrize("kernels", [k for k in KERNELS if k.isa == "avx2" or k.products == "int16"], ids=str)
@pytest.mark.parametrize("kv", [BF16, I8], ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_int16_products_keep_their_bound(kernels: Kernels, kv: torch.dtype, data: st.DataObject) -> None:
    """Against float64 attention over what the cache holds. Queries, keys and values are off by at most half of their
    largest magnitude / limit, a chunk's probabilities by 256 halves of 1 / 32767 of their largest: no row is off by
    more than these make together, whatever the numbers are; normal ones by 0.1% on average."""
    group = data.draw(st.sampled_from([1, 3, 8]))
    shape = Shape(2 * group, 2, 16 * data.draw(st.integers(1, 16)), layers=1)
    shape.window = data.draw(st.sampled_from([None, 1, 40, 300]))
    sizes = st.floats(-5, 5) | st.sampled_from([15.0, -math.inf])
    shape.sinks = tuple(data.draw(st.just(()) | st.lists(sizes, min_size=shape.heads, max_size=shape.heads)))
    (s,) = draw_sequences(shape, [data.draw(st.integers(1, 600))], F32, data.draw(st.integers(0, 2**20)))
    outlier = data.draw(st.sampled_from([1.0, 1.0, 10.0, 100.0]))  # of one dimension of all keys, queries or values
    getattr(s, data.draw(st.sampled_from("qkv")))[..., data.draw(st.integers(0, shape.head_dim - 1))] *= outlier
    out = whole(shape.make(F32, kernels, kv=kv), s, data.draw(st.lists(st.integers(1, 599), max_size=2)))

    s.k, s.v = rounded(s.k, kv), rounded(s.v, kv)
    error = (out.double() - shape.reference(s, torch.float64)).abs()
    limit = min(8191, math.isqrt((2**31 - 1) // shape.head_dim))
    q, k, v = s.q.abs(), s.k.abs(), s.v.abs()
    score = k.sum(-1).max() * q.amax(-1) / 2 / (32767 if kv == I8 else limit)
    if kv == BF16:
        score += q.sum(-1) * k.max() / 2 / limit
    weights = torch.expm1(2 * score / math.sqrt(shape.head_dim)) + 128 / 32767 + 1e-3  # the last: of float32
    assert (error.amax(-1) <= v.max() * (weights + 0.5 / 8191)).all()
    if outlier == 1:
        assert error.mean() < 1e-3 * out.abs().mean() + 1e-6


@pytest.mark.skipif("avx512" not in ISAS, reason="needs AVX-512")
@pytest.mark.parametrize("kv", [BF16, I8])
def test_products_are_those_that_this_cpu_is_faster_with(kv: torch.dtype) -> None:
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    own = Shape().make(BF16, Kernels("avx512"), kv=kv)
    assert own.kernel.products == ("int16" if intel else "bfloat16")
    (s,) = draw_sequences(Shape(), [300], BF16, seed=11)
    forced = Shape().make(BF16, Kernels("avx512", own.kernel.products), kv=kv)
    assert torch.equal(whole(own, s, [290]), whole(forced, s, [290]))


@pytest.mark.skipif("amx" not in ISAS, reason="needs AMX")
@pytest.mark.parametrize(("dtype", "kv"), KINDS, ids=IDS)
def test_what_tiles_do_not_take_is_the_avx512_kernel(dtype: torch.dtype, kv: torch.dtype) -> None:
    for head_dim in (48, 64):
        shape = Shape(head_dim=head_dim)
        (s,) = draw_sequences(shape, [300], dtype, seed=8)
        tiles, vectors = (whole(shape.make(dtype, Kernels(isa), kv=kv), s, [290]) for isa in ("amx", "avx512"))
        assert torch.equal(tiles, vectors) == (head_dim == 48 or kv == F32)


@each_kernel
def test_groups_of_tiles_end_anywhere(kernels: Kernels) -> None:
    """A long chunk is walked in groups of tiles whose last sees more chunks of the KV than their first."""
    shape = Shape(heads=16, kv_heads=2, head_dim=64)
    (s,) = draw_sequences(shape, [1100], BF16, seed=10)
    alone = whole(shape.make(BF16, kernels), s, [])
    assert_close(alone, shape.reference(s), BF16)
    assert torch.equal(whole(shape.make(BF16, kernels), s, [251, 777, 1099]), alone)
