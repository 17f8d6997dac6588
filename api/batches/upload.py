"""A file that a client uploads: taken apart as it comes, never held in memory."""

from __future__ import annotations

from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from api.errors import ApiError, bad_request, shortened

_MAX_FIELD_BYTES = 1024
_MAX_PARTS = 16
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class Form:
    """`fields`: the small ones, by name. `filename`: of the part "file", None until it has come."""

    def __init__(self, content_type: str) -> None:
        """Raises ApiError for another type of body."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(415, f"multipart/form-data is expected, got {shortened(content_type)}", param="file")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._name = ""
        self._value = bytearray()
        self._header = bytearray()
        self._header_value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._found: list[bytes] = []
        self._parts = 0
        self._ended = False
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            raise bad_request(f"the form's boundary is wrong: {error}", "file") from None

    def feed(self, chunk: bytes) -> list[bytes]:
        """The file's bytes in the next part of the body. Raises ApiError."""
        self._found = []
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise bad_request(f"the form is broken: {error}", "file") from None
        return self._found

    def finish(self) -> str:
        """The file's name. Raises ApiError if the body has ended too early, or there is no file."""
        if not self._ended:
            raise bad_request("the form ends before its last boundary", "file")
        if self.filename is None:
            raise bad_request("file: a part 'file' with a filename is missing", "file")
        return self.filename

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._all,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise bad_request(f"the form has more than {_MAX_PARTS} parts", "file")
        self._headers, self._value = {}, bytearray()

    def _header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise bad_request("file: one file is expected, got two", "file")
            self.filename = options.get(b"filename", b"file").decode("utf-8", "replace")[:255]
        elif self._name not in _FIELDS or self._name in self.fields:
            known = ", ".join(("file", *_FIELDS))
            raise bad_request(f"unknown or repeated field {shortened(self._name)}; fields: {known}", self._name[:100])

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._found.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise bad_request(f"{self._name}: the value has more than {_MAX_FIELD_BYTES} bytes", self._name)

    def _end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _all(self) -> None:
        self._ended = True
