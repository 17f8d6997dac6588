"""Folders that would hurt their reader: each is refused with a reason, within its limits, and the next load works."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from engine.errors import AdapterError, EngineError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget
from engine.lora.files.reader import read_adapter
from engine.lora.reading import handover
from engine.lora.reading.process import AdapterReader, Limits, ReadRequest
from testing.waiting import PATIENCE_S, eventually
from tests.lora import make
from tests.lora.test_formats import assert_same

CONFIG = make.model_config()
WEIGHTS = make.random_adapter(CONFIG, extra=1)
QUICK = Limits(wall_s=PATIENCE_S, cpu_s=1.0, memory_bytes=256 << 20)
Q = f"{make.PREFIX}model.layers.0.self_attn.q_proj"
CONFIG_FILE, MODEL_FILE = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def reader() -> Iterator[AdapterReader]:
    reader = AdapterReader(QUICK)
    yield reader
    reader.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good(tmp_path / "adapter")


def good(path: Path) -> Path:
    tensors = make.linear_keys(WEIGHTS) | make.per_expert_keys(WEIGHTS) | make.extra_keys(WEIGHTS)
    return make.write(path, tensors, make.lora_config())


def request(path: Path | str, **options) -> ReadRequest:
    return ReadRequest(str(path), "x", CONFIG, **options)


def test_what_is_handed_over_is_what_was_read(reader: AdapterReader, folder: Path) -> None:
    read = reader.read(request(folder, max_rank=8))
    direct = read_adapter(folder, CONFIG, name="x", max_rank=8)
    assert_same(read, WEIGHTS)
    assert (read.format, read.path, read.warnings, read.num_bytes) == (
        direct.format,
        direct.path,
        direct.warnings,
        direct.num_bytes,
    )
    assert torch.equal(read.extra_mlps[0][0].gate, direct.extra_mlps[0][0].gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_memory_that_was_handed_over_cannot_change(dtype: torch.dtype) -> None:
    weights = make.random_adapter(CONFIG, dtype=dtype)
    head, file = handover.pack(make.random_adapter(CONFIG, dtype=dtype))
    for change in (
        lambda: os.pwrite(file, b"x", 0),
        lambda: os.ftruncate(file, 0),
        lambda: os.ftruncate(file, 1 << 30),
    ):
        with pytest.raises(PermissionError):
            change()
    read = handover.unpack(head, file)
    os.close(file)
    for layer, lora in weights.experts.items():
        assert torch.equal(read.experts[layer].down_b, lora.down_b) and read.experts[layer].down_b.dtype is dtype


def test_an_unsealed_or_foreign_hand_over_is_refused() -> None:
    head, sealed = handover.pack(make.random_adapter(CONFIG))
    file = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    with pytest.raises(EngineError, match="may change"):
        handover.unpack(head, file)
    for wrong in (b"", b"\xc0", head[:-3]):
        with pytest.raises(EngineError, match="was not handed over"):
            handover.unpack(wrong, sealed)
    small, nothing = handover.pack(AdapterWeights("x", "none"))
    with pytest.raises(EngineError, match="was not handed over"):
        handover.unpack(head, nothing)  # tensors beyond its end
    assert handover.unpack(small, nothing).rank == 0


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
def test_only_regular_files_are_read(reader: AdapterReader, folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    with pytest.raises(AdapterError, match=r"not a regular file|cannot be read|missing"):
        reader.read(request(folder))


def test_links_to_files_are_followed(reader: AdapterReader, folder: Path, tmp_path: Path) -> None:
    """As in a cache of the hub."""
    (tmp_path / "snapshot").mkdir()
    for file in folder.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    (tmp_path / "link").symlink_to(tmp_path / "snapshot")
    assert_same(reader.read(request(tmp_path / "link")), WEIGHTS)


@pytest.mark.parametrize(
    "path", ["~nouser-of-this-machine/x", "/" + "x" * 4095, "/" + "y/" * 5000, "/nul\0", "/dev/zero"]
)
def test_paths(reader: AdapterReader, path: str) -> None:
    with pytest.raises(AdapterError, match=r"cannot be opened|is not a folder"):
        reader.read(request(path))


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
def test_settings_that_are_no_settings(reader: AdapterReader, folder: Path, content: bytes) -> None:
    (folder / CONFIG_FILE).write_bytes(content)
    with pytest.raises(AdapterError) as caught:
        reader.read(request(folder))
    reason = str(caught.value)
    assert CONFIG_FILE in reason and len(reason) < 1000 and caught.value.field == "lora_path"
    reason.encode()


def test_a_million_keys(reader: AdapterReader, folder: Path) -> None:
    (folder / MODEL_FILE).write_bytes(many_keys())
    with pytest.raises(AdapterError, match=r"header of .* bytes, at most"):
        reader.read(request(folder))


PATTERNS = {
    "backtracking": {"(a|a)*(.|.)*(.+)+x": 3},
    "many": {f"{i}.*.*.*x": 3 for i in range(20_000)},
    "long": {"(" * 200 + "x" * 100_000 + ")" * 200: 3},
    "counted": {"((x{1,1000}){1,1000}){1,1000}": 3},
    "broken": {"(": 3},
    "huge count": {"x{99999999999999999999}": 3},
}


@pytest.mark.parametrize("which", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS)
def test_patterns_end(reader: AdapterReader, folder: Path, which: str, patterns: dict[str, int]) -> None:
    """Within the limit of processor time: refused, or matched if they are harmless after all."""
    (folder / CONFIG_FILE).write_text(json.dumps(make.lora_config() | {which: patterns}))
    spent = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    try:
        reader.read(request(folder))
    except AdapterError as error:
        assert len(str(error)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - spent < 1.0, "not in this process"


def test_a_pattern_that_backtracks_is_cut_off(reader: AdapterReader, folder: Path) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps(make.lora_config() | {"rank_pattern": {"(.|.)*(.|.)*(.|.)*!": 3}}))
    with pytest.raises(AdapterError, match="more processor time than"):
        reader.read(request(folder))
    assert_same(reader.read(request(good(folder.parent / "next"))), WEIGHTS)


def test_a_process_that_only_reads_limits_itself(folder: Path) -> None:
    """As `ktserve adapters inspect` does."""
    code = (
        "import sys\nfrom engine.lora.files.inspect import describe\nfrom tests.lora.make import model_config\n"
        "from engine.lora.reading.process import Limits, limit_this_process\n"
        "print(describe(sys.argv[1], model_config(), opened=limit_this_process(Limits(cpu_s=1.0))))"
    )

    def inspected() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, str(folder)]
        return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)

    assert "served     yes" in inspected().stdout
    (folder / CONFIG_FILE).write_text(json.dumps(make.lora_config() | {"rank_pattern": {"(.|.)*(.|.)*(.|.)*!": 3}}))
    assert inspected().returncode == -signal.SIGXCPU


@pytest.mark.parametrize("binary", [False, True])
def test_memory_is_bounded(reader: AdapterReader, folder: Path, binary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
        reader.read(ReadRequest(str(folder), "x", CONFIG if binary else config))


def test_what_does_not_fit_is_refused_by_its_files(reader: AdapterReader, folder: Path) -> None:
    with open(folder / MODEL_FILE, "r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk, and would take a while to read
    with pytest.raises(UserError, match="--adapter-memory") as caught:
        reader.read(request(folder, budget=AdapterBudget(1 << 20, slots=1)))
    assert caught.value.field == "lora_path"


def job_of(reader: AdapterReader) -> psutil.Process:
    """What reads now, once it does."""
    found: list[psutil.Process] = []

    def running() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            server = reader._forks._server
            found[:] = [] if server is None else psutil.Process(server.pid).children(recursive=True)
        return len(found) == 2  # a keeper and its job

    eventually(running)
    return found[1]


def test_time_is_bounded(reader: AdapterReader, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_limits", Limits(wall_s=0.0))
    with pytest.raises(AdapterError, match="took longer than 0 s"):
        reader.read(request(folder))


def test_close_ends_a_read_and_leaves_nothing(folder: Path) -> None:
    """No process, of reads that were given up neither, and no descriptor; and none is made later."""

    def give_up(_: object) -> None:
        raise UserError("no room")

    before, errors = psutil.Process().num_fds(), []
    reader = AdapterReader(Limits(cpu_s=600))
    assert_same(reader.read(request(folder)), WEIGHTS)
    with pytest.raises(UserError, match="no room"):
        reader.read(request(folder), give_up)
    assert reader._forks._server is not None
    server = psutil.Process(reader._forks._server.pid)
    eventually(lambda: not server.children(recursive=True), "jobs end, keepers are reaped")
    (folder / CONFIG_FILE).write_text(json.dumps(make.lora_config() | {"rank_pattern": {"(.|.)*(.|.)*(.|.)*!": 3}}))

    def read() -> None:
        try:
            reader.read(request(folder))
        except (AdapterError, EngineError) as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    job = job_of(reader)
    reader.close()
    thread.join(30)
    eventually(lambda: not job.is_running())
    with pytest.raises(EngineError, match="the engine ends"):
        reader.read(request(folder))
    assert errors == ["adapter 'x': the engine ends"] and not server.is_running()
    assert reader._forks._server is None and psutil.Process().num_fds() == before


def test_a_reader_that_is_killed_is_replaced(
    reader: AdapterReader, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_limits", Limits(cpu_s=600))
    (folder / CONFIG_FILE).write_text(json.dumps(make.lora_config() | {"rank_pattern": {"(.|.)*(.|.)*(.|.)*!": 3}}))
    killer = threading.Thread(target=lambda: job_of(reader).kill())
    killer.start()
    with pytest.raises(AdapterError, match="was killed"):
        reader.read(request(folder))
    killer.join()
    assert_same(reader.read(request(good(folder.parent / "next"))), WEIGHTS)


@pytest.mark.parametrize("which", ["server", "keeper"])
def test_processes_that_are_killed_beside_a_read_are_no_fault_of_the_folder(
    reader: AdapterReader, folder: Path, which: str
) -> None:
    """It is read again, once."""
    killed: list[int] = []

    def kill(_: object) -> None:
        if len(killed) < allowed:
            job = job_of(reader)
            keeper = job.parent()
            assert keeper is not None
            victim = keeper if which == "keeper" else keeper.parent()
            assert victim is not None
            victim.kill()
            killed.append(job.pid)
            eventually(lambda: not job.is_running())

    allowed = 1
    assert_same(reader.read(request(folder), kill), WEIGHTS)
    assert len(killed) == 1
    if which == "keeper":  # what it costs is small
        allowed = 3
        with pytest.raises(EngineError, match="no process to read it can be started, or stays"):
            reader.read(request(folder), kill)


def test_a_server_that_has_just_died_is_replaced(
    reader: AdapterReader, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.read(request(folder))
    server = reader._forks._server
    assert server is not None
    psutil.Process(server.pid).kill()
    eventually(lambda: psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE)
    monkeypatch.setattr(server, "poll", lambda: None)  # it was alive when it was looked at
    assert_same(reader.read(request(folder)), WEIGHTS)


@pytest.mark.parametrize("name", [MODEL_FILE, CONFIG_FILE])
def test_truncation_while_loading(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    """At every read that the reader makes, the file is cut off first."""
    import engine.weights.regular as regular

    whole, preadv, at = (folder / name).read_bytes(), os.preadv, 0
    while True:
        calls = 0

        def cut(fd: int, buffers: list, offset: int, at: int = at) -> int:
            nonlocal calls
            calls += 1
            if calls == at:
                os.truncate(folder / name, len(whole) // 3)
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(regular.os, "preadv", cut)
        try:
            read_adapter(folder, CONFIG, name="x")
        except AdapterError as error:
            assert "became shorter" in str(error) or "JSON" in str(error)
        (folder / name).write_bytes(whole)
        if calls < at:
            break
        at += 1
    assert at > 3


def test_loads_beside_truncation(reader: AdapterReader, folder: Path, tmp_path: Path) -> None:
    """A file that shrinks and grows all the time: read or refused, and nobody dies of it."""
    path, whole = folder / MODEL_FILE, (folder / MODEL_FILE).read_bytes()
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            os.truncate(path, len(whole) // 2)
            path.write_bytes(whole)

    thread = threading.Thread(target=churn)
    thread.start()
    ends = {True: 0, False: 0}
    try:
        for _ in range(12):
            try:
                reader.read(request(folder))
                ends[True] += 1
            except AdapterError as error:
                assert "killed" not in str(error) and "ended" not in str(error)
                ends[False] += 1
    finally:
        stop.set()
        thread.join()
    assert sum(ends.values()) == 12
    assert_same(reader.read(request(good(tmp_path / "next"))), WEIGHTS)
