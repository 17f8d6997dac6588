"""Every setting of a training run, once: name, type, allowed values, default, meaning. Torch-free.

The YAML reader, the overrides and docs/training-config.md are made from these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from ktserve.settings import option

_LARGE = 1 << 31
LATENT_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
DELTA_TARGETS = (*("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),)
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *LATENT_TARGETS, *DELTA_TARGETS)  # those that a model has
REPORTERS = ("tensorboard", "wandb")
EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")  # of shared experts and dense layers too
TARGET_ALIASES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's own names


@dataclass(frozen=True)
class TrainConfig:
    """One run. Paths are as written, `~` expanded, relative ones to the working directory."""

    # ---- model
    model_name_or_path: str = option(
        "", "frozen base: a Hugging Face folder, or a .gguf file or folder. Required", "Model"
    )
    kt_weight_path: str | None = option(
        None, "folder or .gguf with the routed experts' weights, where they are not those of the model", "Model",
        aliases=("kt_expert_checkpoint_path",),
    )  # fmt: skip
    kt_expert_weight_format: str = option(
        "auto",
        "another name for kt_backend's types: bf16 (AMXBF16) or int8 (AMXInt8), where kt_backend is auto",
        "Model",
        choices=("auto", "bf16", "int8"),
    )
    kt_backend: str = option(
        "auto",
        "type that frozen experts of plain types are held in: that of activations (auto), bfloat16 (AMXBF16), or int8, "
        "quantised while loading (AMXInt8). Quantised ones stay as the files have them (auto). The kernels are the "
        "best that the CPU has, whatever the name says",
        "Model",
        choices=("auto", "AMXBF16", "AMXInt8"),
    )
    kt_num_threads: int | None = option(
        None, "threads of the CPU pool, at most one for each CPU of the machine", "Model", limits=(1, 4096),
        default_help="one per core", aliases=("cpu_infer",),
    )  # fmt: skip
    kt_tp_enabled: bool = option(
        True, "split each expert over the NUMA nodes; on a machine of one node it changes nothing", "Model"
    )
    kt_cpu_activation: str = option(
        "retain",
        "what the experts' forward keeps for their backward: inputs and gate and up products (retain), or inputs alone "
        "and the products are computed again (recompute)",
        "Model",
        choices=("retain", "recompute"),
    )
    device: str = option("auto", "where attention runs", "Model", choices=("auto", "cpu", "cuda"))
    stream_min_tokens: int | None = option(
        None,
        "with attention on a GPU: tokens of a micro-batch, padding included, from which the routed experts are "
        "computed there too, a layer's weights copied to it at a time, forward and backward; 0: never",
        "Model",
        limits=(0, _LARGE),
        default_help="measured as the run begins",
    )
    bf16: bool = option(
        False, "activations and unquantised weights in bfloat16; float32 without. LoRA masters are float32", "Model"
    )
    flash_attn: str = option(
        "auto",
        "attention implementation of transformers: sdpa (auto; fa2 and fa3 too: it has flash attention's kernels) or "
        "eager (disabled)",
        "Model",
        choices=("auto", "disabled", "sdpa", "fa2", "fa3"),
    )
    gradient_checkpointing: bool = option(
        False, "keep each layer's input only, and compute the layer again in the backward pass", "Model",
        aliases=("activation_checkpointing",),
    )  # fmt: skip
    force_memory_plan: bool = option(False, "start although the memory plan says that it does not fit", "Model")

    # ---- method
    stage: str = option("sft", "supervised fine-tuning, or direct preference optimisation", "Method",
                         choices=("sft", "dpo"))  # fmt: skip
    finetuning_type: str = option("lora", "what is trained", "Method", choices=("lora",))
    lora_rank: int = option(8, "rank", "Method", limits=(1, 512), per_adapter=True, aliases=("kt_lora_rank",))
    lora_alpha: float = option(
        16.0, "scale: LoRA's output is multiplied by alpha / rank", "Method", limits=(1e-6, 1e6), per_adapter=True,
        default_help="2 x lora_rank", aliases=("kt_lora_alpha",),
    )  # fmt: skip
    lora_dropout: float = option(0.0, "dropout on LoRA's input", "Method", limits=(0.0, 0.99), per_adapter=True)
    lora_target: tuple[str, ...] = option(
        ("all",),
        "projections with LoRA, of attention and experts alike (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
        "down_proj; w1, w3, w2 are other names for the last three); all or all-linear: every one; all_attention: the "
        "first four",
        "Method",
    )
    pref_beta: float = option(0.1, "DPO's beta", "Method", limits=(1e-6, 100.0))
    pref_loss: str = option("sigmoid", "DPO's loss", "Method", choices=("sigmoid", "hinge", "ipo"))
    pref_ftx: float = option(0.0, "weight of the chosen answers' SFT loss beside DPO's", "Method", limits=(0.0, 100.0))
    dpo_label_smoothing: float = option(
        0.0, "probability that a preference is the wrong way round; with pref_loss sigmoid", "Method",
        limits=(0.0, 0.499),
    )  # fmt: skip
    adapter_name_or_path: str | None = option(
        None,
        "folder of a finished adapter, in any form that is served, which training goes on with: its rank, scale and "
        "targets are taken, whatever lora_rank, lora_alpha and lora_target say",
        "Method",
    )
    adapters: tuple[TrainConfig, ...] = option(
        (),
        "several adapters, trained in one batch over one pass of the base weights: a list of mappings with `name` and "
        "what differs from the settings above (those marked so may)",
        "Method",
    )
    adapter_name: str = option("default", "the adapter's name", "Method", aliases=("name",), per_adapter=True)

    # ---- data
    dataset: tuple[str, ...] = option(
        (), "names in dataset_info.json, or files (.json, .jsonl, .csv, .parquet). Required", "Data", per_adapter=True
    )
    dataset_dir: str = option("data", "folder of dataset_info.json and of the files that it names", "Data")
    eval_dataset: tuple[str, ...] = option((), "the same, for evaluation", "Data", per_adapter=True)
    val_size: float = option(
        0.0, "part of the data that is kept for evaluation: a share below 1, else a number of samples", "Data",
        limits=(0.0, _LARGE),
    )  # fmt: skip
    template: str = option(
        "auto",
        "chat template: the model's own (auto), or a .jinja file. LLaMA-Factory's names of the Qwen family (qwen, "
        "qwen2, qwen2_5, qwen3, qwen3_nothink) mean the model's own; the last one sets enable_thinking: false",
        "Data",
    )
    enable_thinking: bool | None = option(
        None, "the template's variable of that name", "Data", default_help="the template's", per_adapter=True
    )
    cutoff_len: int = option(2048, "most tokens of a sample, and of a packed row", "Data", limits=(8, 1 << 22))
    overlong: str = option(
        "truncate",
        "what is done with a sample of more than cutoff_len tokens: an error, leave it out (drop), or cut it as "
        "LLaMA-Factory does (truncate): turn by turn, the longer of prompt and answer first; what is left without a "
        "token to learn is left out",
        "Data",
        choices=("error", "drop", "truncate"),
    )
    skip_bad_rows: int = option(
        0, "leave out so many rows that cannot be read, each with a line that says why; one more ends the run", "Data",
        limits=(0, _LARGE),
    )  # fmt: skip
    packing: bool = option(
        False, "several samples in a row, which never attend to one another", "Data", aliases=("neat_packing",)
    )
    train_on_prompt: bool = option(False, "loss on all tokens, not on answers only", "Data")
    mask_history: bool = option(False, "loss on a conversation's last answer only", "Data")
    split_special_tokens: bool = option(
        True, "text of samples that spells a control token stays text; false: it becomes the token", "Data"
    )
    max_samples: int | None = option(None, "read so many rows of each data set", "Data", limits=(1, _LARGE))

    # ---- training
    output_dir: str = option("", "folder for adapters, checkpoints and the log. Required", "Training")
    overwrite_output_dir: bool = option(False, "write into an output_dir that is not empty", "Training")
    resume_from_checkpoint: str | None = option(
        None, "checkpoint folder to resume from; true: the newest in output_dir", "Training"
    )
    per_device_train_batch_size: int = option(1, "rows of a micro-batch", "Training", limits=(1, 1 << 16))
    gradient_accumulation_steps: int = option(1, "micro-batches of a step", "Training", limits=(1, 1 << 16))
    learning_rate: float = option(5e-5, "AdamW's, at its peak", "Training", limits=(0.0, 10.0), per_adapter=True)
    weight_decay: float = option(0.0, "AdamW's", "Training", limits=(0.0, 10.0), per_adapter=True)
    adam_beta1: float = option(0.9, "AdamW's", "Training", limits=(0.0, 0.999999))
    adam_beta2: float = option(0.999, "AdamW's", "Training", limits=(0.0, 0.999999))
    adam_epsilon: float = option(1e-8, "AdamW's", "Training", limits=(1e-16, 1.0))
    idle_experts: str = option(
        "step",
        "experts that no row of a step has gone through: their LoRA has a gradient of zeros, so that AdamW decays it "
        "and moves it by its moments, as stacked experts have it (step), or it is left alone, as that of experts with "
        "parameters of their own (skip)",
        "Training",
        choices=("step", "skip"),
    )
    max_grad_norm: float = option(
        1.0, "gradients of attention and experts together are clipped to this norm; 0: never", "Training",
        limits=(0.0, 1e9),
    )  # fmt: skip
    num_train_epochs: float | None = option(
        3.0, "passes over the data; not together with max_steps", "Training", limits=(1e-6, 1e6), per_adapter=True
    )
    max_steps: int | None = option(
        None, "optimiser steps, instead of num_train_epochs; -1: none", "Training", limits=(1, _LARGE),
        per_adapter=True,
    )  # fmt: skip
    lr_scheduler_type: str = option(
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
    warmup_steps: int = option(0, "steps of warm-up", "Training", limits=(0, _LARGE), per_adapter=True)
    warmup_ratio: float = option(
        0.0, "share of all steps; not together with warmup_steps", "Training", limits=(0.0, 0.99), per_adapter=True
    )
    seed: int = option(42, "of LoRA's initial values, dropout, and the order of data", "Training",
                        limits=(0, (1 << 32) - 1), per_adapter=True)  # fmt: skip
    data_seed: int | None = option(
        None, "of the order of data alone", "Training", limits=(0, (1 << 32) - 1), default_help="seed"
    )

    # ---- evaluation and output
    logging_steps: int = option(10, "steps between lines of the log", "Output", limits=(1, _LARGE))
    logging_first_step: bool = option(False, "a line for the first step too", "Output")
    report_to: tuple[str, ...] = option(
        (), "where the log goes beside log.jsonl: none, tensorboard (output_dir/runs), wandb", "Output"
    )
    run_name: str | None = option(None, "the run's name there", "Output")
    plot_loss: bool = option(True, "draw the loss curve (loss.svg)", "Output")
    save_strategy: str = option("steps", "when checkpoints are written", "Output", choices=("no", "steps", "epoch"))
    save_steps: int = option(500, "steps between checkpoints", "Output", limits=(1, _LARGE))
    save_only_model: bool = option(
        False, "checkpoints without the optimiser's state, from which no run is resumed", "Output"
    )
    save_total_limit: int | None = option(None, "checkpoints that are kept", "Output", limits=(1, 1 << 20))
    adapter_format: str = option(
        "peft", "files of the result: PEFT's keys per expert, or beside them KT's fused tensors", "Output",
        choices=("peft", "kt-fused"),
    )  # fmt: skip
    eval_strategy: str = option(
        "no", "when the evaluation data is run", "Output", choices=("no", "steps", "epoch"),
        aliases=("evaluation_strategy",),
    )  # fmt: skip
    eval_steps: int | None = option(
        None, "steps between evaluations; with eval_strategy: steps", "Output", limits=(1, _LARGE),
        default_help="logging_steps",
    )  # fmt: skip
    eval_on_start: bool = option(False, "evaluate before the first step too", "Output")
    eval_delay: float = option(
        0.0, "steps (or epochs, as eval_strategy says) before the first evaluation", "Output", limits=(0.0, _LARGE)
    )
    load_best_model_at_end: bool = option(
        False, "the result is the checkpoint with the lowest loss of evaluation, as with early_stopping_steps", "Output"
    )
    per_device_eval_batch_size: int = option(1, "rows of a micro-batch of evaluation", "Output", limits=(1, 1 << 16))
    early_stopping_steps: int | None = option(
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
