"""Every setting has its effect, or it is refused or noted; every number has limits, checked before anything is read."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from api.cli.launch import text_settings
from api.cli.main import _settings, build_parser, main
from api.config import ServeConfig
from demo.paths import demo_model
from engine.config import EngineConfig, check_settings
from engine.errors import UserError
from engine.planning.plan import plan_engine
from engine.planning.unused import unused_settings
from ktserve.settings import settings_of
from native import available
from rules.choice import Choice
from testing.models.tiny import save_hf, tiny_model
from tests.lora.make import SAMPLES

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1])
REFERENCE = {"rules": "reference"}
ADAPTER = f"a={SAMPLES / 'kt_peft_perexpert'}"
NUMBERS = [s for s in settings_of(EngineConfig) + settings_of(ServeConfig) if s.kind in (int, float)]

# Wherever these are given they are obeyed, or the engine does not start for another reason.
ALWAYS = {
    "model", "gguf", "served_model_name", "dtype", "max_model_len", "adapters", "pinned_adapters", "max_adapter_slots",
    "rules", "device", "attention_backend", "linear_backend", "max_num_seqs", "max_num_batched_tokens",
    "kv_cache_tokens", "kv_cache_memory", "kv_cache_dtype", "kv_disk", "prefix_caching", "max_queue", "itl_target_ms",
    "overlap", "seed", "speculate", "profile_dir", "force_memory_plan", "deterministic", "check_integrity",
    "tensor_parallel", "fine_tuning",
}  # fmt: skip
# Setting -> (settings with which it has its effect, settings with which it has none)
SOMETIMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "quantise": ({"quantise": "int8"}, {"quantise": "int8", **REFERENCE}),
    "pack_cache": ({"pack_cache": "somewhere"}, {"pack_cache": "somewhere", **REFERENCE}),
    "isa": ({"isa": "avx2"}, {"isa": "avx2", **REFERENCE}),
    "kt_method": ({}, {"kt_method": "AMXInt8"}),
    "gpu_expert_memory": ({}, {"gpu_expert_memory": "1GiB"}),
    "gpu_experts": ({}, {"gpu_experts": "none"}),
    "expert_profile": ({}, {"expert_profile": "somewhere"}),
    "cpu_threads": ({"cpu_threads": 1}, {}),
    "measure_bandwidth": ({"measure_bandwidth": True}, {"measure_bandwidth": True, **REFERENCE}),
    "kv_disk_dir": ({"kv_disk_dir": "somewhere", "kv_disk": "1GiB"}, {"kv_disk_dir": "somewhere"}),
    "snapshot_share": ({}, {"snapshot_share": 0.5}),
    "prompt_lane": ({}, {"prompt_lane": "off"}),
    "cuda_graphs": ({"cuda_graphs": "padded"}, {"cuda_graphs": "off"}),
    "expert_scaling": ({"expert_scaling": "alpha/r", "adapters": [ADAPTER]}, {"expert_scaling": "alpha/r"}),
    "expert_b_layout": (
        {"expert_b_layout": "rank_major", "adapters": [ADAPTER]},
        {"expert_b_layout": "rank_major"},
    ),
    "adapter_memory": ({"adapter_memory": "1GiB"}, {"adapter_memory": "1GiB", "max_adapter_slots": 0}),
    "max_adapter_rank": ({"max_adapter_rank": 8}, {"max_adapter_rank": 8, "max_adapter_slots": 0}),
    "expert_backend": ({"expert_backend": "native"}, {}),
    "training_share": ({"training_share": 0.2, "fine_tuning": True}, {"training_share": 0.2}),
    "training_tokens": ({"training_tokens": 64, "fine_tuning": True}, {"training_tokens": 64}),
    "expert_parallel": ({"expert_parallel": True, "tensor_parallel": 2}, {"expert_parallel": True}),
}
REFUSED = [
    {"kv_cache_dtype": "fp8"},
    {"deterministic": True, **REFERENCE},
    {"kv_cache_tokens": 64, "kv_cache_memory": "1GiB"},
    {"adapters": ["a=/x"], "max_adapter_slots": 0},
    {"expert_backend": "gpu"},
    {"gpu_experts": "all"},
    {"gpu_experts": "many"},
    {"gpu_experts": "2", "gpu_expert_memory": "1GiB"},
    {"attention_backend": "flashinfer"},
    {"linear_backend": "gpu"},
    {"kv_disk": "much"},
    {"kv_disk": "1KiB"},
    {"kv_disk": "1GiB", "prefix_caching": False},
    {"kv_disk": "1GiB", "tensor_parallel": 2},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(1), folder)
    return folder


def noted(model: Path, name: str, **settings: Any) -> bool:
    plan = plan_engine(EngineConfig(model=str(model), device="cpu", **{"kv_cache_tokens": 256, **settings}))
    return any(line.startswith(f"note: --{name.replace('_', '-')} changes nothing: ") for line in plan.lines)


def test_every_setting_is_judged() -> None:
    assert {f.name for f in fields(EngineConfig)} == ALWAYS | SOMETIMES.keys()


@pytest.mark.parametrize("name", SOMETIMES)
def test_what_changes_nothing_is_noted(model: Path, name: str) -> None:
    works, idle = SOMETIMES[name]
    assert not works or not noted(model, name, **works)
    assert not idle or noted(model, name, **idle)


@pytest.mark.parametrize("settings", REFUSED, ids=str)
def test_what_cannot_be_is_refused(model: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        plan_engine(EngineConfig(model=str(model), device="cpu", **settings))
    assert caught.value.field in {*settings, "kv_cache_memory"}


def test_a_file_that_is_quantised_stays_as_it_is() -> None:
    assert noted(demo_model(), "quantise", quantise="int4")


def test_files_beside_those_that_are_served_are_noted(tmp_path: Path) -> None:
    save_hf(tiny_model(1), tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_cache_tokens=256)
    assert not [line for line in plan_engine(config).lines if ".gguf" in line]
    (tmp_path / "b.gguf").symlink_to(demo_model())
    (tmp_path / "a.gguf").touch()
    (note,) = [line for line in plan_engine(config).lines if ".gguf" in line]
    assert note.startswith("note: the folder's safetensors are served, not a.gguf and 1 more; --model ")
    plan = plan_engine(replace(config, model=str(tmp_path / "b.gguf")))
    assert not [line for line in plan.lines if line.startswith("note: the folder's")]


def test_where_nothing_is_left_to_the_cpu(model: Path) -> None:
    plan = plan_engine(EngineConfig(model=str(model), device="cpu", kv_cache_tokens=256, **REFERENCE))
    there = replace(plan.placement, choices={name: Choice("gpu", "cuda", "cuda") for name in plan.placement.choices})
    notes = unused_settings(EngineConfig(cpu_threads=2), plan.source, there)
    assert notes == ["note: --cpu-threads changes nothing: the GPU computes everything"]
    hybrid = replace(plan.placement, choices={name: Choice("hybrid", "cuda") for name in plan.placement.choices})
    assert unused_settings(EngineConfig(cpu_threads=2, gpu_expert_memory="1GiB"), plan.source, hybrid) == []
    kt = replace(plan.placement, choices={name: Choice("kt", "cpu") for name in plan.placement.choices})
    assert unused_settings(EngineConfig(kt_method="AMXInt8"), plan.source, kt) == []


def test_no_layer_with_experts(tmp_path: Path) -> None:
    save_hf(tiny_model(1, num_hidden_layers=2, mlp_only_layers=[0, 1]), tmp_path)
    source = plan_engine(EngineConfig(model=str(tmp_path), device="cpu", kv_cache_tokens=256)).source
    placement = plan_engine(EngineConfig(model=str(tmp_path), device="cpu", kv_cache_tokens=256)).placement
    (note,) = unused_settings(EngineConfig(expert_backend="native"), source, placement)
    assert "no layer of this model has routed experts" in note


def test_every_number_has_limits() -> None:
    assert [s.name for s in NUMBERS if s.limits is None] == []
    for owner in (EngineConfig, ServeConfig):
        check_settings(owner())


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda s: s.name)
def test_a_number_outside_its_limits_is_one_line_at_start(setting: Any, capsys: pytest.CaptureFixture[str]) -> None:
    least, most = setting.limits
    for value in setting.limits:
        assert setting.one(str(value)) == value and setting.allowed(value) == ""
    wrong: list[float] = [least - 1, most + 1, -(2**70), 2**70]
    if setting.kind is float:
        wrong += [math.nan, math.inf, -math.inf]
    for value in wrong:
        assert main(["serve", "/no/model", f"{setting.flag}={value}"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {setting.flag} {value}: allowed is {setting.range}")
        with pytest.raises(UserError, match="allowed is"):
            check_settings(replace(setting.owner(), **{setting.name: value}))


def test_the_servers_own_settings() -> None:
    always = {
        "host", "port", "drain_timeout_s", "request_timeout_s", "max_body_bytes", "engine_hang_s", "max_restarts",
        "engine_command", "log_level", "api_key", "admin_key", "skip_tokenizer", "generation_config",
        "default_max_tokens", "body_timeout_s", "prompt_cpu_limit_s", "trust_control_tokens",
    }  # fmt: skip
    always |= {"api_keys_file", "admin_key_file", "header_timeout_s", "send_timeout_s"}
    always |= {"max_connections", "max_connections_per_address"}
    always |= {"tenants", "open", "adapter_root", "allow_any_adapter_path", "log_format", "usage_log", "otlp_endpoint"}
    always |= {"unknown_fields", "cors_origins", "root_path", "tool_format", "reasoning_format"}
    always |= {
        "data_dir",
        "max_file_bytes",
        "max_files",
        "max_stored_bytes",
        "max_batch_lines",
        "max_open_batches",
        "batch_concurrency",
    }
    assert {f.name for f in fields(ServeConfig)} == always | {"access_log", "tokenizer", "chat_template"}
    args = build_parser().parse_args(["serve", "--access-log", "--log-level", "warning"])
    assert any("--access-log changes nothing" in note for note in _settings(args)[2])
    for name in ("tokenizer", "chat_template"):
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} with --skip-tokenizer"):
            text_settings(EngineConfig(), ServeConfig(skip_tokenizer=True, **{name: "x"}))
