"""Layers that keep states: the same tokens however a prompt is cut, and clear refusals of what is missing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from engine.errors import EngineError, ModelFileError, UserError
from engine.lora.files.convert import convert
from engine.model.native_executor import NativeExecutor
from engine.model.step import OutputKind, StepInput
from engine.weights.open import open_model
from scheduler.plan import NO_STATE, Idle, RowState
from testing.harness import Harness, greedy
from testing.models.gguf_writer import save_gguf
from testing.models.quantised import FP8_CONFIG, int4_config, save_quantised
from testing.models.tiny import STATEFUL, save_hf, tiny_model
from tests.engine.parity import BACKENDS, CLEAR, prompts
from tests.lora.test_gguf import with_lora
from tests.native.batches import batch
from tests.native.isas import ISAS


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model, folder = tiny_model(3, family="qwen3_next"), tmp_path_factory.mktemp("model")
    save_hf(model, folder)
    return model, folder


@pytest.fixture(scope="module")
def tokens_of(model_folder) -> Callable[[int, int], tuple[list[int], list[int], float]]:
    """(prompt, transformers' greedy tokens behind it, smallest gap) by seed and length, each computed once."""

    @functools.cache
    def tokens(seed: int, length: int) -> tuple[list[int], list[int], float]:
        prompt = prompts(seed, [length])[0]
        return prompt, *greedy(model_folder[0], prompt, 20)

    return tokens


@BACKENDS
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 3, 16, 30, 64, 65, 130])), min_size=1, max_size=4),
    budget=st.one_of(st.integers(1, 20), st.sampled_from([64, 65, 256])),
    tight=st.booleans(),
    overlap=st.booleans(),
)
def test_however_prompts_are_cut_the_tokens_are_those_of_transformers(
    model_folder, tokens_of, backend, asked, budget, tight, overlap
):
    """In one chunk, in chunks of any size, token by token; preempted and recomputed where the cache is tight."""
    expected = [tokens_of(*each) for each in asked]
    engine = Harness(
        model_folder[1], kv_cache_tokens=176 if tight else 1024, max_model_len=160,
        max_num_batched_tokens=budget, max_num_seqs=min(budget, 4), overlap=overlap, **backend,
    )  # fmt: skip
    got = engine.generate([prompt for prompt, _, _ in expected], max_tokens=20)
    engine.close()
    for (_, tokens, gap), found in zip(expected, got, strict=True):
        assert found == tokens or gap < CLEAR


@BACKENDS
@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_and_recomputed(model_folder, tokens_of, backend, overlap):
    expected = [tokens_of(seed, 30) for seed in range(4)]
    engine = Harness(
        model_folder[1], kv_cache_tokens=96, max_model_len=80, max_num_batched_tokens=8, max_num_seqs=4,
        overlap=overlap, **backend,
    )  # fmt: skip
    got = engine.generate([prompt for prompt, _, _ in expected], max_tokens=20)
    assert engine.core.scheduler.stats()["preemptions"] > 0
    engine.close()
    for (_, tokens, gap), found in zip(expected, got, strict=True):
        assert found == tokens or gap < CLEAR


@BACKENDS
@pytest.mark.parametrize("budget", [23, 256])
def test_what_begins_from_a_snapshot_gives_the_same_tokens(model_folder, backend, budget):
    """Turns of a conversation, prompts that part after many blocks, and one that comes again."""
    model, folder = model_folder
    start, tails = prompts(5, [100])[0], prompts(6, [20, 33, 41])
    engine = Harness(folder, max_num_batched_tokens=budget, max_num_seqs=4, **backend)

    def cached(prompt: list[int]) -> int:
        tokens = engine.generate([prompt], max_tokens=20)[0]
        expected, gap = greedy(model, prompt, 20, tokens)
        assert tokens == expected or gap < CLEAR
        conversation.append([*prompt, *tokens])
        return engine.results[f"r{len(conversation) - 1}"].end.cached_tokens

    conversation: list[list[int]] = []
    assert [cached(start + tail) for tail in tails] == [0, 0, 96]
    assert cached(start + tails[0]) == 112
    assert cached([*conversation[2], *tails[0]]) == 160  # 141 tokens and an answer of 20, whose last was not computed
    engine.close()


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built")
@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_is_one_native_call_with_the_bits_of_its_parts(tmp_path, family, dtype):
    """A prompt, a first token, a decode row and a later chunk whose states are saved on the way."""
    save_hf(tiny_model(4, family=family), tmp_path)
    engine = Harness(tmp_path, rules=None, dtype=dtype)
    runner, ids = engine.core.runner, torch.arange(25) * 5 % 128
    held = replace(
        batch(), states=[RowState(0, NO_STATE), RowState(1, NO_STATE), RowState(2, 3), RowState(4, 3, ((20, 5),))]
    )
    assert isinstance(runner.executor, NativeExecutor) and runner.executor.runs_in_one_call(None)
    with torch.inference_mode():
        outs = []
        for executor in (runner.executor, runner.model):
            runner.model.plan(held)
            outs.append(executor.forward(StepInput(ids, held, None, output_kind=OutputKind.LOGITS)).logits)
    assert torch.isfinite(outs[0]).all() and torch.equal(*outs)
    engine.close()


