"""The packed layout holds GGUF's blocks without loss, and its dot products are right on every instruction set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native import _native
from tests.native.blocks import QUANTISED, SCALES, finite_f8, random_blocks, values_of, values_of_block
from tests.native.isas import ISAS

F32 = npt.NDArray[np.float32]
FORMATS = {kind: _native.format_of(kind) for kind in [*QUANTISED, "BF16", "F16"]} | {"F32": "f32"}


@pytest.fixture(scope="module")
def pool() -> _native.WorkerPool:
    return _native.WorkerPool([[0, 1]])


def aligned(size: int) -> npt.NDArray[np.uint8]:
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def pack(
    pool: _native.WorkerPool, kind: str, data: npt.NDArray[np.uint8], n: int, k: int, form: str = ""
) -> npt.NDArray[np.uint8]:
    form = form or _native.format_of(kind)
    out = aligned(_native.packed_size(form, n, k))
    _native.pack(pool, kind, form, data.ctypes.data, n, k, out.ctypes.data)
    return out


def unpack(form: str, packed: npt.NDArray[np.uint8], n: int, k: int) -> F32:
    out = np.empty((n, k), np.float32)
    _native.unpack(form, packed.ctypes.data, k, 0, n, out.ctypes.data)
    return out


def dot(isa: str, form: str, packed: npt.NDArray[np.uint8], n: int, k: int, x: F32) -> F32:
    out = np.full((len(x), -(-n // 16) * 16), np.nan, np.float32)
    _native.dot(isa, form, packed.ctypes.data, n, k, x.ctypes.data, len(x), out.ctypes.data)
    return out[:, :n]


def weights(pool: _native.WorkerPool, kind: str, n: int, k: int) -> tuple[npt.NDArray[np.uint8], F32]:
    """A packed random matrix and its values."""
    if kind == "F32":
        values = np.random.default_rng(4).standard_normal((n, k)).astype(np.float32)
        return pack(pool, kind, values.view(np.uint8), n, k, "f32"), values
    if kind == "BF16":
        bits = (np.random.default_rng(3).standard_normal((n, k)).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
        return pack(pool, kind, bits.view(np.uint8), n, k), (bits.astype(np.uint32) << 16).view(np.float32)
    if kind == "F16":
        halves = np.random.default_rng(5).standard_normal((n, k)).astype(np.float16)
        return pack(pool, kind, halves.view(np.uint8), n, k), halves.astype(np.float32)
    data = random_blocks(kind, n, k)
    return pack(pool, kind, data, n, k), values_of(kind, data)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("n,k", [(16, 256), (50, 768), (7, 2304), (150, 256)])
def test_repacking_loses_nothing(pool: _native.WorkerPool, kind: str, n: int, k: int) -> None:
    packed, values = weights(pool, kind, n, k)
    np.testing.assert_array_equal(unpack(FORMATS[kind], packed, n, k), values)


@settings(max_examples=10)
@given(n=st.integers(1, 40), units=st.integers(1, 6), seed=st.integers(0, 1 << 16))
@pytest.mark.parametrize("kind", QUANTISED)
def test_any_bits_are_repacked_without_loss(pool: _native.WorkerPool, kind: str, n: int, units: int, seed: int) -> None:
    """Scales of every finite kind too: large, subnormal, zero."""
    k = units * values_of_block(kind)
    data = np.random.default_rng(seed).integers(0, 256, random_blocks(kind, n, k).shape, np.uint8)
    blocks = data.reshape(n, units, -1)
    for at in SCALES[kind]:
        blocks[..., at + 1][blocks[..., at + 1] & 0x7C == 0x7C] ^= 0x40
    if kind == "MXFP4":
        blocks[..., 0][blocks[..., 0] > 0xFC] = 0xFC
    if kind == "F8_E4M3":
        blocks[..., 3] &= 0xBF  # scales below 2
        finite_f8(blocks)
    got = unpack(FORMATS[kind], pack(pool, kind, data, n, k), n, k)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, values_of(kind, data))


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_packed_form_hardly_grows(kind: str) -> None:
    n, k = 768, 2048
    assert _native.packed_size(FORMATS[kind], n, k) <= 1.05 * random_blocks(kind, n, k).nbytes


def test_f16_is_kept(pool: _native.WorkerPool) -> None:
    """Every finite bit pattern."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits[bits & 0x7C00 != 0x7C00].view(np.float16).reshape(62, 1024)
    got = unpack("f16", pack(pool, "F16", x.view(np.uint8), 62, 1024), 62, 1024)
    np.testing.assert_array_equal(got.view(np.uint32), x.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("kind,bits", [("F32", np.float32), ("F16", np.float16)])
def test_plain_sources_become_bf16(pool: _native.WorkerPool, kind: str, bits: type) -> None:
    torch = pytest.importorskip("torch")
    x = (
        np.random.default_rng(1).standard_normal((33, 70)) * 10 ** np.random.default_rng(2).uniform(-6, 4, (33, 70))
    ).astype(bits)
    x[0, :5] = [0, -0.0, 65504, 6e-8, -1]
    expected = torch.from_numpy(x.astype(np.float32)).bfloat16().float().numpy()
    np.testing.assert_array_equal(unpack("bf16", pack(pool, kind, x.view(np.uint8), 33, 70, "bf16"), 33, 70), expected)


@pytest.mark.parametrize("form,bound", [("i8", 0.006), ("i4m", 0.1)])
def test_plain_sources_are_quantised_on_request(pool: _native.WorkerPool, form: str, bound: float) -> None:
    x = np.random.default_rng(1).standard_normal((32, 128)).astype(np.float32)
    got = unpack(form, pack(pool, "F32", x.view(np.uint8), 32, 128, form), 32, 128)
    assert np.abs(got - x).mean() < bound * np.abs(x).mean()
    if form == "i8":
        import gguf

        q8_0 = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
        assert np.abs(got - x).mean() <= 1.001 * np.abs(values_of("Q8_0", q8_0) - x).mean()


@pytest.mark.parametrize(
    "kind,form,n,k,message",
    [
        ("IQ1_S", "k4", 16, 256, "IQ1_S"),
        ("Q2_K", "k4", 16, 256, "Q2_K cannot be packed as k4"),
        ("BF16", "f16", 16, 256, "BF16 cannot be packed as f16"),
        ("Q8_0", "i4", 16, 256, "cannot be packed as i4"),
        ("Q4_K", "k4", 16, 128, "multiple of 256"),
        ("Q8_0", "i8", 16, 48, "multiple of 32"),
        ("Q8_0", "i8", 0, 32, "shape"),
        ("F32", "int9", 16, 32, "int9"),
    ],
)
def test_what_cannot_be_packed_is_refused(kind: str, form: str, n: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.check_pack(kind, form, n, k)


SIGN_OR_PAYLOAD = {np.uint16: (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF), np.uint32: (0x7F800000, 0xFF800000, 0x7FC00000)}


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from([*QUANTISED, "F32", "F16", "BF16"]), n=st.integers(1, 40), units=st.integers(1, 3),
    form=st.sampled_from(["", "f32", "i8", "i4m"]), data=st.data(),
)  # fmt: skip
def test_what_is_not_finite_is_found_wherever_it_is(
    pool: _native.WorkerPool, kind: str, n: int, units: int, form: str, data: st.DataObject
) -> None:
    k, row = 256 * units, data.draw(st.integers(0, n - 1))
    if kind in QUANTISED:
        raw, form, values = random_blocks(kind, n, k).copy(), "", values_of_block(kind)
        blocks = raw.reshape(n, k // values, -1)
        at = data.draw(st.integers(0, k // values - 1))
        pack(pool, kind, raw, n, k)  # without it all is well
        if kind == "MXFP4":
            blocks[row, at, 0] = data.draw(st.integers(0xFD, 0xFF))  # codes of 2^125 and 2^126 may be infinite
        elif kind == "F8_E4M3" and data.draw(st.booleans()):
            blocks[row, at, 4 + data.draw(st.integers(0, 127))] = data.draw(st.sampled_from([0x7F, 0xFF]))
        elif kind == "F8_E4M3":
            bits = data.draw(st.sampled_from([*SIGN_OR_PAYLOAD[np.uint32], 0x7B124925, 0xFB124925]))
            blocks[row, at, :4] = np.frombuffer(np.uint32(bits).tobytes(), np.uint8)
        else:
            scale, bits = (
                data.draw(st.sampled_from(SCALES[kind])),
                data.draw(st.sampled_from(SIGN_OR_PAYLOAD[np.uint16])),
            )
            blocks[row, at, scale : scale + 2] = np.frombuffer(np.uint16(bits).tobytes(), np.uint8)
        where = f"row {row}, values {at * values} to {(at + 1) * values - 1}: not finite"
    else:
        word = np.uint32 if kind == "F32" else np.uint16
        held = np.zeros((n, k), word)
        at = data.draw(st.integers(0, k - 1))
        pack(pool, kind, held.view(np.uint8), n, k, form)
        bits = data.draw(st.sampled_from(SIGN_OR_PAYLOAD[word] if kind != "BF16" else (0x7F80, 0xFF80, 0x7FC0, 0xFFFF)))
        held[row, at] = bits
        raw, where = held.view(np.uint8), f"row {row}, value {at}: not finite"
    with pytest.raises(ValueError, match=where):
        pack(pool, kind, raw, n, k, form)


@pytest.mark.parametrize("kind", ["MXFP4", "F8_E4M3"])
def test_the_largest_scale_that_is_taken_gives_finite_values(pool: _native.WorkerPool, kind: str) -> None:
    blocks = random_blocks(kind, 16, 128).reshape(16, 128 // values_of_block(kind), -1)
    if kind == "MXFP4":
        blocks[..., 0] = 0xFC
    else:
        blocks[..., :4] = np.frombuffer(np.uint32(0x7B124924).tobytes(), np.uint8)
    unpacked = unpack(FORMATS[kind], pack(pool, kind, blocks.reshape(16, -1), 16, 128), 16, 128)
    assert np.isfinite(unpacked).all() and np.abs(unpacked).max() > 1e38


def test_what_overflows_bfloat16_is_refused_and_the_largest_that_does_not_is_taken(pool: _native.WorkerPool) -> None:
    x = np.full((1, 32), np.uint32(0x7F7F7FFF)).view(np.float32)
    assert np.isfinite(unpack("bf16", pack(pool, "F32", x.view(np.uint8), 1, 32), 1, 32)).all()
    x.view(np.uint32)[0, 7] += 1
    with pytest.raises(ValueError, match="value 7: not finite in bfloat16"):
        pack(pool, "F32", x.view(np.uint8), 1, 32)
    pack(pool, "F32", x.view(np.uint8), 1, 32, "f32")


def relative(got: F32, expected: npt.NDArray[np.float64]) -> float:
    return float(np.abs(got - expected).mean() / np.abs(expected).mean())


def as_llama(x: F32, kind: str) -> npt.NDArray[np.float64]:
    """Activations as llama.cpp's integer path rounds them: int8 per 32 (half-precision scale), or per block of 256."""
    block = 256 if values_of_block(kind) == 256 else 32
    parts = x.reshape(len(x), -1, block).astype(np.float64)
    scale = np.abs(parts).max(-1, keepdims=True) / 127
    stored = scale if block == 256 else scale.astype(np.float16).astype(np.float64)
    return (np.rint(parts / scale) * stored).reshape(x.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS)
def test_dot_products_err_no_more_than_llama_cpp(pool: _native.WorkerPool, kind: str, isa: str) -> None:
    n, k = 64, 2048
    packed, values = weights(pool, kind, n, k)
    x = np.random.default_rng(7).standard_normal((9, k)).astype(np.float32)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    error = relative(dot(isa, FORMATS[kind], packed, n, k, x), exact)
    if kind in ("BF16", "F16", "F32", "F8_E4M3"):
        assert error < {"BF16": 0.003}.get(kind, 2e-6)
    else:
        theirs = relative((as_llama(x, kind) @ values.astype(np.float64).T).astype(np.float32), exact)
        assert error <= 1.03 * theirs
        assert error < 0.02


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_and_panels_do_not_see_each_other(pool: _native.WorkerPool, kind: str, isa: str) -> None:
    n, k = 80, 1536
    packed, _ = weights(pool, kind, n, k)
    x = np.random.default_rng(8).standard_normal((70, k)).astype(np.float32)
    alone = np.concatenate([dot(isa, FORMATS[kind], packed, n, k, x[r : r + 1]) for r in range(len(x))])
    for rows in [2, 3, 5, 7, 12, 16, 17, 31, 32, 33, 70]:
        np.testing.assert_array_equal(dot(isa, FORMATS[kind], packed, n, k, x[:rows]), alone[:rows])
    for columns in [1, 16, 17, 48]:
        np.testing.assert_array_equal(dot(isa, FORMATS[kind], packed, columns, k, x[:6]), alone[:6, :columns])


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("kind", QUANTISED)
def test_integer_formats_agree_bit_for_bit_between_instruction_sets(
    pool: _native.WorkerPool, kind: str, isa: str
) -> None:
    n, k = 48, 768
    packed, _ = weights(pool, kind, n, k)
    x = np.random.default_rng(9).standard_normal((5, k)).astype(np.float32)
    np.testing.assert_array_equal(dot(isa, FORMATS[kind], packed, n, k, x), dot("avx2", FORMATS[kind], packed, n, k, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS)
def test_extreme_activations(pool: _native.WorkerPool, kind: str, isa: str) -> None:
    n, k = 16, 512
    packed, values = weights(pool, kind, n, k)
    x = np.random.default_rng(10).standard_normal((6, k)).astype(np.float32)
    x[1] = 0
    x[2] *= 3e4
    x[3, 40] = np.nan
    x[4, 300] = np.inf
    x[5] *= 1e-35
    got = dot(isa, FORMATS[kind], packed, n, k, x)
    assert not got[1].any()
    exact = x[2].astype(np.float64) @ values.astype(np.float64).T
    assert relative(got[2], exact) < 0.02
    assert np.isnan(got[3]).all()
    assert not np.isfinite(got[4]).any()
    assert np.abs(got[5]).max() < 1e-28
    np.testing.assert_array_equal(got[:1], dot(isa, FORMATS[kind], packed, n, k, x[:1]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", QUANTISED)
def test_sums_of_the_largest_products(pool: _native.WorkerPool, kind: str, isa: str) -> None:
    """All quants at once as small or as large as they get: no sum of few bits may run over."""
    n, k = 32, 512
    form = FORMATS[kind]
    x = np.ones((17, k), np.float32)
    x[::2] = -1
    for byte in (0x00, 0x77, 0x7F, 0x80, 0xFF):
        packed, _ = weights(pool, kind, n, k)
        quants = packed.reshape(n // 16, -1)[:, _native.packed_formats()[form].scales_size(k) :]
        quants[:] = 0x77 if kind == "F8_E4M3" else byte  # others are not numbers
        values = unpack(form, packed, n, k).astype(np.float64)
        allowed = 1e-3 * np.abs(values).sum(1) + 1e-6
        for rows in (1, 2, 3, 7, 17):
            got = dot(isa, form, packed, n, k, x[:rows])
            assert (np.abs(got - x[:rows].astype(np.float64) @ values.T) <= allowed).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_plain_formats_take_any_inner_size(pool: _native.WorkerPool, kind: str, isa: str) -> None:
    for k in [1, 2, 15, 33, 100]:
        packed, values = weights(pool, kind, 20, k)
        x = np.random.default_rng(k).standard_normal((3, k)).astype(np.float32)
        exact = x.astype(np.float64) @ values.astype(np.float64).T
        assert relative(dot(isa, FORMATS[kind], packed, 20, k, x), exact) < 0.02


def test_an_unknown_or_newer_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="sse9"):
        _native.choose_isa("sse9")
    if _native.best_isa() != "amx":
        with pytest.raises(ValueError, match="amx"):
            _native.choose_isa("amx")


@pytest.mark.parametrize("form", list(_native.packed_formats()))
def test_the_table_of_formats_gives_the_sizes(form: str) -> None:
    table = _native.packed_formats()[form]
    for k in (256, 768, 2304):
        assert table.panel_size(k) * 3 == _native.packed_size(form, 40, k)
        assert table.panel_size(k) == table.scales_size(k) + k // _native.BLOCK * table.quant_bytes
        assert -64 < k // table.unit * table.scale_bytes - table.scales_size(k) <= 0
    if not table.group:
        assert table.scale_bytes == (64 if form == "f8" else 0)
        return
    groups = table.unit // table.group
    if table.grid_values:
        parts = [(0, 32), (32, 32 + 8 * groups), (table.grid_high_offset, table.grid_high_offset + 128)]
        held = [parts[0], *(parts[1:2] if table.step_offset else []), *(parts[2:] if table.grid_high_offset else [])]
        assert [end for _, end in held] == [*(start for start, _ in held[1:]), table.scale_bytes]
        assert len(table.grid) == table.grid_values << table.grid_index_bits
        return
    halves = [0, *([table.minimum_offset] if table.minimum_offset else [])]
    steps = sorted({at for at in (table.step_offset, table.minimum_step_offset) if at})
    zeros = [(table.zero_offset, table.zero_offset + 16)] if table.zero_offset else []
    ends = (
        [(at, at + (16 if table.exponents else 32)) for at in halves] + [(at, at + 16 * groups) for at in steps] + zeros
    )
    assert [end for _, end in ends] == [*(start for start, _ in ends[1:]), table.scale_bytes]  # no gap, no overlap
