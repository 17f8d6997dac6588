"""Every Triton kernel against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.architectures.parts.mlp import Router
from engine.architectures.parts.rotation import Rotation
from engine.ops.base import TorchOps
from engine.ops.rope import Rope

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float32]
EPS = 1e-6


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.float().cpu(), expected.float().cpu(), rtol=tolerance, atol=tolerance)


def oracle() -> TorchOps:
    return TorchOps(EPS)


def tables(device: torch.device) -> Rope:
    return Rope(Rotation(64, 10000.0, 512), 256, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,dim", [(1, 64), (5, 2048), (3, 96)])
def test_add_rms_norm(kernel_device, dtype, rows, dim):
    from engine.ops.gpu_kernels import add_rms_norm

    g = torch.Generator().manual_seed(rows)
    x, d, w = (torch.randn(n, generator=g).to(kernel_device, dtype) for n in ((rows, dim), (rows, dim), (dim,)))
    for delta in (None, d):
        ours, theirs = x.clone(), x.clone()
        close(
            add_rms_norm(ours, delta, w, EPS, torch.empty_like(ours)),
            oracle().add_rms_norm(theirs, delta, w),
        )
        close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm_rope_of_slices(kernel_device, dtype):
    from engine.ops.gpu_kernels import qk_norm_rope

    ops, rope, (tokens, heads, kv_heads, dim) = oracle(), tables(kernel_device), (7, 4, 2, 64)
    g = torch.Generator().manual_seed(0)
    both = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=g).to(kernel_device, dtype)
    q = both[:, : heads * dim].unflatten(1, (heads, dim))
    k = both[:, heads * dim : (heads + kv_heads) * dim].unflatten(1, (kv_heads, dim))
    qw, kw = (torch.randn(dim, generator=g).to(kernel_device, dtype) for _ in range(2))
    positions = torch.tensor([0, 1, 5, 255, 17, 3, 3], device=kernel_device)
    for weights in ((qw, kw), (None, None)):
        expected = ops.qk_norm_rope(q, k, *weights, rope, positions)
        got = qk_norm_rope(q, k, *weights, positions, rope.cos, rope.sin, EPS)
        for a, b in zip(got, expected, strict=True):
            assert a.is_contiguous()
            close(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,dim", [(64, 64), (5, 128), (3, 96)])
def test_share_with_sinks(kernel_device, dtype, heads, dim):
    """Attention without sinks and the sums of its softmax -> the softmax over the sink too; a NaN stays in its head."""
    from engine.ops.gpu_kernels import share_with_sinks

    g, tokens, seen = torch.Generator().manual_seed(heads), 7, 11
    scores = 3 * torch.randn(tokens, heads, seen, generator=g)
    values, sinks = torch.randn(tokens, heads, seen, dim, generator=g), 4 * torch.randn(heads, generator=g)
    shares = torch.cat((scores, sinks[None, :, None].expand(tokens, heads, 1)), -1).softmax(-1)[..., :-1]
    expected = torch.einsum("ths,thsd->thd", shares, values)
    out = torch.einsum("ths,thsd->thd", scores.softmax(-1), values).to(kernel_device, dtype)
    sums = (scores.logsumexp(-1) / np.log(2)).to(kernel_device)
    sums[2, 1] = float("nan")
    share_with_sinks(out, sums, sinks.to(kernel_device))
    assert bool(out[2, 1].isnan().all())
    out[2, 1] = expected[2, 1].to(kernel_device, dtype)
    close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,dim", [(1, 64), (5, 2048), (3, 96)])
def test_add_gated(kernel_device, dtype, rows, dim):
    from engine.ops.gpu_kernels import add_gated

    g = torch.Generator().manual_seed(rows)
    base, x = (torch.randn(rows, dim, generator=g).to(kernel_device, dtype) for _ in range(2))
    gate = 3 * torch.randn(rows, 1, generator=g).to(kernel_device)
    close(add_gated(base, x, gate), oracle().add_gated(base, x, gate))


@pytest.mark.parametrize("experts,k", [(8, 2), (128, 8), (60, 5), (128, 1)])
@pytest.mark.parametrize("normalise", [True, False])
def test_route(kernel_device, experts, k, normalise):
    from engine.ops.gpu_kernels import route

    logits = torch.randn(9, experts, generator=torch.Generator().manual_seed(k)).to(kernel_device)
    weights, ids = torch.empty(9, k, device=kernel_device), torch.empty(9, k, dtype=torch.int64, device=kernel_device)
    route(logits, normalise, weights, ids)
    expected_weights, expected_ids = oracle().route(logits, k, Router(normalise=0.0 if normalise else None))
    assert torch.equal(ids, expected_ids)
    close(weights, expected_weights)


def test_route_of_nan_stays_in_range(kernel_device):
    from engine.ops.gpu_kernels import route

    logits = torch.full((2, 60), float("nan"), device=kernel_device)
    ids = torch.empty(2, 4, dtype=torch.int64, device=kernel_device)
    route(logits, True, torch.empty(2, 4, device=kernel_device), ids)
    assert int(ids.min()) >= 0 and int(ids.max()) < 60


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(kernel_device, dtype):
    from engine.ops.gpu_kernels import silu_mul

    both = torch.randn(5, 2600, generator=torch.Generator().manual_seed(1)).to(kernel_device, dtype)
    gate, up = both.chunk(2, dim=1)
    close(silu_mul(gate, up), oracle().silu_mul(gate, up))


def test_write_kv(kernel_device):
    from engine.ops.gpu_kernels import write_kv

    g = torch.Generator().manual_seed(2)
    keys, values = (torch.zeros(4, 16, 2, 48, device=kernel_device) for _ in range(2))
    k, v = (torch.randn(3, 2, 48, generator=g).to(kernel_device) for _ in range(2))
    slots = torch.tensor([0, 63, 17], device=kernel_device)
    write_kv(keys, values, k, v, slots)
    assert torch.equal(keys.flatten(0, 1)[slots], k) and torch.equal(values.flatten(0, 1)[slots], v)
    assert int((keys != 0).any(-1).any(-1).sum()) == 3


def test_write_kv_in_fp8(kernel_device):
    """Rounded to the nearest, cut to the largest, NaN kept. The interpreter loses the carry of a rounding to 2^n."""
    from engine.ops.gpu_kernels import write_kv

    fp8 = torch.float8_e4m3fn
    g = torch.Generator().manual_seed(2)
    k, v = (torch.randn(3, 2, 48, generator=g).to(kernel_device) for _ in range(2))
    if kernel_device.type != "cuda":
        k, v = (given.to(fp8).float() for given in (k, v))
    k[1, 0, :4] = torch.tensor([1e4, -1e4, 448.0, float("nan")])
    keys, values = (torch.zeros(4, 16, 2, 48, device=kernel_device).to(fp8) for _ in range(2))
    slots = torch.tensor([0, 63, 17], device=kernel_device)
    write_kv(keys, values, k, v, slots)
    for cache, given in ((keys, k), (values, v)):
        stored, wanted = cache.float().flatten(0, 1), given.clamp(-448, 448).to(fp8).float()
        kept = ~wanted.isnan()  # the interpreter has no NaN in fp8
        assert torch.equal(stored[slots][kept], wanted[kept])
        assert kernel_device.type != "cuda" or torch.equal(stored[slots].isnan(), ~kept)
        assert int((stored != 0).any(-1).any(-1).sum()) == 3


class Weight:
    """A weight as a file would hold it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_joined_projections_with_adapters(kernel_device, dtype, biased):
    """Base rows and rows of three adapters (ranks 4, 16 and 20), one of them absent from a projection."""
    from engine.linear.base import LoraBatch
    from engine.linear.gpu import GpuLinearBackend
    from engine.linear.segments import Groups, Segments
    from engine.lora.adapter import LoraPair

    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not multiply bf16 matrices")
    g = torch.Generator().manual_seed(3)
    inner, sizes = 192, [128, 64, 64]
    values = [torch.randn(n, inner, generator=g) / inner**0.5 for n in sizes]
    biases = [torch.randn(n, generator=g) if biased else None for n in sizes]
    backend = GpuLinearBackend(dtype, kernel_device, slots=4, rank=20)
    linears = [
        backend.load(f"p{i}", Weight(v), None if b is None else Weight(b))
        for i, (v, b) in enumerate(zip(values, biases, strict=True))
    ]
    call = backend.join(linears)
    pairs = {
        (slot, part): LoraPair(torch.randn(r, inner, generator=g), torch.randn(n, r, generator=g) / r, 0.5 * slot)
        for slot, r in ((1, 4), (2, 16), (4, 20))
        for part, n in enumerate(sizes)
        if (slot, part) != (2, 1)
    }
    for (slot, part), pair in pairs.items():
        linears[part].set_adapter(slot, pair)
    slots = [0, 2, 2, 1, 0, 4, *[2] * 20, 3]
    groups = Groups.of(np.array(slots))
    tiles = np.concatenate((groups.tiles, np.zeros((3, 3), np.int64)))
    lora = LoraBatch(
        torch.tensor(slots, dtype=torch.int32),
        [],
        Segments(*(torch.tensor(t, dtype=torch.int32, device=kernel_device) for t in (groups.order, tiles))),
    )
    x = torch.randn(len(slots), inner, generator=g).to(dtype)
    for batch in (None, lora):
        outs = call(x.to(kernel_device), batch)
        for part, out in enumerate(outs):
            expected = torch.nn.functional.linear(
                x, values[part].to(dtype), None if not biased else biases[part].to(dtype)
            )
            expected = expected.float()
            for row, slot in enumerate(slots):
                pair = pairs.get((slot, part)) if batch else None
                if pair is not None:
                    a, b = pair.a.to(dtype).float(), pair.b.to(dtype).float()
                    expected[row] += pair.scale * (x[row].float() @ a.T @ b.T)
            error = (out.float().cpu() - expected).abs().mean() / expected.abs().mean()
            assert float(error) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
            close(out, linears[part](x.to(kernel_device), batch))
    linears[0].set_adapter(2, None)
    linears[2].set_adapter(2, None)
    assert torch.equal(call(x.to(kernel_device), lora)[0][1], call(x.to(kernel_device), None)[0][1])


