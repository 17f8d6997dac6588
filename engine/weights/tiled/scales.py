"""The scales of a matrix in tiles (layout.py): a quant u stands for s u + c.

`W` is Matrix.constants. `w`: pointers to the matrix, `n` rows of it, `k` places; of any shapes that broadcast, read
where `real`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_scales(w, n, k, real, W: tl.constexpr):
    """(d, minimum) in float32 of the units that hold k; what a zero point or minimum takes off, per d."""
    at = k // W[7] * W[0] + n
    if W[17] == 1:
        e = tl.load(w + W[13] + at, mask=real, other=0).to(tl.int32)
        bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)  # 2^(e - 128): the least two are below normal numbers
        d = bits.to(tl.float32, bitcast=True)
    elif W[17] == 4:
        d = tl.load((w + W[13]).to(tl.pointer_type(tl.float32)) + at, mask=real, other=0)
    else:
        d = tl.load((w + W[13]).to(tl.pointer_type(tl.float16)) + at, mask=real, other=0).to(tl.float32)
    minimum = d * 0.0
    if W[9] == 1:
        minimum = tl.load((w + W[14]).to(tl.pointer_type(tl.float16)) + at, mask=real, other=0).to(tl.float32)
    if W[9] == 2:
        minimum = -d * tl.load(w + W[14] + at, mask=real, other=0).to(tl.float32)
    return d, minimum


@triton.jit
def group_scales(d, minimum, w, n, k, real, W: tl.constexpr):
    """(s, c) of the groups that hold k, of what `unit_scales` gave."""
    s, c = d, minimum
    if W[10] > 0:
        at = k // W[8] * W[0] + n
        step = tl.load(w + W[15] + at, mask=real, other=0)
        if W[10] == 2:
            s = d * step.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            s = d * step.to(tl.float32)
            c = -minimum * tl.load(w + W[16] + at, mask=real, other=0).to(tl.float32)
    if W[11] > 0:
        c = c - W[11] * s
    return s, c
