"""The GPU and the disk."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.diagnostics.doctor.finding import Figure, Finding, Here
from engine.units import format_bytes

_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")
_READ_BYTES, _BLOCK_BYTES = 512 << 20, 8 << 20
_LEAST_READ_BYTES = 64 << 20  # less shows the disk's latency, not its rate
_SLOW_DISK = 500e6  # bytes a second: 60 GB take two minutes


@dataclass(frozen=True)
class Gpu:
    """As torch sees it. `copy_rate`: bytes a second from pinned host memory; None: not measured."""

    name: str
    num_bytes: int
    copy_rate: float | None


def gpu_findings(here: Here, gpus: list[Gpu], flashinfer: Callable[[], tuple[bool, str]]) -> list[Finding]:
    """`flashinfer`: whether it can be used, or why not; asked only where there is a GPU."""
    driver = here.text("proc/driver/nvidia/version").partition("\n")[0]
    cards = _cards(here)
    if not gpus:
        return [_no_gpu(bool(driver), bool(cards))]
    found = []
    for index, gpu in enumerate(gpus):
        value = f"{gpu.name}, {format_bytes(gpu.num_bytes)}"
        value += f", {gpu.copy_rate / 1e9:.1f} GB/s from host memory" if gpu.copy_rate is not None else ""
        figures: dict[str, Figure] = {"model": gpu.name, "bytes": gpu.num_bytes, "copy_bytes_per_s": gpu.copy_rate}
        found.append(Finding(f"GPU {index}", value, figures=figures))
    found += [_link(here, card) for card in cards]
    usable, why = flashinfer()
    remedy = "" if usable else "pip install 'ktserve[gpu]' flashinfer-jit-cache"
    found.append(Finding("flashinfer", "present" if usable else why, remedy, {"usable": usable}))
    return found


def _no_gpu(driver: bool, card: bool) -> Finding:
    figures = {"driver": driver, "card": card}
    if driver:
        remedy = "install a build of torch for CUDA that suits the driver: pip install torch (nvidia-smi shows both)"
        return Finding("GPU", "a driver is loaded, but torch finds no GPU", remedy, figures)
    if card:
        remedy = "install NVIDIA's driver; in a container: docker run --gpus all, with the NVIDIA container toolkit"
        return Finding("GPU", "a card without a driver", remedy, figures)
    return Finding("GPU", "none; the CPU computes everything", "", figures)


def _cards(here: Here) -> list[Path]:
    found = []
    for card in sorted((here.root / "sys/bus/pci/devices").glob("*")):
        name = f"sys/bus/pci/devices/{card.name}/"
        if here.text(name + "vendor") == _NVIDIA and here.text(name + "class").startswith(_DISPLAY):
            found.append(card)
    return found


def _link(here: Here, card: Path) -> Finding:
    name = f"sys/bus/pci/devices/{card.name}/"
    now, most = here.text(name + "current_link_width"), here.text(name + "max_link_width")
    speed = here.text(name + "current_link_speed")
    narrow = now.isdigit() and most.isdigit() and int(now) < int(most)
    remedy = "move the card to a slot with all lanes; experts that are streamed pass this link" if narrow else ""
    value = f"{now or '?'} of {most or '?'} lanes" + (f", {speed}" if speed else "")
    return Finding("PCIe", value, remedy, {"lanes": int(now) if now.isdigit() else None, "speed": speed or None})


def disk_finding(path: Path) -> Finding:
    """How fast the model's largest file, or the file `path`, is read past the page cache."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    largest = max(files, key=lambda each: each.stat().st_size, default=None)
    if largest is None or largest.stat().st_size < _LEAST_READ_BYTES:
        value = f"not measured: no file of {format_bytes(_LEAST_READ_BYTES)} or more is there"
        return Finding("disk", value, "name a model's file or folder")
    try:
        rate = _direct_rate(largest)
    except OSError as error:
        return Finding("disk", f"not measured: reading past the page cache fails ({error.strerror})")
    remedy = "put the model on an NVMe disk: a start reads all of it" if rate < _SLOW_DISK else ""
    return Finding("disk", f"{rate / 1e9:.2f} GB/s where the model lies", remedy, {"bytes_per_s": rate})


def _direct_rate(path: Path) -> float:
    """Bytes a second, of at most `_READ_BYTES`. Raises OSError where a file system has no O_DIRECT."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:  # aligned to a page, as O_DIRECT wants it
            begin, done = time.perf_counter(), 0
            while done < _READ_BYTES and (count := os.preadv(file, [block], done)):
                done += count
                if count < _BLOCK_BYTES:
                    break
            return done / max(time.perf_counter() - begin, 1e-9)
    finally:
        os.close(file)
