"""The stream's half of the handshake with the CPU pool, as two Triton kernels that a CUDA graph can hold.

    post   copies the true rows' inputs into mapped host memory, then the last program to end writes the next number
    wait   spins on the answer, copies the true rows' results back and adds what the GPU computed itself

A captured value would be a constant, so numbers come from a counter on the device: every program of a post adds one
to it. Both kernels read the row count when they run; rows that do not count cost nothing. Words
(native/src/bridge/bridge.hpp) are written with release and read with acquire semantics at system scope (PTX ISA,
memory consistency model).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

POST_PROGRAMS = 64
WAIT_PROGRAMS = 64


@triton.jit
def _store_release(address, value):
    tl.inline_asm_elementwise(
        "st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0;",
        "=r,l,l",
        [address.to(tl.int64), value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_acquire(address):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u64 $0, [$1];", "=l,l", [address.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _tell(address, value):
    tl.inline_asm_elementwise(
        "st.release.gpu.global.u64 [$1], $2; mov.u32 $0, 0;",
        "=r,l,l",
        [address.to(tl.int64), value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _listen(address):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u64 $0, [$1];", "=l,l", [address.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _now_ns(after):
    """`after` only keeps the reading behind what it was computed from."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,l", [after], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def copy_inputs(
    row, ids, weights, slots, hidden, host_ids, host_weights, host_slots, host_hidden, place, uses, chosen, number,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, HYBRID: tl.constexpr,
):  # fmt: skip
    """One row into host memory. HYBRID: experts that `place` [slots, E] puts on the GPU become -1; uses are counted.
    Returns how many experts no row of the post `number` had chosen before, and writes it to `chosen` [E] for them."""
    at = tl.arange(0, BLOCK)
    for start in range(0, H, BLOCK):
        values = tl.load(hidden + row * H + start + at, mask=start + at < H, other=0)
        tl.store(host_hidden + row * H + start + at, values, mask=start + at < H)
    slot = tl.load(slots + row)
    j = tl.arange(0, KP)
    expert = tl.load(ids + row * K + j, mask=j < K, other=-1)
    valid = (j < K) & (expert >= 0) & (expert < E)  # the pool says what is wrong with others
    last = tl.atomic_xchg(chosen + expert, tl.full([KP], 0, tl.int64) + number, mask=valid, sem="relaxed")
    if HYBRID:
        tl.atomic_add(uses + expert, 1, mask=valid, sem="relaxed")
        expert_slot = tl.load(place + slot * E + expert, mask=valid, other=-1)
        expert = tl.where(expert_slot >= 0, -1, expert)
    tl.store(host_ids + row * K + j, expert, mask=j < K)
    tl.store(host_weights + row * K + j, tl.load(weights + row * K + j, mask=j < K, other=0), mask=j < K)
    tl.store(host_slots + row, slot)
    return tl.sum((valid & (last != number)).to(tl.int64), 0)


@triton.jit(do_not_specialize=["touched"])
def post_kernel(
    bsz, ids, weights, slots, hidden, host_bsz, host_ids, host_weights, host_slots, host_hidden, place, uses,
    counter, posted, chosen, touched,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, HYBRID: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n = tl.load(bsz)
    number = tl.load(counter) // PROGRAMS + 1  # until all programs have added theirs
    distinct = tl.full([], 0, tl.int64)
    for row in range(pid, n, PROGRAMS):
        distinct += copy_inputs(
            row, ids, weights, slots, hidden, host_ids, host_weights, host_slots, host_hidden, place, uses, chosen,
            number, H, K, KP, E, BLOCK, HYBRID,
        )  # fmt: skip
    if distinct > 0:
        tl.atomic_add(touched, distinct, sem="relaxed")
    if pid == 0:
        tl.store(host_bsz, n)
    tl.debug_barrier()  # all threads' copies lie before the one atomic of the program
    ticket = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if ticket % PROGRAMS == PROGRAMS - 1:
        _store_release(posted, ticket // PROGRAMS + 1)


@triton.jit
def add_result(row, out, host_out, extra, good, H: tl.constexpr, BLOCK: tl.constexpr, EXTRA: tl.constexpr):
    """out = the host's row (zeros if it failed) plus, if EXTRA, the GPU's own part."""
    at = tl.arange(0, BLOCK)
    for start in range(0, H, BLOCK):
        inside = start + at < H
        values = tl.load(host_out + row * H + start + at, mask=inside & good, other=0, volatile=True)
        if EXTRA:
            values = values.to(tl.float32) + tl.load(extra + row * H + start + at, mask=inside, other=0)
        tl.store(out + row * H + start + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def wait_kernel(
    bsz, out, host_out, extra, counter, answered, done, expired, timeout_ns,
    H: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, POSTERS: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """Program 0 alone reads host memory (each reader delays the pool's writes to it) and tells the others by `answered`
    in device memory: 2 n + failed, or 2 n + 1 for an answer that did not come in time."""
    pid = tl.program_id(0)
    n = tl.load(bsz)
    number = tl.load(counter) // POSTERS
    if pid == 0:
        seen = _load_acquire(done)
        began = _now_ns(seen)
        late = n * 0
        while (seen // 2 < number) & (late == 0):
            seen = _load_acquire(done)
            late = (_now_ns(seen) - began > timeout_ns).to(tl.int32)
        answer = tl.where(seen // 2 < number, 2 * number + 1, seen)
        if seen // 2 < number:
            _store_release(expired, number)
        _tell(answered, answer)
        for row in range(pid, n, PROGRAMS):
            add_result(row, out, host_out, extra, answer % 2 == 0, H, BLOCK, EXTRA)
    elif pid < n:
        answer = _listen(answered)
        while answer // 2 < number:
            answer = _listen(answered)
        for row in range(pid, n, PROGRAMS):
            add_result(row, out, host_out, extra, answer % 2 == 0, H, BLOCK, EXTRA)
