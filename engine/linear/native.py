"""Dense projections on the CPU kernels: bf16, int8 and int4 weights as the file has them, adapters fused."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import EngineError, UserError
from engine.files.model_file import Bytes
from engine.linear.base import LatentUp, Linear, LinearBackend, LoraBatch
from engine.linear.embedding import BlockEmbedding, Embedding, PackedEmbedding
from engine.lora.adapter import LoraPair
from engine.weights.latent import latent_halves
from engine.weights.pack_cache import PackCache, PackKey
from engine.weights.packed import (
    QUANTISED_FORMATS,
    exact,
    keeps_own,
    naming,
    packed_bytes,
    packed_format,
    plain_format,
    sources,
)
from engine.weights.store import WeightTensor

if TYPE_CHECKING:
    from native import _native

_PAGE, _HUGE_PAGE = 4096, 2 << 20


def weight_bytes(weight: WeightTensor, element_bytes: int, quantise: str | None) -> int:
    """What NativeLinearBackend takes for a projection [out, in]; `element_bytes`: of a plain weight."""
    return _mapped(packed_bytes(weight, plain_format(element_bytes, quantise)))


def embedding_bytes(weight: WeightTensor, element_bytes: int, quantise: str | None, tied: bool) -> int | None:
    """What NativeLinearBackend.embedding takes beside the head (`tied`: which holds the same tensor); None: it makes
    none."""
    plain = plain_format(element_bytes, quantise)
    if tied and exact(weight.type, plain):
        return 0
    if keeps_own(weight.type, plain):
        return weight_bytes(weight, element_bytes, quantise)
    return weight.num_bytes if weight.quantised else None


def _mapped(num_bytes: int) -> int:
    """Memory from the kernel comes in huge pages where one would be filled."""
    step = _HUGE_PAGE if num_bytes >= _HUGE_PAGE else _PAGE
    return -(-num_bytes // step) * step


class NativeLinear(Linear):
    """x bf16 or float32 [T, in], rows any stride apart; a row's result does not depend on its neighbours' values, nor
    (a deterministic backend) on their number.

    Sums are float32 and rounded once. Quantised weights meet activations in int8 blocks of 32 (in calls of many rows on
    AMX both become bf16), a bf16 weight meets bf16 activations, an f16 or float32 one float32; an adapter's A meets
    bf16 activations (float32 where the weight is). A row with a NaN or infinity comes out as NaN and leaves the
    others alone.
    """

    def __init__(
        self, name: str, packed: _native.PackedLinear, runner: _native.LinearRunner, shape: tuple[int, int]
    ) -> None:
        self.name = name
        self.packed = packed
        self.out_features, self.in_features = shape
        self.runner = runner

    @property
    def format(self) -> str:
        """How the weights lie: a format of native/src/packing/format.hpp."""
        return str(self.packed.format)

    @property
    def num_bytes(self) -> int:
        return int(self.packed.num_bytes)

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        rows, bf16 = _input(self, x)
        out = torch.empty((rows, self.out_features), dtype=x.dtype)
        self.runner.run(
            self.packed,
            x=x.data_ptr(),
            stride=x.stride(0),
            rows=rows,
            is_bf16=bf16,
            slots=slots_address(lora, rows),
            out=out.data_ptr(),
            out_stride=self.out_features,
        )
        return out

    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        if slot < 1:
            raise EngineError(f"{self.name}: slot {slot}; an adapter's slot is 1 or more")
        if pair is None:
            self.packed.clear_adapter(slot)
            return
        a, b, rank = pair.a, pair.b, pair.rank
        if a.shape != (rank, self.in_features) or b.shape != (self.out_features, rank) or rank == 0:
            raise EngineError(
                f"{self.name}: LoRA A {tuple(a.shape)}, B {tuple(b.shape)}; wanted [r, {self.in_features}] and "
                f"[{self.out_features}, r], r at least 1"
            )
        dtype = torch.bfloat16 if a.dtype == b.dtype == torch.bfloat16 else torch.float32
        a, b = (t.detach().to("cpu", dtype).contiguous() for t in (a, b))
        self.packed.set_adapter(slot, a.data_ptr(), b.data_ptr(), dtype == torch.bfloat16, rank, pair.scale)


class NativeLatentUp(LatentUp):
    """x bf16 or float32 [T, H, n], values of a head contiguous; as `NativeLinear` computes. An adapter's small products
    are float32, of weights in bf16 (float32 where the projection is). `halves`: K_h^T of all heads [H x kv_rank, nope],
    and V_h [H x value, kv_rank]."""

    def __init__(self, kernel: _native.LatentUp, keys: NativeLinear, values: NativeLinear, heads: int) -> None:
        self.kernel, self.halves = kernel, (keys, values)
        self._heads, self._nope, self._rank = heads, keys.in_features, values.in_features
        self._value = values.out_features // heads
        self._bytes = keys.num_bytes + values.num_bytes

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def absorb(self, q: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        return self._run(self.kernel.absorb, q, self._nope, self._rank, lora)

    def values(self, mixed: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        return self._run(self.kernel.values, mixed, self._rank, self._value, lora)

    def _run(
        self, product: Callable[..., None], x: torch.Tensor, inner: int, outer: int, lora: LoraBatch | None
    ) -> torch.Tensor:
        tokens, bf16 = x.shape[0], x.dtype is torch.bfloat16
        if x.shape != (tokens, self._heads, inner) or x.stride(2) != 1 or not (bf16 or x.dtype is torch.float32):
            raise EngineError(
                f"x: {x.dtype} {tuple(x.shape)} with strides {x.stride()}; wanted bf16 or float32 "
                f"[T, {self._heads}, {inner}], values of a head contiguous"
            )
        out = torch.empty((tokens, self._heads, outer), dtype=x.dtype)
        product(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_head_stride=x.stride(1),
            out=out.data_ptr(),
            out_stride=self._heads * outer,
            out_head_stride=outer,
            tokens=tokens,
            is_bf16=bf16,
            slots=slots_address(lora, tokens),
        )
        return out

    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        if pair is None:
            self.kernel.clear_adapter(slot)
            return
        dtype = torch.bfloat16 if pair.a.dtype == pair.b.dtype == torch.bfloat16 else torch.float32
        a, b = (t.detach().to("cpu", dtype) for t in (pair.a, pair.b))
        by_heads = b.view(self._heads, self._nope + self._value, pair.rank)
        a, keys, values = (t.contiguous() for t in (a, by_heads[:, : self._nope], by_heads[:, self._nope :]))
        try:
            self.kernel.set_adapter(
                slot, a.data_ptr(), keys.data_ptr(), values.data_ptr(), dtype == torch.bfloat16, pair.rank, pair.scale
            )
        except ValueError as error:
            raise EngineError(f"kv_b_proj: {error}") from error


class NativeLinearBackend(LinearBackend):
    """Packs each weight once, over `pool` (a `native._native.WorkerPool`), into the format that holds it without loss.

    F32 and BF16 weights are held as `plain`, bfloat16 or float32 (default: `dtype`, the activations'), F16 likewise but
    as it is where `plain` is bfloat16; `quantise`
    ("int8": as Q8_0, "int4": as Q4_1) makes them smaller instead. GGUF types without a packed format are dequantised
    and treated likewise. `cache`: keeps packed weights on disk; None: nothing does. `deterministic`: a row's result
    never depends on the other rows; otherwise calls of many rows use faster kernels where there are some.
    Calls of one backend follow one another: its scratch is shared.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        pool: _native.WorkerPool,
        isa: str = "",
        quantise: str | None = None,
        *,
        plain: torch.dtype | None = None,
        cache: PackCache | None = None,
        deterministic: bool = False,
    ) -> None:
        plain = plain or dtype
        if not {dtype, plain} <= {torch.bfloat16, torch.float32}:
            raise UserError(f"dtype {dtype}, {plain}: the native projections take bfloat16 and float32", field="dtype")
        if quantise is not None and quantise not in QUANTISED_FORMATS:
            raise UserError(f"quantise {quantise!r}: allowed are {', '.join(QUANTISED_FORMATS)}", field="quantise")
        self._native: Any = importlib.import_module("native._native")
        self._pool = pool
        self._isa = isa
        self._cache = cache
        self._plain = plain_format(plain.itemsize, quantise)
        try:
            self._runner: _native.LinearRunner = self._native.LinearRunner(pool, isa, deterministic)
        except ValueError as error:
            raise UserError(f"native linear: {error}") from error

    def load(self, name: str, weight: WeightTensor, bias: WeightTensor | None) -> NativeLinear:
        if len(weight.shape) != 2:
            raise UserError(f"{name}: shape {weight.shape}; a projection has two dimensions", field=name)
        added = None if bias is None else bias.dequantise(torch.float32).contiguous()
        if added is not None and added.shape != weight.shape[:1]:
            raise UserError(f"{name}: bias {tuple(added.shape)}; wanted {weight.shape[:1]}", field=name)
        form, shards = self._form(weight), self._pool.groups
        n, k = weight.shape

        def make() -> Any:
            bias = 0 if added is None else added.data_ptr()
            return self._native.PackedLinear(form, n, k, shards, bias, self._pool.nodes)

        def pack(made: _native.PackedLinear) -> None:
            kind, data = self._source(weight)
            for file, (place,) in sources([data]):
                with naming(file) as descriptor:
                    made.load(self._pool, kind, place, data.nbytes, descriptor)

        try:
            if self._cache is None:
                packed = make()
                pack(packed)
            else:
                source = self._cache.source_hash([weight])
                key = PackKey(name, self._native.LAYOUT_VERSION, (n, k), (form,), shards, source)
                packed = self._cache.load(key, make, pack, self._pool)
        except ValueError as error:
            raise UserError(f"{name}: {error}", field=name) from error
        return NativeLinear(name, packed, self._runner, (n, k))

    def latent_up(self, name: str, weight: WeightTensor, heads: int, nope: int) -> LatentUp:
        """Each half in a format of its own (`latent_halves`)."""
        stored = latent_halves(weight, heads, nope)
        keys, values = (
            self.load(f"{name}.{part}", half, None) for part, half in zip(("keys", "values"), stored, strict=True)
        )
        kernel = self._native.LatentUp(
            self._pool, keys.packed, values.packed, heads, self._isa, self._runner.deterministic
        )
        return NativeLatentUp(kernel, keys, values, heads)

    def embedding(self, name: str, weight: WeightTensor, head: Linear | None) -> Embedding | None:
        """Quantised, F16, or shared with the head: packed, if that loses nothing. A quantised type that has no packed
        form stays as it is; other weights are smallest and quickest as a table."""
        if isinstance(head, NativeLinear) and exact(weight.type, self._plain):
            return PackedEmbedding(head.packed, self._pool, weight.shape[1], shared=True)
        if keeps_own(weight.type, self._plain):
            packed = self.load(name, weight, None).packed
            return PackedEmbedding(packed, self._pool, weight.shape[1], shared=False)
        return BlockEmbedding(weight) if weight.quantised else None

    def _form(self, weight: WeightTensor) -> str:
        return packed_format(weight.type, self._plain)

    def _source(self, weight: WeightTensor) -> tuple[str, Bytes]:
        """Type and bytes to pack. A type without a packed format is dequantised."""
        if self._native.has_source_type(weight.type):
            return weight.type, weight.data
        return "F32", weight.dequantise(torch.float32).view(torch.uint8).flatten().numpy()

    def join(self, linears: Sequence[Linear]) -> Callable[[torch.Tensor, LoraBatch | None], list[torch.Tensor]]:
        """One native call: x is packed once and the pool is woken once. Any number of projections."""
        own = [linear for linear in linears if isinstance(linear, NativeLinear)]
        if len(own) != len(linears) or len({linear.in_features for linear in own}) != 1:
            raise EngineError("projections that are joined must be native and share their input's size")
        packed, sizes = [linear.packed for linear in own], [linear.out_features for linear in own]
        first, runner = own[0], self._runner

        def run(x: torch.Tensor, lora: LoraBatch | None) -> list[torch.Tensor]:
            rows, bf16 = _input(first, x)
            outs = [torch.empty((rows, size), dtype=x.dtype) for size in sizes]
            places = [out.data_ptr() for out in outs]
            runner.run_many(
                packed,
                x=x.data_ptr(),
                stride=x.stride(0),
                rows=rows,
                is_bf16=bf16,
                slots=slots_address(lora, rows),
                outs=places,
                out_strides=sizes,
            )
            return outs

        return run


def _input(linear: NativeLinear, x: torch.Tensor) -> tuple[int, bool]:
    """(rows, whether bf16) of an x that the kernels can read; EngineError otherwise."""
    bf16 = x.dtype is torch.bfloat16
    if x.dim() != 2 or x.shape[1] != linear.in_features or not (bf16 or x.dtype is torch.float32):
        raise EngineError(
            f"{linear.name}: x is {x.dtype} {tuple(x.shape)}; wanted bf16 or float32 [T, {linear.in_features}]"
        )
    if x.stride(1) != 1 and linear.in_features > 1:
        raise EngineError(f"{linear.name}: x has strides {x.stride()}; rows must be contiguous")
    return x.shape[0], bf16


def slots_address(lora: LoraBatch | None, rows: int) -> int:
    """Address of the rows' slots [T], 0 for a base-only batch."""
    if lora is None or not lora.groups:
        return 0
    slots = lora.slots
    if slots.shape != (rows,) or slots.dtype is not torch.int32 or not slots.is_contiguous():
        raise EngineError(f"slots: {slots.dtype} {tuple(slots.shape)}; wanted contiguous int32 [{rows}]")
    return int(slots.data_ptr())
