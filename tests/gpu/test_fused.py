"""What one launch does of a decode step that took several, against the several in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.architectures.parts.mlp import Router as RouterSpec
from engine.attention.base import KvPlaces
from engine.ops.base import RowAdapters
from engine.ops.greedy import NOT_FINITE, greedy_tokens
from tests.gpu.test_kernels import DTYPES, EPS, close, oracle, tables

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,dim,experts,k", [(1, 64, 8, 2), (2, 2050, 20, 5), (16, 96, 12, 8), (7, 96, 70, 3)])
@pytest.mark.parametrize("normalise", [True, False])
def test_norm_and_route(kernel_device, dtype, rows, dim, experts, k, normalise):
    """Twice by one object, whose counts must be as they were; delta's rows lie apart."""
    from engine.ops.gpu_router import Router

    ops, route = oracle(), Router(kernel_device)
    g = torch.Generator().manual_seed(rows)
    for _ in range(2):
        x, both, gain = (
            torch.randn(shape, generator=g).to(kernel_device, dtype) for shape in ((rows, dim), (rows, 2 * dim), (dim,))
        )
        delta, router = both[:, :dim], torch.randn(experts, dim, generator=g).to(kernel_device) / dim**0.5
        ours, theirs = x.clone(), x.clone()
        out = (
            torch.full((rows, dim), 7.0, dtype=dtype, device=kernel_device),
            torch.full((rows, k), 7.0, device=kernel_device),
            torch.full((rows, k), 7, dtype=torch.int64, device=kernel_device),
        )
        route(ours, delta, gain, EPS, router, normalise, out)
        close(out[0], ops.add_rms_norm(theirs, delta, gain))
        if dtype == torch.float32 or kernel_device.type == "cuda":  # the interpreter does not round to the nearest bf16
            assert torch.equal(ours, theirs)
        weights, ids = ops.route(out[0].float() @ router.T, k, RouterSpec(normalise=0.0 if normalise else None))
        assert torch.equal(out[2], ids)
        close(out[1], weights)
        assert not route._arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,dim,experts,k,rank", [(1, 64, 8, 2, 16), (5, 130, 20, 5, 32), (16, 96, 70, 8, 64)])
