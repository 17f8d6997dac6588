"""`kv_cache_dtype`: what each attention backend can hold, what the memory plan makes of it, and what it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import engine.planning.plan as build
from engine.config import EngineConfig
from engine.errors import UserError
from engine.memory.items import Kind
from engine.memory.limits import Memory
from engine.planning.plan import plan_engine
from engine.planning.precision import Precision
from native import available
from rules import Machine
from testing.harness import Harness, full_logits
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import prompts

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
GPU = Machine(gpu=True, native=True, flashinfer=True, gpu_count=1)
CPU = Machine(native=True)
needs_native = pytest.mark.skipif(not available()[0], reason="the native kernels are not built here")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(4, num_hidden_layers=2, head_dim=64).bfloat16(), folder)
    return folder


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, path: Path):
    """plan_engine() as on another machine."""

    def plan(machine: Machine, **settings: object) -> build.Blueprint:
        monkeypatch.setattr(build, "find_machine", lambda config, model: machine)
        monkeypatch.setattr(build, "gpu_memory", lambda device: Memory("GPU 0", 64 << 30, 80 << 30))
        return plan_engine(EngineConfig(model=str(path), **settings))

    return plan


@pytest.mark.parametrize(
    ("machine", "settings", "expected"),
    [
        (CPU, {}, Precision(F32, BF16, BF16)),
        (CPU, {"kv_cache_dtype": "bfloat16"}, Precision(F32, BF16, BF16)),
        (CPU, {"kv_cache_dtype": "float32"}, Precision(F32, BF16, F32)),
        (CPU, {"kv_cache_dtype": "bfloat16", "dtype": "float32"}, Precision(F32, F32, BF16)),
        (CPU, {"kv_cache_dtype": "bfloat16", "rules": "reference"}, Precision(BF16, BF16, BF16)),
        (CPU, {"kv_cache_dtype": "int8"}, Precision(F32, BF16, torch.int8)),
        (CPU, {"kv_cache_dtype": "int8", "dtype": "bfloat16"}, Precision(BF16, BF16, torch.int8)),
        (GPU, {}, Precision(BF16, BF16, BF16)),
        (GPU, {"kv_cache_dtype": "bfloat16"}, Precision(BF16, BF16, BF16)),
        (GPU, {"kv_cache_dtype": "fp8"}, Precision(BF16, BF16, FP8)),
    ],
    ids=str,
)
def test_what_it_means(on, machine: Machine, settings: dict[str, str], expected: Precision) -> None:
    plan = on(machine, kv_cache_tokens=256, **settings)
    assert plan.precision == expected
    (kv,) = [item.num_bytes for item in plan.memory.items if item.kind is Kind.KV_CACHE]
    scale = 4 if expected.kv == torch.int8 else 0
    assert kv == 256 * plan.source.config.kv_bytes_per_token(expected.kv.itemsize, scale)


@pytest.mark.parametrize(
    ("machine", "settings", "message"),
    [
        (
            CPU,
            {"kv_cache_dtype": "fp8"},
            "attention by native with float32 rows takes auto, float32, bfloat16, int8; fp8",
        ),
        (
            CPU,
            {"kv_cache_dtype": "fp8", "rules": "reference"},
            "attention by reference with bfloat16 rows takes auto",
        ),
        (CPU, {"kv_cache_dtype": "float32", "dtype": "bfloat16"}, "with bfloat16 rows takes auto, bfloat16, int8$"),
        (CPU, {"kv_cache_dtype": "int8", "rules": "reference"}, "int8 needs the native attention, on a CPU$"),
        (GPU, {"kv_cache_dtype": "int8"}, "attention by flashinfer .*; int8 needs the native attention, on a CPU$"),
        (GPU, {"kv_cache_dtype": "float32"}, "attention by flashinfer with bfloat16 rows takes auto, bfloat16, fp8$"),
        (
            GPU,
            {"kv_cache_dtype": "fp8", "dtype": "float32"},
            "attention by reference with float32 rows takes auto",
        ),
        (GPU, {"kv_cache_dtype": "fp8", "device": "cpu", "rules": "cpu"}, "attention by native"),
    ],
    ids=str,
)
def test_what_cannot_be_held_is_refused(on, machine: Machine, settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        on(machine, **settings)
    assert refused.value.field == "kv_cache_dtype"


def test_fp8_doubles_what_a_size_holds(on) -> None:
    half, full = (on(GPU, kv_cache_memory="64MiB", kv_cache_dtype=kind) for kind in ("fp8", "auto"))
    assert half.num_blocks == 2 * full.num_blocks
    asked = on(GPU, kv_cache_dtype="fp8", kv_cache_tokens=4096).memory
    wide = on(GPU, kv_cache_tokens=4096).memory
    gpu = asked.devices[0]
    assert wide.needed(gpu) - asked.needed(gpu) == 4096 * asked_bytes(on)


def asked_bytes(on) -> int:
    return int(on(GPU).source.config.kv_bytes_per_token(1))


@needs_native
@pytest.mark.parametrize(
    ("dtype", "kv"), [("float32", "float32"), ("float32", "bfloat16"), ("auto", "float32"), ("auto", "int8")]
)
def test_the_cpu_holds_what_it_says(path: Path, dtype: str, kv: str) -> None:
    """Against float32 throughout: nothing is lost where all is float32, roundings elsewhere."""
    model = tiny_model(4, num_hidden_layers=2, head_dim=64)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    engine = Harness(path, rules=None, dtype=dtype, kv_cache_dtype=kv, pack_cache="off", prefix_caching=False)
    (attention,) = engine.core.runner.model.attention_backends
    config, size = engine.plan.source.config, {"float32": 4, "bfloat16": 2, "int8": 1}[kv]
    assert attention.kv_bytes_per_token == config.kv_bytes_per_token(size, 4 if kv == "int8" else 0)
    assert attention.cache_bytes == 16 * engine.plan.cache_blocks * attention.kv_bytes_per_token
    prompt = prompts(3, [40])[0]
    rid = engine.submit(prompt, max_tokens=4, logprobs=1, prompt_logprobs=1)
    engine.run()
    result = engine.results[rid]
    want = torch.log_softmax(full_logits(model, prompt + result.tokens), -1)
    got = [x.chosen.logprob for x in result.logprobs]
    expected = [float(want[len(prompt) - 1 + i, token]) for i, token in enumerate(result.tokens)]
    engine.close()
    assert got == pytest.approx(expected, abs=1e-4 if dtype == kv else 0.05 if kv == "int8" else 0.02)
