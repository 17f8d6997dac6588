"""Whatever a parquet file holds, its rows become samples or one line that names the file, the row and the column."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from api.text.tokenizer import Tokenizer, load_tokenizer
from demo.paths import demo_model
from testing.fuzz.broken import ODD, broken
from tests.training.test_broken_data import GOOD, built
from training.config import TrainConfig
from training.data import DataError, build_datasets

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

_NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
_OF_TABLES: st.SearchStrategy[Any] = st.sampled_from(
    [b"a", b"\xff", _NOW, _NOW.date(), _NOW.time(), _NOW.replace(tzinfo=datetime.timezone.utc), decimal.Decimal("1.5"),
     datetime.timedelta(days=1)]
)  # fmt: skip
_ROWS = st.sampled_from(GOOD).flatmap(lambda row: st.one_of(st.just(row), broken(row, st.one_of(ODD, _OF_TABLES))))
_NAMES = st.sampled_from(
    ["messages", "conversations", "instruction", "output", "history", "system", "tools", "prompt", "chosen", "rejected",
     "when", "", "a\nb", "\0"]
)  # fmt: skip
_FIELDS = ("role", "content", "from", "value", "type", "text", "tool_calls", "weight", "name", "x")
_TIMES: tuple[Any, ...] = (
    pyarrow.time64("ns"), pyarrow.duration("ns"),
    *(pyarrow.timestamp(unit, zone) for unit in ("s", "ns") for zone in (None, "UTC", "Nowhere/Land")),
)  # fmt: skip
_TEXTS = st.sampled_from(["", "a", "user", "assistant", "gpt", "text", "[]", '{"name": "f"}', "x" * 5000])
_NUMBERS = st.sampled_from([0, 1, 100])


def _leaves(size: int) -> st.SearchStrategy[Any]:
    """Arrays without others in them."""

    def arrays(kind: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        some = st.lists(st.one_of(st.none(), values), min_size=size, max_size=size)
        return some.map(lambda given: pyarrow.array(given, kind))

    moments = arrays(pyarrow.int64(), st.one_of(_NUMBERS, st.integers(-(2**50), 2**50)))
    return st.one_of(
        *(arrays(kind, _TEXTS) for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())),
        arrays(pyarrow.string(), _TEXTS).map(lambda array: array.dictionary_encode()),
        arrays(pyarrow.binary(), st.binary(max_size=3)),
        arrays(pyarrow.binary(), st.sampled_from([b"\xff\xfe", b"a"])).map(
            lambda array: pyarrow.Array.from_buffers(pyarrow.string(), size, array.buffers())  # not UTF-8
        ),
        arrays(pyarrow.float64(), st.floats()),
        arrays(pyarrow.bool_(), st.booleans()),
        arrays(pyarrow.decimal128(38, 2), st.sampled_from([decimal.Decimal("0.5"), decimal.Decimal(10**30)])),
        st.just(pyarrow.nulls(size)),
        *(arrays(kind, _NUMBERS) for kind in (pyarrow.int8(), pyarrow.uint64())),
        arrays(pyarrow.int32(), _NUMBERS).map(lambda array: array.view(pyarrow.date32())),
        st.tuples(moments, st.sampled_from(_TIMES)).map(lambda drawn: drawn[0].view(drawn[1])),
    )


@st.composite
def _arrays(draw: st.DrawFn, size: int, depth: int = 3) -> Any:
    form = draw(st.sampled_from(["leaf", "list", "struct", "map"])) if depth else "leaf"
    if form == "leaf":
        return draw(_leaves(size))
    if form == "struct":
        names = draw(st.lists(st.sampled_from(_FIELDS), min_size=1, max_size=3))  # a name may come twice
        return pyarrow.StructArray.from_arrays([draw(_arrays(size, depth - 1)) for _ in names], names)
    ends = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    offsets = [sum(ends[:i]) for i in range(size + 1)]
    inner = draw(_arrays(offsets[-1], depth - 1))
    if form == "list":
        return pyarrow.ListArray.from_arrays(pyarrow.array(offsets, pyarrow.int32()), inner)
    keys = pyarrow.array([f"k{i % 2}" for i in range(offsets[-1])], pyarrow.string())
    return pyarrow.MapArray.from_arrays(pyarrow.array(offsets, pyarrow.int32()), keys, inner)


@st.composite
def _tables(draw: st.DrawFn) -> Any:
    """Of rows that were good, with columns of any type in the place of some, or beside them."""
    size, columns = draw(st.sampled_from([0, 1, 1, 1, 2, 3])), []
    for name in draw(st.lists(_NAMES, max_size=2, unique=True)):
        columns.append((name, draw(_arrays(size))))
    drawn = {name for name, _ in columns}
    if size:
        row = draw(_ROWS)
        assume(isinstance(row, dict))
        try:
            table = pyarrow.Table.from_pylist([row, {}, row][-size:])
        except (pyarrow.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
            assume(False)  # of several types
        twice = draw(st.integers(0, 9)) == 0
        good = zip(table.column_names, table.columns, strict=True)
        columns += [(name, column) for name, column in good if twice or name not in drawn]
    return pyarrow.table([column for _, column in columns], names=[name for name, _ in columns])


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(_tables(), st.sampled_from(["sft", "dpo"]), st.booleans())
def test_a_table_becomes_samples_or_one_line(
    tokenizer: Tokenizer, tmp_path: Path, table: Any, stage: str, skips: bool
) -> None:
    path = tmp_path / "rows.parquet"
    try:
        parquet.write_table(table, path)
    except (pyarrow.ArrowException, UnicodeError):
        assume(False)
    built(tokenizer, path, stage=stage, **({"skip_bad_rows": 10} if skips else {}))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["none", "snappy", "zstd"]), st.booleans(), st.data())
def test_a_damaged_file_becomes_samples_or_one_line(
    tokenizer: Tokenizer, tmp_path: Path, compression: str, cut: bool, data: st.DataObject
) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([GOOD[0]] * 9), path, compression=compression)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole[:at] if cut else whole)
    built(tokenizer, path)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"output": [_NOW]}, ": row 1: response: a text is expected"),
        ({"output": [b"b"]}, ": row 1: response: a text is expected"),
        ({"output": [None]}, ": row 1: column 'output' is missing"),
        ({"output": ["b"], "tools": [[{"name": "f", "x": _NOW}]]}, ": row 1: tools[0].x is of the type datetime"),
        ({"output": ["b"], "history": [[["a", None]]]}, ": row 1: history: a list of pairs of texts"),
        ({"output": ["b"], "when": pyarrow.array([1], pyarrow.timestamp("s", "Nowhere/Land"))},
         ": row 1: column 'when' cannot be read"),
        ({"output": pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"]).buffers())},
         ": row 1: column 'output' cannot be read: 'utf-8'"),
    ],
)  # fmt: skip
def test_the_file_the_row_and_the_column_are_named(
    tokenizer: Tokenizer, tmp_path: Path, columns: dict[str, Any], said: str
) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"instruction": ["a"], **columns}), path)
    with pytest.raises(DataError) as caught:
        build_datasets(TrainConfig(dataset=(str(path),)), tokenizer)
    assert str(caught.value).startswith(f"{path}{said}")


def test_a_row_that_cannot_be_read_can_be_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    texts = pyarrow.array([b"a", b"\xff", b"c"]).buffers()
    answers = pyarrow.Array.from_buffers(pyarrow.string(), 3, texts)
    parquet.write_table(pyarrow.table({"instruction": ["x", "y", "z"], "output": answers}), path)
    data, _ = build_datasets(TrainConfig(dataset=(str(path),), skip_bad_rows=1), tokenizer)
    assert (data.report.rows, data.report.bad) == (2, 1)


def test_times_beside_what_is_learnt_hurt_nobody(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Records of chats have them in rows and in messages."""
    path = tmp_path / "rows.parquet"
    talk = [{"from": role, "value": "a", "timestamp": _NOW} for role in ("human", "gpt")]
    parquet.write_table(pyarrow.table({"conversations": [talk], "when": [_NOW]}), path)
    data, _ = build_datasets(TrainConfig(dataset=(str(path),)), tokenizer)
    assert data.report.samples == 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo_model())