@BACKENDS
def test_blocks_and_snapshots_take_each_others_memory(model_folder, tokens_of, backend):
    """Prompts that have nothing in common, many times the cache; in between one that stays right."""
    engine = Harness(model_folder[1], kv_cache_tokens=2048, max_model_len=512, max_num_seqs=2, **backend)
    released: list[Idle] = []
    memory = engine.core.runner.idle_memory
    assert memory is not None
    memory.release = lambda idle, release=memory.release: (released.append(idle), release(idle))
    prompt, expected, gap = tokens_of(0, 130)
    for seed in range(8):
        got = engine.generate([prompt, *prompts(seed, [400, 150])], max_tokens=20)
        assert got[0] == expected or gap < CLEAR
    assert any(idle.slots for idle in released) and any(idle.blocks for idle in released)
    engine.core.scheduler.check_integrity()
    engine.close()


def test_a_step_without_states_is_an_error(model_folder):
    for rules in ("reference", *([None] if ISAS else [])):
        engine = Harness(model_folder[1], rules=rules)
        with pytest.raises(EngineError, match="a step of 4 rows has 0 states"):
            engine.core.runner.model.plan(batch())
        engine.close()


@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize(
    "config", [FP8_CONFIG, int4_config("gptq", 32), int4_config("awq", 32)], ids=lambda config: config["quant_method"]
)
def test_quantised_folders(tmp_path, family, config):
    wide = dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 128)
    wide |= {"linear_key_head_dim": 32, "linear_value_head_dim": 64}  # FP8 is read in multiples of 128
    held, _ = save_quantised(tiny_model(4, family=family, **wide), tmp_path, config)
    engine, asked = Harness(tmp_path), prompts(4, [5, 40])  # native kernels round activations beside such weights
    got = engine.generate(asked, max_tokens=8)
    engine.close()
    for prompt, tokens in zip(asked, got, strict=True):
        expected, gap = greedy(held, prompt, 8, tokens)
        assert tokens == expected or gap < CLEAR


@BACKENDS
@pytest.mark.parametrize("family", STATEFUL)
def test_gguf(tmp_path, family, backend):
    """Under llama.cpp's names, with its order of heads and what it changes in vectors."""
    model, asked = tiny_model(4, family=family), prompts(4, [5, 70])
    held = save_gguf(model, tmp_path / "m.gguf", "F32", "F32")
    engine = Harness(tmp_path / "m.gguf", max_num_batched_tokens=32, **backend)
    got = engine.generate(asked, max_tokens=12)
    engine.close()
    for prompt, tokens in zip(asked, got, strict=True):
        for source in (model, held):
            expected, gap = greedy(source, prompt, 12, tokens)
            assert tokens == expected or gap < CLEAR


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"ssm.time_step_rank": 3}, "ssm.time_step_rank is 3, not a multiple of ssm.group_count 2"),
        ({"ssm.inner_size": 130}, "ssm.inner_size is 130, not a multiple of ssm.time_step_rank 4"),
        ({"ssm.conv_kernel": 1}, "ssm.conv_kernel"),
        ({"ssm.state_size": 32}, "blk.0.attn_qkv.weight"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_gguf_sizes_that_do_not_go_together_are_refused(tmp_path, model_folder, metadata, problem):
    metadata = {f"qwen3next.{name}": value for name, value in metadata.items()}
    save_gguf(model_folder[0], tmp_path / "m.gguf", "F32", "F32", metadata=metadata)
    with pytest.raises(ModelFileError, match=problem):
        open_model(str(tmp_path / "m.gguf"))


def test_heads_that_the_kernels_do_not_take_are_computed_in_torch(tmp_path):
    model, asked = tiny_model(4, family="qwen3_next", linear_key_head_dim=24), prompts(4, [40])
    save_hf(model, tmp_path)
    engine = Harness(tmp_path, rules=None)
    assert not ISAS or any("linear_key_head_dim 24 is not a multiple of 16" in line for line in engine.plan.lines)
    (expected, gap), got = greedy(model, asked[0], 8), engine.generate(asked, max_tokens=8)[0]
    assert got == expected or gap < CLEAR
    engine.close()


def test_gguf_of_early_files(tmp_path, model_folder):
    """All of a delta net's projections in one tensor, `ssm_in`, beside the folder's configuration or alone."""
    model, folder = model_folder
    save_gguf(model, tmp_path / "m.gguf", "F32", "F32", early=True)
    expected, gap = greedy(model, prompts(4, [30])[0], 12)
    for beside in ({}, {"gguf": str(tmp_path / "m.gguf")}):
        engine = Harness(folder if beside else tmp_path / "m.gguf", **beside)
        assert engine.generate(prompts(4, [30]), max_tokens=12)[0] == expected or gap < CLEAR
        engine.close()


@pytest.mark.parametrize("family", STATEFUL)
def test_gguf_quantised(tmp_path, family):
    """Projections of one layer in several types."""
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "linear_value_head_dim": 64}
    types = {"blk.0.attn_qkv.weight": "Q4_K", "blk.0.attn_gate.weight": "Q6_K"}
    held = save_gguf(tiny_model(4, family=family, **wide), tmp_path / "m.gguf", types=types)
    engine, asked = Harness(tmp_path / "m.gguf"), prompts(4, [5, 40])
    got = engine.generate(asked, max_tokens=8)
    engine.close()
    for prompt, tokens in zip(asked, got, strict=True):
        expected, gap = greedy(held, prompt, 8, tokens)
        assert tokens == expected or gap < CLEAR


