"""Folders that would hurt their reader: each is refused with a reason, within its limits, and the next load works."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import AdapterError, EngineError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget
from engine.lora.files.parse import parse_adapter
from engine.lora.reader_process import Limits, ParseRequest, ReaderProcesses
from engine.lora.sealed_memory import map_sealed, write_sealed
from testing.waiting import PATIENCE_S
from tests.lora import make
from tests.lora.forms import assert_same
from tests.lora.parse_requests import CONFIG, CONFIG_FILE, MODEL_FILE, WEIGHTS, Q, good, read, request


def test_what_is_handed_over_is_what_was_read(reader: ReaderProcesses, folder: Path) -> None:
    got = read(reader, request(folder, max_rank=8))
    direct = parse_adapter(folder, CONFIG, name="x", max_rank=8)
    assert_same(got, WEIGHTS)
    assert (got.format, got.path, got.warnings, got.num_bytes) == (
        direct.format,
        direct.path,
        direct.warnings,
        direct.num_bytes,
    )
    assert torch.equal(got.extra_mlps[0][0].gate, direct.extra_mlps[0][0].gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_memory_that_was_handed_over_cannot_change(dtype: torch.dtype) -> None:
    weights = make.random_adapter(CONFIG, dtype=dtype)
    head, file = write_sealed(make.random_adapter(CONFIG, dtype=dtype))
    for change in (
        lambda: os.pwrite(file, b"x", 0),
        lambda: os.ftruncate(file, 0),
        lambda: os.ftruncate(file, 1 << 30),
    ):
        with pytest.raises(PermissionError):
            change()
    mapped = map_sealed(head, file)
    os.close(file)
    for layer, lora in weights.experts.items():
        assert torch.equal(mapped.experts[layer].down_b, lora.down_b) and mapped.experts[layer].down_b.dtype is dtype


def test_an_unsealed_or_foreign_hand_over_is_refused() -> None:
    head, sealed = write_sealed(make.random_adapter(CONFIG))
    file = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    with pytest.raises(EngineError, match="may change"):
        map_sealed(head, file)
    for wrong in (b"", b"\xc0", head[:-3]):
        with pytest.raises(EngineError, match="was not handed over"):
            map_sealed(wrong, sealed)
    small, nothing = write_sealed(AdapterWeights("x", "none"))
    with pytest.raises(EngineError, match="was not handed over"):
        map_sealed(head, nothing)  # tensors beyond its end
    assert map_sealed(small, nothing).rank == 0


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            s.bind(path.name)
        finally:
            os.chdir(here)


KINDS = {
    "fifo": fifo,
    "device": device,
    "socket": bound_socket,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
    "dangling": lambda path: path.symlink_to("/nowhere/at/all"),
}


@pytest.mark.parametrize("name", [CONFIG_FILE, MODEL_FILE, "fused_expert_lora.safetensors", "kt_adapter_manifest.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(reader: ReaderProcesses, folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    with pytest.raises(AdapterError, match=r"not a regular file|cannot be read|missing"):
        read(reader, request(folder))


def test_links_to_files_are_followed(reader: ReaderProcesses, folder: Path, tmp_path: Path) -> None:
    """As in a cache of the hub."""
    (tmp_path / "snapshot").mkdir()
    for file in folder.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    (tmp_path / "link").symlink_to(tmp_path / "snapshot")
    assert_same(read(reader, request(tmp_path / "link")), WEIGHTS)


@pytest.mark.parametrize(
    "path", ["~nouser-of-this-machine/x", "/" + "x" * 4095, "/" + "y/" * 5000, "/nul\0", "/dev/zero"]
)
def test_paths(reader: ReaderProcesses, path: str) -> None:
    with pytest.raises(AdapterError, match=r"cannot be opened|is not a folder"):
        read(reader, request(path))


def many_keys() -> bytes:
    entry = '":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = ("{" + ",".join(f'"k{i}{entry}' for i in range(1_000_000)) + "}").encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * 4


BAD_JSON = {
    "deep": b"[" * 1_000_000,
    "deep in a field": b'{"r": ' + b'{"a":' * 100_000,
    "long number": b'{"r": ' + b"9" * 100_000 + b"}",
    "alpha of 400 digits": b'{"r": 3, "lora_alpha": ' + b"9" * 400 + b"}",
    "rank of 400 digits": b'{"lora_alpha": 3, "r": ' + b"9" * 400 + b"}",
    "infinite": b'{"r": 3, "lora_alpha": Infinity}',
    "tiny": b'{"r": 3, "lora_alpha": 1e-300}',
    "long text": b'{"peft_type": "' + b"x" * 1_000_000 + b'"}',
    "surrogate": b'{"peft_type": "\\ud800"}',
    "not UTF-8": b'{"peft_type": "\xff\xfe"}',
    "long field": b'{"r": "' + b"x" * (17 << 20) + b'"}',
    "list": b"[]",
}


@pytest.mark.parametrize("content", BAD_JSON.values(), ids=BAD_JSON)
def test_settings_that_are_no_settings(reader: ReaderProcesses, folder: Path, content: bytes) -> None:
    (folder / CONFIG_FILE).write_bytes(content)
    with pytest.raises(AdapterError) as caught:
        read(reader, request(folder))
    reason = str(caught.value)
    assert CONFIG_FILE in reason and len(reason) < 1000 and caught.value.field == "lora_path"
    reason.encode()


def test_a_million_keys(reader: ReaderProcesses, folder: Path) -> None:
    (folder / MODEL_FILE).write_bytes(many_keys())
    with pytest.raises(AdapterError, match=r"header of .* bytes, at most"):
        read(reader, request(folder))


PATTERNS = {
    "backtracking": {"(a|a)*(.|.)*(.+)+x": 3},
    "many": {f"{i}.*.*.*x": 3 for i in range(20_000)},
    "long": {"(" * 200 + "x" * 100_000 + ")" * 200: 3},
    "counted": {"((x{1,1000}){1,1000}){1,1000}": 3},
    "broken": {"(": 3},
    "huge count": {"x{99999999999999999999}": 3},
}


@pytest.mark.parametrize(  # one function matches both: of alpha's, one that does not end and one that does
    ("which", "name"),
    [*(("rank_pattern", name) for name in PATTERNS), ("alpha_pattern", "backtracking"), ("alpha_pattern", "broken")],
)
def test_patterns_end(reader: ReaderProcesses, folder: Path, which: str, name: str) -> None:
    """Within the limit of processor time: refused, or matched if they are harmless after all."""
    (folder / CONFIG_FILE).write_text(json.dumps(make.lora_config() | {which: PATTERNS[name]}))
    spent = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    try:
        read(reader, request(folder))
    except AdapterError as error:
        assert len(str(error)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - spent < 1.0, "not in this process"


def test_a_pattern_that_backtracks_is_cut_off(reader: ReaderProcesses, folder: Path) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps(make.lora_config() | {"rank_pattern": {"(.|.)*(.|.)*(.|.)*!": 3}}))
    with pytest.raises(AdapterError, match="more processor time than"):
        read(reader, request(folder))
    assert_same(read(reader, request(good(folder.parent / "next"))), WEIGHTS)


def test_a_process_that_only_reads_limits_itself(folder: Path) -> None:
    """As `ktserve adapters inspect` does."""
    code = (
        "import sys\nfrom engine.lora.files.inspect import describe\nfrom tests.lora.make import model_config\n"
        "from engine.lora.reader_process import Limits, limit_this_process\n"
        "print(describe(sys.argv[1], model_config(), opened=limit_this_process(Limits(cpu_s=1.0))).text)"
    )

    def inspected() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, str(folder)]
        return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)

    assert "served     yes" in inspected().stdout
    (folder / CONFIG_FILE).write_text(json.dumps(make.lora_config() | {"rank_pattern": {"(.|.)*(.|.)*(.|.)*!": 3}}))
    assert inspected().returncode == -signal.SIGXCPU


@pytest.mark.parametrize("binary", [False, True])
def test_memory_is_bounded(
    reader: ReaderProcesses, folder: Path, binary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"x": torch.zeros(20_000_000)}
    (folder / MODEL_FILE).unlink()
    make.write(folder, tensors, make.lora_config(), binary=binary)
    if not binary:  # one that is read whole
        pair = {"lora_A": torch.zeros(3, CONFIG.hidden_size), "lora_B": torch.zeros(10_000_000, 3)}
        make.write(folder, {f"{Q}.{half}.weight": t for half, t in pair.items()}, make.lora_config())
        config = make.model_config(num_attention_heads=1_250_000)
    small = Limits(wall_s=PATIENCE_S, cpu_s=5.0, memory_bytes=16 << 20, memory_per_byte=0)
    monkeypatch.setattr(reader, "_limits", small)
    with pytest.raises(AdapterError, match="takes more memory than files of its size may"):
        read(reader, ParseRequest(str(folder), "x", CONFIG if binary else config))


def test_what_does_not_fit_is_refused_by_its_files(reader: ReaderProcesses, folder: Path) -> None:
    with open(folder / MODEL_FILE, "r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk, and would take a while to read
    with pytest.raises(UserError, match="--adapter-memory") as caught:
        read(reader, request(folder, budget=AdapterBudget(1 << 20, slots=1)))
    assert caught.value.field == "lora_path"
