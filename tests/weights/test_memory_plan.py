"""The memory plan: what is counted, against which limit, what it refuses and what it advises."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.architectures.config import ModelConfig
from engine.errors import MemoryPlanError, UserError
from engine.memory.items import Item, Kind
from engine.memory.limits import Memory, cpu_memory
from engine.memory.plan import MemoryPlan
from engine.units import format_bytes, parse_bytes
from engine.weights.open import open_model
from engine.weights.store import ExpertStore, WeightSource
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.weights.planned import plan, size

GIB, MIB = 1 << 30, 1 << 20
WEIGHTS = 8 * 3 * 64 * 64  # of one layer's experts


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    """Two layers; one token's KV is 2 * 2 * 2 * 32 numbers."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    save_gguf(tiny_model(0, max_position_embeddings=40960), path, expert_type="Q8_0", dense_type="Q8_0")
    return open_model(str(path))


@pytest.mark.parametrize(
    ("backend", "method", "expected"),
    [
        ("reference", "auto", 2 * WEIGHTS),
        ("kt", "AMXBF16", 2 * WEIGHTS),
        ("kt", "AMXInt8", 1.01 * WEIGHTS),
        ("kt", "AMXInt4", 0.51 * WEIGHTS),
        ("kt", "GGUF", WEIGHTS * 34 / 32),
        ("kt", "auto", 2 * WEIGHTS),
        ("native", "auto", WEIGHTS * 34 / 32),
        ("gpu", "auto", 2 * WEIGHTS),
    ],
)
def test_experts_by_backend(source: WeightSource, backend: str, method: str, expected: float) -> None:
    made = plan(source, backend=backend, kt_method=method)
    assert size(made, Kind.EXPERTS) == pytest.approx(2 * expected, rel=1e-4)
    assert f"2 layers on {backend}" in made.render()


def test_its_message_has_every_item_once(source: WeightSource) -> None:
    made = plan(source)
    sent = made.message()
    assert [each.device for each in sent] == [device.name for device in made.devices]
    for each, device in zip(sent, made.devices, strict=True):
        assert (each.limit_bytes, each.free_bytes) == (device.limit_bytes, device.free_bytes)
        assert sum(item.num_bytes for item in each.items) == made.needed(device)
    assert sum(len(each.items) for each in sent) == len(made.items)


