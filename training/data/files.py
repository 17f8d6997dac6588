"""Rows of data files, each with its place. Torch-free."""

from __future__ import annotations

import csv
import io
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import DataError

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
# Raised by values of pyarrow: not UTF-8, times beyond Python's, unknown zones, a field's name twice, broken indices.
_UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, RecursionError)


@dataclass(frozen=True)
class Row:
    """`where`: "FILE:LINE", of the line that the row begins in; "FILE: row N" for a format without lines."""

    data: dict[str, Any]
    where: str

    def error(self, message: str) -> DataError:
        return DataError(f"{self.where}: {message}", "dataset")


Bad = Callable[[DataError], None]


def _raised(error: DataError) -> None:
    raise error


def read_rows(path: Path, bad: Bad = _raised) -> Iterator[Row]:
    """The rows of a .json (a list, or lines), .jsonl, .csv or .parquet file, or of all such files in a folder, by name.
    `bad` gets the error of a row behind which the next one can be found, and may raise it. DataError for what cannot be
    read."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise DataError(f"{path}: no file ends in {', '.join(SUFFIXES)}", "dataset")
        for file in files:
            yield from read_rows(file, bad)
        return
    readers: dict[str, Callable[[Path, Bad], Iterator[Row]]] = {
        ".json": _json, ".jsonl": _json, ".csv": _csv, ".parquet": _parquet,
    }  # fmt: skip
    if path.suffix not in readers:
        raise DataError(f"{path}: ends in {path.suffix!r}; allowed is {', '.join(SUFFIXES)}", "dataset")
    try:
        yield from readers[path.suffix](path, bad)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", "dataset") from None


def _json(path: Path, bad: Bad) -> Iterator[Row]:
    with path.open("rb") as file:
        first = next((line for line in file if line.removeprefix(BOM_UTF8).strip()), b"")
    is_list = first.removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    yield from _json_list(path, bad) if is_list else _json_lines(path, bad)


def _json_lines(path: Path, bad: Bad) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = _json_line(line, path, number)
            except DataError as error:
                bad(error)
                continue
            if row is not None:
                yield row


def _json_line(line: bytes, path: Path, number: int) -> Row | None:
    """None for an empty line."""
    where = f"{path}:{number}"
    text = _decoded(line, path, number)
    if not text.strip():
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {_reason(error)}", "dataset") from None
    return _row(value, where)


def _json_list(path: Path, bad: Bad) -> Iterator[Row]:
    """Value by value, so that each has its line."""
    text = _decoded(path.read_bytes(), path)
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    line, counted = 1, 0
    separator = ""
    while True:
        at = _skip_space(text, at)
        line, counted = line + text.count("\n", counted, at), at
        where = f"{path}:{line}"
        found = text[at : at + 1]
        if found == "]" and separator != ",":
            break
        if separator == "value":
            if found != ",":
                raise DataError(f"{where}: not JSON: ',' or ']' is expected", "dataset")
            at, separator = at + 1, ","
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg}", "dataset") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {_reason(error)}", "dataset") from None
        separator = "value"
        try:
            row = _row(value, where)
        except DataError as error:
            bad(error)
            continue
        yield row
    if text[at + 1 :].strip():
        raise DataError(f"{path}:{line}: not JSON: more text behind the list", "dataset")


def _decoded(data: bytes, path: Path, line: int = 1) -> str:
    """Text without a byte order mark. DataError names the line that is not UTF-8; `line`: the first one's number."""
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        raise DataError(f"{path}:{line}: not UTF-8: {error.reason}", "dataset") from None


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _csv(path: Path, bad: Bad) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(_decoded(path.read_bytes(), path), newline=""), strict=True)
    begins = 2
    try:
        for data in reader:
            row = _row(data, f"{path}:{begins}")
            begins = reader.line_num + 1
            if None in data or None in data.values():
                bad(row.error(f"the number of cells is not that of the header, {len(reader.fieldnames or ())}"))
            else:
                yield row
    except csv.Error as error:
        raise DataError(f"{path}:{begins}: not CSV: {error}", "dataset") from None


def _parquet(path: Path, bad: Bad) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading parquet needs the package pyarrow: pip install pyarrow", "dataset") from None
    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = _columns(file, path)
        for batch in file.iter_batches(batch_size=1024):
            for i in range(batch.num_rows):
                number += 1
                where = f"{path}: row {number}"
                try:
                    data = {name: _cell(column[i], name, where) for name, column in zip(names, batch, strict=True)}
                except DataError as error:
                    bad(error)
                    continue
                yield Row(data, where)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # not of what is in the file
        behind = f" behind row {number}" if number else ""
        raise DataError(f"{path}: not parquet{behind}: {_first_line(error)}", "dataset") from None


def _columns(file: Any, path: Path) -> list[str]:
    names: list[str] = file.schema_arrow.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: there are several columns {twice!r}", "dataset")
    return names


def _cell(value: Any, name: str, where: str) -> Any:
    try:
        return value.as_py()
    except _UNREADABLE as error:
        raise DataError(f"{where}: column {name!r} cannot be read: {_first_line(error)}", "dataset") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row is an object with names, not a {type(value).__name__}", "dataset")
    return Row(value, where)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else "a number of too many digits"
