"""Kernels in CUDA C++ for few rows: which layers they serve, and on a GPU shapes beside test_experts_tiled.py's."""

from __future__ import annotations

import pytest
import torch

from engine.architectures.parts.mlp import Activation
from engine.errors import EngineError
from engine.experts.gpu import few_rows, nvrtc, products
from engine.experts.gpu.compute import GpuCompute
from engine.experts.gpu.layout import ExpertLayout, Sizes
from engine.weights.tiled.layout import Matrix, has_tiles, packed_formats
from tests.gpu.test_experts_kernels import tables
from tests.native.expert_layers import BF16, E, K, Layer, batch, error, expected, lora, put

HOPPER_BYTES = 227 * 1024
QWEN3, GPT_OSS, DEEPSEEK = Sizes(128, 8, 2048, 768), Sizes(128, 4, 2880, 2880), Sizes(256, 8, 7168, 2048)
LLAMA4 = Sizes(16, 1, 5120, 8192)
LONG = [
    (("Q4_0", "Q4_0", "Q8_0"), 2880, 128, None),
    (("Q4_0", "Q4_0", "Q8_0"), 2880, 128, 7.0),
    (("MXFP4", "MXFP4", "MXFP4"), 2880, 320, 7.0),
    (("Q4_K", "Q4_K", "Q6_K"), 2304, 256, None),
    (("F8_E4M3", "F8_E4M3", "Q4_1"), 4096, 128, 7.0),
    (("F8_E4M3", "Q5_K", "F8_E4M3"), 512, 256, None),
]
FORMATS = [form for form in packed_formats() if has_tiles(form)]


def sources(
    sizes: Sizes, form: str, limit: int = HOPPER_BYTES, rank: int = 0
) -> tuple[few_rows.Source, few_rows.Source] | None:
    layout = ExpertLayout.of(sizes, (form,) * 3, 2)
    return few_rows.sources(sizes, layout, layout.num_bytes, Activation(), False, rank, False, limit)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("sizes", [QWEN3, LLAMA4], ids=["qwen3", "llama4"])
def test_two_blocks_fit_a_multiprocessor(sizes: Sizes, form: str) -> None:
    made, with_lora = sources(sizes, form), sources(sizes, form, rank=64)
    assert made is not None and with_lora is not None
    for source, width in zip(made + with_lora, (sizes.inner, sizes.hidden) * 2, strict=True):
        assert 2 * (source.shared_bytes + 1024) <= HOPPER_BYTES + 1024
        assert width % source.outputs == 0 and source.threads % 32 == 0 and source.threads <= 1024
        assert f"constexpr int SHARED = {source.shared_bytes};" in source.text


def test_fewer_outputs_where_more_do_not_fit() -> None:
    made, smaller = sources(LLAMA4, "f8"), sources(QWEN3, "f8")
    assert made and smaller and made[0].outputs == 8 < smaller[0].outputs == 16
    assert sources(DEEPSEEK, "f8") is None and sources(DEEPSEEK, "k4") is not None


def test_what_is_not_served() -> None:
    """Five bits of 2880 values are no whole tiles; what has bf16 beside it, or lies at odd addresses."""
    assert few_rows.serves(Matrix("mx4", 2880, 2880)) and sources(GPT_OSS, "mx4") is not None
    assert not few_rows.serves(Matrix("i5", 2880, 2880)) and sources(GPT_OSS, "i5") is None
    assert not few_rows.serves(Matrix("bf16", 2048, 768))
    layout = ExpertLayout.of(QWEN3, ("k4",) * 3, 2)
    assert few_rows.sources(QWEN3, layout, layout.num_bytes + 8, Activation(), False, 0, False, HOPPER_BYTES) is None


def test_a_device_without_the_kernels() -> None:
    layout = ExpertLayout.of(QWEN3, ("k4",) * 3, 2)
    made = few_rows.FewRows(QWEN3, torch.device("cpu"))
    assert made.kernels(layout, few_rows.Elementwise(), layout.num_bytes, 0, BF16) is None
    with pytest.raises(EngineError, match="float16: bfloat16 and float32"):
        made.kernels(layout, few_rows.Elementwise(), layout.num_bytes, 0, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("result", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("with_lora", [False, True], ids=["base", "adapters"])
@pytest.mark.parametrize(
    "kinds, hidden, inner, limit", LONG, ids=lambda v: "-".join(v) if isinstance(v, tuple) else str(v)
)
def test_long_rows_in_a_graph(
    kinds: tuple[str, str, str],
    hidden: int,
    inner: int,
    limit: float | None,
    with_lora: bool,
    result: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of more lines than a warp has lanes; one graph for fewer rows, other experts and adapters; biases."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() < few_rows.HOPPER:
        pytest.skip("no Hopper GPU here")
    monkeypatch.setattr(products, "CUDA_CHOICE_ROWS", 99.0)
    layer = Layer(*kinds, hidden=hidden, inner=inner, biased=limit is not None, limit=limit)
    sizes = Sizes(E, K, hidden, inner)
    experts = GpuCompute(sizes, BF16, device, max_rows=6, max_rank=32, max_slots=7)
    adapters = {1: lora(4, 11, BF16, hidden, inner), 2: lora(32, 12, BF16, hidden, inner)} if with_lora else {}
    table, slots, _keep = tables(layer, adapters, BF16, list(range(E)), device, sizes)
    b = batch(4, BF16, hidden=hidden)
    for name in ("bsz", "ids", "weights", "slots", "hidden", "out"):
        setattr(b, name, getattr(b, name).to(device))
    out = b.out.to(result)
    experts.run(b, table, slots, 0, out, lora=with_lora)  # compiles
    assert len(experts._few_rows._kernels) == 1 and None not in experts._few_rows._kernels.values()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.run(b, table, slots, 0, out, lora=with_lora)
    for rows in (4, 1, 3, 0):
        want = batch(rows, BF16, seed=rows, slots=[2, 0, 1] if with_lora else None, hidden=hidden)
        put(b, want)
        out.fill_(7)
        graph.replay()
        if rows:
            assert error(out[:rows].cpu(), expected(layer, want, adapters)) < 0.025
        assert (out[rows:] == 7).all()


@pytest.mark.gpu
def test_the_compiler_says_what_is_wrong() -> None:
    with pytest.raises(EngineError, match="nonsense"):
        nvrtc.compiled("nonsense;", "broken", "sm_90")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVRTC")
def test_without_a_compiler() -> None:
    with pytest.raises(EngineError, match="without NVRTC"):
        nvrtc.compiled("", "empty", "sm_90")
