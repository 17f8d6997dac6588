"""What is stored of a fine-tuning job, its events and its checkpoints, and how OpenAI's clients see them."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import msgspec

Auto = Literal["auto"]


class JobStatus(Enum):
    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN = frozenset({JobStatus.VALIDATING, JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED})
ENDED = frozenset(JobStatus) - OPEN
WORKED = OPEN - {JobStatus.PAUSED}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The hyperparameters of a request. `beta`: of dpo alone."""

    method: Literal["supervised", "dpo"] = "supervised"
    n_epochs: int | Auto = "auto"
    batch_size: int | Auto = "auto"
    learning_rate_multiplier: float | Auto = "auto"
    beta: float | Auto = "auto"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is done of it, known when the files have been checked. `valid`: examples of the validation file."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float
    examples: int
    valid: int
    tokens: int  # of an epoch

    @property
    def steps_an_epoch(self) -> int:
        return -(-self.examples // self.batch_size)

    @property
    def steps(self) -> int:
        return self.n_epochs * self.steps_an_epoch


class JobError(msgspec.Struct, frozen=True):
    code: str
    message: str
    param: str | None = None


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`step`: of the state on disk that work goes on from, `state` its folder's name, None: the beginning. `begins`:
    the fine-tuned model whose copy it begins with, None: the base, which `model` names in any case."""

    id: str
    tenant: str
    model: str
    training_file: str
    created_at: int
    seed: int
    asked: Asked
    validation_file: str | None = None
    begins: str | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None
    status: JobStatus = JobStatus.VALIDATING
    plan: Plan | None = None
    step: int = 0
    state: str | None = None
    started_at: int | None = None
    finished_at: int | None = None
    estimated_finish: int | None = None
    fine_tuned_model: str | None = None
    trained_tokens: int | None = None
    result_files: list[str] = []
    error: JobError | None = None

    @property
    def stops_early(self) -> bool:
        """How many epochs are trained is left to the job, and there is something to tell it by."""
        return self.asked.n_epochs == "auto" and self.validation_file is not None

    def shown(self) -> dict[str, Any]:
        asked, plan = self.asked, self.plan
        names = ["n_epochs", "batch_size", "learning_rate_multiplier", *(["beta"] if asked.method == "dpo" else [])]
        values = {name: getattr(asked if plan is None else plan, name) for name in names}
        running = self.status is JobStatus.RUNNING
        return {
            "id": self.id,
            "object": "fine_tuning.job",
            "created_at": self.created_at,
            "finished_at": self.finished_at,
            "estimated_finish": self.estimated_finish if running else None,
            "status": self.status.value,
            "model": self.begins or self.model,
            "fine_tuned_model": self.fine_tuned_model,
            "organization_id": self.tenant,
            "training_file": self.training_file,
            "validation_file": self.validation_file,
            "result_files": self.result_files,
            "trained_tokens": self.trained_tokens,
            "seed": self.seed,
            "hyperparameters": {name: value for name, value in values.items() if name != "beta"},
            "method": {"type": asked.method, asked.method: {"hyperparameters": values}},
            "metadata": self.metadata,
            "integrations": [],
            "user_provided_suffix": self.suffix,
            "error": None if self.error is None else msgspec.to_builtins(self.error),
        }


class Metrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Means over targets, of preferences over pairs. What was not computed at the step is None."""

    step: int
    train_loss: float
    train_mean_token_accuracy: float
    valid_loss: float | None = None
    valid_mean_token_accuracy: float | None = None
    full_valid_loss: float | None = None
    full_valid_mean_token_accuracy: float | None = None


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`step`: of metrics; those behind the state that work goes on from are computed again."""

    id: str
    created_at: int
    message: str
    level: Literal["info", "warn", "error"] = "info"
    metrics: Metrics | None = None

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "fine_tuning.job.event",
            "created_at": self.created_at,
            "level": self.level,
            "message": self.message,
            "type": "message" if self.metrics is None else "metrics",
            "data": {} if self.metrics is None else msgspec.to_builtins(self.metrics),
        }


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`folder`: its adapter's, in the job's."""

    id: str
    job: str
    created_at: int
    model: str
    folder: str
    metrics: Metrics

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "fine_tuning.job.checkpoint",
            "created_at": self.created_at,
            "fine_tuned_model_checkpoint": self.model,
            "fine_tuning_job_id": self.job,
            "step_number": self.metrics.step,
            "metrics": msgspec.to_builtins(self.metrics),
        }
