"""What `ktserve adapters inspect` says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from engine.lora import reader_process
from engine.lora.files.folder import ADAPTER_FILES, CONFIG_FILE, EXTRA_FILE, FUSED_FILE, MANIFEST_FILE
from engine.lora.files.inspect import describe
from engine.main import main
from tests.lora import make

CONFIG = make.model_config()
WEIGHTS = make.random_adapter(CONFIG, extra=2)


def lines(path: Path, with_base: bool = True, **kwargs: object) -> list[str]:
    found = describe(path, CONFIG if with_base else None, **kwargs)  # type: ignore[arg-type]
    assert found.refused == ("\nrefused " in found.text)
    return found.text.splitlines()


def test_samples() -> None:
    path = make.SAMPLES / "kt_fused_all"
    assert describe(path, make.sample_config()).text.splitlines() == [
        f"adapter    {path}",
        "format     kt-fused: KT fused experts, with manifest",
        "trained on base",
        "rank       8, alpha 16, scaled by alpha/r = 2",
        "experts'   rank 8, alpha 16, scaled by alpha/r (manifest)",
        "modules    mlp.gate, self_attn.k_proj, self_attn.o_proj, self_attn.q_proj, self_attn.v_proj: layers 0-2",
        "           of rank 8",
        "experts    gate up down: 0-15 of layers 0-2",
        "tensors    48, 1.0 MiB (18 bfloat16, 30 float32)",
        "served     yes: rank 8, 1.0 MiB in memory",
    ]
    text = describe(make.SAMPLES / "kt_peft_perexpert", None).text
    assert text.endswith("served     not checked against a base: give a model")
    assert "experts    gate up down: 0-15 of layers 0-2" in text


def test_fused_3d_patterns_and_extra_mlps(tmp_path: Path) -> None:
    tensors = make.linear_keys(WEIGHTS) | make.fused_3d_keys(WEIGHTS) | make.extra_keys(WEIGHTS)
    config = make.lora_config(rank_pattern={"gate_up_proj": 6, "nothing": 2}, alpha_pattern={"gate_up_proj": 12})
    said = lines(make.write(tmp_path, tensors, config))
    assert "format     peft-fused-3d+extra-mlps: PEFT on fused experts (target_parameters)" in said
    assert "patterns   rank_pattern {'gate_up_proj': 6, 'nothing': 2}, alpha_pattern {'gate_up_proj': 12.0}" in said
    assert "modules    mlp.down_proj, mlp.gate_proj, mlp.up_proj: layers 1" in said
    assert "experts    fused [24, 24] [32, 24], [12, 16] [24, 12]: layers 0, 2" in said
    assert "extra MLPs 2 a layer: layers 0, 2" in said
    assert said[-2] == "warning    patterns that match no module: nothing"
    assert said[-1].startswith("served     yes: rank 3, ")


def test_open_scale(tmp_path: Path) -> None:
    make.write(tmp_path, make.per_expert_keys(WEIGHTS), make.lora_config(use_rslora=True))
    said = lines(tmp_path)
    assert "experts'   scale not settled by the files: load with expert_scaling alpha/r, alpha/sqrt(r) or peft" in said
    assert said[-1].startswith("refused") and "give expert_scaling" in said[-1]
    assert lines(tmp_path, expert_scaling="alpha/r")[-1].startswith("served     yes")


def test_a_refused_setting_still_shows_the_tensors(tmp_path: Path) -> None:
    make.write(tmp_path, make.per_expert_keys(WEIGHTS), make.lora_config(use_dora=True))
    for with_base in (True, False):
        said = lines(tmp_path, with_base)
        assert "experts    gate up down: 0-3 of layers 0, 2" in said
        assert said[-1] == "refused    adapter_config.json: use_dora is True: DoRA is not supported"


def test_refused_tensors_are_listed(tmp_path: Path) -> None:
    odd = {f"odd.{index:02}": torch.zeros(1) for index in range(25)}
    said = lines(make.write(tmp_path, make.linear_keys(WEIGHTS) | odd, make.lora_config()))
    assert "rank       3, alpha 6, scaled by alpha/r = 2" in said
    assert said[-21:-1] == [f"           odd.{index:02}" for index in range(20)]
    assert said[-1] == "           and 5 more"


def test_values_and_fit_are_checked_with_a_base(tmp_path: Path) -> None:
    tensors = make.linear_keys(WEIGHTS)
    key = f"{make.PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors[key] = torch.full_like(tensors[key], float("nan"))
    make.write(tmp_path, tensors, make.lora_config())
    assert "not finite" in lines(tmp_path)[-1]
    other = describe(make.SAMPLES / "kt_fused_all", CONFIG).text
    assert "refused" in other and "no experts in the base" in other


@pytest.mark.parametrize("name", ["nowhere", "loop", "empty", "corrupt"])
def test_nothing_to_describe(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").mkdir()
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt/adapter_model.safetensors").write_bytes(b"x" * 30)
    said = lines(tmp_path / name)
    assert len(said) == 2 and said[1].startswith("refused    ")


def test_warnings_are_said_once(tmp_path: Path) -> None:
    make.write(tmp_path, make.linear_keys(WEIGHTS), make.lora_config())
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    (tmp_path / "other.safetensors").write_bytes(b"")
    said = lines(tmp_path)
    assert len([line for line in said if line.startswith("warning")]) == 2 and len(set(said)) == len(said)


def test_manifest_that_does_not_hold(tmp_path: Path) -> None:
    folder = make.write(tmp_path, {}, make.lora_config(), fused=make.fused_keys(WEIGHTS))
    make.write_manifest(folder, status="writing")
    said = lines(folder, with_base=False)
    assert (
        said[-1]
        == "refused    kt_adapter_manifest.json: status is 'writing', not 'ready': the trainer did not finish writing"
    )


@pytest.mark.parametrize("kind", ["folder", "fifo", "/dev/zero", "/nowhere", "empty"])
@pytest.mark.parametrize("name", [*ADAPTER_FILES, FUSED_FILE, EXTRA_FILE, CONFIG_FILE, MANIFEST_FILE])
def test_what_is_no_file_is_a_refusal(tmp_path: Path, name: str, kind: str) -> None:
    held = make.linear_keys(WEIGHTS)
    path = make.write(tmp_path, held, make.lora_config(), binary=name.endswith(".bin"))
    (path / name).unlink(missing_ok=True)
    if kind == "folder":
        (path / name).mkdir()
    elif kind == "fifo":
        os.mkfifo(path / name)
    elif kind == "empty":
        (path / name).touch()
    else:
        (path / name).symlink_to(kind)
    last = lines(path)[-1]
    assert last.startswith("refused    ") and name in last


@pytest.mark.parametrize("rank", [64, 65])
def test_a_rank_that_serving_refuses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    monkeypatch.setattr(reader_process, "limit_this_process", lambda: lambda num_bytes: None)
    model, path = make.SAMPLES / "base-model", tmp_path / "adapter"
    weights = make.random_adapter(make.sample_config(), rank=rank, experts=False)
    make.write(path, make.linear_keys(weights), make.lora_config(rank=rank))
    assert main(["inspect", str(path), "--config-json", json.dumps({"model": str(model)})]) == (0 if rank <= 64 else 2)
    said = capsys.readouterr().out
    assert f"served     yes: rank {rank}" in said or f"rank {rank} is over --max-adapter-rank 64" in said
    assert ("served     yes" in said) == (rank <= 64)


@pytest.mark.parametrize(
    "files, said",
    [
        (["config.json", "model.safetensors"], "is a model, not an adapter"),
        (["Qwen3-30B-Q4_K_M.gguf"], "is a model, not an adapter"),
        (["config.json", "model.safetensors", "trainer_state.json"], "is a checkpoint of a whole model"),
        (["trainer_state.json", "optimizer.pt"], "is a trainer's checkpoint without an adapter"),
        (["checkpoint-10", "checkpoint-20"], "name one of its checkpoints: checkpoint-10, checkpoint-20"),
        (["notes.txt"], "holds no adapter"),
    ],
)
def test_folders_that_are_none(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    text = lines(tmp_path)[-1]
    assert text.startswith("refused ") and said in text


@pytest.mark.parametrize(
    "state, said", [('{"global_step": 40}', ", step 40"), ("{}", ""), ("{", ": trainer_state.json is")]
)
def test_a_checkpoint_with_an_adapter(tmp_path: Path, state: str, said: str) -> None:
    make.write(tmp_path, make.linear_keys(WEIGHTS), make.lora_config())
    (tmp_path / "trainer_state.json").write_text(state)
    found = lines(tmp_path)
    assert found[1].startswith(f"checkpoint of a training run{said}") and found[-1].startswith("served     yes")


def test_what_files_leave_open_is_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both commands; alone it means nothing."""
    monkeypatch.setattr(reader_process, "limit_this_process", lambda: lambda num_bytes: None)
    base = make.SAMPLES / "base-model"
    weights = make.random_adapter(make.sample_config())
    folder = make.write(tmp_path / "a", make.per_expert_keys(weights), make.lora_config(use_rslora=True))
    model, option = ["--config-json", json.dumps({"model": str(base)})], ["--expert-scaling", "peft"]
    assert main(["inspect", str(folder), *model]) == 2
    assert main(["inspect", str(folder), *model, *option]) == 0
    assert main(["inspect", str(folder), *model, "--expert-scaling", "new"]) == 1
    assert main(["inspect", str(folder), *option]) == 1
    out = str(tmp_path / "out")
    assert main(["convert", str(folder), *model, "--to", "peft", "--out", out]) == 1
    assert main(["convert", str(folder), *model, "--to", "peft", "--out", out, *option]) == 0
    assert "expert_scaling is 'new'" in capsys.readouterr().err