def test_a_routers_adapters_are_added_before_it_chooses(kernel_device, dtype, rows, dim, experts, k, rank):
    """In one launch and of more rows in one of its own; slots 0 and 2 have none, others are of smaller ranks, too."""
    from engine.ops.gpu_router import Router

    ops, route, g = oracle(), Router(kernel_device), torch.Generator().manual_seed(rows)
    x, delta, gain = (
        torch.randn(shape, generator=g).to(kernel_device, dtype) for shape in ((rows, dim), (rows, dim), (dim,))
    )
    router = torch.randn(experts, dim, generator=g).to(kernel_device) / dim**0.5
    ranks = torch.tensor([0, rank, 0, 16], dtype=torch.int32)
    a, b = torch.randn(4, rank, dim, generator=g), torch.randn(4, experts, rank, generator=g)
    for slot, own in enumerate(ranks.tolist()):  # what lies beyond a slot's rank is not read
        a[slot, own:], b[slot, :, own:] = float("nan"), float("nan")
    scales, slots = torch.rand(4, generator=g) / dim, (torch.arange(rows) + 1).int() % 4
    held = [t.to(kernel_device) for t in (slots, a, b, scales, ranks)]
    out = (
        torch.empty(rows, dim, dtype=dtype, device=kernel_device),
        torch.empty(rows, k, device=kernel_device),
        torch.empty(rows, k, dtype=torch.int64, device=kernel_device),
    )
    route(x.clone(), delta, gain, EPS, router, True, out, RowAdapters(*held))
    normed = out[0].float()
    plain = normed @ router.T
    logits = plain.clone()
    for row, slot in enumerate(slots.tolist()):
        own = int(ranks[slot])
        down, up = a[slot, :own].to(kernel_device), b[slot, :, :own].to(kernel_device)
        logits[row] += up @ (down @ normed[row]) * scales[slot]
    weights, ids = ops.route(logits, k, RouterSpec(normalise=0.0))
    assert torch.equal(out[2], ids)
    close(out[1], weights)
    assert not torch.equal(plain, logits)
    apart = plain.clone()
    route.add_adapters(apart, out[0], RowAdapters(*held))
    close(apart, logits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a product of bf16 into float32 needs a GPU")
@pytest.mark.parametrize("exact", [True, False])
def test_routers_of_many_rows_are_multiplied_in_bf16_where_that_loses_nothing(exact):
    from engine.ops.gpu import GpuOps

    device = torch.device("cuda")
    plain = oracle()
    ops, g = GpuOps(EPS, device), torch.Generator().manual_seed(3)
    for _ in range(2):  # another router each time
        x, delta, gain = (
            torch.randn(shape, generator=g).to(device, torch.bfloat16) for shape in ((40, 256),) * 2 + ((256,),)
        )
        router = torch.randn(64, 256, generator=g).to(device) / 16
        router = router.bfloat16().float() if exact else router
        ours, theirs = x.clone(), x.clone()
        out = (
            torch.empty_like(x),
            torch.empty(40, 6, device=device),
            torch.empty(40, 6, dtype=torch.int64, device=device),
        )
        assert ops.norm_route(ours, delta, gain, router, RouterSpec(), out) is exact
        if exact:
            close(out[0], plain.add_rms_norm(theirs, delta, gain))
            assert torch.equal(ours, theirs)
            weights, ids = plain.route(out[0].float() @ router.T, 6, RouterSpec())
            assert torch.equal(out[2], ids)
            close(out[1], weights)
        else:
            assert torch.equal(ours, x)


def test_of_equal_experts_the_lower_ones_are_chosen(kernel_device):
    from engine.ops.gpu_router import Router

    for rows in (2, 16):
        x = torch.ones(rows, 64, device=kernel_device)
        out = (
            x.clone(),
            torch.empty(rows, 3, device=kernel_device),
            torch.empty(rows, 3, dtype=torch.int64).to(x.device),
        )
        Router(kernel_device)(x, x.clone(), x[0], EPS, torch.ones(12, 64, device=kernel_device), True, out)
        assert out[2].tolist() == [[0, 1, 2]] * rows
        close(out[1], torch.full((rows, 3), 1 / 3))


def test_nan_routes_within_range(kernel_device):
    from engine.ops.gpu_router import Router

    for rows in (2, 16):
        x = torch.ones(rows, 64, device=kernel_device)
        x[1] = float("nan")
        out = (
            x.clone(),
            torch.empty(rows, 4, device=kernel_device),
            torch.empty(rows, 4, dtype=torch.int64).to(x.device),
        )
        router = torch.randn(60, 64, generator=torch.Generator().manual_seed(1)).to(kernel_device)
        Router(kernel_device)(x, torch.ones_like(x), x[0].clone(), EPS, router, True, out)
        assert int(out[2].min()) >= 0 and int(out[2].max()) < 60
        assert out[1][1].isnan().all() and out[1][0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", [None, FP8], ids=str)
@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_rope_and_its_places(kernel_device, dtype, kv, normed):
    """q, k and v are slices of one tensor; what is in no place stays as it was."""
    from engine.ops.gpu_kernels import qk_norm_rope_keep

    ops, rope, (tokens, heads, kv_heads, dim) = oracle(), tables(kernel_device), (5, 4, 2, 64)
    g = torch.Generator().manual_seed(0)
    both = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=g).to(kernel_device, dtype)
    both[1, -1, :3] = torch.tensor([1e4, -1e4, 448.0])
    q, k, v = both.split((heads, kv_heads, kv_heads), dim=1)
    norms = [torch.randn(dim, generator=g).to(kernel_device, dtype) if normed else None for _ in range(2)]
    positions = torch.tensor([0, 1, 5, 255, 17], device=kernel_device)
    slots = torch.tensor([0, 63, 17, 16, 40], device=kernel_device)

    def places() -> KvPlaces:
        caches = [torch.zeros(4, 16, kv_heads, dim, device=kernel_device).to(kv or dtype) for _ in range(2)]
        return KvPlaces(*caches, slots)

    ours, theirs = places(), places()
    expected = ops.qk_norm_rope_keep(q, k, v, *norms, rope, positions, theirs)
    got = qk_norm_rope_keep(q, k, v, *norms, positions, rope.cos, rope.sin, EPS, ours.keys, ours.values, ours.slots)
    assert got.is_contiguous()
    close(got, expected)
    for mine, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        if kv is None:
            close(mine, other)
        else:  # one step of three bits of mantissa, where the bf16 values differ in their last bit
            near = torch.isclose(mine.float(), other.float(), rtol=0.13, atol=0.01)
            assert near.all() if kernel_device.type == "cuda" else near.float().mean() > 0.99
        assert int((mine.float() != 0).any(-1).any(-1).sum()) == tokens
    if kv is None or kernel_device.type == "cuda":  # the interpreter's conversion to fp8 is not a GPU's
        assert torch.equal(ours.values.float(), theirs.values.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outer,inner", [(3, 50), (70, 2048), (5, 4100)])
def test_a_row_s_product(kernel_device, dtype, outer, inner):
    from engine.linear.gpu_row import multiply

    g = torch.Generator().manual_seed(inner)
    x, weight = (torch.randn(n, inner, generator=g).to(kernel_device, dtype) for n in (1, outer))
    close(multiply(x, weight), (x.double() @ weight.double().T).to(dtype))


def test_next_ids(kernel_device):
    from engine.ops.gpu_tokens import next_ids

    ids, sources, sampled = torch.arange(200) + 500, torch.full((200,), -1), torch.tensor([7, NOT_FINITE, 9])
    sources[3], sources[150], sources[199] = 2, 1, 0
    expected = ids.clone()
    expected[3], expected[150], expected[199] = 9, 0, 7
    got = next_ids(*(t.to(kernel_device) for t in (ids, sources, sampled)))
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(oracle().next_ids(ids, sources, sampled), expected)


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """With ties, rows without a finite number, and rows whose largest is none; and the greedy tokens."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).to(dtype)
    logits[0, [2, 4, vocabulary - 1]] = 50.0
    logits[1, vocabulary - 1] = 60.0
    logits[2] = float("-inf")
    logits[3, 3] = float("nan")
    if rows > 4:
        logits[4, 1], logits[5, 2] = float("inf"), float("-inf")
        logits[6, 0], logits[6, 3] = float("inf"), float("nan")
    expected = greedy_tokens(logits.float())
    assert expected[:4].tolist() == [2, vocabulary - 1, NOT_FINITE, NOT_FINITE]
    return logits, expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5, 4096, 9001])
def test_greedy(kernel_device, dtype, vocabulary):
    """Twice by one object."""
    from engine.ops.gpu_tokens import Best

    best = Best(12, vocabulary, kernel_device)
    for rows in (9, 4):
        logits, expected = logits_of(rows, vocabulary, dtype)
        tokens, sampled = (torch.full((12,), 77, dtype=torch.int64, device=kernel_device) for _ in range(2))
        best.tokens(logits.to(kernel_device), NOT_FINITE, tokens, sampled)
        assert torch.equal(tokens[:rows].cpu(), expected) and torch.equal(sampled[:rows].cpu(), expected.clamp(min=0))
        assert (tokens[rows:] == 77).all() and (sampled[rows:] == 77).all()
        assert not best._arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5, 9001])
def test_greedy_tokens_of_three_parts(kernel_device, dtype, vocabulary):
    """As ranks find them, the last of which may have no tokens at all."""
    from engine.ops.gpu_tokens import Best, best_of

    rows, width = 9, -(-vocabulary // 2)
    logits, expected = logits_of(rows, vocabulary, dtype)
    whole = F.pad(logits, (0, 3 * width - vocabulary), value=float("-inf"))
    pairs = torch.full((3, 12, 2), 77.0)
    for part in range(3):
        mine = whole[:, part * width : (part + 1) * width]
        found = pairs[part].to(kernel_device, copy=True)
        Best(12, width, kernel_device).pairs(mine.to(kernel_device), part * width, found)
        oracle().best(mine, part * width, pairs[part])
        assert torch.equal(found[:, 0].cpu(), pairs[part][:, 0]) and (found[rows:] == 77).all()
        finite = found[:, 0].cpu().isfinite()
        assert torch.equal(found.cpu()[finite], pairs[part][finite])
    given = pairs[:, :rows].transpose(0, 1).contiguous()
    for device, way in ((torch.device("cpu"), None), (kernel_device, best_of)):
        tokens, sampled = (torch.full((12,), 77, dtype=torch.int64, device=device) for _ in range(2))
        if way is None:
            oracle().best_of(given, tokens, sampled)
        else:
            way(given.to(device), NOT_FINITE, tokens, sampled)
        assert torch.equal(tokens[:rows].cpu(), expected) and torch.equal(sampled[:rows].cpu(), expected.clamp(min=0))
        assert (tokens[rows:] == 77).all() and (sampled[rows:] == 77).all()
