"""Which backend computes which module on this machine, and the backends themselves."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

import torch

from engine.attention.base import AttentionBackend
from engine.attention.reference import ReferenceAttention
from engine.config import EngineConfig
from engine.errors import RulesError, UserError
from engine.experts.base import ExpertBackend
from engine.experts.kt import KtExperts, kt_available
from engine.experts.reference import ReferenceExperts
from engine.linear.base import LinearBackend
from engine.linear.reference import ReferenceLinearBackend
from engine.model.load import Backends
from engine.model.ops import TorchOps
from engine.model.rope import Rope
from engine.model_config import ModelConfig
from native import available as native_available
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
    for kind, (backend, suffix) in flags.items():
        if backend is None:
            continue
        if reason := machine.missing(backend):
            raise UserError(f"--{kind}-backend {backend}: {reason}", field=f"{kind}_backend")
        for module, choice in choices.items():
            if module.endswith(suffix) or (kind == "linear" and module == "lm_head"):
                choices[module] = replace(choice, backend=cast(Backend, backend))
    placement = Placement(choices, [])
    lines = [f"rules: {name}" + ("" if config.rules else " (chosen from this machine)")]
    if not config.rules and not machine.native:
        lines.append(f"note: no native kernels, torch computes, much slower: {machine.reasons['native']}")
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
    config: EngineConfig, model: ModelConfig, placement: Placement, num_blocks: int, max_model_len: int, max_rows: int
) -> Backends:
    """One object per backend that occurs, shared by the layers that use it."""
    device = torch.device("cpu")
    dtype = activation_dtype(config)
    threads = cpu_threads(config)

    def reference_linear() -> LinearBackend:
        return ReferenceLinearBackend(dtype, device)

    def reference_attention() -> AttentionBackend:
        return ReferenceAttention(model, num_blocks, dtype, device)

    def reference_experts() -> ExpertBackend:
        return ReferenceExperts(dtype, device)

    def kt_experts() -> ExpertBackend:
        return KtExperts(model, config.kt_method, max_rows=max_rows, threads=config.cpu_threads)

    linear = _Shared("linear", {"reference": reference_linear})
    attention = _Shared("attention", {"reference": reference_attention})
    experts = _Shared("experts", {"reference": reference_experts, "kt": kt_experts})
    torch.set_num_threads(threads)
    return Backends(
        ops=TorchOps(model.rms_norm_eps, Rope(model, max_model_len, device)),
        linear=lambda name: linear.get(placement.backend(name)),
        router=ReferenceLinearBackend(torch.float32, device),
        attention=lambda layer: attention.get(placement.backend(f"model.layers.{layer}.self_attn")),
        experts=lambda layer: experts.get(placement.backend(f"model.layers.{layer}.mlp.experts")),
        dtype=dtype,
        device=device,
    )


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
