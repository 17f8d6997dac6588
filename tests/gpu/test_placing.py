"""Weights on their way into a GPU's memory: what arrives is the file's, however often buffers are used again before a
copy has ended, and no more is pinned than the buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import ModelFileError
from engine.files.model_file import ModelFile
from engine.weights.staging import Staging
from engine.weights.store import WeightTensor, dequantised
from engine.weights.tiled.layout import matrix_of
from engine.weights.tiled.packer import Packer
from tests.weights.test_placing import pieces_of, raw_blocks

CUDA = torch.device("cuda", 0)
COUNT, N, K = 24, 512, 1024


def in_file(folder: Path, type: str) -> list[WeightTensor]:
    parts = [raw_blocks(type, N, K, seed) for seed in range(COUNT)]
    path = folder / f"{type}.bin"
    path.write_bytes(b"".join(part.tobytes() for part in parts))
    file, size = ModelFile(path), parts[0].nbytes
    return [WeightTensor(f"w{i}", (N, K), type, file.bytes(i * size, size)) for i in range(COUNT)]


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [1 << 12, 1 << 20])
@pytest.mark.parametrize("type", ["BF16", "F32", "F16", "TQ2_0"])
def test_numbers_arrive(type: str, piece: int, tmp_path: Path) -> None:
    weights = in_file(tmp_path, type)
    wanted = dequantised(weights, torch.bfloat16)
    staging = Staging(CUDA)
    for _ in range(2):  # the second time over buffers that are copied from
        out = torch.zeros(COUNT, N, K, dtype=torch.bfloat16, device=CUDA)
        with pieces_of(piece):
            staging.put(weights, out.unbind())
        different = (out.cpu() != wanted).nonzero()
        assert not len(different), f"{len(different)} values, the first at {different[0].tolist()}"
    assert staging.num_bytes <= 32 * 4 * piece
    staging.release()
    assert staging.num_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("type", ["Q4_K", "Q8_0", "Q6_K", "MXFP4", "F8_E4M3", "Q3_K", "IQ3_S"])
def test_packed_ones_arrive(type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU; two buffers, of which each is used many times."""
    monkeypatch.setattr("engine.weights.tiled.packer._AT_ONCE", 2 * N * K)
    monkeypatch.setattr("engine.weights.tiled.packer._NUMBERS_AT_ONCE", 2 * N * K)
    weights = in_file(tmp_path, type)
    matrix = matrix_of(weights[0], 2, None)
    outs = []
    for device in (torch.device("cpu"), CUDA):
        out = torch.zeros(COUNT, matrix.num_bytes, dtype=torch.uint8, device=device)
        Packer(device).put(weights, matrix, out, torch.bfloat16)
        outs.append(out.cpu())
    if matrix.plain:  # one may round to the other's neighbour
        on_cpu, on_gpu = (out.view(torch.bfloat16).float() for out in outs)
        torch.testing.assert_close(on_gpu, on_cpu, rtol=2**-7, atol=1e-7)
    else:
        different = (outs[0] != outs[1]).nonzero()
        assert not len(different), f"{len(different)} bytes, the first at {different[0].tolist()}"


@pytest.mark.gpu
@pytest.mark.parametrize("type", ["BF16", "Q4_K"])
def test_what_is_not_finite_is_named_and_the_next_arrive(type: str, tmp_path: Path) -> None:
    weights = in_file(tmp_path, type)
    raw = raw_blocks(type, N, K, 5)
    block = 144 if type == "Q4_K" else 2
    raw[-block:][:2] = 0xFF
    matrix, pack = matrix_of(weights[0], 2, None), Packer(CUDA)
    out = torch.zeros(COUNT, matrix.num_bytes, dtype=torch.uint8, device=CUDA)
    with pytest.raises(ModelFileError, match=r"w5: (value \[511, 1023\]|row 511, values 768 to 1023)"):
        bad = WeightTensor("w5", (N, K), type, raw)
        pack.put([*weights[:5], bad, *weights[6:]], matrix, out, torch.bfloat16)
    pack.put(weights, matrix, out, torch.bfloat16)
    again = torch.zeros_like(out)
    Packer(CUDA).put(weights, matrix, again, torch.bfloat16)
    assert torch.equal(out, again)
