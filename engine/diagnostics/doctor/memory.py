"""Host memory: limits, nodes, pages, modules, and how fast it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.diagnostics.doctor.finding import Finding, Here, ranges
from engine.diagnostics.doctor.modules import MemoryModule, memory_modules
from engine.memory.limits import Memory
from engine.units import format_bytes
from native.topology import cpu_quota, node_cpus, parse_cpu_list

ReadRate = Callable[[int, list[int]], float]  # (node, -1 where there is one; its CPUs) -> bytes a second
_BYTES_OF_TRANSFER = 8
_LEAST_SHARE = 0.55  # of the modules' peak: all cores of a node reach 70 to 90% where nothing else runs
_POLICIES = {"bind": "--membind", "interleave": "--interleave", "prefer": "--preferred"}


@dataclass(frozen=True)
class _Node:
    number: int
    cpus: list[int]  # those that this process may use
    num_bytes: int


def memory_findings(here: Here, memory: Memory, read_rate: ReadRate | None) -> list[Finding]:
    """`read_rate` None: nothing is measured."""
    nodes = _nodes(here)
    modules = memory_modules(here)
    found = [_free(here, memory), *_numa(here, nodes), *_pages(here), *_modules(modules)]
    if read_rate is not None:
        found += _rates(nodes, modules, read_rate, here)
    return found


def _nodes(here: Here) -> list[_Node]:
    found = []
    for number, cpus in sorted(node_cpus(here.root).items()):
        lines = here.text(f"sys/devices/system/node/node{number}/meminfo").splitlines()
        total = next((line.split()[-2] for line in lines if "MemTotal:" in line), "0")
        found.append(_Node(number, [cpu for cpu in here.cpus if cpu in cpus], int(total) << 10))
    return found


def _free(here: Here, memory: Memory) -> Finding:
    value = f"{format_bytes(memory.free_bytes)} free of {format_bytes(memory.limit_bytes)}"
    machine = _meminfo(here).get("MemTotal", memory.limit_bytes)
    figures = {"free_bytes": memory.free_bytes, "limit_bytes": memory.limit_bytes, "machine_bytes": machine}
    remedy = ""
    if memory.limit_bytes < 0.9 * machine:
        value += f" that the cgroup allows; the machine has {format_bytes(machine)}"
        remedy = "docker run --memory, MemoryMax= of systemd: allow more, if the model does not fit"
    elif memory.free_bytes < memory.limit_bytes // 2:
        remedy = "end what else holds memory (ps --sort=-rss -eo rss,comm), if the model does not fit"
    return Finding("memory", value, remedy, figures)


def _meminfo(here: Here) -> dict[str, int]:
    """Bytes."""
    pairs = (line.split(":", 1) for line in here.text("proc/meminfo").splitlines() if line.endswith(" kB"))
    return {name: int(size.split()[0]) << 10 for name, size in pairs}


def _numa(here: Here, nodes: list[_Node]) -> list[Finding]:
    if len(nodes) < 2:
        return [Finding("NUMA", "one node", figures={"nodes": 1})]
    mine = [node.number for node in nodes if node.cpus]
    allowed = parse_cpu_list(_status(here).get("Mems_allowed_list", "")) or [node.number for node in nodes]
    shown = ", ".join(f"node {n.number}: {len(n.cpus)} CPUs, {format_bytes(n.num_bytes)}" for n in nodes)
    remedy = ""
    with_memory = [node.number for node in nodes if node.num_bytes]
    if unused := [number for number in with_memory if number not in mine]:
        remedy = f"no CPU of node {ranges(unused)} may be used, so its memory is read from afar: widen taskset, cpuset"
    elif forbidden := [number for number in mine if number not in allowed]:
        remedy = f"memory of node {ranges(forbidden)} is forbidden, its CPUs read from afar: widen --cpuset-mems"
    figures: dict[str, int | str] = {"nodes": len(nodes), "nodes_with_cpus": len(mine), "nodes_allowed": len(allowed)}
    found = [Finding("NUMA", shown, remedy, figures)]
    if flag := _policy(here):
        value = (
            f"numactl {flag}: the KV cache and buffers are placed so; packed weights are bound to their nodes anyway"
        )
        remedy = "start without numactl: each node's share of every expert is placed on that node by itself"
        found.append(Finding("NUMA policy", value, remedy, {"policy": flag}))
    if (balancing := here.text("proc/sys/kernel/numa_balancing")) not in ("", "0"):
        remedy = "sudo sysctl kernel.numa_balancing=0: pages are placed already, and moving them costs faults"
        found.append(Finding("NUMA balancing", "on", remedy, {"balancing": balancing}))
    return found


def _status(here: Here) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in here.text("proc/self/status").splitlines() if ":" in line)
    return {name: value.strip() for name, value in pairs}


def _policy(here: Here) -> str:
    """The flag of numactl under which this process was started; "" for none. The stack has the process's policy."""
    stack = next((line for line in here.text("proc/self/numa_maps").splitlines() if " stack" in line), "")
    words = stack.split()
    return next((flag for name, flag in _POLICIES.items() if len(words) > 1 and words[1].startswith(name)), "")


