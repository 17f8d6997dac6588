"""Keys of LLaMA-Factory, transformers and KTransformers that change nothing here, with the reason. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NoOp:
    """A key that may be there. `allowed`: the values (lower case) that mean what is done anyway; () for any."""

    reason: str
    allowed: tuple[str, ...] = ()
    instead: str = field(default="")  # said of other values


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

NO_OPS: Mapping[str, NoOp] = {
    "use_kt": NoOp("routed experts are always computed by the CPU pool", _TRUE, "leave it out"),
    "do_train": NoOp("`ktserve train` trains", _TRUE, "`ktserve plan --train` looks without training"),
    "do_eval": NoOp("eval_strategy decides when to evaluate"),
    "optim": NoOp("AdamW with float32 moments is the optimiser", ("adamw_torch", "adamw_torch_fused"), "leave it out"),
    "preprocessing_num_workers": NoOp("the tokenizer uses all cores in one process"),
    "dataloader_num_workers": NoOp("samples are tokens in memory; there is nothing to load in the background"),
    "dataloader_pin_memory": NoOp("a batch of token ids is copied in microseconds"),
    "overwrite_cache": NoOp("tokenised data is not cached on disk"),
    "remove_unused_columns": NoOp("only the columns that the format names are read"),
    "ddp_timeout": NoOp("training is one process"),
    "trust_remote_code": NoOp("code in a model's folder is never run"),
    "low_cpu_mem_usage": NoOp("weights are read straight into their packed form"),
    "use_fast_tokenizer": NoOp("the tokenizer is always the fast one", _TRUE, "leave it out"),
    "tf32": NoOp("matrix products are bf16 or float32, as bf16 says"),
    "include_num_input_tokens_seen": NoOp("the log always counts tokens"),
    "log_level": NoOp("warnings are always shown"),
    "kt_max_cache_depth": NoOp("every forward keeps its own activations until its backward, however many there are"),
    "kt_share_backward_bb": NoOp("the backward pass reads the forward's packed weights; there is no second copy"),
    "kt_skip_expert_loading": NoOp("experts are only ever loaded into the CPU pool"),
    "kt_force_fused_expert_lora": NoOp("experts' LoRA is always computed inside the expert; adapter_format: its files"),
    "kt_model_max_length": NoOp("buffers follow the rows of a batch"),
    "kt_weight_lifecycle": NoOp("weights stay in memory until the run ends"),
    "kt_threadpool_count": NoOp("with kt_tp_enabled there is one part per NUMA node that the process may use"),
    "kt_num_gpu_experts": NoOp("no expert stays on the GPU while training", ("0",), "0, or leave it out"),
    "kt_train_mode": NoOp("LoRA is what is trained", ("lora",), "lora"),
    "mix_strategy": NoOp("several data sets are put behind one another, then shuffled", ("concat",), "concat"),
    "prediction_loss_only": NoOp("evaluation computes the loss only"),
    "include_for_metrics": NoOp("evaluation computes the loss only"),
    "batch_eval_metrics": NoOp("evaluation computes the loss only"),
    "eval_accumulation_steps": NoOp("evaluation computes the loss only"),
    "eval_do_concat_batches": NoOp("evaluation computes the loss only"),
    "eval_use_gather_object": NoOp("training is one process"),
    "metric_for_best_model": NoOp(
        "the loss of evaluation decides", ("eval_loss", "loss"), "eval_loss, or leave it out"
    ),
    "greater_is_better": NoOp("the lowest loss is the best", _FALSE, "false, or leave it out"),
    "logging_strategy": NoOp("logging_steps says how often", ("steps",), "steps, with logging_steps"),
    "bf16_full_eval": NoOp("evaluation computes in the types of training"),
    "train_sampling_strategy": NoOp("samples are shuffled every epoch", ("random",), "random, or leave it out"),
    "average_tokens_across_devices": NoOp("training is one process; a step's loss is the mean over its tokens"),
    "gradient_checkpointing_kwargs": NoOp("layers are computed again without torch's re-entrant way"),
    "activation_checkpointing_kwargs": NoOp("layers are computed again without torch's re-entrant way"),
    "use_reentrant_gc": NoOp("layers are computed again without torch's re-entrant way"),
    "use_cache": NoOp("training needs no cache of keys and values"),
    "use_kv_cache": NoOp("training needs no cache of keys and values"),
    "torch_empty_cache_steps": NoOp("memory of the GPU is kept from step to step"),
    "disable_tqdm": NoOp("there are lines of the log, no progress bar"),
    "log_on_each_node": NoOp("training is one process"),
    "log_level_replica": NoOp("training is one process"),
    "save_on_each_node": NoOp("training is one process"),
    "logging_nan_inf_filter": NoOp("a loss that is no number ends the run"),
    "restore_callback_states_from_checkpoint": NoOp("a checkpoint always has the state of early stopping"),
    "enable_jit_checkpoint": NoOp("Ctrl-C and SIGTERM always write a checkpoint"),
    "length_column_name": NoOp("lengths are those of the tokens"),
    "skip_memory_metrics": NoOp("memory is planned before the run, not measured in it"),
    "include_effective_tokens_per_second": NoOp("the log always has tokens per second"),
    "include_tokens_per_second": NoOp("the log always has tokens per second"),
    "print_param_status": NoOp("the number of trained parameters is always printed"),
    "preprocessing_batch_size": NoOp("the tokenizer uses all cores in one process"),
    "data_shared_file_system": NoOp("training is one process"),
    "tool_format": NoOp("the model's chat template says how calls are written"),
    "ignore_pad_token_for_loss": NoOp("padding never counts", _TRUE, "true, or leave it out"),
    "upcast_lmhead_output": NoOp("the loss is computed in float32"),
    "infer_backend": NoOp("`ktserve serve` serves the adapter"),
    "infer_dtype": NoOp("`ktserve serve` serves the adapter"),
    "adapter_folder": NoOp("adapter_name_or_path is a path on this machine"),
    "offload_folder": NoOp("nothing is put on disk: the memory plan is checked first"),
    "kt_optimize_rule": NoOp(
        "placement needs no rule file: attention runs on `device`, experts in the CPU pool; kt_backend, kt_num_threads "
        "and kt_weight_path set the rest"
    ),
    "chunk_size": NoOp("the pool cuts batches itself"),
    "mode": NoOp("there is one way of attention, for short and long texts"),
    "kt_mode": NoOp("there is one way of attention, for short and long texts"),
    "kt_share_cache_pool": NoOp("buffers follow the rows of a batch"),
    "kt_maxlen": NoOp("belongs to KTransformers' engine for inference"),
    "kt_use_cuda_graph": NoOp("belongs to KTransformers' engine for inference"),
    "kt_force_think": NoOp("belongs to KTransformers' engine for inference"),
}

# By how a key begins: settings of what is itself refused, or not there.
BELONGS: Mapping[str, str] = {
    "galore_": "use_galore, which is refused",
    "apollo_": "use_apollo, which is refused",
    "badam_": "use_badam, which is refused",
    "swanlab_": "use_swanlab, which is refused",
    "trackio_": "report_to: trackio, which is not offered",
    "project": "report_to: trackio, which is not offered",
    "hub_": "push_to_hub, which is refused",
    "ddp_": "several processes; training is one",
    "ray_": "Ray; training is one process",
    "resources_per_worker": "Ray; training is one process",
    "placement_strategy": "Ray; training is one process",
    "freeze_": "finetuning_type: freeze and images, which are not offered",
    "oft_": "finetuning_type: oft, which is not offered",
    "module_dropout": "finetuning_type: oft, which is not offered",
    "ppo_": "stage: ppo, which is not offered",
    "kto_": "stage: kto, which is not offered",
    "simpo_": "pref_loss: simpo, which is not offered",
    "reward_model_": "stage: ppo, which is not offered",
    "ref_model_": "ref_model, which is refused",
    "pissa_iter": "pissa_init, which is refused",
    "pissa_convert": "pissa_init, which is refused",
    "loraplus_lr_embedding": "loraplus_lr_ratio, which is refused",
    "quantization_type": "quantization_bit, which is refused",
    "quantization_device_map": "quantization_bit, which is refused",
    "double_quantization": "quantization_bit, which is refused",
    "fp8_": "fp8, which is refused",
    "export_": "exporting; the adapter is served as it is",
    "kt_lora_expert_": "kt_use_lora_experts, which is refused",
    "vllm_": "inference",
    "sglang_": "inference",
    "image_": "images, which are not offered",
    "video_": "images, which are not offered",
    "audio_": "images, which are not offered",
    "use_audio_in_video": "images, which are not offered",
    "crop_to_patches": "images, which are not offered",
    "media_dir": "images, which are not offered",
    "dataloader_persistent_workers": "loading in the background, of which there is none",
    "dataloader_prefetch_factor": "loading in the background, of which there is none",
    "dataloader_multiprocessing_context": "loading in the background, of which there is none",
    "dataloader_in_order": "loading in the background, of which there is none",
    "generation_": "predict_with_generate, which is refused",
    "sortish_sampler": "predict_with_generate, which is refused",
    "eval_num_beams": "predict_with_generate, which is refused",
    "do_sample": "predict_with_generate, which is refused",
    "temperature": "predict_with_generate, which is refused",
    "top_p": "predict_with_generate, which is refused",
    "top_k": "predict_with_generate, which is refused",
    "num_beams": "predict_with_generate, which is refused",
    "max_length": "predict_with_generate, which is refused",
    "max_new_tokens": "predict_with_generate, which is refused",
    "repetition_penalty": "predict_with_generate, which is refused",
    "length_penalty": "predict_with_generate, which is refused",
    "skip_special_tokens": "predict_with_generate, which is refused",
    "init_special_tokens": "add_special_tokens, which is refused",
}


def belongs(key: str) -> str | None:
    """What a key is a setting of that is not there."""
    return next(
        (what for name, what in BELONGS.items() if key == name or (name[-1] == "_" and key.startswith(name))), None
    )
