"""adapter_config.json: what is honoured and what is refused by name."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from engine.architectures.base import Architecture
from engine.errors import AdapterError, ModelFileError
from engine.files.regular import read_at
from engine.lora.files.folder import CONFIG_FILE, AdapterFiles, brief, shown

_MAX_JSON_BYTES, _MAX_TEXT = 16 << 20, 200
_LEAST, _MOST = 1e-6, 1e6  # what a scale of float32 takes with any rank
ALPHAS = f"a number from {_LEAST:g} to {_MOST:g}"

SCALINGS = ("alpha/r", "alpha/sqrt(r)")
PEFT = "peft"  # as PEFT computes: use_rslora and alpha_pattern are honoured
EXPERT_SCALINGS = (*SCALINGS, PEFT)  # the first two: of lora_alpha, whatever use_rslora and alpha_pattern say

# Whatever of these is set changes what the adapter computes in a way that is not served.
_REFUSED = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole modules trained beside the LoRA are not supported",
    "lora_bias": "LoRA biases are not supported",
    "trainable_token_indices": "trained embeddings are not supported",
    "layer_replication": "replicated layers are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "kasa_config": "KaSA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "megatron_config": "Megatron layers are not supported",
}
# These initialisations change the base's weights, so the file alone is not the difference to the base.
_ALTERED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_HARMLESS = frozenset(
    [
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
        "velora_config",
    ]
)


@dataclass(frozen=True)
class Settings:
    """`of` answers for one module; the patterns are PEFT's. `families` are those that the base may be of: patterns
    are matched with a module's name here and with the names that their files have for it."""

    rank: int
    alpha: float
    rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    base: str | None = None
    peft_version: str | None = None
    families: tuple[Architecture, ...] = ()
    warnings: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def of(self, module: str) -> tuple[int, float]:
        """(rank, alpha) of a module, named as in the model ("model.layers.0.self_attn.q_proj")."""
        rank_key, alpha_key = self.match(self.rank_pattern, module), self.match(self.alpha_pattern, module)
        self.used.update(key for key in (rank_key, alpha_key) if key is not None)
        rank = self.rank if rank_key is None else self.rank_pattern[rank_key]
        alpha = self.alpha if alpha_key is None else self.alpha_pattern[alpha_key]
        return rank, alpha

    def names(self, module: str) -> tuple[str, ...]:
        """The module's name here first."""
        return tuple(dict.fromkeys((module, *(family.stored(module) for family in self.families))))

    def match(self, patterns: Iterable[str], module: str) -> str | None:
        """PEFT's rule: the first pattern, in file order, that matches the whole of a name or its end after a dot."""
        names = self.names(module)
        return next((key for key in patterns if any(re.match(rf"(.*\.)?({key})$", name) for name in names)), None)

    @property
    def unused_patterns(self) -> list[str]:
        return [key for key in {**self.rank_pattern, **self.alpha_pattern} if key not in self.used]


def scaling(alpha: float, rank: int, kind: str) -> float:
    return alpha / math.sqrt(rank) if kind == "alpha/sqrt(r)" else alpha / rank


def read_json(files: AdapterFiles, name: str) -> dict[str, Any]:
    """A JSON object, or AdapterError with the file's name."""
    if name not in files.names:
        raise AdapterError(f"{name} is missing", [name])
    try:
        size = os.fstat(files.open(name).fileno()).st_size
        if size > _MAX_JSON_BYTES:
            raise AdapterError(f"{name} has {size} bytes, at most {_MAX_JSON_BYTES} are read", [name])
        content = json.loads(read_at(files.open(name).fileno(), files.folder / name, 0, size))
    except ModelFileError as error:
        raise AdapterError(str(error), [name]) from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{name} is not valid JSON: {error}", [name]) from error
    if not isinstance(content, dict):
        raise AdapterError(f"{name} must hold a JSON object", [name])
    return content


def read_settings(files: AdapterFiles, families: tuple[Architecture, ...] = ()) -> Settings:
    """Parse and check adapter_config.json. `families` as `Settings` has them."""
    content = read_json(files, CONFIG_FILE)
    _refuse(content)
    patterns = {}
    for name in ("rank_pattern", "alpha_pattern"):
        patterns[name] = _patterns(name, content.get(name) or {})
    targets = content.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise _wrong("target_parameters", targets, "a list of names")
    rslora = content.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise _wrong("use_rslora", rslora, "true or false")
    unknown = sorted(key for key, value in content.items() if value and key not in _HARMLESS and key not in _REFUSED)
    return Settings(
        rank=_rank("r", content.get("r")),
        alpha=_alpha("lora_alpha", content.get("lora_alpha")),
        rslora=rslora,
        rank_pattern={key: _rank(f"rank_pattern[{brief(key)}]", v) for key, v in patterns["rank_pattern"].items()},
        alpha_pattern={key: _alpha(f"alpha_pattern[{brief(key)}]", v) for key, v in patterns["alpha_pattern"].items()},
        target_parameters=tuple(targets),
        base=_text(content.get("base_model_name_or_path")),
        peft_version=_text(content.get("peft_version")),
        families=families,
        warnings=[f"{CONFIG_FILE} has settings that are not known here: {shown(unknown)}"] if unknown else [],
    )


def _refuse(content: dict[str, Any]) -> None:
    kind = content.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type is {brief(kind)}, only 'LORA' is supported", ["peft_type"])
    if (content.get("bias") or "none") != "none":
        raise AdapterError(f"{CONFIG_FILE}: bias is {brief(content['bias'])}, only 'none' is supported", ["bias"])
    for key, reason in _REFUSED.items():
        if content.get(key):
            raise AdapterError(f"{CONFIG_FILE}: {key} is {brief(content[key])}: {reason}", [key])
    init = content.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_ALTERED_BASE):
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights is {brief(init)}: it changes the base's weights too; "
            "save the adapter converted to plain LoRA",
            ["init_lora_weights"],
        )


def _patterns(name: str, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise _wrong(name, content, "an object")
    for key in content:
        try:
            re.compile(f"(.*\\.)?({key})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterError(f"{CONFIG_FILE}: {name} has the pattern {brief(key)}: {error}", [name]) from error
    return content


def _rank(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise _wrong(name, value, "an integer > 0")
    return value


def _alpha(name: str, value: object) -> float:
    if not is_alpha(value):
        raise _wrong(name, value, ALPHAS)
    return float(value)


def is_alpha(value: object) -> TypeGuard[int | float]:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and _LEAST <= value <= _MOST


def _text(value: object) -> str | None:
    return value[:_MAX_TEXT] if isinstance(value, str) and value else None


def _wrong(name: str, value: object, allowed: str) -> AdapterError:
    return AdapterError(f"{CONFIG_FILE}: {name} is {brief(value)}, it must be {allowed}", [name])
