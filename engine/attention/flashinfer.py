"""Paged attention on an NVIDIA GPU by flashinfer: one plan a step, tensor-core decode, graphs for padded batches."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from engine.attention.base import BLOCK_SIZE, AttentionBackend, BatchLayout
from engine.errors import EngineError, UserError
from engine.model_config import ModelConfig

WORKSPACE_BYTES = 512 << 20  # 128 MiB are too few for a chunk of 512 rows over 2048 positions
HEAD_DIMS = (64, 128, 256)


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


def flashinfer_limit(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """Why flashinfer cannot serve this model; None if it can."""
    if dtype != torch.bfloat16:
        return f"flashinfer's attention takes bfloat16, not {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in HEAD_DIMS:
        return f"flashinfer's attention takes head_dim {', '.join(map(str, HEAD_DIMS))}, not {config.head_dim}"
    return None


class FlashInferAttention(AttentionBackend):
    """KV of layer l: two bf16 tensors [num_blocks, BLOCK_SIZE, G, D] on the GPU.

    A padded decode batch uses a wrapper of its own size, whose arrays stay where they are, so a captured `forward`
    replays after any later `plan` of that size. Every other batch uses one wrapper for prefill and decode rows alike.
    `max_rows`: of a padded batch; `max_row_blocks`: of a sequence. UserError for shapes and dtypes that flashinfer does
    not take, or if it is not installed.
    """

    captures = True
    parts = 2

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_row_blocks: int,
    ) -> None:
        if limit := flashinfer_limit(config, dtype):
            raise UserError(f"{limit}: use --attention-backend reference", field="attention_backend")
        ready, why = flashinfer_available()
        if not ready:
            raise UserError(why, field="attention_backend")
        self._flashinfer: Any = importlib.import_module("flashinfer")
        self._write = importlib.import_module("engine.kernels.ops").write_kv
        shape = (num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        self.cache = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.num_hidden_layers)
        ]
        self._config = config
        self._device = device
        self._dtype = dtype
        self._token_bytes = config.kv_bytes_per_token(dtype.itemsize)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill: Any = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
        self._decode: dict[tuple[int, int], Any] = {}  # by part and rows
        # Sequences that share a prefix list its blocks each, so a step can list more blocks than there are.
        self._indices = [torch.zeros(max_rows * max_row_blocks, dtype=torch.int32, device=device) for _ in range(2)]
        self._planned: dict[int, Any] = {}  # by part
        self._slots: dict[int, torch.Tensor] = {}
        cuda: Any = torch.cuda
        self._copied: list[Any] = [cuda.Event(), cuda.Event()]  # the arrays of a part's last plan have left the host

    @property
    def kv_bytes_per_token(self) -> int:
        return self._token_bytes

    def plan(self, batch: BatchLayout) -> None:
        """Waits until the GPU has taken the arrays of the part's plan before, which by then it has as a rule."""
        self._copied[batch.part].synchronize()
        pages = [-(-length // BLOCK_SIZE) for length in batch.context_lens]
        starts = [0]
        for count in pages:
            starts.append(starts[-1] + count)
        blocks = [block for table, n in zip(batch.block_tables, pages, strict=True) for block in table[:n]]
        last = [(length - 1) % BLOCK_SIZE + 1 for length in batch.context_lens]
        indptr, last_page = _pinned(starts), _pinned(last)
        indices = _pinned(blocks).to(self._device, non_blocking=True)
        if batch.padded:
            self._planned[batch.part] = self._plan_decode(batch.part, batch.num_rows, indptr, indices, last_page)
        else:
            self._planned[batch.part] = self._plan_any(batch, indptr, indices, last_page)
        self._slots[batch.part] = batch.slot_mapping
        self._copied[batch.part].record()

    def _plan_any(self, batch: BatchLayout, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> Any:
        c = self._config
        self._prefill.plan(
            _pinned(batch.row_starts),
            indptr,
            indices,
            last,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            BLOCK_SIZE,
            causal=True,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._prefill

    def _plan_decode(
        self, part: int, rows: int, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor
    ) -> Any:
        c, held = self._config, self._indices[part]
        if len(indices) > len(held):
            raise EngineError(f"attention: {len(indices)} blocks in a step, {len(held)} at most")
        if (part, rows) not in self._decode:
            self._decode[part, rows] = self._wrapper(rows, held)
        mine = held[: len(indices)]
        mine.copy_(indices)
        self._decode[part, rows].plan(
            indptr,
            mine,
            last,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            BLOCK_SIZE,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._decode[part, rows]

    def _wrapper(self, rows: int, indices: torch.Tensor) -> Any:
        """The parts share one workspace: a stream's kernels use it one after the other."""
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32, device=self._device),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=torch.ones(rows, dtype=torch.int32, device=self._device),
        )

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: int = 0) -> torch.Tensor:
        if part not in self._slots:
            raise EngineError("attention: plan() comes before forward()")
        keys, values = self.cache[layer]
        self._write(keys, values, k, v, self._slots[part])
        out: torch.Tensor = self._planned[part].run(q.contiguous(), (keys, values))
        return out


def _pinned(values: list[int]) -> torch.Tensor:
    """int32 [n] in pinned memory that is not reused before its copy to the GPU has ended."""
    return torch.tensor(values, dtype=torch.int32).pin_memory()
