"""ktserve doctor on trees of /proc and /sys: what is found, and that what holds a machine back has a remedy."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.diagnostics.doctor import report
from engine.diagnostics.doctor.cpu import cpu_findings
from engine.diagnostics.doctor.devices import Gpu, disk_finding, gpu_findings
from engine.diagnostics.doctor.finding import Finding, Here, ranges
from engine.diagnostics.doctor.memory import memory_findings
from engine.diagnostics.doctor.modules import MemoryModule, memory_modules
from engine.diagnostics.doctor.rates import rates_finding
from engine.diagnostics.doctor.report import anonymous, to_json, to_text
from engine.errors import UserError
from engine.memory.limits import Memory
from ktserve.launcher import program
from native.topology import parse_cpu_list
from testing.waiting import PATIENCE_S
from tests.doctor.trees import AMX, AVX512, machine, modules, write

MEMORY = Memory("CPU", 60 << 30, 64 << 30)


def named(found: Sequence[Finding]) -> dict[str, Finding]:
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def cpu(here: Here, loads: bool = True, isa: str = "avx512") -> dict[str, Finding]:
    return named(cpu_findings(here, lambda: (loads, isa)))


def memory(here: Here, held: Memory = MEMORY, rate: float | None = None) -> dict[str, Finding]:
    return named(memory_findings(here, held, None if rate is None else lambda node, cpus: rate))


def test_a_machine_that_nothing_holds_back(tmp_path: Path) -> None:
    here = machine(tmp_path)
    modules(tmp_path, [(16384, 4800)] * 8)
    found = [*cpu(here).values(), *memory(here, rate=250e9).values()]
    assert not [each for each in found if each.remedy]
    assert to_text(found).endswith("nothing holds this machine back")


@pytest.mark.parametrize(
    ("flags", "loads", "isa", "remedy"),
    [
        (AMX, True, "amx", ""),
        (AMX, True, "avx512", "arch_prctl"),
        (AMX, True, "avx2", "arch_prctl"),
        (AVX512, True, "avx2", "unset KTSERVE_ISA"),
        ("avx2 fma f16c", True, "avx2", ""),
        ("sse4_2", False, "this machine has no AVX2", "need avx2"),
        (AVX512, False, "the extension is not built (x)", "pip install"),
        (AVX512, False, "isa: 'foo'; allowed are avx2, avx512, amx", "unset KTSERVE_ISA"),
    ],
)
def test_instruction_sets(tmp_path: Path, flags: str, loads: bool, isa: str, remedy: str) -> None:
    found = cpu(machine(tmp_path, flags=flags), loads, isa)["instruction sets"]
    assert remedy in found.remedy and bool(remedy) == bool(found.remedy)
    assert isa in found.value


@given(has=st.sets(st.sampled_from(AMX.split()[3:])))
def test_a_better_instruction_set_is_asked_for_only_where_all_of_it_is_there(has: set[str]) -> None:
    """Ice Lake has AVX-512 without BF16: the kernels take AVX2 there, and no setting changes that."""
    with tempfile.TemporaryDirectory() as folder:
        found = cpu(machine(Path(folder), flags=" ".join(["avx2 fma f16c", *has])), True, "avx2")["instruction sets"]
    missing = set(AVX512.split()[3:]) - has
    assert ("the CPU has A" in found.remedy) == (not missing)
    if "avx512f" in has:
        assert all(flag in found.value for flag in missing), "why AVX-512 is not used"


def test_here_the_kernels_choice_is_what_the_flags_say() -> None:
    """With no variable set, nothing is wrong with this machine's instruction sets unless AMX is not permitted."""
    native = pytest.importorskip("native._native", reason="the extension is not built")
    here = Here(Path("/"), (0,))
    (best,) = [f for f in cpu_findings(here, lambda: (True, native.best_isa())) if f.name == "instruction sets"]
    assert "unset KTSERVE_ISA" not in best.remedy, best


def test_what_is_granted_and_smt(tmp_path: Path) -> None:
    here = machine(tmp_path, smt=True, per_node=8)
    found = cpu(here)
    assert found["CPU"].figures == {"model": "Some CPU", "cores": 4, "threads": 8}
    assert "--cpu-threads 4" in found["SMT"].remedy and not found["CPUs granted"].remedy
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "300000 100000\n"})
    found = cpu(Here(tmp_path, (0, 2, 4, 6)))
    assert "SMT" not in found  # one thread of each core
    assert found["CPUs granted"].value == "3 of 8 (affinity: 0,2,4,6; cgroup: 3)" and found["CPUs granted"].remedy


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ({"scaling_governor": "powersave"}, True),
        ({"scaling_governor": "powersave", "scaling_driver": "intel_pstate"}, False),
        (
            {
                "scaling_governor": "powersave",
                "scaling_driver": "intel_pstate",
                "energy_performance_preference": "power",
            },
            True,
        ),
        ({"scaling_governor": "schedutil"}, False),
    ],
)
def test_governor(tmp_path: Path, files: Mapping[str, str], remedy: bool) -> None:
    here = machine(tmp_path, per_node=1)
    write(tmp_path, {f"sys/devices/system/cpu/cpu0/cpufreq/{name}": text for name, text in files.items()})
    assert bool(cpu(here)["governor"].remedy) == remedy


