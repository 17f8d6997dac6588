"""Every argument that LLaMA-Factory, KTransformers and transformers know is obeyed, changes nothing, or is refused."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import Seq2SeqTrainingArguments

from training.config import ConfigError, TrainConfig, load_config
from training.config.fields import ATTENTION_TARGETS
from training.config.others import NO_OPS, belongs
from training.config.refused import REFUSED
from training.data import DataError, build_datasets, load_tokenizer
from training.data.cutting import cut, kept
from training.run import train

MODEL = {
    "adapter_name_or_path", "adapter_folder", "cache_dir", "use_fast_tokenizer", "resize_vocab", "split_special_tokens",
    "add_tokens", "add_special_tokens", "new_special_tokens_config", "init_special_tokens", "model_revision",
    "low_cpu_mem_usage", "rope_scaling", "flash_attn", "shift_attn", "mixture_of_depths", "use_unsloth",
    "use_unsloth_gc", "enable_liger_kernel", "moe_aux_loss_coef", "disable_gradient_checkpointing", "use_reentrant_gc",
    "upcast_layernorm", "upcast_lmhead_output", "train_from_scratch", "infer_backend", "offload_folder", "use_kv_cache",
    "use_v1_kernels", "infer_dtype", "hf_hub_token", "ms_hub_token", "om_hub_token", "print_param_status",
    "trust_remote_code", "quantization_method", "quantization_bit", "quantization_type", "double_quantization",
    "quantization_device_map", "fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather", "image_max_pixels",
    "image_min_pixels", "image_do_pan_and_scan", "crop_to_patches", "video_max_pixels", "video_fps", "video_maxlen",
    "use_audio_in_video", "audio_sampling_rate", "export_dir", "export_size", "export_device", "export_legacy_format",
    "export_quantization_bit", "export_hub_model_id", "vllm_maxlen", "vllm_gpu_util", "vllm_config", "sglang_maxlen",
    "sglang_config", "use_kt", "kt_optimize_rule", "cpu_infer", "chunk_size", "mode", "kt_maxlen", "kt_use_cuda_graph",
    "kt_mode", "kt_force_think",
}  # fmt: skip
METHOD = {
    "freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "additional_target", "lora_alpha",
    "lora_dropout", "lora_rank", "lora_target", "loraplus_lr_ratio", "loraplus_lr_embedding", "use_rslora", "use_dora",
    "pissa_init", "pissa_iter", "pissa_convert", "create_new_adapter", "module_dropout", "oft_rank", "oft_block_size",
    "oft_target", "pref_beta", "pref_ftx", "pref_bco_weight", "pref_loss", "dpo_label_smoothing", "kto_chosen_weight",
    "kto_rejected_weight", "simpo_gamma", "ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target",
    "ppo_whiten_rewards", "ref_model", "ref_model_adapters", "ref_model_quantization_bit", "reward_model",
    "reward_model_adapters", "reward_model_quantization_bit", "reward_model_type", "ld_alpha", "use_galore",
    "galore_target", "galore_rank", "galore_update_interval", "galore_scale", "galore_proj_type", "galore_layerwise",
    "use_apollo", "apollo_rank", "apollo_scale_front", "use_badam", "badam_mode", "badam_verbose", "use_swanlab",
    "swanlab_project", "swanlab_api_key", "pure_bf16", "stage", "finetuning_type", "use_llama_pro", "use_adam_mini",
    "use_mca", "use_muon", "use_dft_loss", "freeze_vision_tower", "freeze_multi_modal_projector",
    "freeze_language_model", "compute_accuracy", "disable_shuffling", "early_stopping_steps", "plot_loss",
    "include_effective_tokens_per_second",
}  # fmt: skip
DATA = {
    "template", "dataset", "eval_dataset", "dataset_dir", "media_dir", "cutoff_len", "train_on_prompt", "mask_history",
    "streaming", "buffer_size", "mix_strategy", "interleave_probs", "overwrite_cache", "preprocessing_batch_size",
    "preprocessing_num_workers", "max_samples", "eval_num_beams", "ignore_pad_token_for_loss", "val_size",
    "eval_on_each_dataset", "packing", "neat_packing", "tool_format", "default_system", "enable_thinking",
    "tokenized_path", "data_shared_file_system",
}  # fmt: skip
OTHER = {
    "overwrite_output_dir", "ray_run_name", "ray_storage_path", "ray_num_workers", "resources_per_worker",
    "placement_strategy", "do_sample", "temperature", "top_p", "top_k", "num_beams", "max_length", "max_new_tokens",
    "repetition_penalty", "length_penalty", "skip_special_tokens", "kt_expert_weight_format", "kt_backend",
    "kt_num_threads", "kt_tp_enabled", "kt_threadpool_count", "kt_weight_path", "kt_num_gpu_experts",
    "kt_expert_checkpoint_path", "kt_skip_expert_loading", "kt_share_backward_bb", "kt_share_cache_pool",
    "kt_max_cache_depth", "kt_model_max_length", "kt_lora_rank", "kt_lora_alpha", "kt_use_lora_experts",
    "kt_lora_expert_num", "kt_lora_expert_intermediate_size", "kt_weight_lifecycle", "kt_cpu_activation",
    "kt_non_expert_weight_path", "kt_train_mode",
}  # fmt: skip
TRANSFORMERS = {field.name: field for field in fields(Seq2SeqTrainingArguments) if field.init}
NAMES = {f.name for f in fields(TrainConfig)} | {a for f in fields(TrainConfig) for a in f.metadata["aliases"]}
NAMES |= {"disable_gradient_checkpointing", "use_cpu", "no_cuda", *NO_OPS, *REFUSED}
_HEAD = "model_name_or_path: m\noutput_dir: o\ndataset: a\n"


def _load(folder: Path, written: dict[str, Any]) -> TrainConfig:
    (folder / "c.yaml").write_text(_HEAD + yaml.safe_dump(written))
    return load_config(folder / "c.yaml")


@pytest.mark.parametrize("key", sorted({*MODEL, *METHOD, *DATA, *OTHER, *TRANSFORMERS}))
def test_every_argument_has_a_place(key):
    assert key in NAMES or belongs(key)


def _defaults() -> dict[str, Any]:
    found = {name: field.default for name, field in TRANSFORMERS.items() if field.default is not MISSING}
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in found.items()}
    return {name: value for name, value in plain.items() if name not in ("output_dir", "do_train")}


@pytest.mark.parametrize(("key", "value"), _defaults().items())
def test_a_default_that_is_written_out_is_no_error(tmp_path, key, value):
    _load(tmp_path, {key: value})


def test_all_defaults_together(tmp_path):
    _load(tmp_path, _defaults())


# As LLaMA-Factory's examples are: of transformers' trainer, then of the three generations of KTransformers' keys.
_COMMON = """\
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
cutoff_len: 48
max_samples: 20
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
logging_steps: 1
logging_first_step: true
save_steps: 500
plot_loss: false
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
max_steps: 1
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
flash_attn: fa2
template: qwen2_5
metric_for_best_model: eval_loss
use_kt: true
"""
_KT = {
    "none": "use_kt: true\n",
    "rules": "kt_optimize_rule: examples/rules.yaml\ncpu_infer: 32\nchunk_size: 8192\n",
    "flat": "kt_backend: AMXBF16\nkt_num_threads: 60\nkt_tp_enabled: true\nkt_num_gpu_experts: 0\n",
    "nested": "kt_cpu_activation: retain\nkt_config:\n  kt_expert_weight_format: bf16\n  kt_backend: auto\n"
    "  kt_num_threads: 60\n  kt_tp_enabled: true\n  kt_threadpool_count: 2\n  kt_max_cache_depth: 2\n"
    "  kt_model_max_length: 2176\n  kt_share_backward_bb: true\n  kt_weight_lifecycle: persistent\n",
    "int8": "kt_config: {kt_expert_weight_format: int8, kt_backend: auto}\n",
}


@pytest.mark.parametrize("kind", _KT)
def test_their_examples_start(kind, chat_model, talks, tmp_path, capfd):
    """Unchanged, but for model, data and lengths. A machine has fewer CPUs than theirs."""
    folder = tmp_path / "data"
    folder.mkdir()
    info = {"talks": {"file_name": str(talks), "formatting": "openai"}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    text = _COMMON.replace("use_kt: true\n", "") + _KT[kind]
    where = f"model_name_or_path: {chat_model}\ndataset: talks\ndataset_dir: {folder}\noutput_dir: {tmp_path / 'out'}\n"
    (tmp_path / "c.yaml").write_text(where + text)
    config = load_config(tmp_path / "c.yaml", ["device=cpu"])
    assert train(config).folders
    if kind == "nested":
        assert config.kt_backend == "AMXBF16" and "kt_num_threads: 60 is lowered to" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("written", "wanted"),
    [("all_attention", ATTENTION_TARGETS), ("all-linear", ("all",)),
     ("all_attention,up_proj", (*ATTENTION_TARGETS, "up_proj"))],
)  # fmt: skip
def test_names_that_stand_for_targets(tmp_path, written, wanted):
    assert _load(tmp_path, {"lora_target": written}).lora_target == wanted


def test_a_weight_format_that_contradicts_the_backend(tmp_path):
    assert _load(tmp_path, {"kt_expert_weight_format": "int8"}).kt_backend == "AMXInt8"
    with pytest.raises(ConfigError, match="contradicts kt_backend: AMXBF16"):
        _load(tmp_path, {"kt_expert_weight_format": "int8", "kt_backend": "AMXBF16"})


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 60))
def test_a_cut_keeps_the_beginning_of_every_part(learnt, limit):
    ids, flags = cut(list(range(len(learnt))), learnt, limit)
    assert len(ids) == len(flags) <= limit and ids == sorted(ids)
    assert [learnt[i] for i in ids] == flags
    if len(learnt) <= limit:
        assert ids == list(range(len(learnt)))
    elif any(learnt) and limit > 1 and len(set(learnt)) == 1:
        assert len(ids) == limit


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_of_prompt_and_answer_the_longer_is_cut(prompt, answer, room):
    left = kept(prompt, answer, room)
    assert 0 <= left[0] <= prompt and 0 <= left[1] <= answer and sum(left) <= max(room, 0)
    if prompt + answer >= room > 0:
        assert sum(left) >= room - 1
    if 2 * answer < room:
        assert left[1] == answer


@given(bad=st.sets(st.integers(0, 5), max_size=4), allowed=st.integers(0, 4))
def test_so_many_bad_rows_are_left_out(tmp_path_factory, chat_model, bad, allowed):
    path = tmp_path_factory.getbasetemp() / "bad.jsonl"
    kinds = ["not json", "[1]", '{"messages": []}', '{"messages": [{"role": "user", "content": "x"}]}', "\udcff", "{}"]
    good = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}'
    lines = [kinds[i] if i in bad else good for i in range(6)] + [good]
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    config = TrainConfig(model_name_or_path=str(chat_model), dataset=(str(path),), skip_bad_rows=allowed)
    if len(bad) > allowed:
        with pytest.raises(DataError, match=f"bad.jsonl:{sorted(bad)[allowed] + 1}: "):
            build_datasets(config, load_tokenizer(config))
        return
    rows, _ = build_datasets(config, load_tokenizer(config))
    assert len(rows) == 7 - len(bad) and rows.report.bad == len(bad)


def test_reports_go_to_tensorboard(config):
    pytest.importorskip("tensorboard")
    from dataclasses import replace

    train(replace(config, max_steps=1, save_strategy="no", report_to=("tensorboard",)))
    assert list(config.output.glob("runs/*/events*"))
