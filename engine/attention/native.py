"""Paged attention on the CPU kernels, rows and KV bf16 or float32: a row's bits are the same alone or in any batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mla import Latent
from engine.attention.base import AttentionBackend, BatchLayout, kv_scale_bytes
from engine.errors import EngineError, UserError

if TYPE_CHECKING:
    from native import _native

_KV_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 16
MAX_LATENT_WIDTH, MAX_ROTARY = 576, 256


def native_limit(spec: GroupedQuery | Latent) -> str | None:
    """Why the kernels cannot compute this attention; None if they can."""
    if isinstance(spec, Latent):
        return _latent_limit(spec)
    dim = spec.head_dim
    if MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM and dim % HEAD_DIM_STEP == 0:
        return None
    return f"head_dim {dim} is not a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"


def _sizes(spec: GroupedQuery | Latent) -> tuple[int, int, int]:
    """(KV heads, values of a key, of a value)."""
    if isinstance(spec, Latent):
        return 1, spec.width, spec.kv_rank
    return spec.kv_heads, spec.head_dim, spec.head_dim


def _latent_limit(spec: Latent) -> str | None:
    for name, size in (
        ("kv_lora_rank", spec.kv_rank),
        ("qk_nope_head_dim", spec.nope_dim),
        ("v_head_dim", spec.value_dim),
    ):
        if size % 32:
            return f"{name} {size} is not a multiple of 32"
    if spec.rope_dim % HEAD_DIM_STEP or spec.rope_dim > MAX_ROTARY:
        return f"qk_rope_head_dim {spec.rope_dim} is not a multiple of {HEAD_DIM_STEP} up to {MAX_ROTARY}"
    if spec.width > MAX_LATENT_WIDTH:
        return f"kv_lora_rank + qk_rope_head_dim is {spec.width}; the kernels take up to {MAX_LATENT_WIDTH}"
    return None


class NativeAttention(AttentionBackend):
    """Owns the KV blocks of `layers`, all of one `spec`, in the kernels' layout (drawn in
    native/src/attention/attention.hpp).

    `dtype` is that of q, k, v and the result, `kv_dtype` the cache's: the same (default), bfloat16 under float32 rows,
    or int8 with a float32 scale of each position and head; k and v are then rounded as they are stored. `pool` is a
    `native._native.WorkerPool`; `isa` "avx2", "avx512" or "amx", "" for the best. The cache's pages are taken from the
    system when a block is first written. `products` "int16" or "bfloat16" forces what keys and values of a bfloat16
    or int8 cache are multiplied as, which otherwise the CPU decides. A NaN in q, k or v stays within its own sequence.
    Raises UserError for shapes and dtypes that the kernels do not take.
    """

    def __init__(
        self,
        spec: GroupedQuery | Latent,
        layers: Sequence[int],
        num_blocks: int,
        dtype: torch.dtype,
        pool: _native.WorkerPool,
        isa: str = "",
        *,
        kv_dtype: torch.dtype | None = None,
        products: str = "",
    ) -> None:
        if limit := native_limit(spec):
            raise UserError(f"{limit}: use attention_backend reference", field="head_dim")
        if dtype not in (torch.bfloat16, torch.float32):
            raise UserError(f"dtype {dtype}: the native attention takes bfloat16 and float32", field="dtype")
        kv_dtype = kv_dtype or dtype
        if kv_dtype not in (dtype, torch.bfloat16, torch.int8):
            raise UserError(f"kv_dtype {kv_dtype}: beside {dtype} it is {dtype}, bfloat16 or int8", field="dtype")
        from native import _native

        latent = isinstance(spec, Latent)
        kv_heads, head_dim, value_dim = _sizes(spec)
        if latent and kv_dtype == torch.int8:
            raise UserError(
                "kv_cache_dtype int8: latents have one scale for keys and values of all heads; allowed are auto, "
                "float32 and bfloat16",
                field="kv_cache_dtype",
            )
        try:
            self.kernel = _native.PagedAttention(
                pool,
                layers=len(layers),
                num_blocks=num_blocks,
                heads=spec.heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                latent=value_dim if latent else 0,
                scale=spec.scale if isinstance(spec, Latent) else 0.0,
                window=0 if isinstance(spec, Latent) else spec.window or 0,
                kv=_KV_NAMES[kv_dtype],
                isa=isa,
                float_rows=dtype == torch.float32,
                products=products,
            )
        except ValueError as error:
            raise UserError(f"native attention: {error}") from error
        self.dtype = dtype
        self._q_shape, self._out_shape = (spec.heads, head_dim), (spec.heads, value_dim)
        self._k_shape, self._v_shape = (kv_heads, head_dim), (kv_heads, value_dim)
        self.places_of = {layer: place for place, layer in enumerate(layers)}  # in the kernels' cache
        self._num_blocks = num_blocks
        self._token_bytes = len(layers) * spec.cache.position_bytes(kv_dtype.itemsize, kv_scale_bytes(kv_dtype))

    @property
    def kv_bytes_per_token(self) -> int:
        return self._token_bytes

    def set_sinks(self, layer: int, sinks: torch.Tensor) -> None:
        """Copies them. EngineError for a layer that is not there and for other than float32 [H]."""
        place, heads = self._place(layer), self._q_shape[0]
        if sinks.shape != (heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous():
            raise EngineError(f"native attention: sinks: {sinks.dtype} {tuple(sinks.shape)}; wanted float32 [{heads}]")
        self.kernel.set_sinks(place, sinks.data_ptr())

    def _place(self, layer: int) -> int:
        if layer not in self.places_of:
            raise EngineError(f"native attention: layer: {layer}; allowed are {list(self.places_of)}")
        return self.places_of[layer]

    @property
    def cache_bytes(self) -> int:
        """Bytes of address space that the blocks take."""
        return int(self.kernel.cache_bytes)

    def host_planes(self) -> list[NDArray[np.uint8]]:
        """Valid as long as this object lives."""
        memory = (ctypes.c_uint8 * self.cache_bytes).from_address(self.kernel.cache_address)
        return [np.ctypeslib.as_array(memory).reshape(len(self.places_of), self._num_blocks, -1)]

    def plan(self, batch: BatchLayout) -> None:
        """`slot_mapping` and `positions` follow from the rows, which is what the kernels use."""
        try:
            self.kernel.plan(batch.row_starts, batch.context_lens, batch.block_tables)
        except ValueError as error:
            raise EngineError(f"native attention: {error}") from error

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q, k, v may be slices of one tensor: tokens any stride apart, heads and dimensions contiguous."""
        tokens, place = q.shape[0], self._place(layer)
        out = torch.empty((tokens, *self._out_shape), dtype=self.dtype)
        for name, t, shape in (("q", q, self._q_shape), ("k", k, self._k_shape), ("v", v, self._v_shape)):
            heads_lie = shape[0] == 1 or t.stride(1) == shape[1]
            if t.shape != (tokens, *shape) or t.dtype != self.dtype or not heads_lie or t.stride(2) != 1:
                raise EngineError(
                    f"native attention: {name} is {t.dtype} {tuple(t.shape)} with strides {t.stride()}; "
                    f"wanted {self.dtype} {(tokens, *shape)} with heads and dimensions contiguous"
                )
        try:
            self.kernel.forward(
                place,
                tokens,
                q=q.data_ptr(),
                q_stride=q.stride(0),
                k=k.data_ptr(),
                k_stride=k.stride(0),
                v=v.data_ptr(),
                v_stride=v.stride(0),
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        except ValueError as error:
            raise EngineError(f"native attention: {error}") from error
        return out
