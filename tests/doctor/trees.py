"""Trees of /proc and /sys like those of machines."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from engine.diagnostics.doctor.finding import Here

AVX512 = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512vbmi avx512_vnni avx512_bf16"
AMX = f"{AVX512} avx512_fp16 amx_tile amx_int8 amx_bf16"


def machine(root: Path, *, nodes: int = 1, per_node: int = 4, smt: bool = False, flags: str = AVX512) -> Here:
    """CPUs are numbered node by node; with `smt` two neighbours are one core. 64 GiB a node."""
    count = nodes * per_node
    files = {
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n\nprocessor\t: 1\n",
        "proc/meminfo": f"MemTotal:       {nodes * (64 << 20)} kB\nMemFree:        1 kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/status": f"Name:\tx\nMems_allowed_list:\t0-{nodes - 1}\n",
        "proc/self/numa_maps": "7f0000000000 default anon=1\n7ffc00000000 default stack anon=3 N0=3\n",
        "proc/sys/kernel/numa_balancing": "0\n",
        "sys/devices/system/cpu/online": f"0-{count - 1}\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }
    for cpu in range(count):
        first = cpu - cpu % 2
        siblings = f"{first}-{first + 1}" if smt else str(cpu)
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings + "\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"] = "performance\n"
    for node in range(nodes):
        folder = f"sys/devices/system/node/node{node}"
        files[f"{folder}/cpulist"] = f"{node * per_node}-{(node + 1) * per_node - 1}\n"
        files[f"{folder}/meminfo"] = f"Node {node} MemTotal:       {64 << 20} kB\n"
    write(root, files)
    return Here(root, tuple(range(count)))


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def modules(root: Path, slots: list[tuple[int, int]]) -> None:
    """The firmware's table with a module of (MiB, MT/s) in each slot; 0 MiB: it is empty."""
    table = struct.pack("<BBH4s", 0, 8, 0, b"bios") + b"vendor\0\0"
    for handle, (mib, speed) in enumerate(slots, 1):
        large = mib >= 0x7FFF
        fields = bytearray(0x28)
        struct.pack_into("<BBH", fields, 0, 17, len(fields), handle)
        struct.pack_into("<H", fields, 0x0C, 0x7FFF if large else mib)
        struct.pack_into("<I", fields, 0x1C, mib if large else 0)
        struct.pack_into("<H", fields, 0x15, 5600)
        struct.pack_into("<H", fields, 0x20, speed)
        table += bytes(fields) + b"DIMM\0\0"
    table += struct.pack("<BBH", 127, 4, 99) + b"\0\0"
    path = root / "sys/firmware/dmi/tables/DMI"
    path.parent.mkdir(parents=True)
    path.write_bytes(table)
