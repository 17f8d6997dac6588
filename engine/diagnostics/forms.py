"""`ktserve plan` of several forms of one model: a table of what each needs here and how fast it may be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import UserError
from engine.memory.limits import cpu_memory
from engine.planning.expected import Expected, MachineRates, expected_of, measure, span_text
from engine.planning.plan import EnginePlan, plan_engine
from engine.units import format_bytes
from native import available as native_available

_TITLES = ("form", "on disk", "memory", "context", "1 sequence", "8 sequences", "prompt of 2048")


def forms_table(config: EngineConfig, forms: Sequence[tuple[str, str]]) -> str:
    """`forms`: label and path of each. One that cannot be served has its reason below the table."""
    machine = _measured(config) if native_available()[0] else None
    notes: list[str] = []
    rows: list[tuple[str, ...]] = [_TITLES]
    for label, path in forms:
        try:
            plan = plan_engine(replace(config, model=path) if config.gguf is None else replace(config, gguf=path))
        except UserError as error:
            rows.append((label, *["-"] * (len(_TITLES) - 1)))
            notes.append(f"{label}: {error}".replace(os.path.dirname(path) + os.sep, ""))
            continue
        rows.append(_row(label, plan, machine))
        if plan.memory.short:
            notes.append(f"{label} does not fit: {plan.memory.shortage()}")
    widths = [max(len(row[i]) for row in rows) for i in range(len(_TITLES))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *_explained(machine), *notes])


def _measured(config: EngineConfig) -> MachineRates:
    """By the threads that a server here would have."""
    from native.topology import make_pool

    return measure(make_pool(config.cpu_threads), config.isa or "", cpu_memory().free_bytes)


def _row(label: str, plan: EnginePlan, machine: MachineRates | None) -> tuple[str, ...]:
    memory = plan.memory
    needs = ", ".join(
        f"{d.name} {format_bytes(memory.needed(d))} of {format_bytes(d.free_bytes)}" for d in memory.devices
    )
    context = "does not fit" if memory.short else f"{memory.max_model_len} ({memory.kv_tokens} in all)"
    expected = Expected(None, None, None) if machine is None else expected_of(plan, machine)
    rates = map(span_text, (expected.decode_1, expected.decode_8, expected.prefill))
    return (label, format_bytes(plan.source.num_bytes), needs, context, *rates)


def _explained(machine: MachineRates | None) -> list[str]:
    if machine is None:
        return ["tokens a second are expected only where the native kernels compute"]
    read, peak = f"{machine.read / 1e9:.1f} GB/s read", f"{machine.int8 / 1e9:.0f} Gop/s of int8"
    return [
        f"tokens a second, all sequences together, expected of this machine ({machine.isa}: {read}, {peak}, measured "
        "now) and the shares of them that were recorded on others; -: none was, or not all is computed on the CPU"
    ]
