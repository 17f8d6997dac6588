"""What each row of the CPU benchmark is to reach, by the instructions that the machine has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Entry = dict[str, Any]
Part = tuple[str, bool | None]

# Decode, by sequences: the share of the memory's read peak. AVX2 is bound by its products and has none.
_READ = {
    "Q8_0": {1: 0.88, 8: 0.88, 16: 0.86, 32: 0.84},
    "Q4_K_M": {1: 0.85, 8: 0.80, 16: 0.76, 32: 0.72},
    "BF16": {1: 0.85},
}
_DECODE_RATIO = 1.15  # over llama.cpp at least, in every type
# Prefill, by tokens: the share of the peak of the products that are used.
_PEAK = {"avx512": {512: 0.65, 2048: 0.65, 8192: 0.55, 32768: 0.5}, "amx": {2048: 0.2}}
_FLAT: dict[str, tuple[str, Callable[[Entry], bool]]] = {  # what is written, and what holds
    "idle": ("98%", lambda entry: entry["ours"] >= 98),
    "arrivals": ("at most 3x", lambda entry: entry["ours"] <= 3),
    "first": ("none of the others ended", lambda entry: entry["ended"] == 0),
    "adapters": ("92% of base", lambda entry: entry["kept"] >= 0.92),
}


def target(entry: Entry, isa: Sequence[str]) -> tuple[str, bool | None]:
    """What an entry is to reach, and whether it does; None where that cannot be told (no peer). "" without a target."""
    row, what = entry["row"], entry["what"]
    if row in _FLAT:
        text, holds = _FLAT[row]
        return text, holds(entry)
    if row == "python":
        return ("under 3%", entry["ours"] < 3) if "8 rows" in what else ("", None)
    if row == "start":
        return _all([_ratio(entry, 2.0 if what == "first start" else 1.5, less=True)])
    if row == "kt":
        return _all([_ratio(entry, _over_kt_kernel(entry))])
    if row == "server":
        theirs = entry.get("peer_ttft_s")
        return _all([_ratio(entry, 2.0), ("TTFT 1/3", None if theirs is None else entry["ttft_s"] <= theirs / 3)])
    if row in ("decode", "batch"):
        share = _READ.get(entry["type"], {}).get(int(what.split()[1])) if "avx512_vnni" in isa else None
        return _all([_ratio(entry, _DECODE_RATIO), *_share(entry, "of_read", share, "read")])
    if row in ("prefill", "long"):
        level = "amx" if "amx_int8" in isa else "avx512" if "avx512_vnni" in isa else "avx2"
        tokens = int(what.split()[1])
        peer = [_ratio(entry, 1.7 if entry["type"] == "BF16" else 2.0)] if tokens <= 2048 else []
        return _all([*peer, *_share(entry, "of_peak", _PEAK.get(level, {}).get(tokens), "peak")])
    return "", None


def _over_kt_kernel(entry: Entry) -> float:
    """2x on a small machine; with cores to spare the memory bounds both."""
    if entry["threads"] <= 2:
        return 2.0
    return {"BF16": 1.1, "Q8_0": 1.4, "Q4_K_M": 1.5}[entry["type"]] if entry["rows"] == 1 else 1.0


def _ratio(entry: Entry, wanted: float, less: bool = False) -> Part:
    """To the peer: at least, of what is better the larger it is, or at most."""
    text = f"at most {wanted:g}x" if less else f"{wanted:g}x"
    ratio = entry["ratio"]
    return text, None if ratio is None else ratio <= wanted if less else ratio >= wanted


def _share(entry: Entry, key: str, wanted: float | None, of: str) -> list[Part]:
    return [] if wanted is None else [(f"{wanted:.0%} of {of}", entry[key] >= wanted)]


def _all(parts: Sequence[Part]) -> tuple[str, bool | None]:
    text, reached = " and ".join(text for text, _ in parts), [good for _, good in parts]
    if not parts or False in reached:
        return text, False if parts else None
    return text, None if None in reached else True
