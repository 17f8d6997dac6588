"""A machine's section of docs/performance.md, from the results of benchmarks/cpu/run.py."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks.kernels.probe import LEAST_OF_KNOWN_READ
from benchmarks.report.roofline import points
from benchmarks.report.targets import Entry, target


def instruction(isa: Sequence[str], format: str) -> str:
    """The fastest that such a CPU has for products of the format: what its peak was measured with."""
    if {"amx_bf16", "amx_int8"} <= set(isa) and format != "f32":
        return {"bf16": "AMX tdpbf16ps", "int8": "AMX tdpbssd"}[format]
    if "avx512_vnni" in isa:
        bf16 = "vdpbf16ps" if "avx512_bf16" in isa else "vfmadd"
        return "AVX-512 " + {"f32": "vfmadd", "bf16": bf16, "int8": "vpdpbusd"}[format]
    return "AVX2 " + {"f32": "vfmadd", "bf16": "vfmadd", "int8": "vpmaddubsw"}[format]


def render(data: dict[str, Any], image: str = "roofline.svg") -> str:
    """Markdown between the markers, these not included."""
    machine, versions = data["machine"], data["versions"]
    lines = [
        f"{machine['cpu']}; {machine['cores']} cores, {machine['threads']} threads, {machine['memory_gb']} GB; "
        f"{', '.join(machine['isa'])}. Commit {data['commit']}, {data['date']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". {data['seconds'] / 60:.0f} minutes, load before it {machine['load_before']:.1f}.",
        "",
        f"    {data['command']}",
        "",
    ]
    for mix, measured in data["peaks"].items():
        peaks = ", ".join(f"{name} {measured[f'{name}_per_s'] / 1e9:.0f}" for name in ("f32", "bf16", "int8"))
        read = f"read {measured['bytes_per_s'] / 1e9:.1f} GB/s"
        known = machine.get("known_read_gb_s")
        share = f" ({measured['bytes_per_s'] / 1e7 / known:.0f}% of the {known:.0f} seen on it before)" if known else ""
        share += " - too little, its rows are void" if void(data, mix) else ""
        lines.append(f"- Peaks beside {mix}: {read}{share}; {peaks} G operations/s")
    isa = _useful(machine["isa"], data["peaks"])
    used = "; ".join(f"{name}: {instruction(isa, name)}" for name in ("f32", "bf16", "int8"))
    lines.append(f"- A peak is the highest of several, of this CPU's fastest instruction for the format: {used}")
    for mix, sweep in data["peer_sweep"].items():
        best, searched = ("best ", f", of {len(sweep['tried'])} tried") if sweep["tried"] else ("", "")
        lines.append(f"- llama.cpp's {best}flags for {mix}: `{sweep['best']}`{searched}")
    if "llama.cpp" not in versions:
        lines.append("- Measured without llama.cpp: its columns are empty")
    lines += [
        "",
        "| | type | ours | peer | ratio | seen with it | to reach | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(entry, isa, void(data, entry["type"])) for entry in data["rows"]]
    if points(data) and data["peaks"]:
        lines += ["", f"![Operations per second against operations per byte]({image})"]
    judged = [entry for entry in data["rows"] if not void(data, entry["type"])]
    lines += ["", f"Missed: {'; '.join(_missed(judged, machine['isa'])) or 'nothing'}."]
    for text in data.get("left_out", []):
        lines += ["", f"Not measured: {text}"]
    return "\n".join(map(_wrapped, lines))


def _wrapped(line: str) -> str:
    """As the page is, but for tables, pictures and commands."""
    if line.startswith(("|", "!", "    ")):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _useful(isa: Sequence[str], peaks: dict[str, Any]) -> list[str]:
    """Without the dot product of bf16 where float32's was the faster one."""
    slow = any(each["bf16_per_s"] < each["f32_per_s"] for each in peaks.values())
    return [name for name in isa if not (slow and name == "avx512_bf16")]