def test_two_nodes(tmp_path: Path) -> None:
    here = machine(tmp_path, nodes=2)
    found = memory(here, rate=100e9)
    assert not found["NUMA"].remedy and "NUMA policy" not in found and "NUMA balancing" not in found
    assert {"memory read, node 0", "memory read, node 1"} <= found.keys()
    assert "node 1" in memory(Here(tmp_path, (0, 1)))["NUMA"].remedy  # taskset -c 0,1
    write(
        tmp_path,
        {
            "proc/sys/kernel/numa_balancing": "1\n",
            "proc/self/numa_maps": "7f0000000000 bind:0 anon=1\n7ffc00000000 bind:0 stack anon=3 N0=3\n",
            "proc/self/status": "Mems_allowed_list:\t0\n",
        },
    )
    found = memory(here)
    assert "memory of node 1 is forbidden" in found["NUMA"].remedy
    assert "--membind" in found["NUMA policy"].value and found["NUMA policy"].remedy
    assert "kernel.numa_balancing=0" in found["NUMA balancing"].remedy


def test_memory_limits_and_pages(tmp_path: Path) -> None:
    here = machine(tmp_path)
    found = memory(here, Memory("CPU", 7 << 30, 8 << 30))
    assert "the cgroup allows" in found["memory"].value and "--memory" in found["memory"].remedy
    assert "ps " in memory(here, Memory("CPU", 9 << 30, 64 << 30))["memory"].remedy
    write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"})
    assert "madvise" in memory(here)["huge pages"].remedy


def test_memory_modules(tmp_path: Path) -> None:
    here = machine(tmp_path)
    assert "sudo" in memory(here)["memory modules"].remedy
    modules(tmp_path, [(65536, 4800), (0, 0), (16384, 4400), (0, 0), (0, 0)])
    assert memory_modules(here)[:3] == [
        MemoryModule(64 << 30, 4800),
        MemoryModule(0, 5600),
        MemoryModule(16 << 30, 4400),
    ]
    found = memory(here, rate=10e9)
    assert "2 of 5 slots filled, 4400 and 4800 MT/s" in found["memory modules"].value
    assert found["memory modules"].remedy and found["memory read"].remedy


@given(st.binary(max_size=200))
def test_any_table_of_the_firmware_is_read(tmp_path_factory: pytest.TempPathFactory, table: bytes) -> None:
    root = tmp_path_factory.mktemp("dmi")
    modules(root, [])
    (root / "sys/firmware/dmi/tables/DMI").write_bytes(table)
    assert all(module.num_bytes >= 0 for module in memory_modules(Here(root, (0,))))


def test_the_quota_bounds_the_threads_that_read(tmp_path: Path) -> None:
    here = machine(tmp_path, nodes=2)
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "400000 100000\n"})
    seen = []

    def rate(node: int, cpus: list[int]) -> float:
        seen.append((node, cpus))
        return 1e9

    memory_findings(here, MEMORY, rate)
    assert seen == [(0, [0, 1]), (1, [4, 5])]


def test_gpus(tmp_path: Path) -> None:
    here = machine(tmp_path)
    missing = (False, "flashinfer does not load (x)")
    assert not named(gpu_findings(here, [], lambda: missing))["GPU"].remedy
    card = "sys/bus/pci/devices/0000:01:00.0"
    write(tmp_path, {f"{card}/vendor": "0x10de\n", f"{card}/class": "0x030200\n"})
    write(tmp_path, {f"{card}/current_link_width": "8\n", f"{card}/max_link_width": "16\n"})
    assert "install NVIDIA's driver" in named(gpu_findings(here, [], lambda: missing))["GPU"].remedy
    write(tmp_path, {"proc/driver/nvidia/version": "NVRM version: 570\nGCC\n"})
    assert "torch for CUDA" in named(gpu_findings(here, [], lambda: missing))["GPU"].remedy
    found = named(gpu_findings(here, [Gpu("H100", 80 << 30, 50e9)], lambda: missing))
    assert found["GPU 0"].value == "H100, 80.00 GiB, 50.0 GB/s from host memory"
    assert "8 of 16 lanes" in found["PCIe"].value and found["PCIe"].remedy and found["flashinfer"].remedy


def test_an_empty_tree_is_no_error(tmp_path: Path) -> None:
    here = Here(tmp_path, (0, 1))
    found = [*cpu(here).values(), *memory(here, rate=1e9).values(), *gpu_findings(here, [], lambda: (True, ""))]
    assert "unknown CPU" in to_text(found) and json.loads(to_json(found))["findings"]


