"""What the post and wait kernels move and say, in Triton's interpreter; it has no PTX, so plain loads stand for it."""

from __future__ import annotations

import pytest
import torch

ROWS, H, K, E, PROGRAMS = 8, 64, 3, 8, 4


@pytest.mark.gpu
@pytest.mark.parametrize("n", [0, 1, 5])
def test_rows_words_and_failures(n: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel_device.type == "cuda":
        pytest.skip("the interpreter's own test; on a GPU test_experts_bridge.py runs the real kernels")
    import triton
    import triton.language as tl

    from engine.experts.bridge import kernels as k

    load = triton.jit(_load)
    for name in ("_load_acquire", "_listen"):
        monkeypatch.setattr(k, name, load)
    for name in ("_store_release", "_tell"):
        monkeypatch.setattr(k, name, triton.jit(_store))
    monkeypatch.setattr(k, "_now_ns", triton.jit(_zero))
    monkeypatch.setitem(globals(), "tl", tl)
    g = torch.Generator().manual_seed(n)
    bsz = torch.tensor([n], dtype=torch.int32)
    ids, weights = torch.randint(0, E, (ROWS, K), generator=g), torch.rand(ROWS, K, generator=g)
    slots, hidden = torch.randint(0, 3, (ROWS,), generator=g, dtype=torch.int32), torch.randn(ROWS, H, generator=g)
    host = [torch.zeros_like(t) for t in (bsz, ids, weights, slots, hidden)]
    place = torch.full((3, E), -1, dtype=torch.int32)
    place[1:, 2] = 0
    uses, counter, posted = torch.zeros(E, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.zeros(1).long()
    chosen, touched, distinct = torch.zeros(E, dtype=torch.int64), torch.tensor(0), 0
    for number in (1, 2, 3):
        k.post_kernel[(PROGRAMS,)](
            bsz, ids, weights, slots, hidden, *host, place, uses, counter, posted, chosen, touched,
            H=H, K=K, KP=4, E=E, BLOCK=64, PROGRAMS=PROGRAMS, HYBRID=True,
        )  # fmt: skip
        assert int(posted) == number
        distinct += torch.unique(ids[:n]).numel()
        assert int(touched) == distinct
    there = ids.clone()
    there[place[slots.long()[:, None], ids] >= 0] = -1
    for got, sent in zip(host[1:], (there, weights, slots, hidden), strict=True):
        assert torch.equal(got[:n], sent[:n])
        assert not got[n:].any()
    assert int(host[0]) == n
    assert torch.equal(uses, 3 * torch.bincount(ids[:n].flatten(), minlength=E).int())

    result, extra = torch.randn(ROWS, H, generator=g), torch.randn(ROWS, H, generator=g)
    done, expired = torch.tensor([6]), torch.zeros(1, dtype=torch.int64)

    def wait(timeout_ns: int, add: bool) -> torch.Tensor:
        out = torch.full((ROWS, H), 7.0)
        k.wait_kernel[(PROGRAMS,)](
            bsz, out, result, extra, counter, counter[1:], done, expired, timeout_ns,
            H=H, BLOCK=64, PROGRAMS=PROGRAMS, POSTERS=PROGRAMS, EXTRA=add,
        )  # fmt: skip
        assert (out[n:] == 7).all()
        return out[:n]

    assert torch.allclose(wait(10**9, True), (result + extra)[:n])
    assert torch.equal(wait(10**9, False), result[:n])
    done[0] = 7  # number 3 failed
    assert torch.equal(wait(10**9, True), extra[:n])
    assert int(expired) == 0
    done[0] = 4  # number 3 does not come
    assert not wait(-1, False).any()
    assert int(expired) == 3


def _load(address):  # type: ignore[no-untyped-def]
    return tl.load(address)  # type: ignore[name-defined]  # noqa: F821


def _store(address, value):  # type: ignore[no-untyped-def]
    tl.store(address, value)  # type: ignore[name-defined]  # noqa: F821


def _zero(value):  # type: ignore[no-untyped-def]
    return value * 0
