"""The native row operations against float32 torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.architectures.parts.mlp import Router
from engine.architectures.parts.rotation import RopeScaling, Rotation
from engine.errors import EngineError
from engine.ops.base import TorchOps
from engine.ops.native import NativeOps
from engine.ops.rope import Rope
from native import _native
from tests.native.isas import ISAS

POOL = _native.WorkerPool([[0, 1, 2]])
BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6
SUM_OF_ONE = Router()


def rope(head_dim: int = 32, scaling: RopeScaling | None = None) -> Rope:
    return Rope(Rotation(head_dim, 10000.0, 4096, scaling), 512, torch.device("cpu"))


def make(isa: str = "") -> NativeOps:
    return NativeOps(EPS, POOL, isa)


def draw(*shape: int, seed: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """float32 to the last places; bf16 to its rounding of the float32 result."""
    if out.dtype == F32:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    else:
        torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-6)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS) * weight.float()


def rotate(table: Rope, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The first values of x's heads, as many as the table is made for."""
    dim = 2 * table.cos.shape[1]
    return torch.cat((table.apply(x[..., :dim], positions), x[..., dim:]), dim=-1)


on_all = pytest.mark.parametrize("isa", ISAS)
both = pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
shapes = st.tuples(st.sampled_from([0, 1, 2, 3, 8, 65, 300]), st.one_of(st.integers(1, 70), st.just(2048)))


@on_all
@both
@settings(max_examples=20)
@given(shape=shapes, wide_weight=st.booleans(), with_delta=st.booleans())
def test_add_rms_norm(
    isa: str, dtype: torch.dtype, shape: tuple[int, int], wide_weight: bool, with_delta: bool
) -> None:
    residual, delta = draw(*shape, seed=1, dtype=dtype), draw(*shape, seed=2, dtype=dtype)
    weight = draw(shape[1], seed=3, dtype=F32 if wide_weight else dtype)
    added = (residual.float() + delta.float()).to(dtype) if with_delta else residual.clone()
    out = make(isa).add_rms_norm(residual, delta if with_delta else None, weight)
    assert torch.equal(residual, added)
    assert_close(out, rms_norm(added, weight))


@on_all
@both
@settings(max_examples=20)
@given(
    tokens=st.sampled_from([0, 1, 2, 7, 90]),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    rotated=st.integers(1, 80).map(lambda half: 2 * half),
    rest=st.one_of(st.just(0), st.integers(1, 70)),
)
def test_qk_norm_rope(
    isa: str, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, rotated: int, rest: int
) -> None:
    head_dim = rotated + rest
    ops, table = make(isa), rope(rotated)
    fused = draw(tokens, (heads + 2 * kv_heads) * head_dim, seed=5, dtype=dtype)
    q, k, v = fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    q, k = q.view(tokens, heads, head_dim), k.view(tokens, kv_heads, head_dim)
    q_weight, k_weight = draw(head_dim, seed=6, dtype=dtype), draw(head_dim, seed=7, dtype=dtype)
    positions = torch.arange(tokens) * 5 % 512
    expected_q = rotate(table, rms_norm(q, q_weight), positions)
    expected_k = rotate(table, rms_norm(k, k_weight), positions)
    kept = v.clone()
    out_q, out_k = ops.qk_norm_rope(q, k, q_weight, k_weight, table, positions)
    assert out_q is q and out_k is k and torch.equal(v, kept)
    # a difference of two products may be small: the places lost are those of the terms
    torch.testing.assert_close(out_q.float(), expected_q, rtol=2**-8 if dtype == BF16 else 1e-5, atol=2e-6)
    torch.testing.assert_close(out_k.float(), expected_k, rtol=2**-8 if dtype == BF16 else 1e-5, atol=2e-6)


