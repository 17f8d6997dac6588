"""The CPU: instruction sets, cores, what of them is granted, their clock."""

from __future__ import annotations

from collections.abc import Callable

from engine.diagnostics.doctor.finding import Finding, Here, ranges
from native.topology import cpu_quota, parse_cpu_list

# What native/src/runtime/isa.cpp asks the CPU for; each set also needs the ones below it.
_AMX = ("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_vnni", "avx512_bf16")
_AVX2 = ("avx2", "fma", "f16c")
_SHOWN = (*_AVX2, *_AVX512, *_AMX)
_USED_FOR = {
    "amx": "AMX multiplies many rows (prompts, batches), AVX-512 few",
    "avx512": "AVX-512 for all products; prompts would be several times as fast with AMX",
    "avx2": "AVX2 for all products",
}
_SAVING = ("powersave", "conservative")
_HARDWARE_DRIVERS = ("intel_pstate", "amd-pstate-epp")  # their "powersave" still reaches the highest clock


def cpu_findings(here: Here, native: Callable[[], tuple[bool, str]]) -> list[Finding]:
    """`native`: whether the kernels load, and their instruction set or the reason why not."""
    return [_cores(here), _instructions(here, *native()), *_granted(here), *_threads(here), *_clock(here)]


def _online(here: Here) -> list[int]:
    return parse_cpu_list(here.text("sys/devices/system/cpu/online")) or list(here.cpus)


def _siblings(here: Here) -> dict[int, str]:
    """The list of threads of each CPU's core."""
    path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {cpu: here.text(path.format(cpu)) or str(cpu) for cpu in _online(here)}


def _cores(here: Here) -> Finding:
    siblings = _siblings(here)
    cores, info = len(set(siblings.values())), here.cpu_info()
    model = info.get("model name", "unknown CPU")
    value = f"{model}, {cores} cores, {len(siblings)} threads"
    return Finding("CPU", value, figures={"model": model, "cores": cores, "threads": len(siblings)})


def _instructions(here: Here, loads: bool, found: str) -> Finding:
    flags = set(here.cpu_info().get("flags", "").split())
    shown = [flag for flag in _SHOWN if flag in flags]
    figures = {"flags": " ".join(shown), "used": found if loads else None}
    if not loads:
        missing = [flag for flag in _AVX2 if flag not in flags]
        if missing:
            remedy = f"the kernels need {', '.join(_AVX2)}: use a machine of 2013 or later, or a VM that passes them on"
        elif found.startswith("isa:"):
            remedy = "unset KTSERVE_ISA"
        else:
            remedy = "install a wheel of ktserve, or build from its folder: pip install . (a C++ compiler is needed)"
        return Finding("instruction sets", f"no native kernels, torch computes: {found}", remedy, figures)
    value, remedy = f"{found} is used: {_USED_FOR.get(found, found)}", ""
    missing = [flag for flag in _AVX512 if flag not in flags]
    if found != "amx" and flags.issuperset((*_AVX512, *_AMX)):
        remedy = "the CPU has AMX: Linux 5.16 or later is needed, a sandbox must allow arch_prctl, KTSERVE_ISA be unset"
    elif found == "avx2" and not missing:
        remedy = "the CPU has AVX-512: unset KTSERVE_ISA"
    elif found == "avx2" and "avx512f" in flags:
        value += f"; the kernels' AVX-512 needs {', '.join(missing)} too, which this CPU has not"
    return Finding("instruction sets", value, remedy, figures)


def _granted(here: Here) -> list[Finding]:
    online, quota = _online(here), cpu_quota(here.root)
    granted = min(len(here.cpus), quota or len(here.cpus))
    limits = []
    if len(here.cpus) < len(online):
        limits.append(f"affinity: {ranges(list(here.cpus))}")
    if quota is not None and quota < len(online):
        limits.append(f"cgroup: {quota}")
    value = f"{granted} of {len(online)}" + (f" ({'; '.join(limits)})" if limits else "")
    remedy = ""
    if limits:
        remedy = "docker run --cpus / --cpuset-cpus, CPUQuota= and CPUAffinity= of systemd, taskset: grant more"
    return [Finding("CPUs granted", value, remedy, {"granted": granted, "online": len(online), "quota": quota})]


def _threads(here: Here) -> list[Finding]:
    siblings = _siblings(here)
    mine = {cpu: siblings[cpu] for cpu in here.cpus if cpu in siblings}
    cores = len(set(mine.values()))
    if cores == len(mine):
        return []
    value = f"{len(mine)} threads on {cores} cores"
    remedy = f"try --cpu-threads {cores}: decoding is bound by memory, and a core's second thread adds little"
    return [Finding("SMT", value, remedy, {"threads": len(mine), "cores": cores})]


def _clock(here: Here) -> list[Finding]:
    folder = "sys/devices/system/cpu/cpu{}/cpufreq/"
    names = {here.text(folder.format(cpu) + "scaling_governor") for cpu in here.cpus} - {""}
    if not names:
        return []
    first = folder.format(here.cpus[0])
    driver, preference = here.text(first + "scaling_driver"), here.text(first + "energy_performance_preference")
    if driver in _HARDWARE_DRIVERS:
        slow = preference in ("power", "balance_power")
    else:
        slow = any(name in _SAVING for name in names)
    remedy = "sudo cpupower frequency-set -g performance" if slow else ""
    value = ", ".join(sorted(names)) + (f" ({driver})" if driver else "")
    return [Finding("governor", value, remedy, {"governor": ", ".join(sorted(names)), "driver": driver or None})]
