"""kt_kernel's classes in the order of a CUDA stream, by its own host functions: what it offers, and what it costs.

A task's failure inside a host function ends the process, and nothing can look at its inputs first: the guards of
KtExperts that look at the rows do not run here. Row counts and expert ids come from the model's own kernels.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ExpertBackendError
from engine.experts.base import ExpertTask
from engine.experts.kt.backend import KtExperts


class KtStreamExperts(KtExperts):
    """KtExperts whose post and wait may be captured in a CUDA graph. Buffers are bf16, pinned, and filled and read on
    the stream. A step of no rows (while graphs are captured) computes one row of what the buffers hold."""

    follows_stream = True

    @property
    def offers(self) -> tuple[object, ...]:
        """Nothing: who would count experts cannot look at a stream's rows."""
        return ()

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        if stream is None:
            super().post(task)
            return
        call = task.handle
        if call.hidden is not task.buffers.hidden:
            raise ExpertBackendError("on a stream the kt backend takes bfloat16 buffers only")
        self._pool.submit_with_cuda_stream(stream, call.task)

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        if stream is None:
            super().wait(task)
        else:
            self._pool.sync_with_cuda_stream(stream)
