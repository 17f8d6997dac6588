"""Rows of data files, each with its place. Torch-free."""

from __future__ import annotations

import csv
import io
import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data.errors import DataError

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class Row:
    """`where`: "FILE:LINE", of the line that the row begins in; "FILE: row N" for a format without lines."""

    data: dict[str, Any]
    where: str

    def error(self, message: str) -> DataError:
        return DataError(f"{self.where}: {message}", "dataset")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a .json (a list, or lines), .jsonl, .csv or .parquet file, or of all such files in a folder, by name.
    DataError for what cannot be read."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise DataError(f"{path}: no file ends in {', '.join(SUFFIXES)}", "dataset")
        for file in files:
            yield from read_rows(file)
        return
    readers = {".json": _json, ".jsonl": _json, ".csv": _csv, ".parquet": _parquet}
    if path.suffix not in readers:
        raise DataError(f"{path}: ends in {path.suffix!r}; allowed is {', '.join(SUFFIXES)}", "dataset")
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", "dataset") from None


def _json(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        first = next((line for line in file if line.removeprefix(BOM_UTF8).strip()), b"")
    yield from _json_list(path) if first.removeprefix(BOM_UTF8).lstrip().startswith(b"[") else _json_lines(path)


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            text = _decoded(line, path, number)
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON: {_reason(error)}", "dataset") from None
            yield _row(value, where)


def _json_list(path: Path) -> Iterator[Row]:
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
        except RecursionError:
            raise DataError(f"{where}: not JSON: nested too deeply", "dataset") from None
        yield _row(value, where)
        separator = "value"
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


def _csv(path: Path) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(_decoded(path.read_bytes(), path), newline=""), strict=True)
    begins = 2
    try:
        for data in reader:
            row = _row(data, f"{path}:{begins}")
            if None in data or None in data.values():
                raise row.error(f"the number of cells is not that of the header, {len(reader.fieldnames or ())}")
            yield row
            begins = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{begins}: not CSV: {error}", "dataset") from None


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading parquet needs the package pyarrow: pip install pyarrow", "dataset") from None
    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for data in batch.to_pylist():
                number += 1
                yield Row(data, f"{path}: row {number}")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not parquet: {str(error).splitlines()[0]}", "dataset") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row is an object with names, not a {type(value).__name__}", "dataset")
    return Row(value, where)


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
