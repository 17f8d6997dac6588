"""Latent attention by flashinfer: equal to plain torch over drawn batches, whole models with and without graphs,
adapters mixed and alone, a prefix from the cache."""

from __future__ import annotations

import random
from array import array
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.accuracy.table import MIXES, Files, measure
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.rotation import Rotation
from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.attention.flashinfer import fa3_limit
from engine.attention.flashinfer_latent import FlashInferLatentAttention
from engine.attention.latent import ReferenceLatentAttention
from engine.linear.latent import TorchLatentUp
from testing.harness import greedy
from testing.models.tiny import tiny_model
from tests.engine.family import Family
from tests.engine.parity import prompts
from tests.gpu.test_serving import GPU, agree

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32
BOUND = 0.01  # mean|d| / mean|ref|; of grouped-query attention 0.006: sums of a part of a sequence are bf16 here
BLOCKS, LAYERS = 160, [0, 2]
SHAPE = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "hidden_size": 128,
    "num_attention_heads": 4, "q_lora_rank": 64,
}  # fmt: skip
# Every expert of every token: a random router's choice would flip between bf16 and float32, and tokens with it.
SURE = {"num_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")


def spec(heads: int) -> Latent:
    return Latent(heads, None, 512, 128, 128, Rotation(64, 1e4, 2048))


class Sequences:
    """Sequences that grow from step to step, in blocks of any order."""

    def __init__(self, count: int, seed: int) -> None:
        self.random = random.Random(seed)
        free = list(range(BLOCKS - 1))  # the last is the scratch block
        self.random.shuffle(free)
        each = len(free) // count
        self.tables = [array("i", free[i * each : (i + 1) * each]) for i in range(count)]
        self.lengths = [0] * count

    def step(self, tokens: list[int], device: torch.device, pad: int = 0) -> BatchLayout:
        """So many more of each; `pad`: rows of the scratch block, which make it a padded step."""
        starts, positions, slots, lengths, tables = [0], [], [], [], []
        for row, count in enumerate(tokens):
            if count:
                begin, table = self.lengths[row], self.tables[row]
                self.lengths[row] = begin + count
                starts.append(starts[-1] + count)
                lengths.append(begin + count)
                tables.append(table)
                positions += range(begin, begin + count)
                slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(begin, begin + count)]
        for _ in range(pad):
            starts.append(starts[-1] + 1)
            lengths.append(1)
            tables.append(array("i", [BLOCKS - 1]))
            positions.append(0)
            slots.append((BLOCKS - 1) * BLOCK_SIZE)
        at = [torch.tensor(values, dtype=torch.int64, device=device) for values in (positions, slots)]
        return BatchLayout(starts, lengths, tables, at[0], at[1], pad > 0)


def both(heads: int, prefill: str) -> tuple[Any, Any]:
    device = torch.device("cuda")
    if prefill == "fa3" and (why := fa3_limit(torch.cuda.get_device_capability(device), BF16)):
        pytest.skip(why)
    ours = FlashInferLatentAttention(
        spec(heads), LAYERS, BLOCKS, BF16, device, 8, BLOCKS, prefill=prefill, expand_from=None
    )
    return ours, ReferenceLatentAttention(spec(heads), LAYERS, BLOCKS, F32, device)


def qk(tokens: int, heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, n, 576, generator=g).to("cuda", BF16) for n in (heads, 1))
    return q * 0.6, k  # of scores with a spread of one


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).abs().mean() / want.abs().mean())


