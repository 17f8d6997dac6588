"""training.memory: the plan against what transformers, PEFT and autograd really hold."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import ktserve
from api.cli.main import main as command_line
from demo.paths import demo_model
from engine.errors import MemoryPlanError, UserError
from engine.memory.limits import Memory
from engine.weights.open import open_model
from testing.models.tiny import TRAINED, tiny_model
from training.attention import SINK_ATTENTION
from training.config import TrainConfig, load_config
from training.config.fields import DELTA_TARGETS
from training.memory.costs import Run, dense_lora, layer_bytes, lora_parameters
from training.memory.plan import plan_training
from training.plan import main as child

# peft looks for transformers' own experts, which these models have not
pytestmark = pytest.mark.filterwarnings("ignore:(target_parameters=|The following (rank|alpha)_pattern keys)")
_LARGE = Memory("CPU", 1 << 50, 1 << 50)
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_ALL = (*_ATTENTION, *DELTA_TARGETS, "gate_proj", "up_proj", "down_proj")


def _tiny(family: str, **more: Any) -> Any:
    dense = {"mlp_only_layers": [1]} if family == "qwen2_moe" else {}  # PEFT gives Qwen3's dense layers no LoRA
    return tiny_model(family=family, num_hidden_layers=3, **dense, **more)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for family in TRAINED:
        folders[family] = tmp_path_factory.mktemp(family)
        _tiny(family).save_pretrained(folders[family])
    return folders


def _config(folder: Path, **settings: Any) -> TrainConfig:
    data = folder / "d.jsonl"
    data.write_text("{}\n")  # its rows are not read
    given = {"cutoff_len": 64, "dataset": (str(data),), "device": "cpu", **settings}
    return TrainConfig(model_name_or_path=str(folder), output_dir="out", **given)


class _NoExperts(nn.Module):
    """Stands for the routed experts, whose part of the plan is apart."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden * 0.5


