"""Which backend computes which module on this machine, and the backends themselves."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch

from engine.attention.base import AttentionBackend
from engine.attention.native import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM, NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.config import EngineConfig
from engine.errors import RulesError, UserError
from engine.experts.base import ExpertBackend
from engine.experts.kt import KtExperts, kt_available
from engine.experts.native import NativeExperts
from engine.experts.reference import ReferenceExperts
from engine.linear.base import LinearBackend
from engine.linear.native import NativeLinearBackend
from engine.linear.reference import ReferenceLinearBackend
from engine.model.load import Backends
from engine.model.native_ops import NativeOps
from engine.model.ops import TorchOps
from engine.model.rope import Rope
from engine.model_config import ModelConfig
from engine.weights.store import WeightSource
from native import available as native_available
from native.topology import make_pool
from rules import Choice, Machine, RuleSet, default_rules, load_rules, place, qwen3moe_modules
from rules import RulesError as BadRules
from rules.choice import Backend

T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """A choice per module name, and what a person should be told about it."""

    choices: dict[str, Choice]
    lines: list[str]

    def backend(self, module: str) -> str:
        return self.choices[module].backend

    def used(self, suffix: str) -> list[str]:
        """The backends of all modules whose name ends so, in order of first use."""
        return list(dict.fromkeys(c.backend for name, c in self.choices.items() if name.endswith(suffix)))


def find_machine(config: EngineConfig) -> Machine:
    """What this machine has; packages are tried, not guessed. kt_kernel only if something asks for it: loading it
    changes the process (its threads, its handling of denormal numbers)."""
    gpu = config.device != "cpu" and torch.cuda.is_available()
    if config.device == "cuda" and not gpu:
        raise UserError("--device cuda: torch finds no GPU here (auto or cpu would work)", field="device")
    reasons: dict[str, str] = {}
    native, reasons["native"] = native_available()
    kt, reasons["kt"] = kt_available() if _asks_for_kt(config) else (False, "not looked for")
    return Machine(gpu=gpu, native=native, kt=kt, gpu_count=torch.cuda.device_count() if gpu else 0, reasons=reasons)


def _asks_for_kt(config: EngineConfig) -> bool:
    if config.expert_backend == "kt":
        return True
    rules = _load(config.rules).rules if config.rules else ()
    return any("kt" in (rule.choice.backend, rule.choice.options.get("cpu")) for rule in rules)


def _load(name: str) -> RuleSet:
    try:
        return load_rules(name)
    except BadRules as error:
        raise RulesError(str(error), field="rules") from error


def choose(config: EngineConfig, model: ModelConfig, machine: Machine) -> Placement:
    """Rules, then the flags that override them. RulesError names the file, the line and what is allowed."""
    name = config.rules or default_rules(machine)
    rule_set = _load(name)
    try:
        choices = place(rule_set, qwen3moe_modules(model.num_hidden_layers, model.sparse_layers), machine)
    except BadRules as error:
        raise RulesError(str(error), field="rules") from error
    flags = {
        "expert": (config.expert_backend, ".mlp.experts"),
        "attention": (config.attention_backend, ".self_attn"),
        "linear": (config.linear_backend, "_proj"),
    }
    limits = native_limits(model) if not config.rules and machine.native else {}
    for kind, (backend, suffix) in flags.items():
        if backend is None:
            if kind not in limits:
                continue
            backend = "reference"
        if reason := machine.missing(backend):
            raise UserError(f"--{kind}-backend {backend}: {reason}", field=f"{kind}_backend")
        for module, choice in choices.items():
            if module.endswith(suffix) or (kind == "linear" and module == "lm_head"):
                choices[module] = replace(choice, backend=cast(Backend, backend))
    placement = Placement(choices, [])
    lines = [f"rules: {name}" + ("" if config.rules else " (chosen from this machine)")]
    if not config.rules and not machine.native:
        lines.append(f"note: no native kernels, torch computes, much slower: {machine.reasons['native']}")
    lines += [f"note: {kind}s run in torch, slower: {why}" for kind, why in limits.items()]
    lines += [str(note) for note in rule_set.notes]
    for kind, (_, suffix) in flags.items():
        lines.append(f"{kind}s: {', '.join(placement.used(suffix)) or 'none'}")
    return Placement(choices, lines)


def cpu_threads(config: EngineConfig) -> int:
    """Threads to compute with: asked for, or as many as this process may run on."""
    available = len(os.sched_getaffinity(0))
    if config.cpu_threads is None:
        return available
    if not 1 <= config.cpu_threads <= 4 * available:
        raise UserError(
            f"--cpu-threads {config.cpu_threads}: 1 to {4 * available} on this machine", field="cpu_threads"
        )
    return config.cpu_threads


def activation_dtype(config: EngineConfig) -> torch.dtype:
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def make_backends(
    config: EngineConfig,
    source: WeightSource,
    placement: Placement,
    num_blocks: int,
    max_model_len: int,
    max_rows: int,
) -> Backends:
    """One object per backend that occurs, shared by the layers that use it; one worker pool for all native ones."""
    device, dtype, model = torch.device("cpu"), activation_dtype(config), source.config
    pools = _Shared("pool", {"native": lambda: make_pool(config.cpu_threads and cpu_threads(config))})
    isa, rope = config.isa or "", Rope(model, max_model_len, device)

    def native_experts() -> ExpertBackend:
        return NativeExperts(
            model,
            dtype,
            pools.get("native"),
            isa=isa,
            quantise=config.quantise,
            cache_dir=pack_cache(config),
            source_id=source.identity,
        )

    linear: _Shared[LinearBackend] = _Shared(
        "linear",
        {
            "reference": lambda: ReferenceLinearBackend(dtype, device),
            "native": lambda: NativeLinearBackend(dtype, pools.get("native"), isa, config.quantise),
        },
    )
    router: _Shared[LinearBackend] = _Shared(
        "router",
        {
            "reference": lambda: ReferenceLinearBackend(torch.float32, device),
            "native": lambda: NativeLinearBackend(torch.float32, pools.get("native"), isa),
        },
    )
    attention: _Shared[AttentionBackend] = _Shared(
        "attention",
        {
            "reference": lambda: ReferenceAttention(model, num_blocks, dtype, device),
            "native": lambda: NativeAttention(model, num_blocks, dtype, pools.get("native"), isa),
        },
    )
    experts: _Shared[ExpertBackend] = _Shared(
        "experts",
        {
            "reference": lambda: ReferenceExperts(dtype, device),
            "native": native_experts,
            "kt": lambda: KtExperts(model, kt_method(config, placement), max_rows=max_rows, threads=config.cpu_threads),
        },
    )
    kinds = {choice.backend for choice in placement.choices.values()}
    all_native = "native" in kinds and placement.used("_proj") == placement.used(".self_attn") == ["native"]
    torch.set_num_threads(1 if all_native else cpu_threads(config))  # torch's threads would fight the pool's
    eps = model.rms_norm_eps
    return Backends(
        ops=NativeOps(eps, rope, pools.get("native"), isa) if all_native else TorchOps(eps, rope),
        linear=lambda name: linear.get(placement.backend(name)),
        router=router.get("native" if all_native else "reference"),
        attention=lambda layer: attention.get(placement.backend(f"model.layers.{layer}.self_attn")),
        experts=lambda layer: experts.get(placement.backend(f"model.layers.{layer}.mlp.experts")),
        dtype=dtype,
        device=device,
        pool=pools.get("native") if "native" in kinds else None,
    )


def kt_method(config: EngineConfig, placement: Placement) -> str:
    """kt_kernel's class: the flag, or the one that the rules name."""
    if config.kt_method != "auto":
        return config.kt_method
    named = {str(c.options.get("method", "auto")) for c in placement.choices.values() if c.backend == "kt"} or {"auto"}
    if len(named) > 1:
        raise RulesError(f"rules name several kt methods ({', '.join(sorted(named))}); one pool has one", field="rules")
    return named.pop()


