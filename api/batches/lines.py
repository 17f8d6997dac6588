"""The lines of a batch's input file: what each must be, and where it stands."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import msgspec

from api.batches.records import LineError
from api.bodies.parsing import why_no_json
from api.errors import cut, shortened

MAX_ERRORS = 50  # that are listed; a file with more is not read on
_MAX_CUSTOM_ID = 512
_ENVELOPE_BYTES = 64 * 2**10  # what may stand beside the body


class RequestLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decode = msgspec.json.Decoder(RequestLine).decode


def read_line(path: Path, start: int, size: int) -> RequestLine:
    """One that `Checker` has accepted. Raises OSError or msgspec.DecodeError if the file is not what it was."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _decode(os.pread(descriptor, size, start))
    finally:
        os.close(descriptor)


class _WrongLineError(Exception):
    def __init__(self, code: str, message: str, param: str | None) -> None:
        super().__init__(cut(message))
        self.code = code
        self.param = param


class Checker:
    """Reads a file from its beginning, some lines at a time. `found` counts the requests so far."""

    def __init__(self, path: Path, endpoint: str, *, max_body_bytes: int, max_lines: int) -> None:
        self._file = path.open("rb")
        self._endpoint = endpoint
        self._max_line = max_body_bytes + _ENVELOPE_BYTES
        self._max_body = max_body_bytes
        self._max_lines = max_lines
        self._number = 0
        self._start = 0
        self.found = 0
        self.errors: list[LineError] = []
        self.at_end = False

    def __enter__(self) -> Checker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def some(self, count: int = 500, size: int = 2**20) -> list[tuple[int, int, int, str]]:
        """(line, start, size, custom_id) of the next good lines; about so many lines or bytes are read."""
        good: list[tuple[int, int, int, str]] = []
        until = self._start + size
        while not self.at_end and len(good) < count and self._start < until:
            raw = self._file.readline(self._max_line + 1)
            if not raw:
                self.at_end = True
                if not self.found and not self.errors:
                    self.errors.append(LineError("empty_file", "the input file has no requests"))
                break
            self._number += 1
            start, self._start = self._start, self._start + len(raw)
            if len(raw) > self._max_line:
                text = f"the line has more than {self._max_line} bytes"
                self.errors.append(LineError("line_too_long", text, self._number))
                self.at_end = True  # where the next one begins is not looked for
                break
            if raw.isspace():
                continue
            skipped = 3 if self._number == 1 and raw.startswith(b"\xef\xbb\xbf") else 0
            try:
                custom_id = self._checked(raw[skipped:])
            except _WrongLineError as error:
                self.errors.append(LineError(error.code, str(error), self._number, error.param))
            else:
                good.append((self._number, start + skipped, len(raw) - skipped, custom_id))
            self.at_end = self.at_end or len(self.errors) >= MAX_ERRORS
        return good

    def _checked(self, raw: bytes) -> str:
        """The line's custom_id."""
        self.found += 1
        if self.found > self._max_lines:
            self.at_end = True
            raise _WrongLineError("too_many_lines", f"a batch has at most {self._max_lines} requests", None)
        try:
            line = _decode(raw)
        except msgspec.ValidationError as error:
            raise _WrongLineError("invalid_request_line", f"the line is no request of a batch: {error}", None) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _WrongLineError(
                "invalid_json_line", f"the line is not JSON: {why_no_json(raw, error)}", None
            ) from None
        if not 0 < len(line.custom_id) <= _MAX_CUSTOM_ID:
            raise _WrongLineError("invalid_custom_id", f"1 to {_MAX_CUSTOM_ID} characters are expected", "custom_id")
        if line.method != "POST":
            raise _WrongLineError("invalid_method", f"'POST' is expected, got {shortened(line.method)}", "method")
        if line.url != self._endpoint:
            raise _WrongLineError("mismatched_url", f"{self._endpoint!r} is expected, got {shortened(line.url)}", "url")
        body = bytes(line.body).strip()
        if not body.startswith(b"{"):
            raise _WrongLineError("invalid_body", "an object is expected", "body")
        if len(body) > self._max_body:
            raise _WrongLineError("body_too_large", f"the body has more than {self._max_body} bytes", "body")
        return line.custom_id