@on_all
@both
@pytest.mark.parametrize("rest", [0, 1, 16, 48])
@pytest.mark.parametrize("rotated", [2, 16, 30, 64, 128])
def test_rotation_without_a_norm(isa: str, dtype: torch.dtype, rotated: int, rest: int) -> None:
    q, k = (draw(9, heads, rotated + rest, seed=heads, dtype=dtype) for heads in (3, 2))
    positions = torch.arange(9) * 50
    expected = [rotate(rope(rotated), part.float(), positions) for part in (q, k)]
    got = make(isa).qk_norm_rope(q, k, None, None, rope(rotated), positions)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-8 if dtype == BF16 else 1e-5, atol=2e-6)
        assert torch.equal(a[..., rotated:].float(), b[..., rotated:])


def test_a_norm_of_one_of_both_is_refused() -> None:
    with pytest.raises(EngineError, match="one is null"):
        make().qk_norm_rope(
            draw(2, 1, 32, seed=1), draw(2, 1, 32, seed=2), torch.ones(32), None, rope(), torch.arange(2)
        )


def test_rope_takes_scaled_tables() -> None:
    scaling = RopeScaling("yarn", 4.0, original_max_position_embeddings=64)
    ops, table = NativeOps(EPS, POOL), rope(32, scaling)
    q, k = draw(9, 2, 32, seed=1), draw(9, 1, 32, seed=2)
    one = torch.ones(32)
    positions = torch.arange(9) * 50
    expected = TorchOps(EPS).qk_norm_rope(q, k, one, one, table, positions)
    out = ops.qk_norm_rope(q.clone(), k.clone(), one, one, table, positions)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@on_all
@both
@settings(max_examples=20)
@given(shape=shapes, scale=st.sampled_from([1.0, 30.0]))
def test_silu_mul(isa: str, dtype: torch.dtype, shape: tuple[int, int], scale: float) -> None:
    both_parts = draw(shape[0], 2 * shape[1], seed=1) * scale
    gate, up = both_parts.to(dtype).split([shape[1], shape[1]], dim=1)
    out = make(isa).silu_mul(gate, up)
    assert_close(out, F.silu(gate.float()) * up.float())


@on_all
@both
@settings(max_examples=20)
@given(shape=shapes, scale=st.sampled_from([1.0, 30.0]))
def test_add_gated(isa: str, dtype: torch.dtype, shape: tuple[int, int], scale: float) -> None:
    base, x = draw(shape[0], 2 * shape[1], seed=1).to(dtype).split([shape[1], shape[1]], dim=1)
    gate = draw(shape[0], 1, seed=2) * scale
    out = make(isa).add_gated(base, x, gate)
    assert out.dtype == dtype
    expected = base.float() + torch.sigmoid(gate) * x.float()
    torch.testing.assert_close(out.float(), expected, rtol=2**-8 if dtype == BF16 else 1e-5, atol=2e-6)


@on_all
def test_silu_at_the_ends(isa: str) -> None:
    gate = torch.tensor([[0.0, -0.0, 88.0, -88.0, 200.0, -200.0, 3e38, -3e38, float("inf")]])
    out = make(isa).silu_mul(gate, torch.ones_like(gate))
    torch.testing.assert_close(out, F.silu(gate), rtol=1e-5, atol=1e-37)


@on_all
@both
@settings(max_examples=40)
@given(
    rows=st.sampled_from([0, 1, 5, 70]),
    experts=st.one_of(st.integers(1, 140), st.sampled_from([512, 1024])),
    data=st.data(),
)
def test_a_plain_route(isa: str, dtype: torch.dtype, rows: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, min(experts, 12)))
    normalise, coarse = data.draw(st.booleans()), data.draw(st.booleans())
    logits = draw(rows, experts, seed=experts) * 3
    if coarse:  # many equal probabilities: the order of equals is torch.topk's
        logits = logits.round()
    logits = logits.to(dtype)
    weights, ids = make(isa).route(logits, top_k, SUM_OF_ONE if normalise else Router(normalise=None))
    probabilities = F.softmax(logits, dim=-1, dtype=F32)
    expected, expected_ids = torch.topk(probabilities, top_k, dim=-1)
    if coarse:
        assert torch.equal(ids, expected_ids)
    else:
        torch.testing.assert_close(probabilities.gather(1, ids), expected, rtol=1e-5, atol=1e-9)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-9)
    assert all(len(set(row)) == top_k for row in ids.tolist())


