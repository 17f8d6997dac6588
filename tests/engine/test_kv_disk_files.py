"""The folder of KV blocks: what was written is read, or it is known that it cannot be, whatever happened to files."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UserError
from engine.kv_disk import files as module
from engine.kv_disk.files import KEY_BYTES, SUFFIX, BlockFiles, Bytes, size_on_disk
from testing.waiting import eventually
from tests.api.conftest import ROOT

SIZE = 65  # of a block


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def block(fill: int) -> Bytes:
    return np.full(SIZE, fill, np.uint8)


def path(folder: Path, number: int) -> Path:
    return folder / f"{key(number).hex()}{SUFFIX}"


@pytest.fixture
def files(tmp_path: Path):
    opened = BlockFiles(tmp_path / "kv", "kv_disk_dir")
    yield opened
    opened.close()


Action = st.tuples(
    st.sampled_from(["put", "get", "delete", "flip", "cut", "grow", "swap"]),
    st.integers(0, 3),
    st.integers(0, 10_000),
)


@settings(deadline=None, max_examples=60)
@given(actions=st.lists(Action, max_size=30))
def test_what_is_read_is_what_was_written(actions: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = BlockFiles(folder, "kv_disk_dir")
        good: dict[int, int] = {}
        there: set[int] = set()
        for what, number, value in actions:
            file = path(folder, number)
            if what == "put":
                files.write(key(number), block(value % 256))
                good[number] = value % 256
                there.add(number)
            elif what == "delete":
                files.delete(key(number))
                good.pop(number, None)
                there.discard(number)
            elif what == "get":
                got = block(7)
                assert files.read(key(number), got) == (number in good)
                if number in good:
                    assert (got == good[number]).all()
            elif number in there:
                content = bytearray(file.read_bytes())
                if what == "flip" and content:
                    content[value % len(content)] ^= 1 + value % 255
                elif what == "cut":
                    del content[value % (len(content) + 1) :]
                elif what == "grow":
                    content += bytes(1 + value % 9)
                elif what == "swap":  # another's file under this name
                    files.write(key(9), block(value % 256))
                    path(folder, 9).replace(file)
                    content = bytearray(file.read_bytes())
                if bytes(content) != file.read_bytes() or what == "swap":
                    good.pop(number, None)
                file.write_bytes(bytes(content))
        assert {number for number, _ in files.scan()} == {key(number) for number in there}
        files.close()


def test_the_order_of_use_outlives_the_process(files: BlockFiles) -> None:
    for number in (1, 2, 3):
        files.write(key(number), block(number))
    files.keep_order([key(2), key(3), key(1), key(99)], now_ns=10**18)
    size = size_on_disk(SIZE)
    assert files.scan() == [(key(2), size), (key(3), size), (key(1), size)]
    assert files.read(key(2), block(0))
    assert [found for found, _ in files.scan()] == [key(3), key(1), key(2)]


def test_what_is_no_block_is_left_alone(files: BlockFiles, caplog: pytest.LogCaptureFixture) -> None:
    files.write(key(1), block(1))
    others = ["notes.txt", f"XY{SUFFIX}", f"{key(2).hex()}{SUFFIX}2"]
    for name in others:
        (files.folder / name).write_text("mine")
    path(files.folder, 3).mkdir()
    os.mkfifo(path(files.folder, 4))
    path(files.folder, 5).symlink_to(path(files.folder, 1))
    (files.folder / f"{key(6).hex()}{SUFFIX}.partial").write_text("half")
    assert [found for found, _ in files.scan()] == [key(1)]
    (line,) = caplog.messages
    assert "6 entries" in line and "left alone" in line
    assert all((files.folder / name).read_text() == "mine" for name in others)
    assert not list(files.folder.glob("*.partial"))
    assert not any(files.read(key(number), block(0)) for number in (3, 4, 5, 6))


def test_damage_is_one_line(files: BlockFiles, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        files.write(key(number), block(number))
        path(files.folder, number).write_bytes(b"junk")
        assert not files.read(key(number), block(0))
    (line,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "its length" in line.message


@pytest.mark.parametrize("how", ["short", "full"])
def test_a_full_disk_leaves_nothing(files: BlockFiles, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def writev(file: int, buffers: list[object]) -> int:
        if how == "short":
            return os.write(file, b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "writev", writev)
    with pytest.raises(OSError, match=r"full|No space") as caught:
        files.write(key(1), block(1))
    assert caught.value.errno == errno.ENOSPC
    assert [entry.name for entry in files.folder.iterdir()] == ["lock"]


def test_one_server_at_a_time(files: BlockFiles, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--kv-disk-dir .*another server uses it") as caught:
        BlockFiles(files.folder, "kv_disk_dir")
    assert caught.value.field == "kv_disk_dir"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--kv-disk-dir"):
        BlockFiles(tmp_path / "file", "kv_disk_dir")


_WRITER = """
import sys
from pathlib import Path
import numpy as np
from engine.kv_disk.files import BlockFiles
files = BlockFiles(Path(sys.argv[1]), "kv_disk_dir")
for number in range(10**9):
    files.write((number % 5).to_bytes(32, "big"), np.full(1 << 20, number % 256, np.uint8))
"""


def test_a_writer_that_is_killed_leaves_whole_blocks(tmp_path: Path) -> None:
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], cwd=ROOT)
        eventually(lambda: len(list(tmp_path.glob(f"*{SUFFIX}"))) == 5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        files = BlockFiles(tmp_path, "kv_disk_dir")
        found = [found for found, _ in files.scan()]
        assert sorted(found) == [key(number) for number in range(5)]
        for each in found:
            got = np.zeros(1 << 20, np.uint8)
            assert files.read(each, got) and (got == got[0]).all()
        assert not list(tmp_path.glob("*.partial"))
        files.close()
