"""Which backend computes which module on this machine, and the backends themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from engine.architectures.config import ModelConfig
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.mlp import FLOAT32_MODULES
from engine.architectures.registry import architecture_of
from engine.attention.flashinfer import flashinfer_available, flashinfer_limit
from engine.attention.native import native_limit
from engine.attention.native_delta import delta_limit
from engine.config import EngineConfig
from engine.errors import RulesError, UserError
from engine.experts.kt.backend import kt_available
from native import available as native_available
from rules import Choice, Machine, RuleSet, default_rules, load_rules, place
from rules import RulesError as BadRules
from rules.choice import Backend

_NAMES = {"expert": "experts", "attention": "attention", "linear": "projections"}
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
T = TypeVar("T")
_OWN_DEVICE = {"native": "cpu", "kt": "cpu", "gpu": "cuda", "hybrid": "cuda", "flashinfer": "cuda"}


@dataclass(frozen=True)
class Placement:
    """A choice per module name, and the notes to print about it."""

    choices: dict[str, Choice]
    lines: list[str]

    def backend(self, module: str) -> str:
        return self.choices[module].backend

    def used(self, suffix: str) -> list[str]:
        """The backends of all modules whose name ends so, in order of first use."""
        return list(dict.fromkeys(c.backend for name, c in self.choices.items() if name.endswith(suffix)))

    def native(self, *suffixes: str) -> bool:
        """Whether the native kernels compute all modules whose names end so."""
        return self.device == "cpu" and {b for suffix in suffixes for b in self.used(suffix)} == {"native"}

    @property
    def device(self) -> str:
        """Where attention and projections are, and with them all but routed experts. RulesError if that is more than
        one place."""
        places: dict[str, str] = {}
        for name, choice in self.choices.items():
            if name.endswith((".self_attn", "_proj")) and ".mlp.experts" not in name:
                places.setdefault(choice.device, name)
        if len(places) > 1:
            found = ", ".join(f"{name} on {device}" for device, name in places.items())
            raise RulesError(f"all but routed experts must be on one device; {found}", field="rules")
        return next(iter(places), "cpu")

    def expert_option(self, name: str, default: Any) -> Any:
        """An option of the experts' rules; RulesError if layers differ in it, since they share one backend."""
        return self._option("experts", ".mlp.experts", name, default)

    @property
    def quantise(self) -> str | None:
        """What the rules say of unquantised experts on the native kernels: "int8", "int4", or None, as they are."""
        experts = [c for name, c in self.choices.items() if name.endswith(".mlp.experts")]
        found = {str(c.options.get("quantise", "")) for c in experts if c.backend in ("native", "hybrid")}
        if len(found) > 1:
            said = ", ".join(sorted(name or "unquantised" for name in found))
            raise RulesError(f"rules name several precisions ({said}) for experts that share a backend", field="rules")
        return next(iter(found), "") or None

    def attention_option(self, name: str, default: Any) -> Any:
        """The same of attention's rules."""
        return self._option("attention", ".self_attn", name, default)

    def _option(self, kind: str, suffix: str, name: str, default: Any) -> Any:
        found = {c.options.get(name, default) for module, c in self.choices.items() if module.endswith(suffix)}
        if len(found) > 1:
            said = ", ".join(sorted(map(str, found)))
            raise RulesError(f"rules name several values of {name} ({said}) for {kind} that share one", field="rules")
        return found.pop() if found else default

    @property
    def streams_prefill(self) -> bool:
        """Whether long chunks' experts are streamed to the GPU."""
        choices = [c for name, c in self.choices.items() if name.endswith(".mlp.experts")]
        backends = {c.backend for c in choices} & {"native", "hybrid"}
        wanted = any(c.prefill_device != "cpu" for c in choices)
        return bool(backends) and wanted and self.device != "cpu" and self.expert_option("prefill_threshold", 0) != 0

    @property
    def moved(self) -> list[str]:
        """Modules that their rules put elsewhere than on `device`, where they are all the same."""
        return [
            name
            for name, choice in self.choices.items()
            if choice.device != self.device and ".mlp.experts" not in name and name != "model"
        ]


