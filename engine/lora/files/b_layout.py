"""How B [out, E r] of LoRA on fused experts lies: PEFT has the expert fastest, Unsloth's own forward has it slowest.

Unsloth says which since September 2026. Files that it wrote before have no such key and hold the other function, so
where its traces are all that there is, the load call must say it.
"""

from __future__ import annotations

from typing import Any

from engine.errors import AdapterError
from engine.lora.files.folder import CONFIG_FILE, brief

RANK_MAJOR, GROUPED = "rank_major", "grouped_by_expert"
B_LAYOUTS = (RANK_MAJOR, GROUPED)
_KEY, _DETAIL = "lora_B_layout", "unsloth_fused_expert_lora"


def read_layouts(content: dict[str, Any]) -> dict[str, str | None]:
    """The layout by parameter ("gate_up_proj"), and that of all others under "". None: the files leave it open.
    AdapterError for a marker that is not known or that contradicts the other."""
    marker = content.get(_KEY)
    found: dict[str, str | None] = {name: _known(f"{_DETAIL}[{name!r}]", value) for name, value in _detail(content)}
    if marker is None and found:
        found[""] = None
    elif marker is None:
        found[""] = None if _of_unsloth(content) else RANK_MAJOR
    else:
        found[""] = layout = _known(_KEY, marker)
        other = next((name for name, value in found.items() if value != layout), None)
        if other is not None:
            raise AdapterError(
                f"{CONFIG_FILE}: {_KEY} is {layout!r}, but {_DETAIL} has {found[other]!r} for {other!r}",
                [_KEY, _DETAIL],
            )
    return found


def _detail(content: dict[str, Any]) -> list[tuple[str, object]]:
    detail = content.get(_DETAIL)
    if detail is None:
        return []
    parameters = detail.get("parameters", {}) if isinstance(detail, dict) else None
    if not isinstance(parameters, dict) or not all(isinstance(value, dict) for value in parameters.values()):
        raise AdapterError(f"{CONFIG_FILE}: {_DETAIL} is {brief(detail)}, it must be an object of objects", [_DETAIL])
    if detail.get("lora_A_layout", GROUPED) != GROUPED:
        raise AdapterError(
            f"{CONFIG_FILE}: {_DETAIL} has lora_A_layout {brief(detail['lora_A_layout'])}, only {GROUPED!r} is known",
            [_DETAIL],
        )
    return [(name, value.get(_KEY)) for name, value in parameters.items()]


def _known(where: str, value: object) -> str:
    if not isinstance(value, str) or value not in B_LAYOUTS:
        raise AdapterError(
            f"{CONFIG_FILE}: {where} is {brief(value)}, it must be one of {', '.join(B_LAYOUTS)}", [_KEY]
        )
    return value


def _of_unsloth(content: dict[str, Any]) -> bool:
    mapping, base = content.get("auto_mapping"), content.get("base_model_name_or_path")
    marked = isinstance(mapping, dict) and bool(mapping.get("unsloth_fixed"))
    return marked or (isinstance(base, str) and base.lower().startswith("unsloth/"))
