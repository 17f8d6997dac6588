"""Weights come into their places whole and in order, from files, from memory and from what is made of both; what is not
finite is found wherever it is; and what is held on the way does not grow with the tensors."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.files.model_file import Bytes, FileBytes, MadeBytes, ModelFile
from engine.weights import dequant
from engine.weights.dequant import dequantise, nonfinite
from engine.weights.scaled_blocks import BLOCKS
from engine.weights.staging import Buffers, Staging
from engine.weights.store import WeightTensor, dequantised
from engine.weights.threads import in_order, loading_threads, made_ahead
from engine.weights.tiled import packer
from engine.weights.tiled.layout import matrix_of
from engine.weights.tiled.packer import Packer
from testing.models.block_types import CRAFTED, QUANTISABLE, encode
from tests.native import blocks

CPU = torch.device("cpu")
TYPES = [*QUANTISABLE, *CRAFTED, *BLOCKS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXTREME = (
    b"\xff",
    b"\x7f",
    b"\x00\x7c",
    b"\x00\xfc",
    b"\x80\x7f",
    b"\x80\xff",
    b"\x00\x80\x7f\x7f",
    b"\x00\xf0\x7f\x47",
)


def raw_blocks(type: str, rows: int, k: int, seed: int) -> npt.NDArray[np.uint8]:
    if type in BLOCKS:
        data = blocks.random_blocks(type, rows, k, seed)
    else:
        data, _ = encode(torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)), type, seed)
    return np.ascontiguousarray(data).view(np.uint8).reshape(-1).copy()


@contextmanager
def pieces_of(values: int) -> Iterator[None]:
    """Of plain types too."""
    held = dequant.PIECE_VALUES, dequant._PLAIN
    dequant.PIECE_VALUES, dequant._PLAIN = values, 1
    try:
        yield
    finally:
        dequant.PIECE_VALUES, dequant._PLAIN = held


@settings(max_examples=300, deadline=None)
@given(
    type=st.sampled_from(TYPES),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 6),
    piece=st.integers(1, 5),
    spoilt=st.lists(st.tuples(st.integers(0, 1 << 20), st.sampled_from(EXTREME)), max_size=3),
    staged=st.booleans(),
    seed=st.integers(0, 99),
)
def test_exactly_what_is_not_finite_is_found(
    type: str, dtype: torch.dtype, rows: int, piece: int, spoilt: list[tuple[int, bytes]], staged: bool, seed: int
) -> None:
    """By the bits in the file, in whatever pieces, as `isfinite` says of the values that they stand for."""
    raw = raw_blocks(type, rows, 512, seed)
    for at, content in spoilt:
        at = at % (len(raw) // 4) * 4
        raw[at : at + len(content)] = np.frombuffer(content, np.uint8)[: len(raw) - at]
    weight = WeightTensor("w", (rows, 512), type, raw)
    with np.errstate(over="ignore", invalid="ignore"), pieces_of(256 * piece):
        wanted = dequantise(raw, type, weight.shape, torch.float32).to(dtype)
        bad = (~torch.isfinite(wanted)).nonzero()
        out = torch.empty(weight.shape, dtype=dtype)
        into = partial(Staging(CPU).put, [weight], [out])
        place: Callable[[], torch.Tensor | None] = into if staged else partial(weight.dequantise, dtype)
        if len(bad):
            where = re.escape(f"w: value {bad[0].tolist()} of [{rows}, 512] is not finite")
            with pytest.raises(ModelFileError, match=where):
                place()
        else:
            got = place()
            assert torch.equal(out if got is None else got, wanted)
        if dtype is torch.float32 and type != "NVFP4":
            assert (nonfinite(raw, type, weight.shape) > 0) == (len(bad) > 0)


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[str, int, int, int], tuple[list[WeightTensor], list[WeightTensor]]]:
    """Matrices of a type in a file, some by ranges and some to be made of them; and the same in memory."""

    def make(type: str, count: int, n: int, k: int) -> tuple[list[WeightTensor], list[WeightTensor]]:
        parts = [raw_blocks(type, n, k, seed) for seed in range(count)]
        path = tmp_path / f"{type}.bin"
        path.write_bytes(b"".join(part.tobytes() for part in parts))
        file, size = ModelFile(path), parts[0].nbytes
        held: list[Bytes] = [file.bytes(at * size, size) for at in range(count)]
        held[1::3] = [
            MadeBytes((data,), size, partial(_read, data)) for data in held[1::3] if isinstance(data, FileBytes)
        ]
        in_file = [WeightTensor(f"w{i}", (n, k), type, data) for i, data in enumerate(held)]
        return in_file, [WeightTensor(f"w{i}", (n, k), type, data) for i, data in enumerate(parts)]

    return make


def _read(data: FileBytes) -> npt.NDArray[np.uint8]:
    return data[:]


@pytest.mark.parametrize("type", ["BF16", "F32", "F16", "Q8_0", "Q4_K", "Q3_K", "IQ3_S", "TQ2_0", "F8_E4M3"])
@pytest.mark.parametrize("at_once", [1 << 12, 1 << 25])
def test_any_way_into_a_device_s_memory_gives_the_file_s_values(
    type: str, at_once: int, stored: Callable[..., tuple[list[WeightTensor], ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "_AT_ONCE", at_once)
    monkeypatch.setattr(packer, "_NUMBERS_AT_ONCE", at_once)
    in_file, in_memory = stored(type, 7, 40, 512)
    matrix = matrix_of(in_memory[0], 2, None)
    outs = []
    for weights in (in_file, in_memory):
        out = torch.zeros(7, matrix.num_bytes + 64, dtype=torch.uint8)
        with pieces_of(1024):
            Packer(CPU).put(weights, matrix, out[:, 32:-32], torch.bfloat16)
        outs.append(out)
    assert torch.equal(*outs)
    assert not outs[0][:, :32].any() and not outs[0][:, -32:].any()
    wanted = dequantised(in_memory, torch.bfloat16)
    if matrix.plain:
        got = outs[0][:, 32:-32].view(torch.bfloat16).view(wanted.shape)
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-7)  # at most rounded to a neighbour
        assert in_memory[0].quantised or torch.equal(got, wanted)
    assert torch.equal(dequantised(in_file, torch.bfloat16), wanted)
    dense = Packer(CPU).dense(in_file[1], torch.float32)
    torch.testing.assert_close(dense, in_memory[1].dequantise(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("type", ["BF16", "Q4_K", "Q3_K"])
def test_the_tensor_of_many_is_named(type: str, stored: Callable[..., tuple[list[WeightTensor], ...]]) -> None:
    _, weights = stored(type, 5, 32, 256)
    raw = weights[3].data[:]
    raw[-2:] = 0xFF
    if type != "BF16":
        raw[-(144 if type == "Q4_K" else 2) :][:2] = 0xFF
    matrix = matrix_of(weights[0], 2, None)
    out = torch.zeros(5, matrix.num_bytes, dtype=torch.uint8)
    with pytest.raises(ModelFileError, match=r"w3: (value \[31, 255\]|row 31, values 0 to 255)"):
        Packer(CPU).put(weights, matrix, out, torch.bfloat16)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    for type, size in (("BF16", 64 * 512), ("Q4_K", 64 * 144)):
        path = tmp_path / f"{type}.bin"
        path.write_bytes(bytes(size))
        data = ModelFile(path).bytes(0, size)
        path.write_bytes(bytes(size // 2))
        weight = WeightTensor("w", (64, 256), type, data)
        matrix = matrix_of(weight, 2, None)
        with pytest.raises(ModelFileError, match=rf"{type}\.bin: became shorter"):
            Packer(CPU).put([weight], matrix, torch.zeros(1, matrix.num_bytes, dtype=torch.uint8), torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 40), most=st.integers(2, 9), fails=st.none() | st.integers(0, 39), taken=st.integers(1, 40))
def test_calls_come_in_order_and_few_at_a_time(count: int, most: int, fails: int | None, taken: int) -> None:
    begun, lock = set[int](), threading.Lock()
    outstanding = most_outstanding = 0

    def call(number: int) -> int:
        nonlocal outstanding, most_outstanding
        with lock:
            begun.add(number)
            outstanding += 1
            most_outstanding = max(most_outstanding, outstanding)
        if number == fails:
            raise ValueError(number)
        return number

    got = []
    with closing(in_order((partial(call, number) for number in range(count)), most)) as results:
        try:
            for result in results:
                got.append(result)
                with lock:
                    outstanding -= 1
                if len(got) == taken:
                    break
        except ValueError as error:
            assert error.args == (len(got),) == (fails,)
    last = min(count, taken, count if fails is None else fails)
    assert got == list(range(last)) and most_outstanding <= most
    ended = len(begun)
    assert ended <= last + most  # none begins afterwards
    assert not [t for t in threading.enumerate() if t.name.startswith("weights")]


def test_what_is_held_does_not_grow_with_the_tensors() -> None:
    """Buffers of a piece each, twice as many as are read ahead; of bytes that must be made, a few tensors' ahead."""
    sizes = []
    with pieces_of(1 << 10):
        for rows in (64, 512):
            raw = raw_blocks("BF16", rows, 1024, 0)
            staging = Staging(CPU)
            staging.put([WeightTensor("w", (rows, 1024), "BF16", raw)], [torch.empty(rows, 1024, dtype=torch.bfloat16)])
            sizes.append(staging.num_bytes)
            staging.release()
            assert staging.num_bytes == 0
    assert sizes[0] == sizes[1] == 2048 * 2 * min(loading_threads() + 1, 16)

    made = ahead = most = 0
    lock = threading.Lock()

    def make() -> npt.NDArray[np.uint8]:
        nonlocal made, most
        with lock:
            made += 1
            most = max(most, made - ahead)
        return np.zeros(8, np.uint8)

    for _ in made_ahead([MadeBytes((), 8, make) for _ in range(100)]):
        with lock:
            ahead += 1
    assert made == 100 and most <= loading_threads() + 1


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 5), sizes=st.lists(st.integers(1, 300), max_size=20))
def test_buffers_are_taken_in_turn(count: int, sizes: list[int]) -> None:
    buffers = Buffers(CPU, count)
    taken = [buffers.next(size) for size in sizes]
    for number, (buffer, size) in enumerate(zip(taken, sizes, strict=True)):
        assert buffer is taken[number % count] and buffer.memory.numel() >= size
        assert buffer.memory.data_ptr() % 64 == 0
    assert len({id(buffer) for buffer in taken}) == min(count, len(sizes))