def void(data: dict[str, Any], mix: str) -> bool:
    """Whether the memory was slower beside this type's rows than such a machine's is: something else ran."""
    known, measured = data["machine"].get("known_read_gb_s"), data["peaks"].get(mix)
    return bool(known and measured) and measured["bytes_per_s"] / 1e9 < LEAST_OF_KNOWN_READ * known


def _missed(rows: Sequence[Entry], isa: Sequence[str]) -> list[str]:
    out = []
    for entry in rows:
        text, good = target(entry, isa)
        if good is False:
            out.append(f"{entry['what']} in {entry['type']} ({text}{_reached(entry)})")
    return out


def _reached(entry: Entry) -> str:
    """Of a missed target, the figure that it asks for: a speed over the peer's, or ours alone."""
    if entry["row"] == "adapters":
        return f", {entry['kept']:.0%}"
    if entry["row"] == "first":
        return f", {entry['ended']}"
    if entry["row"] in ("idle", "python", "arrivals"):
        return f", {_number(entry['ours'])} {entry['unit']}"
    found = [f"{entry['ratio']:.2f}x"] if entry["ratio"] is not None else []
    found += [f"{entry[key]:.0%}" for key in ("of_read", "of_peak") if key in entry]
    return f", {' and '.join(found)}" if found else ""


def _row(entry: Entry, isa: Sequence[str], void: bool) -> str:
    text, good = target(entry, isa)
    unit, peer, ratio = entry["unit"], entry["peer"], entry["ratio"]
    cells = [
        entry["what"],
        entry["type"],
        f"{_number(entry['ours'])} {unit}",
        "" if peer is None else f"{_number(peer)} {unit}",
        "" if ratio is None else f"{ratio:.2f}x",
        "; ".join(_details(entry, isa)),
        text,
        "void" if void else {True: "yes", False: "**no**", None: ""}[good],
    ]
    return f"| {' | '.join(cells)} |"


def _details(entry: Entry, isa: Sequence[str]) -> list[str]:
    out = []
    if "gb_s" in entry:
        out.append(f"{entry['step_mb']:.0f} MB a step, {entry['gb_s']:.1f} GB/s, {entry['of_read']:.0%} of read")
    if "of_peak" in entry:
        out.append(f"{entry['gop_s']:.0f} Gop/s, {entry['of_peak']:.0%} of {instruction(isa, entry['peak_of'])}")
    if "attention" in entry:
        out.append(f"attention {entry['attention']:.0%} of them")
    if "kept" in entry:
        theirs = f" (llama.cpp {entry['peer_kept']:.0%})" if "peer_kept" in entry else ""
        out.append(f"{entry['kept']:.0%} of base only{theirs}")
    for key, name, unit in (("ttft_s", "median TTFT", " s"), ("itl_ms", "ITL", " ms"), ("max_gap_per_itl", "gap", "x")):
        if key in entry:
            theirs = f" ({_number(entry[f'peer_{key}'])})" if f"peer_{key}" in entry else ""
            out.append(f"{name} {_number(entry[key])}{unit}{theirs}")
    if "late_ttft_s" in entry:
        theirs = f" ({_number(entry['peer_late_ttft_s'])})" if "peer_late_ttft_s" in entry else ""
        out.append(f"TTFT of the arriving {_number(entry['late_ttft_s'])} s{theirs}")
    if "ended" in entry:
        theirs = f" ({entry['peer_ended']})" if "peer_ended" in entry else ""
        out.append(f"of {entry['running']} running, {entry['ended']} had ended by then{theirs}")
    if "peer_name" in entry:
        took = f"{_number(entry['us'])} us a layer ({_number(entry['peer_us'])})"
        out.append(f"{took}, {entry['call_of_read']:.0%} of read; kt_kernel's {entry['peer_name']}")
    if "pairs" in entry:
        out.append(f"{entry['pairs']} pairs, quartiles {entry['quartile_low']:.1f} to {entry['quartile_high']:.1f}")
    if "outside_native_ms" in entry:
        out.append(f"{entry['outside_native_ms']:.2f} of {entry['step_ms']:.1f} ms")
    if (runs := len(entry["all_ours"])) > 1 and "pairs" not in entry:
        out.append(f"{runs} repetitions")
    return out


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