def test_padded_steps_without_a_gpu_are_refused(model_folder):
    with pytest.raises(UserError, match="keep a state of each sequence") as caught:
        Harness(model_folder[1], cuda_graphs="padded")
    assert caught.value.field == "cuda_graphs"


# ---- adapters


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DELTA = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
SEPARATE = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]  # Qwen3.5's
SHARED = ["gate_proj", "up_proj", "down_proj"]  # with peft's target_modules; routed experts are parameters
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def trained(base: torch.nn.Module, folder: Path, seed: int, **targets) -> torch.nn.Module:
    """A copy of the base under an adapter of peft's, saved, of which no B is zero."""
    model = get_peft_model(copy.deepcopy(base), LoraConfig(**({"r": 4, "lora_alpha": 8} | targets))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def adapted(model_folder, tmp_path_factory) -> tuple[dict[str | None, torch.nn.Module], Path]:
    """The base (None) and adapters of it by name, which are in the folder."""
    base, folder = model_folder[0], tmp_path_factory.mktemp("adapters")
    targets = {
        "delta": {"target_modules": DELTA},
        "attention": {"target_modules": ATTENTION},
        "all": {"target_modules": [*DELTA, *ATTENTION, *SHARED], "target_parameters": EXPERTS},
    }
    return {None: base} | {name: trained(base, folder / name, 5, **each) for name, each in targets.items()}, folder


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@BACKENDS
@pytest.mark.parametrize("budget", [8, 256])
def test_adapters_of_peft_and_the_base_in_one_batch(model_folder, adapted, backend, budget):
    (base, folder), (models, adapters) = model_folder, adapted
    engine = Harness(folder, max_num_batched_tokens=budget, max_num_seqs=8, **backend)
    for name in models:
        if name is not None:
            engine.adapter(name, adapters / name)
    asked = prompts(8, [20, 20, 9, 30])
    got = engine.generate(asked, list(models), max_tokens=10)
    engine.close()
    for (name, model), prompt, tokens in zip(models.items(), asked, got, strict=True):
        expected, gap = greedy(model, prompt, 10, tokens)
        assert tokens == expected or gap < CLEAR, name
    assert greedy(models["all"], asked[3], 10)[0] != greedy(base, asked[3], 10)[0]


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@BACKENDS
@pytest.mark.parametrize("family", STATEFUL)
def test_an_adapter_of_peft_on_a_gguf_file(tmp_path, family, backend):
    """Its rows and columns follow those of the file; and as a GGUF file, added to the base, it is the same."""
    base, asked = tiny_model(3, family=family), prompts(8, [20, 30])
    delta = DELTA if family == "qwen3_next" else SEPARATE
    adapted = trained(base, tmp_path / "x", 5, target_modules=[*delta, *ATTENTION, *SHARED])
    save_gguf(base, tmp_path / "m.gguf", "F32", "F32")
    engine = Harness(tmp_path / "m.gguf", **backend)
    engine.adapter("x", tmp_path / "x")
    got = engine.generate(asked, [None, "x"], max_tokens=10)
    engine.close()
    expected, gap = greedy(adapted, asked[1], 10, got[1])
    assert (got[1] == expected or gap < CLEAR) and expected != greedy(base, asked[1], 10)[0]
    assert got[0] == greedy(base, asked[0], 10)[0] or greedy(base, asked[0], 10)[1] < CLEAR

    convert(str(tmp_path / "x"), "gguf", str(tmp_path / "x.gguf"), str(tmp_path / "m.gguf"))
    engine = Harness(with_lora(tmp_path / "m.gguf", tmp_path / "x.gguf", tmp_path / "merged.gguf"), **backend)
    assert engine.generate(asked[1:], max_tokens=10)[0] == expected or gap < CLEAR
    engine.close()


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd")
def test_an_adapter_of_the_convolution_is_refused_by_name(model_folder, tmp_path):
    base, folder = model_folder
    engine = Harness(folder)
    trained(base, tmp_path, 5, target_modules=["conv1d", "q_proj"], r=192)  # peft: a multiple of the channels
    with pytest.raises(UserError, match=r"layers\.0\.linear_attn\.conv1d"):
        engine.adapter("x", tmp_path)
    engine.close()