@pytest.mark.parametrize(
    "type",
    ["Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_XS", "IQ2_XS", "IQ1_S", "F16"],
)
def test_native_and_kt_sizes(tmp_path: Path, type: str) -> None:
    """What the plan says is what the kernels' own arithmetic says."""
    native = importlib.import_module("native._native")
    model = tiny_model(0, hidden_size=512, moe_intermediate_size=256, num_experts=2, num_hidden_layers=1)
    save_gguf(model, tmp_path / "m.gguf", expert_type=type)
    made = open_model(str(tmp_path / "m.gguf"))
    form = native.format_of(type) if native.has_source_type(type) else "bf16"
    packed = 2 * (2 * native.packed_size(form, 256, 512) + native.packed_size(form, 512, 256))
    assert size(plan(made, backend="native"), Kind.EXPERTS) == pytest.approx(packed, rel=0.005)  # panels are padded
    kt = size(plan(made, backend="kt"), Kind.EXPERTS)
    blocks = type in ("Q8_0", "Q5_0", "Q4_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
    assert kt == (made.experts(0).num_bytes if blocks else 2 * 3 * 512 * 256 * 2)


def test_dequantised_types_are_named_with_their_cost(tmp_path: Path) -> None:
    model = tiny_model(0, hidden_size=512, moe_intermediate_size=256, num_experts=2, num_hidden_layers=2)
    save_gguf(model, tmp_path / "m.gguf", expert_type="IQ1_S", dense_type="Q8_0")
    made = open_model(str(tmp_path / "m.gguf"))
    weights = 2 * 2 * 3 * 512 * 256
    (note,) = [n for n in plan(made, backend="native", linear_backend="native").notes if "dequantised" in n]
    assert note.startswith("6 tensors of type IQ1_S are") and note in plan(made, backend="native").render()
    assert f"{format_bytes(weights * 2 - weights * 50 // 256)} more" in note
    as_int8 = plan(made, backend="native", quantise="int8")
    assert size(as_int8, Kind.EXPERTS) == weights * 34 // 32  # what the backend makes of it
    assert f"{format_bytes(weights * 34 // 32 - weights * 50 // 256)} more" in as_int8.render()
    assert not [n for n in plan(made, backend="reference").notes if "dequantised" in n]


def test_dequantised_projections_are_named_too(tmp_path: Path) -> None:
    model = tiny_model(0, hidden_size=256, head_dim=64, num_hidden_layers=1, tie_word_embeddings=True)
    save_gguf(model, tmp_path / "m.gguf", dense_type="IQ1_S")
    made = open_model(str(tmp_path / "m.gguf"))
    (note,) = [n for n in plan(made, linear_backend="native").notes if "dequantised" in n]
    types = [made.tensor(name).type for name in made.names() if len(made.tensor(name).shape) == 2]
    assert note.startswith(f"{types.count('IQ1_S')} tensors of type IQ1_S are")
    assert not [n for n in plan(made).notes if "dequantised" in n]


def test_dense_weights(source: WeightSource) -> None:
    model = tiny_model(0)
    dense = sum(p.numel() for n, p in model.named_parameters() if "experts" not in n)
    routers = 2 * 8 * 64
    assert size(plan(source), Kind.WEIGHTS) == 2 * (dense - routers) + 4 * routers
    assert size(plan(source, element=4), Kind.WEIGHTS) == 4 * dense
    assert size(plan(source, linear_backend="native"), Kind.WEIGHTS) < 2 * dense


def test_a_tied_head_is_counted_beside_the_embedding(tmp_path: Path) -> None:
    save_gguf(tiny_model(0, tie_word_embeddings=True), tmp_path / "m.gguf")
    save_gguf(tiny_model(0), tmp_path / "n.gguf")
    tied, untied = (plan(open_model(str(tmp_path / name))) for name in ("m.gguf", "n.gguf"))
    assert size(tied, Kind.WEIGHTS) == size(untied, Kind.WEIGHTS)


def test_cache_holds_a_typical_batch(source: WeightSource) -> None:
    made = plan(source, max_num_seqs=32)
    assert made.kv_tokens == 32 * 4096 and made.max_model_len == 40960
    assert size(made, Kind.KV_CACHE) == 131072 * 2 * 2 * 2 * 32 * 2
    assert plan(source, max_num_seqs=32, max_model_len=1000).kv_tokens == 32 * 1000
    assert plan(source, max_num_seqs=1).kv_tokens == 40960  # one longest request, at least


def test_cache_takes_a_share_of_what_is_free(source: WeightSource) -> None:
    made = plan(source, cpu=300 * MIB)
    rest = 300 * MIB - sum(item.num_bytes for item in made.items if item.kind is not Kind.KV_CACHE)
    assert 0.45 * rest < size(made, Kind.KV_CACHE) <= 0.5 * rest + 16 * 512
    assert made.max_model_len == 40960 and not made.short
    small = plan(source, cpu=270 * MIB)
    assert small.max_model_len == small.kv_tokens < 40960
    assert f"max_model_len is {small.kv_tokens} instead of the model's 40960" in small.render()


def test_cache_by_tokens_and_by_bytes(source: WeightSource) -> None:
    assert plan(source, kv_cache_tokens=1000).kv_tokens == 1008
    assert plan(source, kv_cache_tokens=1000).max_model_len == 1008
    assert plan(source, kv_cache_memory="1MiB").kv_tokens == 2048
    assert plan(source, kv_cache_memory="1MB").kv_tokens == 1000_000 // (16 * 512) * 16


@pytest.mark.parametrize(
    ("settings", "field", "said"),
    [
        ({"kv_cache_tokens": 64, "kv_cache_memory": "1GiB"}, "kv_cache_memory", "both"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens", "0"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory", "'lots'"),
        ({"kv_cache_memory": "-1GiB"}, "kv_cache_memory", "'-1GiB'"),
        ({"kv_cache_memory": "100"}, "kv_cache_memory", "8192 bytes"),
        ({"max_model_len": 50000}, "max_model_len", "50000; this model allows 1 to 40960"),
        ({"max_model_len": -1}, "max_model_len", "-1"),
        ({"max_model_len": 2000, "kv_cache_tokens": 1000}, "max_model_len", "1008 tokens"),
    ],
)
def test_settings_that_contradict(source: WeightSource, settings: dict[str, object], field: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(source, **settings)
    assert caught.value.field == field and said in str(caught.value)


def test_yarn_allows_a_longer_model(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    save_gguf(tiny_model(0, rope_scaling=scaling), tmp_path / "m.gguf")
    stretched = open_model(str(tmp_path / "m.gguf"))
    assert plan(stretched).max_model_len == 512
    assert plan(stretched, max_model_len=2048).max_model_len == 2048


def test_too_large_a_cache_is_refused_with_what_would_fit(source: WeightSource) -> None:
    made = plan(source, cpu=300 * MIB, kv_cache_tokens=1_000_000)
    with pytest.raises(MemoryPlanError) as caught:
        made.check(force=False)
    assert "KV cache, 1000000 tokens 488.3 MiB" in str(caught.value) and "--force-memory-plan" in str(caught.value)
    made.check(force=True)
    (advice,) = [text for text in made.remedies if "kv-cache" in text]
    tokens = int(advice.split()[-1])
    plan(source, cpu=300 * MIB, kv_cache_tokens=tokens).check(force=False)
    assert plan(source, cpu=300 * MIB, kv_cache_tokens=tokens + 16).short


def test_advice_is_tried(source: WeightSource, tmp_path: Path) -> None:
    """Whatever is named does make it fit; what does not help is not named."""
    buffers = plan(source, cpu=300 * MIB, max_num_batched_tokens=50_000)
    assert buffers.remedies == ["--max-num-batched-tokens 128"]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * (100 * MIB))
    (tmp_path / "notes.txt").write_bytes(b"\0" * MIB)
    adapters = plan(source, cpu=300 * MIB, adapters=[f"a={tmp_path}"])
    assert size(adapters, Kind.ADAPTERS) == 200 * MIB  # read, and in a slot
    assert adapters.remedies == ["fewer --adapters"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_model.safetensors").write_bytes(b"\0" * (60 * MIB))
    both = [f"a={tmp_path}", f"b={other}"]
    few = {"adapters": both, "max_adapter_slots": 1, "kv_cache_tokens": 64}
    fits = next(cpu for cpu in range(200, 1000, 10) if not plan(source, cpu=cpu * MIB, **few).short)
    evicting = plan(source, cpu=(fits - 20) * MIB, **few)
    assert evicting.remedies == ["fewer --adapters", "--adapter-memory 200MiB"]
    hopeless = plan(source, cpu=10 * MIB)
    assert hopeless.remedies == []
    with pytest.raises(MemoryPlanError, match="no setting makes it fit"):
        hopeless.check(force=False)


def test_adapters_have_what_is_left_or_what_was_asked(source: WeightSource, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * MIB)
    made = plan(source, kv_cache_tokens=4096)
    assert made.adapter_bytes == 64 * GIB - made.needed(made.devices[0])
    started = plan(source, kv_cache_tokens=4096, adapters=[f"a={tmp_path}", f"b={tmp_path}"], max_adapter_slots=1)
    assert size(started, Kind.ADAPTERS) == 3 * MIB and started.adapter_bytes == made.adapter_bytes
    asked = plan(source, kv_cache_tokens=4096, adapters=[f"a={tmp_path}"], adapter_memory="2GiB")
    assert asked.adapter_bytes == size(asked, Kind.ADAPTERS) == 2 * GIB
    assert "loaded adapters may take 2.00 GiB" in asked.render()
    over = plan(source, cpu=300 * MIB, kv_cache_tokens=4096, adapter_memory="2GiB")
    assert "a smaller --adapter-memory" in over.remedies
    gpu = Memory("GPU 0", 8 * GIB, 8 * GIB)
    for copies, held in (
        (None, {"CPU": 2 * MIB}),
        ({"CPU": 2}, {"CPU": 3 * MIB}),
        ({"CPU": 0, "GPU 0": 1}, {"GPU 0": MIB, "CPU": MIB}),
    ):
        beside = plan(source, gpu=gpu, adapters=[f"a={tmp_path}"], kv_cache_tokens=4096, adapter_copies=copies)
        assert {i.device: i.num_bytes for i in beside.items if i.kind is Kind.ADAPTERS} == held


@pytest.mark.parametrize("quantise", ["int8", "int4"])
def test_weights_that_are_made_smaller_are_counted_so(tmp_path: Path, quantise: str) -> None:
    save_gguf(tiny_model(0), tmp_path / "m.gguf", "F32", "F32")
    made = open_model(str(tmp_path / "m.gguf"))
    share = {"int8": 544, "int4": 320}[quantise] / 512
    assert size(plan(made, backend="native", quantise=quantise), Kind.EXPERTS) == 2 * WEIGHTS * share


def test_smaller_experts_are_advised(source: WeightSource) -> None:
    big = dataclasses.replace(source.config, max_position_embeddings=512)
    source_of_big = _Scaled(source, big, 5000)
    made = plan(source_of_big, cpu=1200 * MIB)
    assert made.remedies == ["--expert-backend kt --kt-method AMXInt4"]
    made = plan(source_of_big, cpu=1300 * MIB)
    assert made.remedies[0] == "--expert-backend native" and len(made.remedies) == 4
    made = plan(source_of_big, cpu=5 * GIB // 2, element=4)
    assert "--dtype bfloat16" in made.remedies and "--expert-backend kt --kt-method AMXInt8" in made.remedies


class _Scaled:
    """A source whose expert count is multiplied: what is planned, never read."""

    def __init__(self, source: WeightSource, config: ModelConfig, factor: int) -> None:
        self.source, self.config, self.whole, self.factor = source, config, config, factor
        self.names, self.tensor = source.names, source.tensor

    def experts(self, layer: int) -> _Many:
        store = self.source.experts(layer)
        return _Many(store, store.num_experts * self.factor)


class _Many:
    def __init__(self, store: ExpertStore, num_experts: int) -> None:
        self.num_experts, self.num_weights = num_experts, store.num_weights // store.num_experts * num_experts
        self.expert = lambda projection, index: store.expert(projection, 0)
        self.projections, self.biases = store.projections, store.biases


def test_gpu_takes_the_dense_part(source: WeightSource) -> None:
    gpu = Memory("GPU 0", GIB, 2 * GIB)
    workspace = Item("GPU 0", Kind.OTHER, "workspace", 512 * MIB)
    made = plan(source, gpu=gpu, extra=[workspace])
    where = {item.kind: item.device for item in made.items if item.kind is not Kind.OTHER}
    on_gpu = dict.fromkeys((Kind.WEIGHTS, Kind.KV_CACHE, Kind.STEP), "GPU 0")
    assert where == {**on_gpu, Kind.EXPERTS: "CPU"} and workspace in made.items
    assert "memory plan, GPU 0: 1.00 GiB free of 2.00 GiB" in made.render()
    whole = plan(source, gpu=gpu, backend="gpu")
    assert {item.device for item in whole.items if item.kind is Kind.EXPERTS} == {"GPU 0"}
    short = plan(source, gpu=Memory("GPU 0", 100 * MIB, GIB))
    assert [device.name for device in short.short] == ["GPU 0"]


@given(
    free=st.integers(0, 8 * GIB),
    seqs=st.integers(1, 256),
    length=st.none() | st.integers(1, 40960),
    tokens=st.none() | st.integers(1, 1 << 20),
)
def test_what_always_holds(source: WeightSource, free: int, seqs: int, length: int | None, tokens: int | None) -> None:
    try:
        made = plan(source, cpu=free, max_num_seqs=seqs, max_model_len=length, kv_cache_tokens=tokens)
    except UserError:
        assert length is not None and tokens is not None and tokens < length
        return
    assert made.kv_tokens % 16 == 0 and 1 <= made.max_model_len <= made.kv_tokens
    assert length is None or made.max_model_len == length
    assert tokens is None or tokens <= made.kv_tokens < tokens + 16
    assert bool(made.short) == (sum(item.num_bytes for item in made.items) > free)
    if not made.short:
        made.check(force=False)
    lines = made.render().splitlines()
    table = [line for line in lines if line.endswith(("iB", " B")) and line.startswith("  ")]
    assert len({len(line) for line in table}) == 1 and len(table) == len(made.items) + 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("4GiB", 4 * GIB), ("4 gib", 4 * GIB), ("1.5g", 3 * GIB // 2), ("2GB", 2 * 10**9), ("10 MiB", 10 * MIB)],
)
def test_bytes_as_written(text: str, size: int) -> None:
    assert parse_bytes(text, "f") == size


def test_bytes_as_shown() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 12 * MIB, 3 * GIB // 2)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "12.0 MiB",
        "1.50 GiB",
    ]


def groups(root: Path, lines: str, files: dict[str, str]) -> Memory:
    for name, text in ({"proc/self/cgroup": lines} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cpu_memory(root)


def test_limit_of_cgroup_v2(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/user/job"
    memory = groups(
        tmp_path,
        "0::/user/job\n",
        {
            f"{folder}/memory.max": "max\n",
            f"{folder}/memory.current": "5000000\n",
            "sys/fs/cgroup/user/memory.max": "200000000\n",
            "sys/fs/cgroup/user/memory.current": "150000000\n",
            "sys/fs/cgroup/user/memory.stat": "anon 1\ninactive_file 30000000\n",
        },
    )
    assert memory == Memory("CPU", 80_000_000, 200_000_000)


def test_limit_of_cgroup_v1(tmp_path: Path) -> None:
    memory = groups(
        tmp_path,
        "9:name=systemd:/\n4:memory,hugetlb:/docker/abc\n0::/\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "100000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "120000000\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 50000000\n",
        },
    )
    assert memory == Memory("CPU", 30_000_000, 100_000_000)


def test_no_limit(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    unlimited = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    }
    for memory in (groups(tmp_path / "a", "4:memory:/\n", unlimited), cpu_memory(tmp_path / "nothing")):
        assert memory.limit_bytes == total and 0 < memory.free_bytes <= total


def test_this_machine() -> None:
    memory = cpu_memory()
    assert 0 < memory.free_bytes <= memory.limit_bytes <= psutil.virtual_memory().total


# ---- states


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    """Two of three layers keep states; the third one token's KV of 2 * 2 * 32 numbers."""
    folder = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(0, family="qwen3_next", max_position_embeddings=40960), folder)
    return open_model(str(folder))


EACH = 2 * 4 * (4 * 16 * 32 + 3 * (2 * 2 * 16 + 4 * 32))  # S of four heads, and three positions of all channels


def kept(made: MemoryPlan) -> dict[str, int]:
    return {item.label: item.num_bytes for item in made.items if item.kind is Kind.KV_CACHE}


def test_states_are_counted_and_snapshots_are_in_the_cache(stateful: WeightSource) -> None:
    made = plan(stateful, max_num_seqs=6, kv_cache_tokens=32768)
    blocks = -(-EACH // (16 * 256))
    snapshots = 32768 // 16 // blocks
    assert (made.num_states, made.num_snapshots, made.snapshot_blocks) == (6, snapshots, blocks)
    assert made.state_slots == 6 + snapshots
    assert kept(made) == {"states, 6 sequences": 6 * EACH, "KV cache, 32768 tokens": 32768 * 256}
    assert any(note.endswith(f", as {16 * blocks} positions") for note in made.notes)


@pytest.mark.parametrize("share", [0.0, 0.15, 1.0])
def test_snapshots_take_no_more_than_their_share(stateful: WeightSource, share: float) -> None:
    made = plan(stateful, max_num_seqs=6, kv_cache_tokens=32768, snapshot_share=share)
    assert made.num_snapshots == int(share * 32768 // 16) // made.snapshot_blocks
    assert any("the prefix cache is not used" in note for note in made.notes) == (share == 0)
    for cache in ({"kv_cache_tokens": 1024}, {"kv_cache_tokens": None}):
        made = plan(stateful, gpu=Memory("GPU 0", GIB, GIB), max_num_seqs=600, snapshot_share=share, **cache)
        most = share * (made.num_snapshots * EACH + made.kv_tokens * 256)
        assert most - EACH < made.num_snapshots * EACH <= most or made.num_snapshots == 1200
        assert (made.num_snapshots > 0) == (share > 0)


def test_a_cache_that_holds_no_snapshot_is_said_not_to_be_used(stateful: WeightSource) -> None:
    made = plan(stateful, max_num_seqs=6, kv_cache_tokens=64)
    assert made.num_snapshots == 0 and any("the prefix cache is not used" in note for note in made.notes)


def test_without_prefix_caching_there_are_none(stateful: WeightSource) -> None:
    assert plan(stateful, prefix_caching=False).num_snapshots == 0


@given(st.integers(200 * MIB, 2 * GIB), st.integers(1, 4000))
def test_states_never_take_more_than_half_of_the_caches_memory(stateful: WeightSource, cpu: int, seqs: int) -> None:
    made = plan(stateful, cpu, max_num_seqs=seqs, max_num_batched_tokens=4000)
    (states, tokens) = kept(made).values()
    if made.short:
        assert made.num_states >= 1
        return
    assert 1 <= made.num_states <= seqs
    assert made.num_states < 2 or (made.num_states * EACH <= tokens + states)
    said = [note for note in made.notes if note.startswith(f"at most {made.num_states} requests run at the same time")]
    assert bool(said) == (made.num_states < seqs)


def test_on_a_gpu_snapshots_have_memory_of_their_own(stateful: WeightSource) -> None:
    """A prompt's and an answer's of as many as run, where memory allows; a slot more is for padding rows."""
    gpu = Memory("GPU 0", 4 * GIB, 8 * GIB)
    made = plan(stateful, gpu=gpu, max_num_seqs=6, kv_cache_tokens=32768)
    assert (made.num_states, made.num_snapshots, made.snapshot_blocks) == (6, 12, 0)
    assert kept(made) == {
        "states, 6 sequences": 7 * EACH, "snapshots of states, 12": 12 * EACH, "KV cache, 32768 tokens": 32768 * 256,
    }  # fmt: skip
    assert all(item.device == "GPU 0" for item in made.items if item.kind is Kind.KV_CACHE)
    assert any(note.endswith(", beside the KV cache") for note in made.notes)
    assert plan(stateful, gpu=gpu, prefix_caching=False).num_snapshots == 0


@given(st.integers(300 * MIB, 2 * GIB), st.integers(1, 4000))
def test_on_a_gpu_all_of_it_fits(stateful: WeightSource, free: int, seqs: int) -> None:
    made = plan(stateful, gpu=Memory("GPU 0", free, free), max_num_seqs=seqs, max_num_batched_tokens=4000)
    if made.short:
        return
    parts = list(kept(made).values())
    assert made.num_snapshots <= 2 * seqs and len(parts) == 2 + bool(made.num_snapshots)
    assert made.num_states < 2 or parts[0] - EACH <= sum(parts)
    assert made.needed(made.devices[0]) <= free


def test_models_without_states_have_none(source: WeightSource) -> None:
    made = plan(source)
    assert (made.num_states, made.num_snapshots) == (0, 0)
    assert [label.partition(",")[0] for label in kept(made)] == ["KV cache"]


def test_training_is_planned_for(source: WeightSource) -> None:
    """Its micro-batch and a run take their part before the KV cache gets one."""
    without, with_it = (plan(source, fine_tuning=on, training_tokens=512) for on in (False, True))
    labels = {item.label for item in with_it.items} - {item.label for item in without.items}
    assert {"training micro-batch, 512 tokens", "a training run of rank 16"} <= labels
    assert with_it.kv_tokens <= without.kv_tokens
