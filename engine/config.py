"""Every setting of the server, once. The CLI's flags, KTSERVE_* environment variables and the YAML file are made
from the fields below; their names are the same everywhere. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from engine.errors import UserError
from ktserve.settings import option, settings_of

KV_BLOCK_TOKENS = 16  # positions in a block of the KV cache
CPU_BATCHED_TOKENS = 512
# Twice as many read and unpack an expert's weights half as often; only while nobody waits for a next token.
NATIVE_BATCHED_TOKENS = 1024
# Well above the rows from which streaming a layer's experts beats computing them on the CPU (2,500 where measured).
GPU_BATCHED_TOKENS = 8192
# Of experts that are streamed to the GPU: all of them pass the bus once a chunk, however long that is.
STREAMED_BATCHED_TOKENS = (32768, 16384)
# Beside a GPU that computes long chunks, running streams wait so long for their next token, or so many decode steps.
GPU_ITL_TARGET_S, GPU_ITL_DECODE_STEPS = 0.1, 3.0


def bucket_sizes(max_rows: int) -> list[int]:
    """The rows that decode steps are padded to: 1, 2, 4, 8, 16, 24, 32, ... and max_rows itself."""
    sizes = [1, 2, 4, *range(8, max_rows, 8), max_rows]
    return sorted({size for size in sizes if size <= max_rows})


def check_settings(settings: Any) -> None:
    """UserError for a value of a settings dataclass that is none of its choices or outside its limits."""
    for setting in settings_of(type(settings)):
        value = getattr(settings, setting.name)
        if value is not None and not setting.many and (allowed := setting.allowed(value)):
            raise UserError(f"{setting.flag} {value}: allowed is {allowed}", setting.name)


@dataclass
class EngineConfig:
    """What the engine process needs to know. Sent to it as JSON when it starts."""

    # ---- model
    model: str = option(
        "",
        "Hugging Face folder, or a .gguf file or folder; or null:step_ms=1,row_us=0,token_us=0,answer=64,load_ms=0: "
        "no model, a step takes so long and each of its rows and tokens so much more, answers are so many "
        "fixed words, an adapter takes so long into its slot",
        group="Model",
        aliases=("model_path",),
    )
    gguf: str | None = option(
        None,
        "GGUF file or folder with the weights, if the model folder holds only config and tokenizer; of null: that with "
        "the vocabulary (default: the demo model's)",
        group="Model",
        aliases=("gguf_path",),
    )
    served_model_name: str | None = option(
        None,
        "name of the base model in the API; default: the folder's or file's",
        group="Model",
        aliases=("model_name",),
    )
    dtype: str = option(
        "auto",
        "type of activations, unquantised weights and KV cache (which kv-cache-dtype may change); auto: bfloat16, with "
        "float32 activations where the native kernels compute everything",
        group="Model",
        choices=("auto", "bfloat16", "float32"),
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus output, in tokens; default: the model's, or what the cache holds",
        group="Model",
        limits=(1, 1 << 24),
    )
    adapters: list[str] = option(  # noqa: RUF009 - a field specifier
        [], "NAME=PATH of an adapter to load at start; may be repeated", group="Adapters", many=True
    )
    max_adapter_slots: int = option(8, "adapters that can be in one batch", group="Adapters", limits=(0, 4096))
    max_adapter_rank: int = option(64, "largest rank that is accepted", group="Adapters", limits=(1, 4096))
    adapter_memory: str | None = option(
        None,
        "host memory for adapters (e.g. 8GiB), their copies in slots included; those that do not fit are read again "
        "when they are wanted; default: what the memory plan leaves free",
        group="Adapters",
    )
    pinned_adapters: list[str] = option(  # noqa: RUF009 - a field specifier
        [], "NAME of a start-up adapter that stays in host memory; may be repeated", group="Adapters", many=True
    )
    expert_scaling: str | None = option(
        None,
        "how start-up adapters scale expert LoRA where their files leave it open",
        group="Adapters",
        choices=("alpha/r", "alpha/sqrt(r)", "peft"),
    )
    expert_b_layout: str | None = option(
        None,
        "how lora_B of start-up adapters on fused experts lies where their files leave it open: as PEFT's (rank_major) "
        "or as that of Unsloth's older releases (grouped_by_expert)",
        group="Adapters",
        choices=("rank_major", "grouped_by_expert"),
    )

    # ---- placement
    rules: str | None = option(
        None,
        "placement rules (YAML, KTransformers' match/replace); default: chosen from the machine",
        group="Placement",
        aliases=("optimize_config_path",),
    )
    device: str = option("auto", "where attention runs", group="Placement", choices=("auto", "cpu", "cuda"))
    expert_backend: str | None = option(
        None,
        "expert backend for all layers, over the rules",
        group="Placement",
        choices=("reference", "native", "kt", "gpu", "hybrid"),
    )
    attention_backend: str | None = option(
        None, "attention backend, over the rules", group="Placement", choices=("reference", "native", "flashinfer")
    )
    linear_backend: str | None = option(
        None,
        "backend of the dense projections, over the rules",
        group="Placement",
        choices=("reference", "native", "gpu"),
    )
    kt_method: str = option(
        "auto",
        "kt_kernel class; auto: from the weights' type",
        group="Placement",
        choices=("auto", "AMXBF16", "AMXInt8", "AMXInt4", "GGUF"),
    )
    quantise: str | None = option(
        None,
        "make unquantised weights smaller for the native kernels",
        group="Placement",
        choices=("int8", "int4"),
    )
    pack_cache: str = option(
        "auto",
        "folder for repacked weights, in it one per model, so that the next start is quick; auto: .ktserve beside the "
        "model's files; off: none",
        group="Placement",
    )
    isa: str | None = option(
        None,
        "instruction set of the native kernels; default: the newest that this CPU has",
        group="Placement",
        choices=("avx2", "avx512", "amx"),
    )
    gpu_experts: str = option(
        "auto",
        "routed experts on the GPU: all, none, a number of each layer's, or a size (e.g. 20GiB) for the hottest and "
        "their LoRA; auto: all if they fit beside the KV cache, else the hottest in what that leaves free, if they pay",
        group="Placement",
    )
    gpu_expert_memory: str | None = option(
        None, "the size for gpu-experts, or for the hot experts of the hybrid expert backend", group="Placement"
    )
    expert_profile: str | None = option(
        None,
        "file that says which experts were hot: read at start, where it exists, so that those are on the GPU from the "
        "first step on; written at the end and every few minutes",
        group="Placement",
    )
    tensor_parallel: int = option(
        1,
        "GPUs, of this machine, that compute each layer together, with a process for each: attention, projections and "
        "experts on the GPU are divided, experts on the CPU are not",
        group="Placement",
        aliases=("tensor_parallel_size", "tp_size"),
        limits=(1, 64),
    )
    expert_parallel: bool = option(
        False,
        "with tensor-parallel each rank has some of the experts whole, instead of a part of each; it is so where an "
        "expert cannot be divided",
        group="Placement",
        aliases=("enable_expert_parallel",),
    )
    cpu_threads: int | None = option(
        None,
        "threads of the CPU pool; default: from the cgroup and affinity",
        group="Placement",
        aliases=("cpu_infer",),
        limits=(1, 4096),
    )

    # ---- batching
    max_num_seqs: int = option(
        32, "requests that run at the same time", group="Batching", aliases=("max_batch_size",), limits=(1, 16384)
    )
    max_num_batched_tokens: int | None = option(
        None,
        f"token budget of a step; prefill is chunked into it; default: {CPU_BATCHED_TOKENS}; {GPU_BATCHED_TOKENS} "
        f"where a GPU computes long chunks' experts, up to {STREAMED_BATCHED_TOKENS[0]} where they are streamed to it "
        f"and memory allows; {NATIVE_BATCHED_TOKENS} for native experts on a CPU, of which "
        f"{CPU_BATCHED_TOKENS} beside running streams (less if memory is short)",
        group="Batching",
        aliases=("chunk_size",),
        limits=(1, 1 << 20),
    )
    kv_cache_tokens: int | None = option(
        None,
        "positions in the KV cache; default: from free memory",
        group="Batching",
        aliases=("cache_lens",),
        limits=(1, 1 << 40),
    )
    kv_cache_memory: str | None = option(
        None, "bytes of the KV cache (e.g. 4GiB), instead of kv-cache-tokens", group="Batching"
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of the KV cache; auto: as dtype says. fp8 (e4m3, half of bfloat16's bytes): by flashinfer on a GPU only; "
        "bfloat16 under float32 activations, and int8 (half of bfloat16's bytes, scales of each position and head): by "
        "the native attention on a CPU",
        group="Batching",
        choices=("auto", "bfloat16", "float32", "fp8", "int8"),
    )
    kv_disk: str | None = option(
        None,
        "disk space (e.g. 50GiB) for blocks of the prefix cache: written when they are complete, read again for "
        "prompts that begin with them when memory has given them away, after a restart too",
        group="Batching",
    )
    kv_disk_dir: str | None = option(
        None,
        "folder for kv-disk, of one server at a time; default: .ktserve/kv-NAME beside the model's files",
        group="Batching",
    )
    prefix_caching: bool = option(True, "reuse the KV of equal prompt beginnings", group="Batching")
    snapshot_share: float | None = option(
        None,
        "of models whose layers keep states: the share of the cache's memory, blocks and snapshots together, that "
        "snapshots may take; default: all that blocks do not need, on a GPU, where blocks cannot have it, 0.5",
        group="Batching",
        limits=(0.0, 1.0),
    )
    max_queue: int = option(
        512,
        "requests that may wait, shared by the tenants that have some; more are answered 429",
        group="Batching",
        limits=(1, 1_000_000),
    )
    itl_target_ms: float | None = option(
        None,
        "prefill chunks are cut, and streams of a tenant that has many take turns while other tenants are there, so "
        "that running streams keep this inter-token latency; default, for chunks alone: where a GPU computes long "
        f"chunks' experts {1000 * GPU_ITL_TARGET_S:.0f}, or {GPU_ITL_DECODE_STEPS:.0f} decode steps if that is longer; "
        "elsewhere the token budget decides",
        group="Batching",
        limits=(0.001, 3_600_000.0),
    )
    prompt_lane: str = option(
        "auto",
        "where long chunks' experts are streamed to the GPU, such chunks are computed beside decode steps, whose "
        "experts the CPU computes meanwhile; off: one step after the other",
        group="Batching",
        choices=("auto", "off"),
    )
    cuda_graphs: str = option(
        "auto",
        "decode steps as CUDA graphs; padded: the same padded steps, launched one by one (to find faults)",
        group="Batching",
        choices=("auto", "padded", "off"),
    )
    overlap: bool | None = option(
        None,
        "launch step N+1 before N's tokens are read, unless drafts are expected to pay behind them; default: on with a "
        "GPU, off with speculate mtp",
        group="Batching",
    )
    speculate: str | None = option(
        None,
        "ngram:K: steps check up to K (1 to 32) draft tokens a request, those that followed its last tokens where they "
        "stood before; suffix:K: also in the tenant's texts of late; mtp:K: what the model's layer of multi-token "
        "prediction says, if its files have one. The same tokens in fewer, larger steps, and only "
        "as many drafts as are expected to pay by what steps took; with :always behind K, all of them",
        group="Batching",
    )

    # ---- training
    fine_tuning: bool = option(
        False,
        "train adapters beside serving, over the same weights: /v1/fine_tuning/jobs (needs data-dir). Experts are "
        "trained by the native kernels on the CPU, all else where it is served",
        group="Training",
    )
    training_share: float = option(
        0.0,
        "share of the time that training may take while live requests run; 0: only the time that they leave",
        group="Training",
        limits=(0.0, 0.9),
    )
    training_tokens: int = option(
        1024,
        "tokens of a training micro-batch, and the longest text that is trained on",
        group="Training",
        limits=(1, 1 << 20),
    )

    # ---- operation
    seed: int = option(0, "seed of requests that bring none", group="Operation", limits=(0, (1 << 63) - 1))
    profile_dir: str | None = option(None, "write steps.jsonl and tokens.jsonl there", group="Operation")
    measure_bandwidth: bool = option(
        False,
        "measure at start how fast memory is read and the CPU multiplies (two seconds, at most 1 GiB), so that "
        "/metrics and the page show the experts' GB/s as a share of it, and print expected tokens a second",
        group="Operation",
    )
    force_memory_plan: bool = option(False, "start although the memory plan says it will not fit", group="Operation")
    deterministic: bool = option(
        False,
        "the same results whatever else is in a step: one kernel per format for any number of rows. Default: on AMX, "
        "many rows of quantised weights use a faster kernel that rounds otherwise. Native backends on a CPU only",
        group="Operation",
    )
    check_integrity: bool = option(False, "check blocks, slots and buffers after every step", group="Operation")


def startup_adapters(config: EngineConfig) -> list[tuple[str, str]]:
    """`--adapters` as names and absolute paths. Raises UserError."""
    wanted: dict[str, str] = {}
    for text in config.adapters:
        name, _, path = text.partition("=")
        if not name or not path:
            raise UserError(f"--adapters {text!r}: write NAME=PATH", "adapters")
        if name in wanted:
            raise UserError(f"--adapters {text!r}: {name} is given already", "adapters")
        wanted[name] = os.path.abspath(os.path.expanduser(path))
    if unknown := [name for name in config.pinned_adapters if name not in wanted]:
        names = ", ".join(wanted) or "none"
        raise UserError(
            f"--pinned-adapters {unknown[0]!r}: no adapter of --adapters; those are {names}", "pinned_adapters"
        )
    return list(wanted.items())