def test_small_and_missing_files_are_not_measured(tmp_path: Path) -> None:
    assert "not measured" in disk_finding(tmp_path).value
    (tmp_path / "a").write_bytes(b"x")
    assert "not measured" in disk_finding(tmp_path).value


@given(st.lists(st.integers(0, 300), unique=True))
def test_ranges_are_what_the_kernel_writes(numbers: list[int]) -> None:
    assert parse_cpu_list(ranges(numbers)) == sorted(numbers)


SEGMENT = st.text("abcxyz0189_-.", min_size=1, max_size=8).filter(lambda part: part.strip("."))


@given(st.lists(SEGMENT, min_size=1, max_size=5), st.sampled_from(["", "~"]), st.sampled_from([" ", "(", '"', "="]))
def test_paths_are_taken_out(parts: list[str], home: str, before: str) -> None:
    path = home + "/q" + "/".join(parts)
    assert anonymous(f"reads{before}{path} at 3 GB/s", []) == f"reads{before}<path> at 3 GB/s"


@given(
    st.ip_addresses().map(str)
    | st.sampled_from(["http://10.0.0.1:80/x?k=v", "ann@example.com", "ipc:///tmp/a.b", "0A:1b:c2:00:11:ff"])
)
def test_addresses_are_taken_out_and_versions_stay(address: str) -> None:
    assert anonymous(f"at {address}, torch 2.13.0+cpu", []) == "at <address>, torch 2.13.0+cpu"


WORD = st.text("bdfgkqvwxz", min_size=3, max_size=9).map(lambda word: "q" + word)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORD, min_size=8, max_size=8, unique=True))
def test_what_is_shared_holds_nothing_of_who_and_where(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words in every place from which one could come: the environment, the folders, the host's name, what failed."""
    user, host, domain, home, folder, model, file, address = words
    monkeypatch.undo()
    base = Path(tempfile.mkdtemp(dir=tmp_path))
    here = base / home / f"{folder} with spaces"
    here.mkdir(parents=True)
    (here / f"{model}.gguf").write_bytes(b"?")
    values = {
        "HOME": f"/{home}/{user}",
        "KTSERVE_ISA": user,
        "HF_HOME": str(here),
        "HF_ENDPOINT": f"http://{address}.example",
    }
    values |= dict.fromkeys(("USER", "LOGNAME", "SUDO_USER"), user) | {"HOSTNAME": f"{host}.{domain}"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(report.platform, "node", lambda: f"{host}.{domain}")
    monkeypatch.chdir(here)
    said = f"{here}/{model}.gguf: {user} at {host} and {host}.{domain}, http://{address}.example/x, {user}@{domain}.org"
    (here / "rates.json").write_text(json.dumps({"error": said}))
    assert report.doctor(f"{model}.gguf", quick=True, as_json=True, share=f"{file}.json", bench="rates.json") == 0
    shared = Path(f"{file}.json").read_text()
    assert [word for word in words if word in shared] == []
    assert {"versions", "rates"} <= {each["name"] for each in json.loads(shared)["findings"]}
    capsys.readouterr()


def test_rates_stand_beside_what_was_expected(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    point = {"what": "1 sequence", "key": "decode_1", "tokens_s": 9.0, "expected_tokens_s": [10, 12]}
    file.write_text(json.dumps({"quick": [point]}))
    found = rates_finding(str(file))
    assert "9 (expected: 10 to 12)" in found.value and not found.remedy
    assert found.figures == {"decode_1_tokens_s": 9.0, "decode_1_expected_low": 10, "decode_1_expected_high": 12}
    file.write_text(json.dumps({"quick": [point | {"tokens_s": 5.0}]}))
    assert "see the lines with ->" in rates_finding(str(file)).remedy
    for text in ("{", "[]", '{"quick": [{}]}', '{"points": []}'):
        file.write_text(text)
        with pytest.raises(UserError, match="no file of ktserve bench --quick"):
            rates_finding(str(file))


def test_names_are_taken_out_as_words() -> None:
    text = anonymous("ann-pc: annual, ann, docs/doctor.md, /sys/kernel/mm", ["ann-pc", "ann"])
    assert text == "<name>: annual, <name>, docs/doctor.md, /sys/kernel/mm"


def test_the_command(tmp_path: Path) -> None:
    share = tmp_path / "report.json"
    argv = [*program("doctor"), "--quick", "--json", f"--share={share}"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)

    done = run()
    assert done.returncode == 0, done.stderr
    names = [each["name"] for each in json.loads(done.stdout)["findings"]]
    assert {"CPU", "instruction sets", "CPUs granted", "memory", "versions"} <= set(
        names
    ) and "memory read" not in names
    shared = share.read_text()
    assert [each["name"] for each in json.loads(shared)["findings"]] == names
    assert not re.search(r"(?<!\w)/(?!proc/|sys/)\w+/\w", shared)
    done = run()
    assert done.returncode == 1 and "the file is there already" in done.stderr and len(done.stderr.splitlines()) == 1
    done = subprocess.run([*program("doctor"), "/none"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stderr == "error: /none: no such file or folder\n"