def test_a_row_of_any_neighbours_is_the_same(kernel_device):
    from engine.linear.gpu_kernels import SegmentedLora
    from engine.linear.segments import Groups

    g = torch.Generator().manual_seed(4)
    x = torch.randn(40, 256, generator=g).to(kernel_device)
    a = torch.randn(3, 16, 256, generator=g).to(kernel_device)
    b = torch.randn(3, 64, 16, generator=g).to(kernel_device)
    ranks = torch.tensor([0, 16, 16], dtype=torch.int32, device=kernel_device)
    scales = torch.ones(3, 1, device=kernel_device)

    def run(rows: list[int], slots: list[int]) -> torch.Tensor:
        y = torch.zeros(len(rows), 64, device=kernel_device)
        groups = Groups.of(np.array(slots))
        order, tiles = (torch.tensor(t, dtype=torch.int32, device=kernel_device) for t in (groups.order, groups.tiles))
        added = SegmentedLora(a, b, ranks, scales, [0], order, tiles)
        part = added.shares(x)
        added.shrink(x[rows], part)
        added.expand(y, part)
        return y

    slots = [i % 3 for i in range(40)]
    together = run(list(range(40)), slots)
    for row in (1, 2, 38):
        alone = run([row], [slots[row]])[0]
        assert torch.equal(alone, together[row]) if x.is_cuda else torch.allclose(alone, together[row], rtol=1e-4)