@pytest.mark.parametrize("prefill", ["fa2", "fa3"])
@pytest.mark.parametrize("heads", [4, 16, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_plain_torch(heads: int, prefill: str, seed: int) -> None:
    """Chunks, decode rows behind them and both at once; the oracle is float32 over the same bf16 rows."""
    ours, theirs = both(heads, prefill)
    rows = Sequences(4, seed)
    draw = rows.random.randint
    steps = [
        [draw(1, 200), draw(0, 40), draw(1, 17), 0],
        [1, draw(1, 90), 1, draw(1, 100)],
        [draw(1, 3), 1, draw(0, 30), 1],
        [1, 1, 1, 1],
    ]
    for number, tokens in enumerate(steps):
        step = rows.step(tokens, torch.device("cuda"))
        q, k = qk(step.num_tokens, heads, number)
        ours.plan(step)
        theirs.plan(step)
        for layer in LAYERS:
            want = theirs.forward(layer, q.float(), k.float(), k.float()[..., :512])
            assert error(ours.forward(layer, q, k, k[..., :512]), want) < BOUND


def test_a_step_is_cut_where_a_wrapper_is_full(monkeypatch) -> None:
    monkeypatch.setattr("engine.attention.flashinfer_latent._TILES", 16)  # 64 tokens of 16 heads
    ours, theirs = both(16, "auto")
    rows = Sequences(2, 5)
    for number, tokens in enumerate(([150, 30], [1, 100])):
        step = rows.step(tokens, torch.device("cuda"))
        q, k = qk(step.num_tokens, 16, number)
        ours.plan(step)
        theirs.plan(step)
        assert len(ours._planned[0]) > 1
        want = theirs.forward(0, q.float(), k.float(), k.float()[..., :512])
        assert error(ours.forward(0, q, k, k[..., :512]), want) < BOUND


@pytest.mark.parametrize("prefill", ["fa2", "fa3"])
@pytest.mark.parametrize(("heads", "nope", "value"), [(128, 128, 128), (20, 192, 256), (16, 64, 128)])
def test_long_chunks_are_expanded(monkeypatch, heads: int, nope: int, value: int, prefill: str) -> None:
    """In pieces of 64 positions, behind a part of the sequence and before shorter rows; the oracle is float32."""
    monkeypatch.setattr("engine.attention.flashinfer_expanded.PIECE", 64)
    device, of = torch.device("cuda"), Latent(heads, None, 512, nope, value, Rotation(64, 1e4, 2048))
    if prefill == "fa3" and (why := fa3_limit(torch.cuda.get_device_capability(device), BF16)):
        pytest.skip(why)
    ours = FlashInferLatentAttention(of, [0], BLOCKS, BF16, device, 8, BLOCKS, prefill=prefill, expand_from=20)
    theirs = ReferenceLatentAttention(of, [0], BLOCKS, F32, device)
    g = torch.Generator().manual_seed(nope)
    weight = torch.randn(heads, nope + value, 512, generator=g).cuda() / 16
    up, exact = TorchLatentUp(weight.to(BF16), nope), TorchLatentUp(weight.to(BF16).float(), nope)
    rows = Sequences(3, 3)
    for tokens in ([300, 7, 40], [20, 1, 150], [1, 64, 19]):
        step = rows.step(tokens, device)
        q = torch.randn(step.num_tokens, heads, nope + 64, generator=g).to(device, BF16) * 0.3
        kept = torch.randn(step.num_tokens, 1, 576, generator=g).to(device, BF16)
        ours.plan(step)
        theirs.plan(step)
        want = theirs.forward(
            0,
            torch.cat((exact.absorb(q[..., :nope].float(), None), q[..., nope:].float()), -1),
            kept.float(),
            kept.float()[..., :512],
        )
        want, got = exact.values(want, None), q.new_empty(step.num_tokens, heads, value)
        ours.keep(0, kept)
        assert len(ours.longs) == sum(count >= 20 for count in tokens)
        for number, span in enumerate(ours.longs):
            got[span] = ours.expanded(0, number, q[span], partial(up.expand, slot=0))
        for number, span in enumerate(ours.shorts):
            asked = torch.cat((up.absorb(q[span][..., :nope], None), q[span][..., nope:]), -1)
            got[span] = up.values(ours.absorbed(0, number, asked), None)
        assert error(got, want) < 2 * BOUND  # keys and values are rounded, too


def test_a_long_prompt_is_expanded_adapters_and_all(tmp_path_factory) -> None:
    sizes = SHAPE | SURE | {"qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 2048}
    family = Family(tmp_path_factory.mktemp("long"), family="deepseek_v3", **sizes)
    engine = family.engine(**GPU | {"max_num_seqs": 4, "max_num_batched_tokens": 1024})
    assert any("expanded from" in note for note in engine.runner.notes), engine.runner.notes
    asked = prompts(1, [700, 5, 900])
    found = engine.generate(asked, ["adapter-1", None, None], max_tokens=12)
    for name, prompt, tokens in zip(("adapter-1", None, None), asked, found, strict=True):
        assert agree(family.merged[name], prompt, greedy(family.merged[name], prompt, 12)[0], tokens)
    engine.close()


@pytest.mark.parametrize("prefill", ["fa2", "fa3"])
@pytest.mark.parametrize("heads", [4, 128])
def test_a_graph_follows_its_plan(heads: int, prefill: str) -> None:
    """Replayed behind other contents, lengths and blocks, with rows that do not count."""
    ours, theirs = both(heads, prefill)
    device, rows = torch.device("cuda"), Sequences(3, 9)
    first = rows.step([100, 7, 40], device)
    q, k = qk(first.num_tokens, heads, 0)
    for each, dtype in ((ours, BF16), (theirs, F32)):
        each.plan(first)
        each.forward(0, q.to(dtype), k.to(dtype), k.to(dtype)[..., :512])
    step = rows.step([1, 1, 1], device, pad=1)
    slots = step.slot_mapping.clone()
    q, k = qk(4, heads, 1)
    step.slot_mapping = slots
    ours.plan(step)
    ours.forward(0, q, k, k[..., :512])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours.forward(0, q, k, k[..., :512])
    for number in range(2, 12):
        following = rows.step([1, 1, 1], device, pad=1) if number > 2 else step
        slots.copy_(following.slot_mapping)
        following.slot_mapping = slots
        for mine, values in zip((q, k), qk(4, heads, number), strict=True):
            mine.copy_(values)
        ours.plan(following)
        graph.replay()
        theirs.plan(following)
        want = theirs.forward(0, q.float(), k.float(), k.float()[..., :512])
        assert error(out[:3], want[:3]) < BOUND


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", LATENT_FAMILIES)
def test_bf16_error_is_bounded(tmp_path_factory, name, mix, graphs) -> None:
    folder = tmp_path_factory.mktemp("files")
    runs = [
        measure(Files(folder, "BF16", seed, family=name, **SHAPE), mix, seed, **GPU, cuda_graphs=graphs)
        for seed in (0, 1, 2)
    ]
    ours, theirs = sum(r.error for r in runs), sum(r.transformers for r in runs)
    assert ours <= 1.25 * theirs, f"{ours / theirs:.2f} times transformers' error"


@pytest.fixture(scope="module", params=LATENT_FAMILIES)
def family(tmp_path_factory, request) -> Family:
    return Family(tmp_path_factory.mktemp("family"), family=request.param, **SHAPE, **SURE)


NAMES: list[str | None] = [None, "adapter-0", "adapter-2", None, "adapter-1"]


def test_adapters_mixed_and_alone_with_and_without_graphs(family) -> None:
    asked = prompts(1, [3, 9, 20, 31, 14])
    found: list[list[list[int]]] = []
    for graphs in ("auto", "padded", "off"):
        engine = family.engine(**GPU | {"max_num_seqs": 6, "max_num_batched_tokens": 64}, cuda_graphs=graphs)
        notes = engine.runner.notes
        assert any("latent attention: flashinfer" in note for note in notes), notes
        assert graphs != "auto" or any("CUDA graphs: 4 sizes up to 6 rows" in note for note in notes), notes
        found.append(engine.generate(asked, NAMES, max_tokens=24))
        if graphs == "auto":
            alone = [engine.generate([p], [n], max_tokens=24)[0] for p, n in zip(asked, NAMES, strict=True)]
            found.append(alone)  # their prompts are in the prefix cache by now
        engine.close()
    for name, prompt, *each in zip(NAMES, asked, *found, strict=True):
        expected, _ = greedy(family.merged[name], prompt, 24)
        for tokens in each:
            assert agree(family.merged[name], prompt, expected, tokens)


def test_a_prefix_from_the_cache_changes_no_token(family) -> None:
    engine = family.engine(**GPU | {"max_num_seqs": 6, "max_num_batched_tokens": 64})
    start, ends = prompts(3, [70])[0], prompts(4, [5, 12])
    for end in (ends[0], *ends):
        asked = start + end
        (tokens,) = engine.generate([asked], max_tokens=16)
        assert agree(family.base, asked, greedy(family.base, asked, 16)[0], tokens)
    assert engine.core.scheduler.stats()["prefix_hit_tokens"] >= 2 * 64
    engine.close()


def test_other_sizes_are_computed_in_torch_and_that_is_said(tmp_path_factory) -> None:
    family = Family(tmp_path_factory.mktemp("narrow"), family="deepseek_v3", **(SHAPE | SURE | {"kv_lora_rank": 64}))
    engine = family.engine(**GPU | {"max_num_seqs": 6, "max_num_batched_tokens": 64})
    lines = engine.plan.placement.lines
    assert any("attentions run in torch" in line and "512 + 64" in line for line in lines), lines
    asked = prompts(1, [9])[0]
    for name in (None, "adapter-1"):
        (tokens,) = engine.generate([asked], [name], max_tokens=12)
        assert agree(family.merged[name], asked, greedy(family.merged[name], asked, 12)[0], tokens)
    engine.close()


def test_the_shape_makes_a_model_that_flashinfer_takes() -> None:
    config = tiny_model(family="deepseek_v3", **SHAPE).config
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)
