"""What serving shares between tenants, batches and training, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def tenants(rows: Sequence[dict[str, Any]]) -> str:
    """Of rows of `benchmarks/serving/tenants.py`."""
    lines = [
        "| --itl-target-ms | quiet tenant alone, p50 / p95 ms | beside the flood | ratio of p95 | flood, tok/s |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        target = "none" if row["itl_target_ms"] is None else f"{row['itl_target_ms']:g}"
        lines.append(f"| {target} | {_latencies(row)} | {row['flood_tok_s']:.0f} |")
    return "\n".join(lines)


def batches(rows: Sequence[dict[str, Any]]) -> str:
    """Latencies of `benchmarks/serving/batches.py`."""
    lines = [
        "| live requests | alone, p50 / p95 ms | beside a batch | ratio of p95 | lines answered meanwhile |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        apart = f"{row['apart_s']:g} s apart" if row["apart_s"] else "one right after the other"
        lines.append(f"| {apart} | {_latencies(row)} | {row['lines']} |")
    return "\n".join(lines)


def _latencies(row: dict[str, Any]) -> str:
    """Three cells: p50 / p95 in ms alone, the same beside others, and the ratio of both p95."""
    alone, beside = (
        f"{1000 * row[f'{which}_p50_s']:.1f} / {1000 * row[f'{which}_p95_s']:.1f}" for which in ("alone", "beside")
    )
    return f"{alone} | {beside} | {row['ratio']:.2f}x"


def uploads(rows: Sequence[dict[str, Any]]) -> str:
    """Large files of `benchmarks/serving/batches.py`."""
    lines = ["| lines | uploaded and checked in s | peak memory of the api, MiB |", "|---|---|---|"]
    lines += [f"| {row['lines']} | {row['seconds']:.1f} | {row['peak_mib']:.0f} |" for row in rows]
    return "\n".join(lines)


def tuning(data: dict[str, Any]) -> str:
    """Of `benchmarks/training/service.py`: three tables."""
    live = ["| live streams | p50 ms between tokens | p95 ms | tokens |", "|---|---|---|---|"]
    live += [
        f"| {row['what']} | {1000 * row['p50_s']:.2f} | {1000 * row['p95_s']:.2f} | {row['tokens']} |"
        for row in data["live"]
    ]
    rates = ["| trained | tokens/s of all |", "|---|---|"]
    rates += [f"| {row['what']} | {row['tokens_s']:.0f} |" for row in data["rates"]]
    parts = ["| part of a round of reinforcement learning | median ms |", "|---|---|"]
    parts += [f"| {name} | {1000 * seconds:.0f} |" for name, seconds in data["round"].items()]
    made = f"{data['rounds_a_minute']:.0f} rounds a minute with {data['answers']} answers each."
    return "\n\n".join(("\n".join(live), "\n".join(rates), "\n".join(parts), made))
