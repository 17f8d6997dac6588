"""docs/training-config.md, from the fields and the tables of other keys: `python -m training.config.reference`.
Torch-free."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ktserve.settings import Setting, settings_of
from training.config.checks import ALONE
from training.config.fields import TrainConfig
from training.config.others import BELONGS, NO_OPS
from training.config.refused import REFUSED

_WIDTH = 118
_HEAD = """\
# Settings of a training run

Made from `training/config/fields.py`, `others.py` and `refused.py` by `python -m training.config.reference`; a test
compares.

`ktserve train CONFIG.yaml [key=value ...]` reads LLaMA-Factory's names, and KTransformers' both flat
(`kt_backend: ...`) and nested (`kt_config: {kt_backend: ...}`). An override takes the place of what the file says,
under any of its names, and of what may not stand beside it (`max_steps=5` that of `num_train_epochs`);
`adapters.0.key=value` reaches into the list of adapters. An unknown key, a value outside its range, and settings that
contradict one another are errors with file and line. Values are read by the setting's type: `1e-4` is a number, `no`
is false where a switch is expected. Relative paths are relative to the working directory.
"""
_KINDS = {str: "text", bool: "true or false", int: "whole number", float: "number"}


def reference() -> str:
    """The page."""
    parts = [_HEAD]
    settings = settings_of(TrainConfig)
    for group in dict.fromkeys(setting.group for setting in settings):
        rows = [_row(setting) for setting in settings if setting.group == group]
        parts.append(f"## {group}\n\n" + "\n".join(rows) + "\n")
    no_ops = []
    for key, row in NO_OPS.items():
        values = f" ({' or '.join(row.allowed)})" if row.allowed else ""
        no_ops.append(_item(f"`{key}`{values}: {row.reason}."))
    for key, what in BELONGS.items():
        no_ops.append(_item(f"`{key}{'...' if key.endswith('_') else ''}`: belongs to {what}."))
    parts.append("## Keys that change nothing\n\n" + "\n".join(no_ops) + "\n")
    refused = [_item(f"`{key}`: {reason}.") for key, reason in REFUSED.items()]
    head = "## Keys that are refused\n\nUnless they are switched off (`false`, `null`, or their default).\n\n"
    parts.append(head + "\n".join(refused) + "\n")
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    return _item(f"`{setting.name}` ({'; '.join(_facts(setting))}): {setting.help}.")


def _facts(setting: Setting) -> Iterator[str]:
    if setting.name == "adapters":
        yield "list of mappings"
    elif setting.many:
        yield "list, or names between commas"
    elif setting.choices:
        yield " or ".join(setting.choices)
    else:
        yield ", ".join(filter(None, [_KINDS[setting.kind], setting.range]))
    if shown := setting.default_help or _default(setting.default):
        yield f"default {shown}"
    if setting.aliases:
        yield "also " + ", ".join(f"`{alias}`" for alias in setting.aliases)
    if setting.name in ALONE:
        yield "with `adapters` only its default"
    elif setting.per_adapter:
        yield "per adapter"


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None or value == "" else f"{value:g}" if isinstance(value, float) else str(value)


def _item(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[2] / "docs" / "training-config.md"
    path.write_text(reference())
