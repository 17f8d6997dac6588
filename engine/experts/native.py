"""Routed experts on our own CPU kernels: one copy of the weights, every row with its own adapter in the same pass."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.architectures.config import ModelConfig
from engine.errors import EngineError, ExpertBackendError, ModelFileError, UserError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import (
    ExpertCounters,
    ExpertPlaces,
    NativeKernels,
    NativeTasks,
    PackedWeights,
    TouchedExperts,
)
from engine.files.model_file import Bytes
from engine.lora.adapter import ExpertLora
from engine.weights.pack_cache import PackCache, PackKey
from engine.weights.packed import QUANTISED_FORMATS, naming, packed_bytes, packed_format, plain_format, sources
from engine.weights.store import ExpertStore, WeightTensor, dequantised
from native.topology import make_pool, pool_groups

if TYPE_CHECKING:
    from native import _native

PROJECTIONS = ("gate", "up", "down")


@dataclass
class _Call:
    """A bound task, the count that it adds to, and whether it was posted and not yet waited for."""

    task: _native.MoeTask
    touched: torch.Tensor
    posted: bool = False


def layer_bytes(store: ExpertStore, element_bytes: int, quantise: str | None) -> int:
    """What NativeExperts takes for a layer's weights; `element_bytes`: of a plain weight."""
    plain = plain_format(element_bytes, quantise)
    packed = sum(packed_bytes(store.expert(projection, 0), plain) for projection in PROJECTIONS)
    return store.num_experts * packed + sum(4 * math.prod(bias.shape) for bias in store.biases.values())


def scratch_bytes(
    store: ExpertStore,
    config: ModelConfig,
    rows: int,
    *,
    plain: torch.dtype,
    quantise: str | None,
    rank: int,
    isa: str,
    deterministic: bool,
    threads: int | None,
) -> int:
    """What NativeExperts take besides a layer's weights in calls of up to `rows` rows. `rank`: of the largest adapter,
    0: none; `threads`: of the pool, None: its own number. UserError for an `isa` that is not to be had."""
    native: Any = importlib.import_module("native._native")
    forms = [packed_format(store.type(name), plain_format(plain.itemsize, quantise)) for name in PROJECTIONS]
    pool = [len(group) for group in pool_groups(threads)]
    sizes = (config.hidden_size, config.moe_intermediate_size)
    try:
        top_k = config.num_experts_per_tok
        return int(native.expert_scratch_bytes(isa, deterministic, pool, *sizes, forms, rows, top_k, rank))
    except ValueError as error:
        raise UserError(f"native experts: {error}", field="isa") from error


