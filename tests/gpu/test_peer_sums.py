"""Sums over the memory of other ranks: what one rank sends and makes of what has come, and two ranks on one GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.ranks.peers.kernels import sum_kernel
from engine.ranks.peers.sums import BLOCKS, WORDS, PeerSums
from tests.gpu.conftest import INTERPRETED

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [F32, BF16] if torch.cuda.is_available() else [F32]  # the interpreter has no bf16


def memory(ranks: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(PeerSums.size_of(ranks), dtype=torch.int64, device=device) for _ in range(ranks)]


def part(cells: torch.Tensor, ranks: int, n: int, source: int) -> torch.Tensor:
    """Of a rank's cells, those that `source` writes for sum number n."""
    return cells.view(2, ranks, BLOCKS * WORDS)[n % 2, source]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, WORDS), (2, 514)], ids=str)
def test_one_rank_of_three(shape: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device) -> None:
    """The others' parts are written by hand."""
    cells = memory(3, kernel_device)
    sums = PeerSums(1, cells)
    for n in range(1, 5):
        given = [torch.randn(shape).to(dtype) for _ in range(3)]
        words = [x.view(-1).view(torch.int32).to(kernel_device).long() & 0xFFFFFFFF for x in given]
        for source in (0, 2):
            part(cells[1], 3, n, source)[: len(words[source])] = n << 32 | words[source]
        x = given[1].to(kernel_device, copy=True)
        out = sums.sum(x, 4)
        assert out.data_ptr() == x.data_ptr()
        wanted = (given[0].float() + given[1].float() + given[2].float()).to(dtype)
        torch.testing.assert_close(out.cpu(), wanted, rtol=0, atol=0)
        for other in (0, 2):
            assert torch.equal(part(cells[other], 3, n, 1)[: len(words[1])], n << 32 | words[1])
            assert not part(cells[other], 3, n, 1)[len(words[1]) :].any()


@pytest.mark.gpu
def test_who_does_not_come_makes_it_nan(kernel_device: torch.device) -> None:
    cells = memory(2, kernel_device)
    sums = PeerSums(0, cells)
    x = torch.ones(2, WORDS, device=kernel_device)
    part(cells[0], 2, 1, 1)[:WORDS] = 1 << 32 | torch.ones(1).view(torch.int32).long()
    assert not sums.missed
    got = sums.sum(x, 2)
    assert (got[0] == 2).all() and got[1].isnan().all() and sums.missed


@pytest.mark.gpu
def test_nobody_waits_after_one_has_not_come(kernel_device: torch.device) -> None:
    """However often the next sums would look."""
    sums = PeerSums(0, memory(2, kernel_device))
    sums.sum(torch.ones(8, device=kernel_device), 1)
    later = [sums.sum(torch.ones(8, device=kernel_device)) for _ in range(4)]
    assert all(x.isnan().all() for x in later) and sums.missed


@pytest.mark.gpu
def test_the_host_ends_sums_that_wait(kernel_device: torch.device) -> None:
    sums = PeerSums(0, memory(2, kernel_device))
    sums.stop()
    got = sums.sum(torch.ones(8, device=kernel_device))
    assert got.isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="two ranks at once need a GPU's streams")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_two_ranks_in_graphs(dtype: torch.dtype) -> None:
    """On one GPU, a stream each; an odd number of sums in a graph, so that pages alternate between replays."""
    device = torch.device("cuda", 0)
    cells = memory(2, device)
    ranks = [PeerSums(rank, cells) for rank in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    given = [[torch.zeros(rows, 2048, dtype=dtype, device=device) for rows in (1, 60, 7)] for _ in range(2)]
    outs = [[torch.zeros_like(x) for x in each] for each in given]
    graphs = []
    for rank, stream in enumerate(streams):
        ranks[rank].prepare()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for x, out in zip(given[rank], outs[rank], strict=True):
                out.copy_(x)
                ranks[rank].sum(out)
        graphs.append(graph)
    for seed in range(20):
        torch.manual_seed(seed)
        for each in given:
            for x in each:
                x.copy_(torch.randn(x.shape, device=device))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for a, b, mine, theirs in zip(*given, *outs, strict=True):
            assert torch.equal(mine, (a.float() + b.float()).to(dtype)) and torch.equal(mine, theirs)


@pytest.mark.skipif(INTERPRETED, reason="it is not compiled")
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("wide", [False, True])
def test_cells_are_written_and_read_past_caches(ranks: int, wide: bool) -> None:
    """Compiled for a Hopper GPU, whatever is here: 8 bytes at once, each store to a rank written through."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants = {"RANK": 0, "SIZE": ranks, "CAPACITY": BLOCKS * WORDS, "BLOCK": WORDS, "WIDE": wide}
    types = {"x": "*i32", "table": "*i64", "counts": "*i32", "missed": "*i32", "told": "*i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in sum_kernel.arg_names}
    source = ASTSource(sum_kernel, signature, {(sum_kernel.arg_names.index(n),): v for n, v in constants.items()})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    ptx = made.asm["ptx"]
    assert ptx.count("st.global.wt.b64") == 4 * (ranks - 1) and "st.global.b64" not in ptx
    assert ptx.count("ld.volatile.global.b64") == 2 * 4 * (ranks - 1)  # the first look and the others
