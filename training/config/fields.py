"""Every setting of a training run, once: name, type, allowed values, default, meaning. Torch-free.

The YAML reader, the overrides and docs/training-config.md are made from these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

_LARGE = 1 << 31
LATENT_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *LATENT_TARGETS)  # those that a model has
REPORTERS = ("tensorboard", "wandb")
EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")  # of shared experts and dense layers too
TARGET_ALIASES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's own names


def setting(
    default: Any,
    doc: str,
    group: str,
    *,
    limits: tuple[float, float] | None = None,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    per_adapter: bool = False,
    default_doc: str = "",
) -> Any:
    """A field of TrainConfig. `limits`: the least and the most that a number may be; `aliases`: other names that files
    have for it; `per_adapter`: an entry of `adapters` may set it for itself."""
    metadata = {
        "doc": doc, "group": group, "limits": limits, "choices": choices, "aliases": aliases,
        "per_adapter": per_adapter, "default_doc": default_doc,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """One run. Paths are as written, `~` expanded, relative ones to the working directory."""

    # ---- model
    model_name_or_path: str = setting(
        "", "frozen base: a Hugging Face folder, or a .gguf file or folder. Required", "Model"
    )
    kt_weight_path: str | None = setting(
        None, "folder or .gguf with the routed experts' weights, where they are not those of the model", "Model",
        aliases=("kt_expert_checkpoint_path",),
    )  # fmt: skip
    kt_expert_weight_format: str = setting(
        "auto",
        "another name for kt_backend's types: bf16 (AMXBF16) or int8 (AMXInt8), where kt_backend is auto",
        "Model",
        choices=("auto", "bf16", "int8"),
    )
    kt_backend: str = setting(
        "auto",
        "type that frozen experts of plain types are held in: that of activations (auto), bfloat16 (AMXBF16), or int8, "
        "quantised while loading (AMXInt8). Quantised ones stay as the files have them (auto). The kernels are the "
        "best that the CPU has, whatever the name says",
        "Model",
        choices=("auto", "AMXBF16", "AMXInt8"),
    )
    kt_num_threads: int | None = setting(
        None, "threads of the CPU pool, at most one for each CPU of the machine", "Model", limits=(1, 4096),
        default_doc="one per core", aliases=("cpu_infer",),
    )  # fmt: skip
    kt_tp_enabled: bool = setting(
        True, "split each expert over the NUMA nodes; on a machine of one node it changes nothing", "Model"
    )
    kt_cpu_activation: str = setting(
        "retain",
        "what the experts' forward keeps for their backward: inputs and gate and up products (retain), or inputs alone "
        "and the products are computed again (recompute)",
        "Model",
        choices=("retain", "recompute"),
    )
    device: str = setting("auto", "where attention runs", "Model", choices=("auto", "cpu", "cuda"))
    stream_min_tokens: int | None = setting(
        None,
        "with attention on a GPU: tokens of a micro-batch, padding included, from which the routed experts are "
        "computed there too, a layer's weights copied to it at a time, forward and backward; 0: never",
        "Model",
        limits=(0, _LARGE),
        default_doc="measured as the run begins",
    )
    bf16: bool = setting(
        False, "activations and unquantised weights in bfloat16; float32 without. LoRA masters are float32", "Model"
    )
    flash_attn: str = setting(
        "auto",
        "attention implementation of transformers: sdpa (auto; fa2 and fa3 too: it has flash attention's kernels) or "
        "eager (disabled)",
        "Model",
        choices=("auto", "disabled", "sdpa", "fa2", "fa3"),
    )
    gradient_checkpointing: bool = setting(
        False, "keep each layer's input only, and compute the layer again in the backward pass", "Model",
        aliases=("activation_checkpointing",),
    )  # fmt: skip
    force_memory_plan: bool = setting(False, "start although the memory plan says that it does not fit", "Model")

    # ---- method
    stage: str = setting("sft", "supervised fine-tuning, or direct preference optimisation", "Method",
                         choices=("sft", "dpo"))  # fmt: skip
    finetuning_type: str = setting("lora", "what is trained", "Method", choices=("lora",))
    lora_rank: int = setting(8, "rank", "Method", limits=(1, 512), per_adapter=True, aliases=("kt_lora_rank",))
    lora_alpha: float = setting(
        16.0, "scale: LoRA's output is multiplied by alpha / rank", "Method", limits=(1e-6, 1e6), per_adapter=True,
        default_doc="2 x lora_rank", aliases=("kt_lora_alpha",),
    )  # fmt: skip
    lora_dropout: float = setting(0.0, "dropout on LoRA's input", "Method", limits=(0.0, 0.99), per_adapter=True)
    lora_target: tuple[str, ...] = setting(
        ("all",),
        "projections with LoRA, of attention and experts alike (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
        "down_proj; w1, w3, w2 are other names for the last three); all or all-linear: every one; all_attention: the "
        "first four",
        "Method",
    )
    pref_beta: float = setting(0.1, "DPO's beta", "Method", limits=(1e-6, 100.0))
    pref_loss: str = setting("sigmoid", "DPO's loss", "Method", choices=("sigmoid", "hinge", "ipo"))
    pref_ftx: float = setting(0.0, "weight of the chosen answers' SFT loss beside DPO's", "Method", limits=(0.0, 100.0))
    dpo_label_smoothing: float = setting(
        0.0, "probability that a preference is the wrong way round; with pref_loss sigmoid", "Method",
        limits=(0.0, 0.499),
    )  # fmt: skip
    adapter_name_or_path: str | None = setting(
        None,
        "folder of a finished adapter, in any form that is served, which training goes on with: its rank, scale and "
        "targets are taken, whatever lora_rank, lora_alpha and lora_target say",
        "Method",
    )
    adapters: tuple[TrainConfig, ...] = setting(
        (),
        "several adapters, trained in one batch over one pass of the base weights: a list of mappings with `name` and "
        "what differs from the settings above (those marked so may)",
        "Method",
    )
    adapter_name: str = setting("default", "the adapter's name", "Method", aliases=("name",), per_adapter=True)

    # ---- data
    dataset: tuple[str, ...] = setting(
        (), "names in dataset_info.json, or files (.json, .jsonl, .csv, .parquet). Required", "Data", per_adapter=True
    )
    dataset_dir: str = setting("data", "folder of dataset_info.json and of the files that it names", "Data")
    eval_dataset: tuple[str, ...] = setting((), "the same, for evaluation", "Data", per_adapter=True)
    val_size: float = setting(
        0.0, "part of the data that is kept for evaluation: a share below 1, else a number of samples", "Data",
        limits=(0.0, _LARGE),
    )  # fmt: skip
    template: str = setting(
        "auto",
        "chat template: the model's own (auto), or a .jinja file. LLaMA-Factory's names of the Qwen family (qwen, "
        "qwen2, qwen2_5, qwen3, qwen3_nothink) mean the model's own; the last one sets enable_thinking: false",
        "Data",
    )
    enable_thinking: bool | None = setting(
        None, "the template's variable of that name", "Data", default_doc="the template's", per_adapter=True
    )
    cutoff_len: int = setting(2048, "most tokens of a sample, and of a packed row", "Data", limits=(8, 1 << 22))
    overlong: str = setting(
        "truncate",
        "what is done with a sample of more than cutoff_len tokens: an error, leave it out (drop), or cut it as "
        "LLaMA-Factory does (truncate): turn by turn, the longer of prompt and answer first; what is left without a "
        "token to learn is left out",
        "Data",
        choices=("error", "drop", "truncate"),
    )
    skip_bad_rows: int = setting(
        0, "leave out so many rows that cannot be read, each with a line that says why; one more ends the run", "Data",
        limits=(0, _LARGE),
    )  # fmt: skip
    packing: bool = setting(
        False, "several samples in a row, which never attend to one another", "Data", aliases=("neat_packing",)
    )
    train_on_prompt: bool = setting(False, "loss on all tokens, not on answers only", "Data")
    mask_history: bool = setting(False, "loss on a conversation's last answer only", "Data")
    split_special_tokens: bool = setting(
        True, "text of samples that spells a control token stays text; false: it becomes the token", "Data"
    )
    max_samples: int | None = setting(None, "read so many rows of each data set", "Data", limits=(1, _LARGE))

    # ---- training
    output_dir: str = setting("", "folder for adapters, checkpoints and the log. Required", "Training")
    overwrite_output_dir: bool = setting(False, "write into an output_dir that is not empty", "Training")
    resume_from_checkpoint: str | None = setting(
        None, "checkpoint folder to resume from; true: the newest in output_dir", "Training"
    )
    per_device_train_batch_size: int = setting(1, "rows of a micro-batch", "Training", limits=(1, 1 << 16))
    gradient_accumulation_steps: int = setting(1, "micro-batches of a step", "Training", limits=(1, 1 << 16))
    learning_rate: float = setting(5e-5, "AdamW's, at its peak", "Training", limits=(0.0, 10.0), per_adapter=True)
    weight_decay: float = setting(0.0, "AdamW's", "Training", limits=(0.0, 10.0), per_adapter=True)
    adam_beta1: float = setting(0.9, "AdamW's", "Training", limits=(0.0, 0.999999))
    adam_beta2: float = setting(0.999, "AdamW's", "Training", limits=(0.0, 0.999999))
    adam_epsilon: float = setting(1e-8, "AdamW's", "Training", limits=(1e-16, 1.0))
    idle_experts: str = setting(
        "step",
        "experts that no row of a step has gone through: their LoRA has a gradient of zeros, so that AdamW decays it "
        "and moves it by its moments, as stacked experts have it (step), or it is left alone, as that of experts with "
        "parameters of their own (skip)",
        "Training",
        choices=("step", "skip"),
    )
    max_grad_norm: float = setting(
        1.0, "gradients of attention and experts together are clipped to this norm; 0: never", "Training",
        limits=(0.0, 1e9),
    )  # fmt: skip
    num_train_epochs: float | None = setting(
        3.0, "passes over the data; not together with max_steps", "Training", limits=(1e-6, 1e6), per_adapter=True
    )
    max_steps: int | None = setting(
        None, "optimiser steps, instead of num_train_epochs; -1: none", "Training", limits=(1, _LARGE),
        per_adapter=True,
    )  # fmt: skip
    lr_scheduler_type: str = setting(
        "linear",
        "the learning rate's schedule after the warm-up",
        "Training",
        choices=(
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "inverse_sqrt",
            "constant",
            "constant_with_warmup",
        ),
        per_adapter=True,
    )
    warmup_steps: int = setting(0, "steps of warm-up", "Training", limits=(0, _LARGE), per_adapter=True)
    warmup_ratio: float = setting(
        0.0, "share of all steps; not together with warmup_steps", "Training", limits=(0.0, 0.99), per_adapter=True
    )
    seed: int = setting(42, "of LoRA's initial values, dropout, and the order of data", "Training",
                        limits=(0, (1 << 32) - 1), per_adapter=True)  # fmt: skip
    data_seed: int | None = setting(
        None, "of the order of data alone", "Training", limits=(0, (1 << 32) - 1), default_doc="seed"
    )

    # ---- evaluation and output
    logging_steps: int = setting(10, "steps between lines of the log", "Output", limits=(1, _LARGE))
    logging_first_step: bool = setting(False, "a line for the first step too", "Output")
    report_to: tuple[str, ...] = setting(
        (), "where the log goes beside log.jsonl: none, tensorboard (output_dir/runs), wandb", "Output"
    )
    run_name: str | None = setting(None, "the run's name there", "Output")
    plot_loss: bool = setting(True, "draw the loss curve (loss.svg)", "Output")
    save_strategy: str = setting("steps", "when checkpoints are written", "Output", choices=("no", "steps", "epoch"))
    save_steps: int = setting(500, "steps between checkpoints", "Output", limits=(1, _LARGE))
    save_only_model: bool = setting(
        False, "checkpoints without the optimiser's state, from which no run is resumed", "Output"
    )
    save_total_limit: int | None = setting(None, "checkpoints that are kept", "Output", limits=(1, 1 << 20))
    adapter_format: str = setting(
        "peft", "files of the result: PEFT's keys per expert, or beside them KT's fused tensors", "Output",
        choices=("peft", "kt-fused"),
    )  # fmt: skip
    eval_strategy: str = setting(
        "no", "when the evaluation data is run", "Output", choices=("no", "steps", "epoch"),
        aliases=("evaluation_strategy",),
    )  # fmt: skip
    eval_steps: int | None = setting(
        None, "steps between evaluations; with eval_strategy: steps", "Output", limits=(1, _LARGE),
        default_doc="logging_steps",
    )  # fmt: skip
    eval_on_start: bool = setting(False, "evaluate before the first step too", "Output")
    eval_delay: float = setting(
        0.0, "steps (or epochs, as eval_strategy says) before the first evaluation", "Output", limits=(0.0, _LARGE)
    )
    load_best_model_at_end: bool = setting(
        False, "the result is the checkpoint with the lowest loss of evaluation, as with early_stopping_steps", "Output"
    )
    per_device_eval_batch_size: int = setting(1, "rows of a micro-batch of evaluation", "Output", limits=(1, 1 << 16))
    early_stopping_steps: int | None = setting(
        None, "end after so many evaluations without a lower loss", "Output", limits=(1, 1 << 20)
    )

    def runs(self) -> tuple[TrainConfig, ...]:
        """One configuration per adapter that is trained: the entries of `adapters`, or this one."""
        return self.adapters or (self,)

    @property
    def scaling(self) -> float:
        """What LoRA's output is multiplied by."""
        return self.lora_alpha / self.lora_rank

    @property
    def order_seed(self) -> int:
        """Of the order of data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def output(self) -> Path:
        return Path(self.output_dir)


KT_FIELDS = tuple(f.name for f in fields(TrainConfig) if f.name.startswith("kt_"))
PER_ADAPTER = tuple(f.name for f in fields(TrainConfig) if f.metadata["per_adapter"])
PATHS = (
    "model_name_or_path", "kt_weight_path", "adapter_name_or_path", "dataset_dir", "output_dir",
    "resume_from_checkpoint", "template",
)  # fmt: skip
