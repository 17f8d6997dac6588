"""Paged attention on an NVIDIA GPU by flashinfer: one plan a step, tensor-core decode, graphs for padded batches.

A sink s beside the scores of a head takes its share of the softmax and gives nothing: what a query gets without it is
multiplied by sum(exp(scores)) / (sum(exp(scores)) + exp(s)) = sigmoid(logsumexp(scores) - s), once flashinfer's kernel
is done. That kernel gives the logarithm in base 2.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mla import Latent
from engine.attention.base import BLOCK_SIZE, AttentionBackend, BatchLayout, KvPlaces, joined, unit_bytes
from engine.errors import EngineError, UserError

WORKSPACE_BYTES = 512 << 20  # 128 MiB are too few for a chunk of 512 rows over 2048 positions
_PLAN_BYTES = 8 << 20  # arrays of one wrapper, on the GPU and again pinned on the CPU
_PREFILL_WRAPPERS = 2  # fa2's and fa3's
PREFILL_PLAN_BYTES = _PREFILL_WRAPPERS * _PLAN_BYTES
HEAD_DIMS = (64, 128, 256)
LATENT_SIZES = (512, 64)  # of the latent and of the rotated part
PREFILLS = ("auto", "fa2", "fa3")
FA3_ROWS = 256  # of a chunk, from which fa3 is used: 1.5 times as fast as fa2 at 512, 1.8 times at 8192
_FP8_CAPABILITY = (8, 9)  # from which a GPU converts to e4m3 by itself
_FA3_CAPABILITY = (9, 0)


def plan_bytes(decode_sizes: int, attentions: int) -> int:
    """What the arrays of all wrappers of so many attentions take beside the workspace, on the GPU and again pinned on
    the CPU."""
    return attentions * (decode_sizes + _PREFILL_WRAPPERS) * _PLAN_BYTES


def make_workspace(device: torch.device) -> torch.Tensor:
    """What kernels use while they run: of one attention after another on a stream."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def flashinfer_available() -> tuple[bool, str]:
    """Whether flashinfer can be imported here and build its kernels; if not, why and what to do."""
    try:
        importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        return False, f"flashinfer does not load ({error}): install ktserve[gpu], or use --rules reference"
    if importlib.util.find_spec("flashinfer_jit_cache") is None and not _has_nvcc():
        return False, (
            "flashinfer compiles its kernels with nvcc, which is not found (PATH, CUDA_HOME, /usr/local/cuda): install "
            "the CUDA toolkit or the package flashinfer-jit-cache, or use --rules reference"
        )
    return True, ""


def _has_nvcc() -> bool:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which("nvcc") is not None or any(home and Path(home, "bin/nvcc").exists() for home in homes)