def _pages(here: Here) -> list[Finding]:
    text = here.text("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if not chosen:
        return []
    remedy = ""
    if chosen == "never":
        remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled: weights ask for huge pages"
    return [Finding("huge pages", chosen, remedy, {"transparent": chosen})]


def _modules(modules: list[MemoryModule]) -> list[Finding]:
    if not modules:
        value = "not readable, or a virtual machine that does not say"
        return [Finding("memory modules", value, "on a machine of your own: sudo ktserve doctor shows them")]
    filled = [module for module in modules if module.num_bytes]
    speeds = sorted({module.speed for module in filled if module.speed})
    shown = f"{len(filled)} of {len(modules)} slots filled"
    shown += f", {' and '.join(map(str, speeds))} MT/s" if speeds else ""
    remedy = ""
    if len(speeds) > 1:
        remedy = "all modules run as fast as the slowest: fit equal ones"
    elif len(filled) * 2 <= len(modules):
        remedy = "each channel adds its bandwidth: fill one slot of every channel (the board's manual says which)"
    slowest = speeds[0] if speeds else None
    return [Finding("memory modules", shown, remedy, {"slots": len(modules), "filled": len(filled), "mt_s": slowest})]


def _rates(nodes: list[_Node], modules: list[MemoryModule], read_rate: ReadRate, here: Here) -> list[Finding]:
    used = [node for node in nodes if node.cpus and node.num_bytes]
    whole = [(-1, list(here.cpus))]
    places = [(node.number, node.cpus) for node in used] if len(used) > 1 else whole
    if quota := cpu_quota(here.root):  # more threads than are granted are stopped in turn
        places = [(number, cpus[: max(1, quota // len(places))]) for number, cpus in places]
    speeds = [module.speed for module in modules if module.num_bytes and module.speed]
    peak = min(speeds) * 1e6 * _BYTES_OF_TRANSFER * len(speeds) / max(1, len(nodes)) if speeds else None
    found = []
    for number, cpus in places:
        rate = read_rate(number, cpus)
        value, remedy = f"{rate / 1e9:.1f} GB/s by {len(cpus)} CPUs", ""
        if peak is not None:
            value += f", {rate / peak:.0%} of {peak / 1e9:.0f} GB/s if each module has a channel"
            if rate < _LEAST_SHARE * peak:
                remedy = "end what else runs and try again; two modules on one channel, or few CPUs, read less too"
        figures: Mapping[str, int | float | None] = {"node": number, "bytes_per_s": rate, "peak_bytes_per_s": peak}
        name = "memory read" if number < 0 else f"memory read, node {number}"
        found.append(Finding(name, value, remedy, figures))
    return found
