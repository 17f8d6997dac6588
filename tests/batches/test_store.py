"""The parts of a batch without a server: generated lines, full disks, forms in any cut."""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.batches.lines import Checker, read_line
from api.batches.output import answer, assemble
from api.batches.records import Answered, BatchRecord, Status
from api.batches.service import Batches
from api.batches.store import Store
from api.config import ServeConfig
from api.database import DiskFullError

ENDPOINT = "/v1/completions"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
GOOD = st.builds(
    lambda custom_id, body: {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body},
    TEXT,
    st.dictionaries(st.text(max_size=5), JSON, max_size=3),
)


def form(data: bytes, **fields: str) -> bytes:
    parts = [
        f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
    ]
    head = '--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    return "".join([*parts, head]).encode() + data + b"\r\n--b--\r\n"


async def in_pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def batch_of(file_id: str) -> BatchRecord:
    return BatchRecord(
        id="batch_1", tenant="t", endpoint=ENDPOINT, input_file_id=file_id, completion_window="24h", created_at=0,
        expires_at=2**40, status=Status.IN_PROGRESS, in_progress_at=1,
    )  # fmt: skip


@given(
    st.lists(
        st.tuples(GOOD, st.booleans(), st.sampled_from([b"\n", b"\r\n", b"\n\n \n"]))
        | st.tuples(JSON | st.binary(max_size=30), st.booleans(), st.just(b"\n")),
        max_size=12,
    )
)
@settings(deadline=None, max_examples=200)
def test_each_line_is_good_or_named(lines: list) -> None:
    """Whatever a file holds: a good line is found where it stands, another is an error with its number."""
    raw, expected = b"", {}
    for content, escaped, end in lines:
        if isinstance(content, bytes):
            raw += content.replace(b"\n", b"").replace(b"\r", b"") + end
            continue
        raw += json.dumps(content, ensure_ascii=escaped).encode("utf-8", "surrogatepass") + end
        if isinstance(content, dict) and content.keys() == {"custom_id", "method", "url", "body"}:
            expected[content["custom_id"]] = content["body"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in"
        path.write_bytes(raw)
        found: dict[int, str] = {}
        with Checker(path, ENDPOINT, max_body_bytes=10_000, max_lines=100) as checker:
            while not checker.at_end:
                for number, start, size, custom_id in checker.some(count=2):
                    found[number] = custom_id
                    assert read_line(path, start, size).custom_id == custom_id
        numbers = {error.line for error in checker.errors}
        assert not numbers & set(found)
        if not any(error.code == "empty_file" for error in checker.errors):
            assert len(numbers) + len(found) == checker.found
        assert set(found.values()) <= set(expected)


@given(st.binary(max_size=300), st.integers(1, 40))
@settings(deadline=None, max_examples=100)
def test_a_form_may_come_in_any_pieces(data: bytes, size: int) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            batches = await Batches.open(ServeConfig(), folder)
            try:
                kind = "multipart/form-data; boundary=b"
                file = await batches.upload("t", kind, in_pieces(form(data, purpose="batch"), size))
                assert batches.path(file.id).read_bytes() == data and file.bytes == len(data)
            finally:
                batches.close()

    if b"--b" not in data:
        asyncio.run(run())


@pytest.mark.parametrize("room", [0, 1, 1000, 2**20, 3 * 2**20])
def test_a_full_disk_leaves_nothing_of_an_upload(tmp_path: Path, room: int) -> None:
    async def run() -> None:
        batches = await Batches.open(ServeConfig(), str(tmp_path))
        body = form(b"x" * 4 * 2**20, purpose="batch")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
            with pytest.raises(DiskFullError, match="full"):
                await batches.upload("t", "multipart/form-data; boundary=b", in_pieces(body, 2**16))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list((tmp_path / "incoming").iterdir()) and not list((tmp_path / "files").iterdir())
        assert await batches.ask(Store.stored, "t") == (0, 0)
        assert (await batches.upload("t", "multipart/form-data; boundary=b", in_pieces(body, 2**16))).bytes == 4 * 2**20
        batches.close()

    asyncio.run(run())


def test_a_full_disk_leaves_nothing_of_an_assembly(tmp_path: Path) -> None:
    async def run() -> None:
        batches = await Batches.open(ServeConfig(), str(tmp_path))
        await batches.ask(Store.add_batch, batch_of("file-1"))
        await batches.ask(Store.add_lines, 1, [(n, 0, 0, f"r{n}") for n in range(1, 9)])
        big = answer(200, "r", b'"' + b"x" * 2**18 + b'"')
        await batches.ask(Store.answer, [Answered(1, n, True, big) for n in range(1, 9)])
        batch = await batches.ask(Store.batch, "batch_1")
        assert batch is not None and batch.completed == 8
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, before[1]))
            with pytest.raises(DiskFullError):
                await assemble(batches, batch)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list((tmp_path / "incoming").iterdir()) and not list((tmp_path / "files").iterdir())
        output, errors = await assemble(batches, batch)
        assert errors is None and output is not None
        assert len(batches.path(output.id).read_bytes().splitlines()) == 8
        batches.close()

    asyncio.run(run())


def test_a_full_database_takes_all_of_a_group_or_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.add_batch(batch_of("file-1"))
    store.add_lines(1, [(n, 0, 0, f"r{n}") for n in range(100)])
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 20}")
    group = [Answered(1, n, True, b"x" * 4096) for n in range(100)]
    with pytest.raises(DiskFullError):
        store.answer(group)
    assert len(store.unanswered(1, -1, 1000)) == 100
    batch = store.batch("batch_1")
    assert batch is not None and batch.completed == 0
    store._db.execute("PRAGMA max_page_count = 1000000")
    store.answer(group)
    store.answer(group)
    batch = store.batch("batch_1")
    assert batch is not None and batch.completed == 100 and not store.unanswered(1, -1, 1000)


def test_a_batch_that_has_ended_takes_no_answer(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.add_batch(batch_of("file-1"))
    store.add_lines(1, [(1, 0, 0, "r")])
    store.move("batch_1", Status.CANCELLING, (Status.IN_PROGRESS,))
    store.answer([Answered(1, 1, True, b"late")])
    assert store.unanswered(1, 0, 10) == [(1, 0, 0)]
