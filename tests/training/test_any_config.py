"""Whatever settings are put together, a run does its two steps, evaluates, saves, resumes and writes its adapter."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.lora.files.parse import parse_adapter
from engine.weights.open import open_model
from training.config import TrainConfig, load_config
from training.loop.progress import read_log
from training.run import train

STAGES = ("sft", "dpo") if importlib.util.find_spec("trl") else ("sft",)
_BATCHES = st.sampled_from([1, 2, 3])


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a run of two steps, as a file has them."""
    stage = draw(st.sampled_from(STAGES))
    written: dict[str, Any] = {
        "stage": stage,
        "max_steps": 2,
        "logging_steps": draw(st.sampled_from([1, 2, 5])),
        "per_device_train_batch_size": draw(_BATCHES),
        "gradient_accumulation_steps": draw(_BATCHES),
        "gradient_checkpointing": draw(st.booleans()),
        "bf16": draw(st.booleans()),
        "flash_attn": draw(st.sampled_from(["auto", "disabled"])),
        "kt_cpu_activation": draw(st.sampled_from(["retain", "recompute"])),
        "lora_rank": draw(st.sampled_from([1, 3, 16])),
        "lora_target": draw(st.sampled_from(["all", "q_proj,v_proj", "gate_proj,down_proj", "o_proj,up_proj"])),
        "adapter_format": "peft",
        "cutoff_len": draw(st.sampled_from([48, 64, 200])),
        "lr_scheduler_type": draw(
            st.sampled_from(["linear", "cosine", "constant", "cosine_with_restarts", "polynomial", "inverse_sqrt"])
        ),
        "idle_experts": draw(st.sampled_from(["step", "skip"])),
        "logging_first_step": draw(st.booleans()),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "max_grad_norm": draw(st.sampled_from([0.0, 1.0])),
        "save_strategy": draw(st.sampled_from(["no", "steps", "epoch"])),
    }
    if stage == "sft":
        written["packing"] = draw(st.booleans())
        written |= draw(st.sampled_from([{}, {"train_on_prompt": True}, {"mask_history": True}]))
    else:
        written |= draw(st.sampled_from([{}, {"pref_loss": "ipo"}, {"pref_ftx": 0.5}]))
    if written["save_strategy"] == "steps":
        written["save_steps"] = 1
    if draw(st.booleans()):
        strategy = draw(st.sampled_from(["steps", "epoch"]))
        written |= {"eval_strategy": strategy, "per_device_eval_batch_size": draw(_BATCHES)}
        written |= draw(st.sampled_from([{"val_size": 3}, {"val_size": 0.2}, {"eval_dataset": True}]))
        written |= {"eval_steps": 1} if strategy == "steps" else {}
        written |= draw(st.sampled_from([{}, {"eval_on_start": True}, {"eval_delay": 1}]))
        if strategy == written["save_strategy"]:
            written |= draw(st.sampled_from([{}, {"early_stopping_steps": 3}, {"load_best_model_at_end": True}]))
    return written


def _config(folder: Path, written: dict[str, Any], model: Path, data: Path) -> TrainConfig:
    if "eval_dataset" in written:
        written = {**written, "eval_dataset": str(data)}
    rest = {
        "model_name_or_path": str(model), "dataset": str(data), "output_dir": str(folder / "out"), "device": "cpu",
        "plot_loss": "false", "kt_num_threads": 1, "learning_rate": "1e-3",
    }  # fmt: skip
    lines = [f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in written.items()]
    path = folder / "run.yaml"
    path.write_text("\n".join([*lines, *(f"{key}: {value}" for key, value in rest.items())]))
    return load_config(path)


# No deadline: a step's time is the machine's. Not shrunk: every attempt is a whole run.
@settings(
    max_examples=10, deadline=None, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(written=configurations(), resumed=st.booleans())
def test_two_steps(written, resumed, chat_model, talks, pairs):
    with TemporaryDirectory() as folder:
        config = _config(Path(folder), written, chat_model, pairs if written["stage"] == "dpo" else talks)
        if resumed and config.save_strategy == "steps":
            train(replace(config, max_steps=1))
            config = replace(config, resume_from_checkpoint="true")
        outcome = train(config)
        records = read_log(config.output / "log.jsonl")
        assert outcome.folders and math.isfinite(outcome.loss)
        assert all(math.isfinite(record.get("eval_loss", 0.0)) for record in records)
        if config.eval_strategy == "steps":
            steps = [record["step"] for record in records if "eval_loss" in record]
            assert steps[-2:] == [1, 2]
        parse_adapter(outcome.folders["default"], open_model(chat_model).config, name="a")


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_packed_training_is_evaluated_sample_by_sample(strategy, config):
    """The evaluation's loss is that of a run without packing: rows of evaluation are never packed."""
    config = replace(
        config, learning_rate=0.0, val_size=4, eval_strategy=strategy, max_steps=None, num_train_epochs=1.0,
        per_device_eval_batch_size=2,
    )  # fmt: skip
    found = []
    for packing in (False, True):
        each = replace(config, packing=packing, output_dir=f"{config.output_dir}-{packing}")
        train(each)
        found.append([r["eval_loss"] for r in read_log(each.output / "log.jsonl") if "eval_loss" in r][-1])
    assert found[0] == pytest.approx(found[1], abs=1e-6)