def _saved(model: nn.Module, batch: dict[str, Any]) -> int:
    """Bytes that autograd keeps of a forward pass, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}  # held, so that no address is another's meanwhile

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(**batch)  # while it is there, no storage is used twice
    del kept
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"bf16": True}),
        ("qwen3_moe", {"bf16": True, "packing": True}),
        ("qwen3_moe", {"packing": True, "lora_target": ("q_proj", "down_proj")}),
        ("qwen3_moe", {"bf16": True, "lora_dropout": 0.1}),
        ("qwen3_moe", {"flash_attn": "disabled"}),
        ("qwen2_moe", {"bf16": True}),
        ("qwen2_moe", {}),
        ("mixtral", {}),
        ("mixtral", {"bf16": True, "packing": True}),
        ("deepseek_v2", {"bf16": True}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"packing": True}),
        ("deepseek_v3", {"flash_attn": "disabled"}),
        ("gpt_oss", {}),
        ("gpt_oss", {"bf16": True}),
        ("gpt_oss", {"packing": True}),
        ("gpt_oss", {"flash_attn": "disabled"}),
        ("gpt_oss", {"flash_attn": "disabled", "bf16": True}),
        ("qwen3_next", {}),
        ("qwen3_next", {"bf16": True}),
        ("qwen3_5_moe_text", {}),
    ],
)
def test_activations_are_what_autograd_keeps(models: dict[str, Path], family: str, settings: dict[str, Any]) -> None:
    config = _config(models[family], lora_rank=4, per_device_train_batch_size=2, **settings)
    sizes = open_model(config.model_name_or_path).config
    run = Run.of(sizes, config)
    base = _tiny(family, dtype=torch.bfloat16 if config.bf16 else torch.float32)
    fused = SINK_ATTENTION if family == "gpt_oss" else "sdpa"
    base.set_attn_implementation("eager" if config.flash_attn == "disabled" else fused)
    base.config.use_cache = False
    for layer in sizes.sparse_layers:
        base.model.layers[layer].mlp.experts = _NoExperts()
    targets = (*_ALL, *_LATENT) if config.lora_target == ("all",) else config.lora_target
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=config.lora_dropout, target_modules=list(targets))
    model = get_peft_model(base, lora).train()
    batch: dict[str, Any] = {"input_ids": torch.randint(64, (run.rows, run.length))}
    if config.packing:
        batch["attention_mask"] = torch.ones(run.rows, 1, run.length, run.length, dtype=torch.bool).tril()
        if family == "gpt_oss":
            batch["attention_mask"] = dict.fromkeys(set(base.config.layer_types), batch["attention_mask"])
    saved = _saved(model.base_model.model.model, batch)
    planned = run.tokens * sum(layer_bytes(run, layer) for layer in range(sizes.num_hidden_layers))
    # less: the first layer's input needs no gradient; more: rotations and the last norm
    assert saved * 0.95 <= planned <= saved * 1.12, (planned, saved)


def test_lora_parameters_are_pefts(models: dict[str, Path]) -> None:
    for family, targets in (("qwen3_moe", ("all",)), ("qwen2_moe", ("k_proj", "up_proj")), ("mixtral", ("all",))):
        config = _config(models[family], lora_rank=4, lora_target=targets)
        sizes = open_model(config.model_name_or_path).config
        dense, trained, frozen = lora_parameters(sizes, config)
        base = _tiny(family)
        for layer in sizes.sparse_layers:
            base.model.layers[layer].mlp.experts = _NoExperts()
        wanted = list(_ALL if targets == ("all",) else targets)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=wanted))
        assert dense == model.get_nb_trainable_parameters()[0]
        per_matrix = (
            4 * len(sizes.sparse_layers) * sizes.num_experts * (sizes.hidden_size + sizes.moe_intermediate_size)
        )
        chosen = 3 if targets == ("all",) else 1
        assert (trained, frozen) == (chosen * per_matrix, (3 - chosen) * per_matrix)
        names = {name.rpartition(".")[2] for layer in range(3) for name, _, _ in dense_lora(sizes, config, layer)}
        assert names == (set(wanted) if family == "qwen2_moe" else set(_ATTENTION))


def test_weights_are_the_files(models: dict[str, Path]) -> None:
    model = _tiny("qwen2_moe")
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    rest = [p for name, p in model.named_parameters() if ".experts." not in name]
    items = {i.label: i.num_bytes for i in plan_training(_config(models["qwen2_moe"]), _LARGE).items}
    assert items["other weights"] == sum(4 * p.numel() for p in rest)
    packed = items["experts, 2 layers"]
    assert sum(4 * p.numel() for p in experts) <= packed <= 1.5 * sum(4 * p.numel() for p in experts)
    int8 = plan_training(_config(models["qwen2_moe"], kt_backend="AMXInt8"), _LARGE)
    assert {i.label: i.num_bytes for i in int8.items}["experts, 2 layers"] < 0.5 * packed


def test_each_setting_that_saves_memory_does(models: dict[str, Path]) -> None:
    config = _config(models["qwen3_moe"], per_device_train_batch_size=4, cutoff_len=1024)

    def needed(**settings: Any) -> int:
        return plan_training(replace(config, **settings), _LARGE).needed(_LARGE)

    assert needed(gradient_checkpointing=True) < needed()
    assert needed(kt_cpu_activation="recompute") < needed()
    assert needed(cutoff_len=512) < needed() < needed(packing=True)
    assert needed(bf16=True) < needed() < needed(lora_rank=64) and needed() < needed(stage="dpo")
    two = (replace(config, adapter_name="a"), replace(config, adapter_name="b"))
    assert needed() < needed(adapters=two)


def test_a_run_that_does_not_fit_says_what_would(models: dict[str, Path], tmp_path: Path) -> None:
    config = _config(models["qwen3_moe"], per_device_train_batch_size=8, cutoff_len=2048)
    limit = Memory("CPU", 0, 1 << 30)
    enough = plan_training(replace(config, per_device_train_batch_size=1), limit).needed(limit)
    small = replace(limit, free_bytes=enough)
    plan = plan_training(config, small)
    with pytest.raises(MemoryPlanError, match=r"CPU: .* needed, .* free") as error:
        plan.check(False)
    plan.check(True)
    assert "per_device_train_batch_size=1 gradient_accumulation_steps=8" in plan.remedies
    file = tmp_path / "c.yaml"
    file.write_text(
        f"model_name_or_path: {config.model_name_or_path}\noutput_dir: out\ndevice: cpu\n"
        f"dataset: {config.dataset[0]}\nper_device_train_batch_size: 8\ncutoff_len: 2048\n"
    )
    for text in plan.remedies:
        assert text in str(error.value)
        assert not plan_training(load_config(file, text.split()), small).short
    with pytest.raises(MemoryPlanError, match="no setting makes it fit"):
        plan_training(config, replace(limit, free_bytes=1 << 20)).check(False)


def test_a_gpu_takes_all_but_experts(models: dict[str, Path]) -> None:
    gpu = Memory("GPU 0", 1 << 40, 1 << 40)
    plan = plan_training(_config(models["qwen3_moe"]), _LARGE, gpu)
    on_cpu = {item.label for item in plan.items if item.device == "CPU"}
    assert {"experts, 3 layers", "expert scratch", "LoRA, rank 8, experts"} <= on_cpu
    assert not {"other weights", "logits, 64 tokens"} & on_cpu and plan.needed(gpu)
    with pytest.raises(UserError, match="no GPU here"):
        if torch.cuda.is_available():
            raise UserError("no GPU here")
        plan_training(_config(models["qwen3_moe"], device="cuda"))


def test_what_streaming_takes(models: dict[str, Path]) -> None:
    """On the GPU instead of the CPU, or on both where it is not known; with one less than it takes, not streaming is
    a way out."""
    gpu = Memory("GPU 0", 1 << 40, 1 << 40)
    there = {"expert streaming, 2 layers", "expert scratch, streamed"}
    moved = {"LoRA, rank 8, experts", "activations, 64 tokens, experts"}
    for least, on_gpu, on_cpu in ((0, False, True), (64, True, False), (65, False, True), (None, True, True)):
        config = _config(models["qwen3_moe"], stream_min_tokens=least)
        plan = plan_training(config, _LARGE, gpu)
        found = {item.label: item.device for item in plan.items if item.label in there}
        assert found == (dict.fromkeys(there, "GPU 0") if on_gpu else {})
        devices = [{i.device for i in plan.items if i.label == label} for label in sorted(moved)]
        wanted = ({"GPU 0"} if on_gpu else set()) | ({"CPU"} if on_cpu else set())
        assert devices[0] == wanted and devices[1] >= wanted  # smaller ones keep what they need on the CPU
        assert any("is measured as the run begins" in note for note in plan.notes) is (least is None)
    assert plan_training(replace(config, stream_min_tokens=64), _LARGE).needed(_LARGE)  # without a GPU: nothing of it
    small = replace(gpu, free_bytes=plan.needed(gpu) - 1)
    assert "stream_min_tokens=0" in plan_training(config, _LARGE, small).remedies


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    (tmp_path / "d.jsonl").write_text("{}\n")
    path.write_text(
        f"model_name_or_path: {demo_model()}\noutput_dir: out\ndevice: cpu\ndataset: {tmp_path / 'd.jsonl'}\n"
    )

    program = [sys.executable, str(Path(ktserve.__file__).with_name("__main__.py")), "plan", "--train", str(path)]
    done = subprocess.run([*program, "lora_rank=16"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "memory plan, CPU" in done.stdout and "LoRA, rank 16" in done.stdout
    assert child([str(path), "lora_rnk=16"]) == 1 and "did you mean lora_rank?" in capsys.readouterr().err
    assert command_line(["plan", "MODEL", "--train", str(path)]) == 1
    assert "--train takes all settings from its file: write MODEL" in capsys.readouterr().err
