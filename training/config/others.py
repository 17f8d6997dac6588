"""Keys of LLaMA-Factory, transformers and KTransformers that are no settings here: those that change nothing, with the
reason, and those that are refused, with what to do instead. Torch-free."""

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
_NONE = ("none", "null", "~", "")

NO_OPS: Mapping[str, NoOp] = {
    "use_kt": NoOp("routed experts are always computed by the CPU pool", _TRUE, "leave it out"),
    "do_train": NoOp("`ktserve train` trains", _TRUE, "`ktserve plan --train` looks without training"),
    "do_eval": NoOp("eval_strategy decides when to evaluate"),
    "optim": NoOp("AdamW with float32 moments is the optimiser", ("adamw_torch", "adamw_torch_fused"), "leave it out"),
    "report_to": NoOp("the log is log.jsonl and loss.png in output_dir", _NONE, "leave it out, and read log.jsonl"),
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
    "prediction_loss_only": NoOp("evaluation computes the loss only", _TRUE, "leave it out"),
}

_FROZEN = "only LoRA is trained: finetuning_type: lora"
_BASE = "the base is read from a local folder: download the model and give its path as model_name_or_path"
_REPORT = "read log.jsonl in output_dir"
_ONE_PROCESS = "training is one process: leave it out"

REFUSED: Mapping[str, str] = {
    "kt_optimize_rule": "placement needs no rule file: attention runs on `device`, experts in the CPU pool; "
    "kt_backend, kt_num_threads and kt_weight_path set the rest",
    "cpu_infer": "use kt_num_threads",
    "chunk_size": "the pool cuts batches itself: leave it out",
    "kt_non_expert_weight_path": "model_name_or_path may itself be bf16, GGUF or a mix of types: give that",
    "fp16": "float16 overflows in training: use bf16: true",
    "pure_bf16": "LoRA masters, gradients and moments are float32: use bf16: true",
    "quantization_bit": "give a quantised GGUF as model_name_or_path, or kt_backend: AMXInt8",
    "quantization_method": "give a quantised GGUF as model_name_or_path, or kt_backend: AMXInt8",
    "use_dora": "DoRA is not served for experts: leave it out",
    "use_rslora": "set lora_alpha: alpha x sqrt(rank) gives the same scale",
    "pissa_init": "A is drawn and B is zero: leave it out",
    "loraplus_lr_ratio": "A and B have one learning rate: leave it out",
    "additional_target": _FROZEN,
    "modules_to_save": _FROZEN,
    "freeze_trainable_layers": _FROZEN,
    "create_new_adapter": "an adapter is never merged into the base: leave it out to go on with adapter_name_or_path",
    "ref_model": "the reference is the same frozen base without the adapter: leave it out",
    "reward_model": "stage is sft or dpo: leave it out",
    "deepspeed": _ONE_PROCESS,
    "fsdp": _ONE_PROCESS,
    "fsdp_config": _ONE_PROCESS,
    "local_rank": _ONE_PROCESS,
    "streaming": "samples are counted, shuffled and packed before the first step: leave it out",
    "buffer_size": "belongs to streaming, which is refused: leave it out",
    "tokenized_path": "tokenised data is not kept on disk: leave it out",
    "interleave_probs": "data sets are put behind one another and shuffled: leave it out",
    "model_revision": _BASE,
    "cache_dir": _BASE,
    "hf_hub_token": _BASE,
    "push_to_hub": "publish output_dir yourself when it is done",
    "predict_with_generate": "serve the adapter, and generate there",
    "do_predict": "serve the adapter, and generate there",
    "run_name": _REPORT,
    "logging_dir": _REPORT,
    "neftune_noise_alpha": "not computed here: leave it out",
    "moe_aux_loss_coef": "routers are frozen, their balance is not trained: leave it out",
    "group_by_length": "use packing: true, which leaves no padding",
    "use_unsloth": "the kernels are this project's own: leave it out",
    "enable_liger_kernel": "the kernels are this project's own: leave it out",
    "export_dir": "the adapter in output_dir is served as it is: leave it out",
    "resize_vocab": _FROZEN,
    "rope_scaling": "is read from the model's config.json: set it there",
    "load_best_model_at_end": "the result is the last step, or with early_stopping_steps the best one: leave it out",
}
