"""The errors that users see. `UserError` says what to change; `EngineError` is ours."""

from __future__ import annotations

_SHOWN = 60  # characters of a wrong value


def shown(value: object) -> str:
    """A wrong value, as messages have it: of a long one the beginning."""
    return repr(value)[:_SHOWN]


class KtserveError(Exception):
    """Base of every error ktserve raises on purpose."""


class UserError(KtserveError):
    """The user can fix this. `field` names the parameter or file; the message says what is allowed."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelFileError(UserError):
    """A model file that cannot be served: truncated, corrupt, of another architecture, or an unsupported type."""


class AdapterError(UserError):
    """An adapter that cannot be served. `keys` are the offending tensors or settings."""

    def __init__(self, message: str, keys: list[str] | None = None) -> None:
        super().__init__(message, "lora_path")
        self.keys = keys or []


class RulesError(UserError):
    """A rules file that is wrong. The message names the file, the rule's number and the key."""


class MemoryPlanError(UserError):
    """The model does not fit. The message holds the plan's short items and what to lower."""


class EngineError(KtserveError):
    """Something failed inside; the request ends as failed, the server stays up."""


class ExpertBackendError(EngineError):
    """An expert backend was called outside what it can do safely, or reported an error."""