def find_machine(config: EngineConfig, model: ModelConfig) -> Machine:
    """What this machine has; packages are tried, not guessed. kt_kernel only if something asks for it: loading it
    changes the process (its threads, its handling of denormal numbers)."""
    gpu = config.device != "cpu" and torch.cuda.is_available()
    if config.device == "cuda" and not gpu:
        raise UserError(
            "--device cuda: torch finds no GPU here (auto or cpu would work; why: ktserve doctor)", field="device"
        )
    reasons: dict[str, str] = {}
    native, reasons["native"] = native_available()
    kt, reasons["kt"] = kt_available() if _asks_for_kt(config, model) else (False, "not looked for")
    flashinfer, reasons["flashinfer"] = flashinfer_available() if gpu else (False, "this machine has no GPU")
    if not gpu and NVIDIA_DRIVER.exists():
        reasons["gpu"] = "an NVIDIA driver is here, but torch finds no GPU (a build for CPUs, or the driver is too old)"
    count = torch.cuda.device_count() if gpu else 0
    return Machine(gpu=gpu, native=native, kt=kt, flashinfer=flashinfer, gpu_count=count, reasons=reasons)


def _asks_for_kt(config: EngineConfig, model: ModelConfig) -> bool:
    if config.expert_backend == "kt":
        return True
    rules = _load(config.rules, model).rules if config.rules else ()
    return any(rule.choice.backend == "kt" for rule in rules)


def _load(name: str, model: ModelConfig) -> RuleSet:
    try:
        return load_rules(name, architecture_of(model).rules)
    except BadRules as error:
        raise RulesError(str(error), field="rules") from error


def choose(config: EngineConfig, model: ModelConfig, machine: Machine) -> Placement:
    """Rules, then the flags that override them. RulesError names the file, the line and what is allowed."""
    name = config.rules or default_rules(machine)
    unused = ""  # why the GPU is left alone
    if machine.gpu and not config.rules and not name.startswith("gpu"):
        unused = "; ".join(why for needed in ("flashinfer", "native") if (why := machine.missing(needed)))
        if config.device == "cuda":
            raise UserError(f"--device cuda: {unused}. --rules reference runs on the GPU without it", field="device")
        machine = replace(machine, gpu=False)
    elif not machine.gpu and config.device == "auto":
        unused = machine.reasons.get("gpu", "")
    rule_set = _load(name, model)
    try:
        choices = place(rule_set, architecture_of(model).module_classes(model), machine)
    except BadRules as error:
        raise RulesError(str(error), field="rules") from error
    flags = {
        "expert": (config.expert_backend, ".mlp.experts"),
        "attention": (config.attention_backend, ".self_attn"),
        "linear": (config.linear_backend, "_proj"),
    }
    limits = {}
    if not config.rules and machine.native:
        limits = gpu_limits(config, model) if machine.gpu else native_limits(model)
    elif machine.gpu and any(isinstance(layer.attention, Latent) for layer in model.layers):
        limits = {kind: why for kind, why in gpu_limits(config, model).items() if kind == "attention"}
    for kind, (backend, suffix) in flags.items():
        if backend is None:
            if kind not in limits:
                continue
            backend = "reference"
        if reason := machine.missing(backend):
            raise UserError(f"--{kind}-backend {backend}: {reason}", field=f"{kind}_backend")
        for module, choice in choices.items():
            if module.endswith(suffix) or (kind == "linear" and module == "lm_head"):
                device = _OWN_DEVICE.get(backend, choice.device)
                device = choice.device if device == "cuda" and choice.device.startswith("cuda") else device
                choices[module] = replace(choice, backend=cast(Backend, backend), device=device)
    placement = Placement(choices, [])
    if model.experts is not None and not model.experts.plain:
        _check_kt(placement)
    if config.deterministic:
        _check_deterministic(placement)
    lines = [f"rules: {name}" + ("" if config.rules else " (chosen from this machine)")]
    if unused:
        lines.append(f"note: the GPU is not used: {unused}")
    if not config.rules and not machine.native:
        lines.append(f"note: no native kernels, torch computes, much slower: {machine.reasons['native']}")
    lines += [f"note: {kind}s run in torch, slower: {why}" for kind, why in limits.items()]
    lines += [str(note) for note in rule_set.notes]
    if placement.moved:
        more = f" and {len(placement.moved) - 1} more" if len(placement.moved) > 1 else ""
        lines.append(f"note: {placement.moved[0]}{more} on {placement.device}, as attention is, whatever the rules say")
    if placement.used(".mlp.experts") == ["kt"] and placement.expert_option("prefill_threshold", 0) != 0:
        lines.append("note: --expert-backend kt: these experts are not streamed to the GPU, whatever the rules say")
    for kind, (_, suffix) in flags.items():
        lines.append(f"{_NAMES[kind]}: {', '.join(placement.used(suffix)) or 'none'}")
    return Placement(choices, lines)


