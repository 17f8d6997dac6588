"""The findings of this machine, as text, as JSON, and as a file that shows nobody's names."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.attention.flashinfer import flashinfer_available
from engine.diagnostics.doctor.cpu import cpu_findings
from engine.diagnostics.doctor.devices import Gpu, disk_finding, gpu_findings
from engine.diagnostics.doctor.finding import Figure, Finding, Here
from engine.diagnostics.doctor.memory import memory_findings
from engine.diagnostics.doctor.rates import rates_finding
from engine.errors import UserError
from engine.memory.limits import cpu_memory
from native import available as native_available

_PACKAGES = ("ktserve", "torch", "transformers", "tokenizers", "huggingface_hub", "gguf", "flashinfer-python")
_READ_BYTES, _COPY_BYTES = 1 << 30, 256 << 20
_PATH = re.compile(r"(?<![\w.~/<>-])~?/(?!(?:proc|sys)/)[\w.~+@-][^\s,;:)\"']*")
_URL = re.compile(r"[a-z][a-z0-9+]*://[^\s\"',;)]+|[\w.+-]+@[\w.-]+", re.IGNORECASE)  # or mail
_DIGITS = re.compile(r"(?<![\w.:])[0-9a-f:.]*[:.][0-9a-f:.]*[0-9a-f:](?![\w:])(?:%\w+)?", re.IGNORECASE)
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}", re.IGNORECASE)
_NAMING = ("USER", "LOGNAME", "SUDO_USER", "HOSTNAME", "HOST")  # variables
_COMMON = frozenset(
    {"/", "home", "root", "tmp", "usr", "var", "opt", "mnt", "data", "models", "memory", "src", "ktserve"}
)


def doctor(model: str, *, quick: bool, as_json: bool, share: str | None, bench: str | None) -> int:
    """Print what is found; `quick` measures nothing. `share` is a file to write, which must not be there; `bench` one
    of `ktserve bench --quick --json`. The exit status: 0 whatever is found. UserError for a model or file that cannot
    be."""
    path = Path(model) if model else None
    if path is not None and not path.exists():
        raise UserError(f"{model[:200]}: no such file or folder", "model")
    found = examine(path, quick=quick) + ([] if bench is None else [rates_finding(bench)])
    print(to_json(found) if as_json else to_text(found))
    if share is not None:
        _write(share, to_json(without_names(found, names_here(model, share))))
        print(f"{share} is written: look through it before you paste it", file=sys.stderr)
    return 0


def examine(model: Path | None, *, quick: bool) -> list[Finding]:
    """Of the machine that this process runs on; what it may use is what a server started here may."""
    here = Here(Path("/"), tuple(sorted(os.sched_getaffinity(0))))
    loads = native_available()[0]
    found = cpu_findings(here, native_available)
    found += memory_findings(here, cpu_memory(), _read_rate if loads and not quick else None)
    found += [] if model is None or quick else [disk_finding(model)]
    return [*found, *gpu_findings(here, list(_gpus(quick)), flashinfer_available), _versions()]


def _read_rate(node: int, cpus: list[int]) -> float:
    from native import _native

    size = min(_READ_BYTES, cpu_memory().free_bytes // 4)
    pool = _native.WorkerPool([cpus], node >= 0, 2000, [node])
    return float(_native.read_bandwidth(pool, size, repeats=5))


def _gpus(quick: bool) -> Iterator[Gpu]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        seen = torch.cuda.get_device_properties(index)
        yield Gpu(seen.name, seen.total_memory, None if quick else _copy_rate(index))


def _copy_rate(index: int) -> float | None:
    """From pinned host memory, in bytes a second; None: the GPU is full."""
    try:
        there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
    except torch.OutOfMemoryError:
        return None
    pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize(index)
        begin = time.perf_counter()
        there.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize(index)
        best = max(best, _COPY_BYTES / (time.perf_counter() - begin))
    return best


def _versions() -> Finding:
    found = {"Linux": platform.release(), "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return Finding("versions", ", ".join(f"{name} {each}" for name, each in found.items()), figures=found)


def to_text(found: Sequence[Finding]) -> str:
    width = max(len(each.name) for each in found)
    lines = []
    for each in found:
        lines.append(f"{each.name:<{width}}  {each.value}")
        if each.remedy:
            lines.append(f"{'':<{width}}  -> {each.remedy}")
    remedies = sum(bool(each.remedy) for each in found)
    lines.append(f"lines with a remedy (->): {remedies}" if remedies else "nothing holds this machine back")
    return "\n".join(lines)


def to_json(found: Sequence[Finding]) -> str:
    return json.dumps({"findings": [asdict(each) for each in found]}, indent=1)


def names_here(*paths: str) -> list[str]:
    """Of this machine, this person, and the folders and files of `paths`; the longest first."""
    names = {platform.node(), *(os.environ.get(name, "") for name in _NAMING)}
    names |= {part for name in list(names) for part in name.split(".")}
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        names.add(getpass.getuser())
    for folder in (Path.home(), Path.cwd(), Path(tempfile.gettempdir()), *map(Path, filter(None, paths))):
        names |= {str(folder), *folder.parts}
    return sorted(names - _COMMON - {""}, key=lambda name: (-len(name), name))


def without_names(found: Sequence[Finding], names: Sequence[str]) -> list[Finding]:
    """The findings without what `anonymous` takes out of their texts."""

    def figure(value: Figure) -> Figure:
        return anonymous(value, names) if isinstance(value, str) else value

    return [
        replace(
            each,
            value=anonymous(each.value, names),
            remedy=anonymous(each.remedy, names),
            figures={key: figure(value) for key, value in each.figures.items()},
        )
        for each in found
    ]


def anonymous(text: str, names: Sequence[str]) -> str:
    """`text` with `<name>` for whole words among `names`, `<address>` for URLs, mail and IP addresses, `<path>` for
    paths but those of /proc and /sys."""
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text, flags=re.IGNORECASE)
    text = _DIGITS.sub(lambda found: "<address>" if _is_address(found[0]) else found[0], _URL.sub("<address>", text))
    return _PATH.sub("<path>", text)


def _is_address(text: str) -> bool:
    if _MAC.fullmatch(text):
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _write(path: str, text: str) -> None:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError:
        raise UserError(f"--share {path}: the file is there already; name another", "share") from None
    except OSError as error:
        raise UserError(f"--share {path}: {error.strerror}", "share") from None
