"""What is stored of a file and of a batch, and how clients see it."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since the epoch, as all times here
    expires_at: int | None = None

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Status(Enum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN = frozenset({Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING})


class LineError(msgspec.Struct, frozen=True):
    """Why a batch failed. `line` is counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`completed` and `failed` count the lines that are answered, `total` all of them (0 until they are checked)."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    status: Status = Status.VALIDATING
    number: int = 0  # its key in the store
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[LineError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    def shown(self) -> dict[str, Any]:
        hidden = ("tenant", "number", "total", "completed", "failed", "output_expires_after_s")
        data = {key: value for key, value in msgspec.to_builtins(self).items() if key not in hidden}
        return {
            **data,
            "object": "batch",
            "errors": {"object": "list", "data": data["errors"]} if self.errors else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
        }


class Answered(msgspec.Struct, frozen=True):
    """A line's answer. `data`: JSON without a line break, what stands beside `custom_id` in the output."""

    batch: int
    line: int
    ok: bool
    data: bytes