def _check_kt(placement: Placement) -> None:
    """Of experts with biases or an activation of their own."""
    if "kt" in placement.used(".mlp.experts"):
        raise UserError(
            "experts on kt: this model's experts have biases, and an activation with a limit, which kt_kernel does not "
            "compute; allowed are native, hybrid, gpu and reference",
            field="expert_backend",
        )


def check_training(config: EngineConfig, placement: Placement) -> None:
    """UserError where --fine-tuning has nothing to train over: packed experts, and projections that can be read."""
    if config.tensor_parallel > 1:
        raise UserError("--fine-tuning: leave --tensor-parallel out", "fine_tuning")
    remedies = {
        ".mlp.experts": ({"native", "hybrid"}, "leave --expert-backend out, and --gpu-experts all"),
        "_proj": ({"native", "gpu"}, "leave --linear-backend out"),
    }
    for suffix, (allowed, remedy) in remedies.items():
        if others := [backend for backend in placement.used(suffix) if backend not in allowed]:
            kind = "routed experts" if suffix == ".mlp.experts" else "projections"
            raise UserError(
                f"--fine-tuning: {kind} are on the backend {others[0]}, which it cannot train over; allowed are "
                f"{' and '.join(sorted(allowed))}: {remedy}",
                "fine_tuning",
            )


def _check_deterministic(placement: Placement) -> None:
    """Other backends choose a kernel by the number of rows, and so does every GPU."""
    computed = (".mlp.experts", ".self_attn", "_proj", "lm_head")
    others = sorted(
        {
            f"{choice.backend} on {choice.device}"
            for name, choice in placement.choices.items()
            if name.endswith(computed) and (choice.backend != "native" or placement.device != "cpu")
        }
    )
    if others:
        raise UserError(
            f"deterministic is true; allowed only where the native backends compute everything on a CPU, here are "
            f"{', '.join(others)}",
            field="deterministic",
        )


def kt_method(config: EngineConfig, placement: Placement) -> str:
    """kt_kernel's class: the flag, or the one that the rules name."""
    if config.kt_method != "auto":
        return config.kt_method
    named = {str(c.options.get("method", "auto")) for c in placement.choices.values() if c.backend == "kt"} or {"auto"}
    if len(named) > 1:
        raise RulesError(f"rules name several kt methods ({', '.join(sorted(named))}); one pool has one", field="rules")
    return named.pop()


def activation_dtype(config: EngineConfig) -> torch.dtype:
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def native_limits(model: ModelConfig) -> dict[str, str]:
    """By kind: why the native backend cannot serve this model. Empty if it can."""
    limits: dict[str, str] = {}
    for spec in model.paged_attention:
        if why := native_limit(spec):
            limits["attention"] = why
    for net in model.delta_nets:
        if why := delta_limit(net):
            limits["attention"] = why
    for index in range(len(model.layers)):
        for module in model.modules(index):
            odd = [size for size in module.shape if size % 32]
            if odd and module.kind == "linear" and module.name not in FLOAT32_MODULES:
                limits.setdefault("linear", f"{module.name} is {list(module.shape)}, not multiples of 32")
    sizes = {"hidden_size": model.hidden_size, "moe_intermediate_size": model.moe_intermediate_size}
    odd_sizes = [f"{name} {size} is not a multiple of 32" for name, size in sizes.items() if size % 32]
    if odd_sizes and model.sparse_layers:
        limits["expert"] = odd_sizes[0]
    return limits


def gpu_limits(config: EngineConfig, model: ModelConfig) -> dict[str, str]:
    """The same for a GPU with experts on the native kernels."""
    limits = {kind: why for kind, why in native_limits(model).items() if kind == "expert"}
    for spec in model.paged_attention:
        if why := flashinfer_limit(spec, activation_dtype(config)):
            limits["attention"] = why
    return limits
