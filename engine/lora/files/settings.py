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
from engine.lora.files.b_layout import read_layouts
from engine.lora.files.folder import CONFIG_FILE, AdapterFiles, brief
from engine.lora.files.keys import check_keys

_MAX_JSON_BYTES, _MAX_TEXT = 16 << 20, 200
_LEAST, _MOST = 1e-6, 1e6  # what a scale of float32 takes with any rank
ALPHAS = f"a number from {_LEAST:g} to {_MOST:g}"

LANGUAGE_MODEL = "language_model"  # of a multimodal model: what is served of it
SCALINGS = ("alpha/r", "alpha/sqrt(r)")
FUSED_PARAMETERS = ("gate_up_proj", "down_proj")  # of all experts of a layer
PEFT = "peft"  # as PEFT computes: use_rslora and alpha_pattern are honoured
EXPERT_SCALINGS = (*SCALINGS, PEFT)  # the first two: of lora_alpha, whatever use_rslora and alpha_pattern say


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
    layouts: dict[str, str | None] = field(default_factory=dict)  # `engine.lora.files.b_layout`
    families: tuple[Architecture, ...] = ()
    used: set[str] = field(default_factory=set)

    def of(self, module: str) -> tuple[int, float]:
        """(rank, alpha) of a module, named as in the model ("model.layers.0.self_attn.q_proj")."""
        rank_key, alpha_key = self.match(self.rank_pattern, module), self.match(self.alpha_pattern, module)
        self.used.update(key for key in (rank_key, alpha_key) if key is not None)
        rank = self.rank if rank_key is None else self.rank_pattern[rank_key]
        alpha = self.alpha if alpha_key is None else self.alpha_pattern[alpha_key]
        return rank, alpha

    def layout(self, parameter: str) -> str | None:
        """Of a fused parameter's B ("gate_up_proj"), one of `B_LAYOUTS`; None: the files leave it open."""
        return self.layouts.get(parameter, self.layouts.get(""))

    @property
    def open_layout(self) -> bool:
        return any(self.layout(parameter) is None for parameter in FUSED_PARAMETERS)

    def names(self, module: str) -> tuple[str, ...]:
        """The module's name here first, and those inside multimodal models last."""
        names = dict.fromkeys((module, *(family.stored(module) for family in self.families)))
        inside = [f"model.{LANGUAGE_MODEL}.{name.removeprefix('model.')}" for name in names]
        return (*names, *inside, *(f"{LANGUAGE_MODEL}.{name}" for name in names))

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
    check_keys(content)
    patterns = {}
    for name in ("rank_pattern", "alpha_pattern"):
        patterns[name] = _patterns(name, content.get(name) or {})
    targets = content.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise _wrong("target_parameters", targets, "a list of names")
    rslora = content.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise _wrong("use_rslora", rslora, "true or false")
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
        layouts=read_layouts(content),
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
