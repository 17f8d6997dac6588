"""The contract between the model and whatever computes the routed experts.

One `ExpertBuffers` per buffer set is shared by all layers; one `ExpertTask` per (layer, buffer set) is bound once
and then replayed. The number of rows is read from `bsz` when the task runs, so a replayed task serves any batch up to
the buffers' size, a captured graph any up to the rows that it was launched for, and padding rows cost nothing.

    model:   fill hidden, ids, weights, slots, bsz  ->  post(task)  ...other work...  wait(task)  ->  read out
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

if TYPE_CHECKING:
    from engine.lora.adapter import ExpertLora
    from engine.weights.store import ExpertStore

C = TypeVar("C")


@dataclass
class ExpertBuffers:
    """Fixed memory that a task reads and writes. M rows at most, top-k experts a row, hidden size H."""

    bsz: torch.Tensor  # int32 [1]: the rows that count, read at run time
    ids: torch.Tensor  # int64 [M, k]: expert of each choice; -1 is skipped
    weights: torch.Tensor  # float32 [M, k]
    slots: torch.Tensor  # int32 [M]: adapter slot of the row, 0 = base
    hidden: torch.Tensor  # model dtype [M, H]
    out: torch.Tensor  # model dtype [M, H]: the weighted sum over the row's experts; rows >= bsz are not written
    rows: int | None = None  # what is launched next is for so many rows: bsz is not more; None: for M

    @classmethod
    def allocate(
        cls,
        rows: int,
        top_k: int,
        hidden: int,
        dtype: torch.dtype,
        pin: bool = False,
        device: torch.device | None = None,
    ) -> ExpertBuffers:
        """`pin`: host memory that a GPU reads and writes directly. `device`: where else than in host memory."""

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pin, device=device)

        return cls(
            bsz=empty(1, dtype=torch.int32),
            ids=torch.full((rows, top_k), -1, dtype=torch.int64, pin_memory=pin, device=device),
            weights=empty(rows, top_k, dtype=torch.float32),
            slots=empty(rows, dtype=torch.int32),
            hidden=empty(rows, hidden, dtype=dtype),
            out=empty(rows, hidden, dtype=dtype),
        )

    @classmethod
    def row_bytes(cls, top_k: int, hidden: int, element_bytes: int) -> int:
        """What `allocate` takes for each row."""
        return top_k * (8 + 4) + 4 + 2 * hidden * element_bytes

    @property
    def max_rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def launch_rows(self) -> int:
        """What launches are sized by: a graph's rows, or a step's, and not what the buffers could hold."""
        return self.max_rows if self.rows is None else self.rows


@dataclass(frozen=True)
class ExpertTask:
    """A call that can be replayed. `handle` belongs to the backend; the task keeps its buffers alive."""

    layer: int
    buffers: ExpertBuffers
    handle: Any


class ExpertBackend(ABC):
    """Computes sum_j w_j * expert_{ids_j}(x) for each row, with each row's own adapter inside the experts.

    gate' = gate(x) + s Bg(Ag x), up' likewise, y = down(silu(gate') * up') + s Bd(Ad h). Biases of the store are added
    to the projections; its `activation` says what becomes of gate' and up'.
    Errors are raised by `wait` as `ExpertBackendError`; a failed step leaves the backend usable. On a stream `wait`
    returns at once, so what fails there is raised by `check`.
    """

    buffers_on: Literal["cpu", "cuda"] = "cpu"  # where the buffers that `bind` takes lie; beside a GPU, "cpu" is pinned
    follows_stream: bool = False  # whether post and wait take a CUDA stream, so that a CUDA graph can hold them

    @property
    def offers(self) -> tuple[object, ...]:
        """What a backend that wraps this one, or a model that runs layers without Python, can use beyond this contract:
        objects of the kinds in engine/experts/capabilities.py."""
        return ()

    def capability(self, kind: type[C]) -> C | None:
        """What is offered of a kind; None: nothing."""
        return next((offered for offered in self.offers if isinstance(offered, kind)), None)

    @abstractmethod
    def load_layer(self, layer: int, store: ExpertStore) -> None:
        """Take a layer's base weights. Called once per layer, before any `bind`."""

    @abstractmethod
    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        """Copy an adapter's expert LoRA (by layer) into a slot that no step in flight uses, or clear it (None).

        Raises AdapterError if the backend has no per-row adapters and `layers` is not empty.
        """

    @abstractmethod
    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        """Make the replayable task of a layer over a buffer set."""

    @abstractmethod
    def post(self, task: ExpertTask, stream: Any = None) -> None:
        """Start the task; never blocks longer than it takes to hand it over (`reference` computes here).

        `stream`: a raw cudaStream_t (int) in whose order the buffers are filled and read; None on a CPU.
        """

    @abstractmethod
    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        """Make the stream (or, on a CPU, the caller) wait for the task's `out`."""

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        """Called on the compute stream before each launch of a step of `rows` true rows, and before a capture.

        `lora`: some row has an adapter (or the captured graph serves such batches). `eager`: nothing is captured or
        replayed, so that the backend may choose by `rows` how it computes. `slots`: the adapter slots that the step's
        rows have; None: any that is filled.
        """
        return None

    def prefetch(self) -> None:
        """Called on the compute stream between `begin_step` and the step's first `post`, when everything that the step
        itself copies to the device has been launched: weights that are brought there follow its inputs."""
        return None

    def trial(self) -> AbstractContextManager[None]:
        """While steps run of which no row counts: weights that only they would read need not be brought to them."""
        return nullcontext()

    def check(self) -> None:
        """Raise what failed in tasks posted on a stream since the last check. Called when a step has ended."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give back threads and memory where the backend can."""
