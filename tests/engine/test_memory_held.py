"""The memory plan against what a loaded engine really holds: nothing large is left out."""

from __future__ import annotations

import pytest

from engine.linear.native import NativeLinear
from engine.linear.reference import ReferenceLinear
from engine.lora.budget import AdapterSize
from engine.memory.items import Kind
from engine.messages import LoadAdapter, Reply
from native import available
from testing.harness import Harness
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import tiny_model
from tests.engine.family import Family

NATIVE = pytest.mark.skipif(not available()[0], reason="the native kernels are not built here")
SHAPE = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "vocab_size": 3000, "head_dim": 64}
LOOSE, PAGES = 1.02, 1 << 16  # pages and panels that are not filled
CASES = [
    pytest.param({"rules": "reference"}, "Q8_0", False, id="reference"),
    pytest.param({"rules": "reference", "dtype": "bfloat16"}, "Q8_0", True, id="reference-tied"),
    *(
        pytest.param({"rules": None, "dtype": "auto", **more}, type, tied, marks=NATIVE, id=name)
        for name, type, tied, more in (
            ("native", "Q8_0", False, {}),
            ("native-tied", "Q8_0", True, {}),
            ("native-k", "Q4_K", True, {}),
            ("native-blocks", "IQ1_S", False, {}),
            ("native-f16-tied", "F16", True, {}),
            ("native-plain", "F32", False, {}),
            ("native-bf16-tied", "BF16", True, {}),
            ("native-float32-tied", "F32", True, {"dtype": "float32"}),
            ("native-int8-tied", "BF16", True, {"quantise": "int8"}),
        )
    ),
]


def planned_bytes(engine: Harness, kind: Kind) -> int:
    return sum(i.num_bytes for i in engine.plan.memory.items if i.kind is kind)


@pytest.mark.parametrize(("settings", "type", "tied"), CASES)
def test_weights_cache_and_buffers_are_counted(tmp_path, settings, type, tied):
    save_gguf(tiny_model(1, tie_word_embeddings=tied, **SHAPE), tmp_path / "m.gguf", type, type)
    engine = Harness(tmp_path / "m.gguf", pack_cache="off", **settings)
    model = engine.core.runner.model
    linears = [*model.linears.values(), model.lm_head]
    held = model.embedding.num_bytes
    for linear in linears:
        if isinstance(linear, NativeLinear):
            held += linear.num_bytes
        else:
            assert isinstance(linear, ReferenceLinear)
            held += linear.weight.numel() * linear.weight.element_size()
    planned = planned_bytes(engine, Kind.WEIGHTS)
    assert held <= LOOSE * planned + PAGES and planned <= LOOSE * held + 20 * PAGES
    if settings["rules"] is None:
        experts = sum(backend.num_bytes for backend in model.expert_backends)
        assert experts <= LOOSE * planned_bytes(engine, Kind.EXPERTS) + PAGES
        cache = sum(backend.cache_bytes for backend in model.attention_backends)
        # one block more: padding rows write there
        spare = 16 * sum(backend.kv_bytes_per_token for backend in model.attention_backends)
        assert planned_bytes(engine, Kind.KV_CACHE) == cache - spare
    buffers = sum(
        t.numel() * t.element_size() for b in model.expert_buffers for t in (b.ids, b.weights, b.slots, b.hidden, b.out)
    )
    memory = engine.plan.memory
    assert buffers <= memory.step_bytes(memory.devices[0])
    engine.close()


def test_an_adapter_that_never_fits_is_refused(tmp_path):
    family = Family(tmp_path, num_experts=4)
    engine = Harness(family.model_path)
    for name in ("adapter-0", "adapter-1"):
        engine.adapter(name, family.paths[name])
    adapters, budget = engine.core.adapters, engine.plan.adapter_budget
    assert budget.limit_bytes == engine.plan.memory.adapter_bytes > 1 << 20
    weights = [adapters.weights(adapters.resolve(name)) for name in ("adapter-0", "adapter-1")]
    sizes = [AdapterSize(each.num_bytes, each.slot_bytes(budget.element_bytes)) for each in weights]
    needed = budget.needed(sizes[1:], sizes)  # the larger one in host memory, copies of both in slots
    engine.close()
    engine = Harness(family.model_path, adapter_memory=str(needed))
    for name in ("adapter-0", "adapter-1"):
        engine.adapter(name, family.paths[name])
    engine.core.handle(LoadAdapter(call_id=5, name="adapter-2", path=str(family.paths["adapter-2"])))
    engine.until(lambda: any(isinstance(message, Reply) for message in engine.messages))
    (reply,) = [message for message in engine.messages if isinstance(message, Reply)]
    assert not reply.ok and reply.status == 400 and "--adapter-memory" in str(reply.error)
    assert engine.generate([[1, 2, 3]] * 2, ["adapter-0", "adapter-1"], max_tokens=2)
    engine.close()
