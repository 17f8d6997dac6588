"""The packed layout read by torch equals what the kernels' own unpacking gives, for every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.weights.tiled.panels import panel_bytes, unpack
from native import _native
from tests.native.blocks import QUANTISED, random_blocks


@pytest.mark.parametrize("kind", [*QUANTISED, "BF16", "F16", "F32"])
def test_equals_the_native_values(kind: str) -> None:
    n, k = 48, 512
    pool = _native.WorkerPool([[0]])
    if kind in QUANTISED:
        data = np.ascontiguousarray(random_blocks(kind, n, k, 3))
    else:
        values = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
        data = (
            values.to({"BF16": torch.bfloat16, "F16": torch.float16}.get(kind, torch.float32)).view(torch.uint8).numpy()
        )
    form = _native.format_of(kind) if kind != "F32" else "f32"
    size = _native.packed_size(form, n, k)
    assert size == panel_bytes(form, k) * n // 16
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    packed = memory[-memory.data_ptr() % 64 :][:size]
    _native.pack(pool, kind, form, data.ctypes.data, n, k, packed.data_ptr())
    wanted = torch.empty(n, k)
    _native.unpack(form, packed.data_ptr(), k, 0, n, wanted.data_ptr())
    got = unpack(packed, form, k, torch.float32)
    assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))
