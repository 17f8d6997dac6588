"""`dtype`: which of activations, unquantised weights and KV cache are bf16, and what that may change."""

from __future__ import annotations

import pytest
import torch

from benchmarks.accuracy.table import recording
from engine.config import EngineConfig
from engine.linear.embedding import TableEmbedding
from engine.linear.native import NativeLinear
from engine.memory.items import Kind
from engine.model.native_executor import NativeExecutor
from engine.planning.plan import plan_engine
from engine.planning.precision import Precision
from native import available
from testing.harness import Harness, full_logits
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.engine.family import Family
from tests.engine.parity import prompts

BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.skipif(not available()[0], reason="the native kernels are not built here")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(4, num_hidden_layers=2).bfloat16(), folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Precision(F32, BF16, BF16)),
        ({"dtype": "bfloat16"}, Precision(BF16, BF16, BF16)),
        ({"dtype": "float32"}, Precision(F32, F32, F32)),
        ({"rules": "reference"}, Precision(BF16, BF16, BF16)),
        ({"attention_backend": "reference"}, Precision(BF16, BF16, BF16)),
        ({"linear_backend": "reference"}, Precision(BF16, BF16, BF16)),
        ({"expert_backend": "reference"}, Precision(BF16, BF16, BF16)),
    ],
    ids=str,
)
def test_what_a_setting_means(path, settings, expected):
    plan = plan_engine(EngineConfig(model=str(path), device="cpu", kv_cache_tokens=256, **settings))
    assert plan.precision == expected
    (kv,) = [item.num_bytes for item in plan.memory.items if item.kind is Kind.KV_CACHE]
    assert kv == 256 * plan.source.config.kv_bytes_per_token(expected.kv.itemsize)


def test_auto_keeps_weights_and_cache_small(path):
    engine = Harness(path, rules=None, dtype="auto", pack_cache="off")
    model, config = engine.core.runner.model, engine.plan.source.config
    assert isinstance(engine.core.runner.executor, NativeExecutor)
    assert {linear.format for n, linear in model.linears.items() if isinstance(linear, NativeLinear)} == {"bf16", "f32"}
    assert {linear.format for n, linear in model.linears.items() if not n.endswith("mlp.gate")} == {"bf16"}
    expert_weights = config.num_hidden_layers * config.num_experts * 3 * config.hidden_size
    held = sum(backend.num_bytes for backend in model.expert_backends)
    assert held < 3 * expert_weights * config.moe_intermediate_size  # 2 bytes each, and padding
    assert isinstance(model.embedding, TableEmbedding)
    assert model.embedding.table.dtype == BF16 and model.dtype == F32
    assert [b.kv_bytes_per_token for b in model.attention_backends] == [config.kv_bytes_per_token(2)]
    assert {b.hidden.dtype for b in model.expert_buffers} == {F32}
    engine.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_a_quantised_embedding_stays_as_it_is(tmp_path, tied, dtype):
    """Looked up exactly, and as small as in the file; one copy of it where the head is tied."""
    held = save_gguf(tiny_model(3, tie_word_embeddings=tied), tmp_path / "m.gguf", "Q8_0", "Q8_0")
    engine = Harness(tmp_path / "m.gguf", rules=None, dtype=dtype, pack_cache="off")
    model, weight = engine.core.runner.model, held.model.embed_tokens.weight
    assert torch.equal(model.embedding(torch.arange(weight.shape[0])), weight)
    assert model.embedding.num_bytes == (0 if tied else weight.numel() * 34 // 32)
    engine.close()


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), scale=0.1)


NAMES = [None, "adapter-0", "adapter-1", "adapter-2"]


def test_adapters_are_bounded(family):
    """One batch of several adapters, some with MLPs of their own: no more is lost than the base model loses."""
    engine = family.engine(rules=None, dtype="auto", pack_cache="off", max_num_batched_tokens=64)
    asked = prompts(8, [30, 25, 40, 20])
    with recording(engine) as logits:
        engine.generate(asked, NAMES, max_tokens=4)
    median: dict[str | None, float] = {}
    for rid, name in zip(engine.results, NAMES, strict=True):
        tokens = engine.prompts[rid] + engine.results[rid].tokens
        want = full_logits(family.merged[name], tokens)
        got = torch.stack([logits[rid, i] for i in range(len(tokens) - 1)])
        median[name] = float(((got - want[:-1]).abs().mean(-1) / want[:-1].abs().mean(-1)).median())
    engine.close()
    assert median[None] < 0.02 and max(median.values()) < 1.5 * median[None], median


def test_neighbours_change_no_bit(family):
    """Prompts alone, and together in one step, adapters or not."""
    asked = prompts(9, [30, 25, 40, 20])
    settings = {"rules": None, "dtype": "auto", "pack_cache": "off", "prefix_caching": False}
    names = [None, "adapter-0", "adapter-2", "adapter-0"]  # without MLPs of their own: those run in torch
    engine = family.engine(**settings)
    with recording(engine) as together:
        engine.generate(asked, names, max_tokens=3)
    engine.close()
    for i, (prompt, name) in enumerate(zip(asked, names, strict=True)):
        engine = family.engine(**settings, max_num_batched_tokens=16, max_num_seqs=4)
        with recording(engine) as alone:
            engine.generate([prompt], [name], max_tokens=3)
        assert len(alone) == len(prompt) + 2
        for (_, position), row in alone.items():
            assert torch.equal(row, together[f"r{i}", position])
        engine.close()