class NativeExperts(ExpertBackend):
    """GGUF blocks are repacked without loss (native/src/packing/format.hpp draws the layout). Plain weights are held as
    `plain`, bfloat16 or float32 (default: `dtype`, the activations'; F16 as it is where that is bfloat16), or are
    quantised on request.

    `pool`: a `native._native.WorkerPool` to share with other backends; default: its own over this process's CPUs.
    `isa`: "avx2", "avx512" or "amx"; "" is KTSERVE_ISA or the machine's best. `quantise`: "int8" or "int4" for plain
    weights. `cache`: keeps packed layers on disk; None: nothing does. `deterministic`: a row's result never depends on
    the other rows; otherwise experts with many rows use faster kernels where there are some. UserError for sizes, types
    or settings that the kernels do not take.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        pool: _native.WorkerPool | None = None,
        *,
        isa: str = "",
        quantise: str | None = None,
        cache: PackCache | None = None,
        plain: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> None:
        plain = plain or dtype
        if not {dtype, plain} <= {torch.bfloat16, torch.float32}:
            raise EngineError(f"dtype {dtype}, {plain}: the native experts take bfloat16 and float32")
        if quantise is not None and quantise not in QUANTISED_FORMATS:
            raise EngineError(f"quantise {quantise}: allowed are {', '.join(QUANTISED_FORMATS)}")
        self._config = config
        self._weight_dtype = plain
        self._plain = plain_format(plain.itemsize, quantise)
        try:
            self._native: Any = importlib.import_module("native._native")
            self.pool: _native.WorkerPool = pool if pool is not None else make_pool()
            self._runner: _native.MoeRunner = self._native.MoeRunner(self.pool, isa, deterministic)
        except (ImportError, ValueError) as error:
            raise UserError(f"native experts: {error}", field="expert_backend") from error
        self._layers: dict[int, _native.ExpertLayer] = {}
        self._touched = TouchedExperts.of(len(config.layers))
        self._cache = cache

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return str(self._runner.isa)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(layer.num_bytes for layer in self._layers.values())

    @property
    def weight_bytes_read(self) -> int:
        """Bytes of base weights that all calls so far have gone through: an expert's once for all rows of a work item,
        whatever adapters they have."""
        return int(self._runner.weight_bytes_read)

    @property
    def offers(self) -> tuple[object, ...]:
        counters = ExpertCounters(self.choices, lambda: self.weight_bytes_read)
        places = ExpertPlaces(lambda: {"CPU": self.num_bytes})
        tasks = NativeTasks(self.pool, self._native_task)
        kernels = NativeKernels(self.pool, self.isa)
        return tasks, PackedWeights(self._layers), kernels, counters, places, self._touched

    def choices(self) -> dict[int, list[int]]:
        """By layer, how often rows have chosen each of its experts in all calls so far."""
        return {index: layer.choices for index, layer in self._layers.items()}

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        types = [store.type(name) for name in PROJECTIONS]
        shape = (store.num_experts, self._config.hidden_size, self._config.moe_intermediate_size)
        forms = [packed_format(kind, self._plain) for kind in types]

        def make() -> _native.ExpertLayer:
            activation = store.activation
            made: _native.ExpertLayer = self._native.ExpertLayer(
                *shape,
                forms,
                self.pool.groups,
                self.pool.nodes,
                biased=bool(store.biases),
                limit=activation.limit or 0.0,
                alpha=activation.alpha,
            )
            return made

        def pack(made: _native.ExpertLayer) -> None:
            for projection, name in enumerate(PROJECTIONS):
                kind, parts = self._source(store, name)
                first = 0
                for file, places in sources(parts):
                    try:
                        with naming(file) as descriptor:
                            made.load(self.pool, projection, kind, first, places, descriptor)
                    except ValueError as error:
                        raise ModelFileError(f"{store.name(name)}: {error}") from error
                    first += len(places)
                if bias := store.biases.get(name):
                    values = self._bias(bias, name)
                    try:
                        made.load_bias(projection, values.data_ptr())
                    except ValueError as error:
                        raise ModelFileError(f"{bias.name}: {error}") from error

        try:
            if self._cache is None:
                made = make()
                pack(made)
                self._layers[layer] = made
                return
            every = (store.expert(name, e) for name, _ in store.projections() for e in range(store.num_experts))
            source = self._cache.source_hash((*every, *store.biases.values()))
            name = f"layer-{layer:03}"
            key = PackKey(name, self._native.LAYOUT_VERSION, shape, tuple(forms), self.pool.groups, source)
            self._layers[layer] = self._cache.load(key, make, pack, self.pool)
        except ValueError as error:
            raise UserError(f"layer {layer}, native experts: {error}", field="expert_backend") from error

    def _source(self, store: ExpertStore, name: str) -> tuple[str, list[Bytes]]:
        """One projection's type and each expert's rows. A type without a packed format is dequantised."""
        experts: list[WeightTensor] = [store.expert(name, e) for e in range(store.num_experts)]
        out, inner = self._config.hidden_size, self._config.moe_intermediate_size
        shape = (out, inner) if name == "down" else (inner, out)
        for weight in experts:
            if weight.shape != shape:
                raise ExpertBackendError(f"{weight.name} is {weight.shape}; the model's {name} is {shape}")
        kind = experts[0].type
        if self._native.has_source_type(kind):
            return kind, [weight.data for weight in experts]
        plain, dtype = ("F32", torch.float32) if self._weight_dtype == torch.float32 else ("BF16", torch.bfloat16)
        return plain, [values.view(torch.uint8).numpy() for values in dequantised(experts, dtype)]

    def _bias(self, bias: WeightTensor, name: str) -> torch.Tensor:
        """Contiguous float32 [E, out]."""
        out = self._config.hidden_size if name == "down" else self._config.moe_intermediate_size
        if bias.shape != (shape := (self._config.num_experts, out)):
            raise ExpertBackendError(f"{bias.name} is {bias.shape}; the model's {name} has biases {shape}")
        return bias.dequantise(torch.float32).contiguous()

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        """Layers that this backend does not hold are another backend's."""
        for index, layer in self._layers.items():
            lora = (layers or {}).get(index)
            if lora is None:
                layer.clear_lora(slot)
            else:
                self._put(layer, slot, lora)

    def _put(self, layer: _native.ExpertLayer, slot: int, lora: ExpertLora) -> None:
        tensors = [lora.gate_a, lora.up_a, lora.down_a, lora.gate_b, lora.up_b, lora.down_b]
        bf16 = all(t.dtype == torch.bfloat16 for t in tensors)
        held = [t.to("cpu", torch.bfloat16 if bf16 else torch.float32).contiguous() for t in tensors]
        self._check_lora(lora)
        pointers = [t.data_ptr() for t in held]
        scales = [lora.gate_scale, lora.up_scale, lora.down_scale]
        try:
            layer.set_lora(self.pool, slot, lora.rank, bf16, pointers[:3], pointers[3:], scales)
        except ValueError as error:
            raise ExpertBackendError(f"slot {slot}, native experts: {error}") from error

    def _check_lora(self, lora: ExpertLora) -> None:
        e, h, i = self._config.num_experts, self._config.hidden_size, self._config.moe_intermediate_size
        r = lora.rank
        expected = {
            "gate_a": (e, r, h),
            "up_a": (e, r, h),
            "down_a": (e, r, i),
            "gate_b": (e, i, r),
            "up_b": (e, i, r),
            "down_b": (e, h, r),
        }
        for name, shape in expected.items():
            if (got := tuple(getattr(lora, name).shape)) != shape:
                raise ExpertBackendError(f"expert LoRA {name} is {got}; the model's is {shape}")

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        if layer not in self._layers:
            raise ExpertBackendError(f"layer {layer} has no experts loaded (loaded: {sorted(self._layers)})")
        self._check_buffers(buffers)
        b, touched = buffers, self._touched.counts[layer]
        try:
            task = self._native.MoeTask(
                self._runner,
                self._layers[layer],
                bsz=b.bsz.data_ptr(),
                ids=b.ids.data_ptr(),
                weights=b.weights.data_ptr(),
                slots=b.slots.data_ptr(),
                hidden=b.hidden.data_ptr(),
                out=b.out.data_ptr(),
                max_rows=b.max_rows,
                top_k=b.ids.shape[1],
                bf16=b.hidden.dtype == torch.bfloat16,
                touched=touched.data_ptr(),
            )
        except ValueError as error:
            raise ExpertBackendError(f"native experts: {error}") from error
        return ExpertTask(layer, buffers, _Call(task, touched))

    def _check_buffers(self, b: ExpertBuffers) -> None:
        if b.hidden.dtype not in (torch.bfloat16, torch.float32):
            raise ExpertBackendError(f"hidden is {b.hidden.dtype}; the native experts take bfloat16 and float32")
        rows, h = b.max_rows, self._config.hidden_size
        k = b.ids.shape[-1]
        expected = {
            "bsz": ((1,), torch.int32),
            "ids": ((rows, k), torch.int64),
            "weights": ((rows, k), torch.float32),
            "slots": ((rows,), torch.int32),
            "hidden": ((rows, h), b.hidden.dtype),
            "out": ((rows, h), b.hidden.dtype),
        }
        for name, (shape, dtype) in expected.items():
            t: torch.Tensor = getattr(b, name)
            if tuple(t.shape) != shape or t.dtype != dtype or t.device.type != "cpu" or not t.is_contiguous():
                got = f"{t.dtype} {tuple(t.shape)} on {t.device}"
                raise ExpertBackendError(f"buffer {name} is {got}; needed is contiguous {dtype} {shape} on cpu")

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        if stream is not None:
            raise ExpertBackendError("native experts serve a GPU's stream through the bridge, not through post")
        task.handle.posted = True

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        """Computes the posted task; the calling thread is worker 0 of the pool."""
        call: _Call = task.handle
        if not call.posted:
            raise ExpertBackendError(f"layer {task.layer}: wait without post")
        call.posted = False
        try:
            call.task.run()
        except (ValueError, RuntimeError, MemoryError) as error:
            raise ExpertBackendError(f"layer {task.layer}, native experts: {error}") from error

    def _native_task(self, task: ExpertTask) -> _native.MoeTask:
        call: _Call = task.handle
        return call.task

    def close(self) -> None:
        """Drops the weights; memory is given back when the last bound task is gone."""
        self._layers.clear()