@st.composite
def routers(draw: st.DrawFn) -> tuple[Router, int, int]:
    """A router, experts, and how many are chosen of them."""
    groups, size = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    top_groups = draw(st.integers(1, groups))
    router = Router(
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalise=draw(st.sampled_from([None, 0.0, 1e-20, 0.5])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        bias=draw(st.booleans()),
        groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2"])),
    )
    return router, groups * size, draw(st.integers(1, min(top_groups * size, 12)))


def choices(scores: torch.Tensor, router: Router, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What a router compares [T, E], -inf where an expert's group is not among the best; and the rows [T] of which the
    best groups are clearly better than the rest."""
    c = scores if bias is None else scores + bias
    grouped = c.view(len(c), router.groups, c.shape[1] // router.groups)
    counted = grouped.topk(min(2 if router.group_score == "top2" else 1, grouped.shape[2]), dim=-1)
    score = counted.values.sum(-1)
    best = score.topk(router.top_groups, dim=-1)
    out = torch.ones(score.shape, dtype=torch.bool).scatter_(1, best.indices, False)
    next_best = score.masked_fill(~out, -torch.inf).amax(-1)
    clear = ~(best.values[:, -1] - next_best < 2e-6)
    return grouped.masked_fill(out[..., None], -torch.inf).flatten(1), clear


@on_all
@both
@settings(max_examples=100)
@given(rows=st.sampled_from([0, 1, 5, 70]), drawn=routers(), coarse=st.booleans(), bad=st.booleans())
def test_a_route_of_any_router(
    isa: str, dtype: torch.dtype, rows: int, drawn: tuple[Router, int, int], coarse: bool, bad: bool
) -> None:
    """Against torch. Where all logits of a row are one of two, the kernels' scores are equal where torch's are: groups
    and experts then come in torch.topk's order, with NaN too. Sums of two different scores round as they like: a group
    that counts its two largest gets one bias for all."""
    router, experts, top_k = drawn
    logits = draw(rows, experts, seed=experts) * 2
    bias = draw(experts, seed=7) if router.bias else None
    if coarse:
        logits = logits.sign()
        if bias is not None:
            bias = torch.ones_like(bias) if router.groups > 1 and router.group_score == "top2" else bias.sign()
    if bad and rows and not coarse:
        logits[-1, experts // 2] = torch.nan
    logits = logits.to(dtype)
    weights, ids = make(isa).route(logits, top_k, router, bias)
    wide = logits.float()
    scores = F.softmax(wide, dim=-1) if router.score == "softmax" else torch.sigmoid(wide)
    compared, clear = choices(scores, router, bias)
    expected_ids = torch.topk(compared, top_k, dim=-1).indices
    if coarse:
        assert torch.equal(ids, expected_ids)
    else:  # near equals may change places
        found, wanted = compared.gather(1, ids)[clear], compared.gather(1, expected_ids)[clear]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    expected = scores.gather(1, ids)
    if router.normalise is not None:
        expected = expected / (expected.sum(-1, keepdim=True) + router.normalise)
    torch.testing.assert_close(weights, expected * router.scale, rtol=2e-5, atol=1e-9, equal_nan=True)
    assert all(len(set(row)) == top_k for row in ids.tolist())


@on_all
def test_a_router_chooses_by_its_bias_and_weighs_without(isa: str) -> None:
    logits, bias = torch.zeros(1, 6), torch.tensor([0.0, 0.5, 0.1, 0.3, 0.0, 0.2])
    router = Router(score="sigmoid", normalise=0.0, bias=True, groups=3, top_groups=2, group_score="top2", scale=2.0)
    weights, ids = make(isa).route(logits, 3, router, bias)
    assert ids.tolist() == [[1, 3, 2]] and torch.equal(weights, torch.full((1, 3), 1.0) / 3 * 2)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (Router(groups=5), "groups: 5; allowed is a divisor of the number of experts"),
        (Router(groups=4, top_groups=5), "top_groups: 5; allowed is 1 to the number of groups"),
        (Router(groups=8, top_groups=1), "top_k: 4; allowed is 1 to the 2 experts of top_groups groups"),
        (Router(normalise=-1.0), "normalise: -1"),
        (Router(scale=float("nan")), "scale: nan"),
        (Router(bias=True), "bias: none; the router has one"),
    ],
)
def test_a_router_that_cannot_be_is_refused(router: Router, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        make().route(draw(2, 16, seed=1), 4, router)


def test_a_bias_of_other_experts_is_refused() -> None:
    with pytest.raises(EngineError, match=r"bias: torch.float32 \(15,\)"):
        make().route(draw(2, 16, seed=1), 4, Router(bias=True), torch.zeros(15))
    with pytest.raises(EngineError, match="bias: one; the router has none"):
        make().route(draw(2, 16, seed=1), 4, Router(), torch.zeros(16))
    names = {"score": "tanh; allowed are softmax, sigmoid", "group_score": "min; allowed are max, top2"}
    for name, message in names.items():
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            _native.Router(1, **{name: message.split(";")[0]})  # type: ignore[arg-type]


@both
@settings(max_examples=20)
@given(rows=st.sampled_from([0, 1, 17, 400]), dim=st.integers(1, 200))
def test_embed(dtype: torch.dtype, rows: int, dim: int) -> None:
    table = draw(50, dim, seed=1, dtype=dtype)
    ids = torch.arange(rows) * 7 % 50
    assert torch.equal(make().embed(table, ids), table[ids])


@on_all
@both
def test_a_row_is_the_same_alone_and_in_a_batch(isa: str, dtype: torch.dtype) -> None:
    ops, rows = make(isa), 150
    x, y, w = draw(rows, 720, seed=1, dtype=dtype), draw(rows, 720, seed=2, dtype=dtype), draw(720, seed=3)
    q, k, h = draw(rows, 9, 32, seed=4, dtype=dtype), draw(rows, 4, 32, seed=5, dtype=dtype), draw(32, seed=6)
    positions = torch.arange(rows)

    def run(a: int, b: int) -> list[torch.Tensor]:
        residual = x[a:b].clone()
        q_out, k_out = ops.qk_norm_rope(q[a:b].clone(), k[a:b].clone(), h, h, rope(), positions[a:b])
        return [
            ops.add_rms_norm(residual, y[a:b], w),
            residual,
            ops.silu_mul(x[a:b], y[a:b]),
            q_out,
            k_out,
            *ops.route(x[a:b], 8, SUM_OF_ONE),
        ]

    together = run(0, rows)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run(0, rows), together, strict=True))
    for i in (0, 1, 77, 149):
        assert all(torch.equal(a[0], b[i]) for a, b in zip(run(i, i + 1), together, strict=True))


@on_all
@both
def test_nan_stays_in_its_row(isa: str, dtype: torch.dtype) -> None:
    ops = make(isa)
    x, y, w = draw(40, 100, seed=1, dtype=dtype), draw(40, 100, seed=2, dtype=dtype), draw(100, seed=3)
    clean = [ops.add_rms_norm(x.clone(), y, w), ops.silu_mul(x, y), ops.route(x, 4, SUM_OF_ONE)[0]]
    x[7, 50] = float("nan")
    dirty = [ops.add_rms_norm(x.clone(), y, w), ops.silu_mul(x, y), ops.route(x, 4, SUM_OF_ONE)[0]]
    rest = [i for i in range(40) if i != 7]
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[rest], b[rest])
    assert dirty[0][7].isnan().all() and dirty[2][7].isnan().all()
    assert dirty[1][7, 50].isnan() and dirty[1][7].isnan().sum() == 1
    q, k = draw(3, 2, 32, seed=4, dtype=dtype), draw(3, 1, 32, seed=5, dtype=dtype)
    q[1, 1, 3] = float("nan")
    ops.qk_norm_rope(q, k, torch.ones(32), torch.ones(32), rope(), torch.arange(3))
    assert q[1, 1].isnan().all() and q.isnan().sum() == 32 and torch.isfinite(k).all()


def test_what_is_refused() -> None:
    ops = make()
    x, w = draw(3, 32, seed=1), draw(32, seed=2)
    q, k, one, positions = draw(3, 2, 32, seed=3), draw(3, 1, 32, seed=4), torch.ones(32), torch.arange(3)
    with pytest.raises(EngineError, match="token id 50; allowed is 0 to 49"):
        ops.embed(draw(50, 8, seed=1), torch.tensor([3, 50]))
    with pytest.raises(EngineError, match="token id -1"):
        ops.embed(draw(50, 8, seed=1), torch.tensor([-1]))
    with pytest.raises(EngineError, match="ids"):
        ops.embed(draw(50, 8, seed=1), torch.tensor([1], dtype=torch.int32))
    with pytest.raises(EngineError, match="residual"):
        ops.add_rms_norm(x.half(), None, w.half())
    with pytest.raises(EngineError, match="weight"):
        ops.add_rms_norm(x, None, draw(33, seed=1))
    with pytest.raises(EngineError, match="delta"):
        ops.add_rms_norm(x, x[:2], w)
    with pytest.raises(EngineError, match="positions: 512 of token 2; allowed is 0 to 511"):
        ops.qk_norm_rope(q, k, one, one, rope(), torch.tensor([0, 1, 512]))
    with pytest.raises(EngineError, match="positions: "):
        ops.qk_norm_rope(q, k, one, one, rope(), torch.tensor([0, 1]))
    with pytest.raises(EngineError, match="head_dim: 16"):
        ops.qk_norm_rope(q[..., :16].contiguous(), k[..., :16].contiguous(), one[:16], one[:16], rope(), positions)
    with pytest.raises(EngineError, match="k: "):
        ops.qk_norm_rope(q, k.bfloat16(), one, one, rope(), positions)
    with pytest.raises(EngineError, match="up"):
        ops.silu_mul(x, x[:, :16])
    with pytest.raises(EngineError, match="top_k: 33"):
        ops.route(x, 33, SUM_OF_ONE)
    with pytest.raises(EngineError, match="experts: 1025"):
        ops.route(draw(1, 1025, seed=1), 8, SUM_OF_ONE)
    with pytest.raises(EngineError, match="strides"):
        ops.silu_mul(x.T.contiguous().T, x)


@on_all
@both
@settings(max_examples=30)
@given(
    rows=st.integers(1, 5),
    n=st.sampled_from([1, 15, 16, 17, 4096, 4097, 20_000]),
    seed=st.integers(0, 99),
    few=st.booleans(),
    bad=st.lists(st.sampled_from([torch.nan, torch.inf, -torch.inf]), max_size=2),
)
def test_argmax_is_torch_s(isa: str, dtype: torch.dtype, rows: int, n: int, seed: int, few: bool, bad: list) -> None:
    """Also among equals (`few` values); -1 where the largest is not finite (NaN, minus infinity alone)."""
    x = draw(rows, n, seed=seed, dtype=dtype)
    x = x.round() if few else x
    x[0] = -torch.inf
    for i, value in enumerate(bad):
        x[-1, (seed * 977 + i * 5003) % n] = value
    out = torch.empty(rows, dtype=torch.int64)
    make(isa).kernel.argmax(logits=x.data_ptr(), stride=n, rows=rows, n=n, out=out.data_ptr(), is_bf16=dtype is BF16)
    best, place = x.max(dim=-1)
    assert torch.equal(out, torch.where(best.isfinite(), place, -1))