def first_error(error: Exception) -> str:
    """The line of a failed build that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else repr(error))[:200]


def fa3_limit(capability: tuple[int, int], kv_dtype: torch.dtype) -> str | None:
    """Why fa3 cannot be the prefill kernel on a GPU of this compute capability; None if it can."""
    if capability != _FA3_CAPABILITY:
        return f"fa3 is for compute capability 9.0 (Hopper), this GPU has {capability[0]}.{capability[1]}"
    if kv_dtype != torch.bfloat16:
        return "fa3 takes fp8 keys and values only with fp8 queries"
    return None


def flashinfer_limit(spec: GroupedQuery | Latent, dtype: torch.dtype) -> str | None:
    """Why flashinfer cannot serve this model; None if it can."""
    if dtype != torch.bfloat16:
        return f"flashinfer's attention takes bfloat16, not {str(dtype).removeprefix('torch.')}"
    if isinstance(spec, Latent):
        sizes = spec.kv_rank, spec.rope_dim
        if sizes == LATENT_SIZES:
            return None
        taken, these = (f"{latent} + {rotated}" for latent, rotated in (LATENT_SIZES, sizes))
        return f"flashinfer's latent attention takes {taken} values a position, not {these}"
    if spec.head_dim not in HEAD_DIMS:
        return f"flashinfer's attention takes head_dim {', '.join(map(str, HEAD_DIMS))}, not {spec.head_dim}"
    return None


def require_flashinfer(spec: GroupedQuery | Latent, dtype: torch.dtype) -> None:
    """UserError where it cannot serve this model, or is not there."""
    if limit := flashinfer_limit(spec, dtype):
        raise UserError(f"{limit}: use --attention-backend reference", field="attention_backend")
    ready, why = flashinfer_available()
    if not ready:
        raise UserError(why, field="attention_backend")


class FlashInferAttention(AttentionBackend):
    """KV of each of `layers`, all of one `spec`: two tensors [num_blocks, BLOCK_SIZE, G, D] on the GPU, bf16 or
    float8_e4m3fn.

    fp8 values are stored as they are, cut to +-448 (scale 1): after QK-norm a key's elements are a few units large, and
    values are of that order too; e4m3 keeps three bits of mantissa from 2^-6 up. A NaN in k or v stays in its own
    sequence; from an fp8 cache fa2 reads it as 480.

    A padded decode batch uses a wrapper of its own size, whose arrays stay where they are, so a captured `forward`
    replays after any later `plan` of that size. Every other batch uses fa2's prefill wrapper for decode rows and chunks
    alike; from the first chunk of FA3_ROWS rows on, fa3's, if `prefill` and the GPU allow it (for a single row it takes
    as long as for a tile of 128). `notes` says which.
    `max_rows`: of a padded batch; `max_row_blocks`: of a sequence; `workspace`: from `make_workspace`, which attentions
    on one stream may share. UserError for shapes and dtypes that flashinfer does
    not take, if it is not installed, or for `prefill` "fa3" where that cannot be had.
    """

    captures = rows_share = True

    def __init__(
        self,
        spec: GroupedQuery,
        layers: Sequence[int],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_row_blocks: int,
        *,
        workspace: torch.Tensor,
        kv_dtype: torch.dtype | None = None,
        prefill: str = "auto",
    ) -> None:
        require_flashinfer(spec, dtype)
        self._flashinfer: Any = importlib.import_module("flashinfer")
        self._kernels: Any = importlib.import_module("engine.ops.gpu_kernels")
        kv_dtype, capability = kv_dtype or dtype, torch.cuda.get_device_capability(device)
        if kv_dtype not in (dtype, torch.float8_e4m3fn):
            raise UserError(f"kv_cache_dtype {kv_dtype}: flashinfer takes bfloat16 and fp8", field="kv_cache_dtype")
        if kv_dtype != dtype and capability < _FP8_CAPABILITY:
            raise UserError(
                f"--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or later, this one has "
                f"{capability[0]}.{capability[1]}: use auto or bfloat16",
                field="kv_cache_dtype",
            )
        shape = (num_blocks, BLOCK_SIZE, spec.kv_heads, spec.head_dim)

        def zeros() -> torch.Tensor:
            return torch.zeros(shape, dtype=kv_dtype, device=device)

        self.cache = {layer: (zeros(), zeros()) for layer in layers}
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._token_bytes = len(layers) * spec.cache.position_bytes(kv_dtype.itemsize)
        self._workspace = workspace
        self._sinks: dict[int, torch.Tensor] = {}
        self._prefill = self._prefill_wrapper("fa2")
        self._long_prefill: Any = None  # fa3's
        self._decode: dict[int, Any] = {}  # by rows
        # What decode wrappers read: page starts [rows + 1], the last pages' lengths [rows], blocks. Sequences that
        # share a prefix list its blocks each, so a step can list more blocks than there are.
        header = max_rows // 4 * 4 + 4
        self._lasts_at, self._blocks_at = header, 2 * header
        self._arrays = torch.zeros(self._blocks_at + max_rows * max_row_blocks, dtype=torch.int32, device=device)
        self._planned: list[tuple[Any, slice]] = []
        self._slots: torch.Tensor | None = None
        cuda: Any = torch.cuda
        self._copied: Any = cuda.Event()  # the arrays of the last plan have left the host
        self.notes = (self._choose_prefill(prefill, fa3_limit(capability, kv_dtype)),)

    def beside(self) -> FlashInferAttention:
        other = copy(self)
        other._workspace = make_workspace(self._device)
        other._prefill = other._prefill_wrapper("fa2")
        other._long_prefill = None if self._long_prefill is None else other._prefill_wrapper("fa3")
        other._decode, other._planned, other._slots = {}, [], None
        other._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return other

    def _prefill_wrapper(self, backend: str) -> Any:
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend)

    def _choose_prefill(self, asked: str, limit: str | None) -> str:
        """Compiles and tries fa3 unless it is not wanted or not possible; what is used, in words."""
        if asked not in PREFILLS:
            raise UserError(f"prefill {asked!r}: allowed are {', '.join(PREFILLS)}", field="rules")
        if asked == "fa2":
            return "prefill attention: flashinfer fa2, as the rules say"
        if limit is None:
            wrapper = self._prefill_wrapper("fa3")
            try:
                self._try(wrapper)
            except (RuntimeError, OSError, ValueError) as error:  # what its build and its loader raise
                limit = f"fa3 could not be built: {first_error(error)}"
            else:
                self._long_prefill = wrapper
                return f"prefill attention: flashinfer fa3 for chunks of {FA3_ROWS} rows and more, fa2 below"
        if asked == "fa3":
            raise UserError(f"prefill fa3: {limit}; use auto or fa2", field="rules")
        return f"prefill attention: flashinfer fa2 ({limit})"

    def _try(self, wrapper: Any) -> None:
        """One row over one block that nobody has written: the kernels are compiled and have run."""
        one = torch.tensor([0, 1], dtype=torch.int32)
        self._plan_prefill(wrapper, one, one, one[:1].to(self._device), one[1:])
        heads, dim = self._spec.heads, self._spec.head_dim
        wrapper.run(torch.zeros(1, heads, dim, dtype=self._dtype, device=self._device), next(iter(self.cache.values())))
        torch.cuda.synchronize(self._device)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._token_bytes

    def device_planes(self) -> list[torch.Tensor]:
        return [unit_bytes(tensor) for pair in self.cache.values() for tensor in pair]

    @property
    def _window_left(self) -> int:
        """How many positions before its own a query sees; -1: all."""
        return -1 if self._spec.window is None else self._spec.window - 1

    def set_sinks(self, layer: int, sinks: torch.Tensor) -> None:
        if sinks.shape != (self._spec.heads,) or sinks.dtype != torch.float32:
            raise EngineError(
                f"attention: sinks: {sinks.dtype} {tuple(sinks.shape)}; wanted float32 [{self._spec.heads}]"
            )
        self._sinks[layer] = sinks

    def plan(self, batch: BatchLayout) -> None:
        """Waits until the GPU has taken the arrays of the plan before, which by then it has as a rule."""
        self._copied.synchronize()
        lengths = np.array(batch.context_lens)
        pages = -(-lengths // BLOCK_SIZE)
        starts = np.concatenate(([0], np.cumsum(pages)))
        blocks = joined(batch.block_tables, pages.tolist())
        last_page = (lengths - 1) % BLOCK_SIZE + 1
        if batch.padded:
            self._planned = [(self._plan_decode(starts, blocks, last_page), slice(0, batch.num_rows))]
        else:
            indices = pinned(blocks).to(self._device, non_blocking=True)
            self._planned = self._plan_any(batch, starts, indices, pinned(last_page))
        self._slots = batch.slot_mapping
        self._copied.record()

    def _plan_any(
        self, batch: BatchLayout, pages: NDArray[np.int64], indices: torch.Tensor, last: torch.Tensor
    ) -> list[tuple[Any, slice]]:
        """Wrappers and the tokens that each computes. Row r's blocks are indices[pages[r] : pages[r + 1]]."""
        rows = batch.num_rows
        longs = [r for r, (start, end) in enumerate(pairwise(batch.row_starts)) if end - start >= FA3_ROWS]
        cut = rows if self._long_prefill is None or not longs else longs[0]
        planned = []
        for wrapper, first, end in ((self._prefill, 0, cut), (self._long_prefill, cut, rows)):
            if first == end:
                continue
            tokens, own = np.array(batch.row_starts[first : end + 1]), pages[first : end + 1]
            self._plan_prefill(
                wrapper,
                pinned(tokens - tokens[0]),
                pinned(own - own[0]),
                indices[own[0] : own[-1]],
                last[first:end],
            )
            planned.append((wrapper, slice(int(tokens[0]), int(tokens[-1]))))
        return planned

    def _plan_prefill(
        self, wrapper: Any, starts: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor
    ) -> None:
        c = self._spec
        wrapper.plan(
            starts,
            indptr,
            indices,
            last,
            c.heads,
            c.kv_heads,
            c.head_dim,
            BLOCK_SIZE,
            causal=True,
            window_left=self._window_left,
            q_data_type=self._dtype,
            kv_data_type=self._kv_dtype,
        )

    def _plan_decode(self, pages: NDArray[np.int64], blocks: NDArray[np.int32], last: NDArray[np.int64]) -> Any:
        """All that the wrapper reads is sent in one copy; its own `plan`, which copies each array apart and looks at
        every row in Python, is for the first time."""
        c, held, rows, lasts, first = self._spec, self._arrays, len(last), self._lasts_at, self._blocks_at
        values = np.zeros(first + len(blocks), np.int32)
        if len(values) > len(held):
            raise EngineError(f"attention: {len(blocks)} blocks in a step, {len(held) - first} at most")
        values[: rows + 1], values[lasts : lasts + rows], values[first:] = pages, last, blocks
        sent = pinned(values)
        held[: len(sent)].copy_(sent, non_blocking=True)
        wrapper = self._decode.get(rows)
        if wrapper is None:
            wrapper = self._decode[rows] = self._wrapper(rows)
            plan = wrapper.plan
        else:
            plan = partial(self._flashinfer.fast_decode_plan, wrapper)
        plan(
            sent[: rows + 1],
            held[first : len(sent)],
            sent[lasts : lasts + rows],
            c.heads,
            c.kv_heads,
            c.head_dim,
            BLOCK_SIZE,
            window_left=self._window_left,
            q_data_type=self._dtype,
            kv_data_type=self._kv_dtype,
        )
        return wrapper

    def _wrapper(self, rows: int) -> Any:
        held, lasts = self._arrays, self._lasts_at
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=held[: rows + 1],
            paged_kv_indices_buffer=held[self._blocks_at :],
            paged_kv_last_page_len_buffer=held[lasts : lasts + rows],
        )

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        to = self.places(layer)
        self._kernels.write_kv(to.keys, to.values, k, v, to.slots)
        return self.attend(layer, q)

    def places(self, layer: int) -> KvPlaces:
        if self._slots is None:
            raise EngineError("attention: plan() comes before forward()")
        return KvPlaces(*self.cache[layer], self._slots)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        q, planned, cache = q.contiguous(), self._planned, self.cache[layer]
        sinks = self._sinks.get(layer)
        if len(planned) == 1 and sinks is None:
            whole: torch.Tensor = planned[0][0].run(q, cache)
            return whole
        out = torch.empty_like(q)
        if sinks is None:
            for wrapper, tokens in planned:
                wrapper.run(q[tokens], cache, out=out[tokens])
            return out
        sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for wrapper, tokens in planned:
            wrapper.run(q[tokens], cache, out=out[tokens], lse=sums[tokens], return_lse=True)
        self._kernels.share_with_sinks(out, sums, sinks)
        return out


def pinned(values: NDArray[Any]) -> torch.Tensor:
    """int32 [n] in pinned memory that is not reused before its copy to the GPU has ended."""
    return torch.as_tensor(values, dtype=torch.int32).pin_memory()