def pack_cache(config: EngineConfig) -> Path | None:
    """Where packed experts are kept: asked for, or beside the model; None: nowhere."""
    if config.pack_cache == "off":
        return None
    if config.pack_cache != "auto":
        return Path(config.pack_cache).expanduser()
    files = Path(config.gguf or config.model)
    folder = files if files.is_dir() else files.parent
    return folder / ".ktserve" if os.access(folder, os.W_OK) else None


def native_limits(model: ModelConfig) -> dict[str, str]:
    """By kind: why the native backend cannot serve this model. Empty if it can."""
    limits: dict[str, str] = {}
    step = HEAD_DIM_STEP
    if not MIN_HEAD_DIM <= model.head_dim <= MAX_HEAD_DIM or model.head_dim % step:
        limits["attention"] = (
            f"head_dim {model.head_dim} is not a multiple of {step} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        )
    sizes = {"hidden_size": model.hidden_size, "heads x head_dim": model.num_attention_heads * model.head_dim}
    if len(model.sparse_layers) < model.num_hidden_layers:
        sizes["intermediate_size"] = model.intermediate_size
    odd = [f"{name} {size} is not a multiple of 32" for name, size in sizes.items() if size % 32]
    if odd:
        limits["linear"] = odd[0]
    sizes = {"hidden_size": model.hidden_size, "moe_intermediate_size": model.moe_intermediate_size}
    odd = [f"{name} {size} is not a multiple of 32" for name, size in sizes.items() if size % 32]
    if odd and model.sparse_layers:
        limits["expert"] = odd[0]
    return limits


class _Shared(Generic[T]):
    """Makes each named thing once, when it is first asked for."""

    def __init__(self, kind: str, makers: dict[str, Callable[[], T]]) -> None:
        self._kind = kind
        self._makers = makers
        self._made: dict[str, T] = {}

    def get(self, name: str) -> T:
        if name not in self._makers:
            raise UserError(f"there is no {name} backend for {self._kind}: {', '.join(self._makers)}", field="rules")
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]
