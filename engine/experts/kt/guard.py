"""What kt_kernel does not check and would crash or lie on: sizes, weight types, buffers, and each call's values."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.architectures.config import ModelConfig
from engine.errors import ExpertBackendError, ModelFileError, UserError
from engine.experts.base import ExpertBuffers
from engine.weights.dequant import nonfinite
from engine.weights.store import ExpertStore
from engine.weights.threads import in_order

METHODS = ("auto", "AMXBF16", "AMXInt8", "AMXInt4", "GGUF")
# Types whose blocks kt_kernel's llamafile class multiplies rightly in every variant. Others abort the process (Q4_1,
# Q5_1, IQ4_NL), are wrong on CPUs without AVX512_BF16 (BF16), or less exact than their blocks (IQ4_XS: 0.05).
BLOCK_TYPES = ("F32", "F16", "Q4_0", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class Method:
    """One of kt_kernel's classes: its name there, and what hidden and intermediate size must be multiples of."""

    name: str
    extension_class: str
    multiple: int


_CLASSES = {
    "AMXBF16": Method("AMXBF16", "AMXBF16_MOE", 32),
    "AMXInt8": Method("AMXInt8", "AMXInt8_MOE", 64),
    "AMXInt4": Method("AMXInt4", "AMXInt4_MOE", 128),
    "GGUF": Method("GGUF", "MOE", 256),
}
_BYTES = {"AMXBF16": 2.0, "AMXInt8": 1.01, "AMXInt4": 0.51}  # of a weight, scales included
# On CPUs without AVX-512 only the bf16 class exists, under another name.
_AVX2_BF16 = Method("AMXBF16", "AVX2BF16_MOE", 16)


def methods_here(classes: Collection[str]) -> dict[str, Method]:
    """The methods that the loaded variant has, given its class names."""
    found = {name: method for name, method in _CLASSES.items() if method.extension_class in classes}
    if "AMXBF16" not in found and _AVX2_BF16.extension_class in classes:
        found["AMXBF16"] = _AVX2_BF16
    return found


def check_method(name: str, config: ModelConfig, here: dict[str, Method]) -> None:
    """UserError if the method is unknown, absent on this CPU, or does not take the model's sizes.

    "auto" needs what AMXBF16 needs: it is what a layer falls back to.
    """
    if name not in METHODS:
        raise UserError(f"kt_method {name!r} is unknown; allowed: {', '.join(METHODS)}", field="kt_method")
    wanted = "AMXBF16" if name == "auto" else name
    if wanted not in here:
        raise UserError(f"kt_method {wanted}: not on this CPU, which has {', '.join(here)}", field="kt_method")
    if not takes_sizes(here[wanted], config):
        fits = [m.name for m in here.values() if takes_sizes(m, config)]
        raise UserError(
            f"kt_method {wanted} needs hidden_size and moe_intermediate_size to be multiples of "
            f"{here[wanted].multiple}; this model has {config.hidden_size} and {config.moe_intermediate_size} "
            f"({'methods that fit: ' + ', '.join(fits) if fits else 'no kt method fits: use native or reference'})",
            field="kt_method",
        )


def takes_sizes(method: Method, config: ModelConfig) -> bool:
    return config.hidden_size % method.multiple == 0 and config.moe_intermediate_size % method.multiple == 0


def choose_method(name: str, store: ExpertStore, config: ModelConfig, here: dict[str, Method]) -> Method:
    """The class for a layer. "auto": the file's own blocks where kt_kernel takes them, else bf16.

    ModelFileError if GGUF is asked for and a projection's type is none that it takes.
    """
    types = {projection: store.type(projection) for projection, _ in store.projections()}
    refused = [f"{projection} is {kind}" for projection, kind in types.items() if kind not in BLOCK_TYPES]
    quantised = any(store.expert(projection, 0).quantised for projection in types)
    if name == "auto":
        blocks = quantised and not refused and "GGUF" in here and takes_sizes(here["GGUF"], config)
        return here["GGUF" if blocks else "AMXBF16"]
    if name == "GGUF" and refused:
        raise ModelFileError(
            f"layer {store.layer} experts: {', '.join(refused)}; kt_method GGUF takes {', '.join(BLOCK_TYPES)} "
            "(AMXBF16 takes every type)",
            field="kt_method",
        )
    return here[name]


def layer_bytes(store: ExpertStore, config: ModelConfig, name: str) -> int:
    """What a layer's weights take by a method, "auto" included, on a CPU that has them all."""
    method = name
    if name == "auto":
        kinds = [store.expert(projection, 0) for projection, _ in store.projections()]
        blocks = all(w.type in BLOCK_TYPES for w in kinds) and any(w.quantised for w in kinds)
        method = "GGUF" if blocks and takes_sizes(_CLASSES["GGUF"], config) else "AMXBF16"
    if method == "GGUF":
        return store.num_experts * sum(store.expert(projection, 0).num_bytes for projection, _ in store.projections())
    return int(store.num_weights * _BYTES[method])


def check_store(store: ExpertStore, config: ModelConfig) -> None:
    """ModelFileError for shapes that are not the model's and for values that are not finite.

    A NaN in a quantised class gives finite wrong rows, in bf16 it poisons every row that meets the expert.
    """
    rows, columns = config.moe_intermediate_size, config.hidden_size
    shapes = {"gate": (rows, columns), "up": (rows, columns), "down": (columns, rows)}
    for projection, held in store.projections():
        count = held.shape[0] if not isinstance(held, list) else len(held)
        if count != config.num_experts:
            raise ModelFileError(f"layer {store.layer} {projection}: {count} experts, not {config.num_experts}")
        weights = [store.expert(projection, expert) for expert in range(count)]
        wheres = [f"layer {store.layer} expert {e} {projection} ({weight.name})" for e, weight in enumerate(weights)]
        for weight, where in zip(weights, wheres, strict=True):
            if weight.shape != shapes[projection] or weight.type != store.type(projection):
                raise ModelFileError(
                    f"{where}: {weight.type} {list(weight.shape)}, not {store.type(projection)} "
                    f"{list(shapes[projection])} as the layer's others"
                )
        counts = in_order(partial(nonfinite, weight.data, weight.type, weight.shape) for weight in weights)
        with closing(counts):
            for weight, where, bad in zip(weights, wheres, counts, strict=True):
                if bad:
                    what = "blocks" if weight.quantised else "values"
                    raise ModelFileError(f"{where}: {bad} {what} are NaN or infinite")


def check_buffers(buffers: ExpertBuffers, config: ModelConfig, max_rows: int) -> None:
    """ExpertBackendError if kt_kernel could not read or write these buffers by pointer."""
    rows, top_k, hidden = buffers.max_rows, config.num_experts_per_tok, config.hidden_size
    if not 1 <= rows <= max_rows:
        raise ExpertBackendError(f"buffers of {rows} rows; this kt backend was made for 1 to {max_rows}")
    expected = {
        "bsz": (buffers.bsz, (1,), (torch.int32,)),
        "ids": (buffers.ids, (rows, top_k), (torch.int64,)),
        "weights": (buffers.weights, (rows, top_k), (torch.float32,)),
        "hidden": (buffers.hidden, (rows, hidden), (torch.bfloat16, torch.float32, torch.float16)),
        "out": (buffers.out, (rows, hidden), (buffers.hidden.dtype,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise ExpertBackendError(
                f"buffer {name} is {tensor.dtype} {list(tensor.shape)}, it must be {allowed} {list(shape)}"
            )
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ExpertBackendError(f"buffer {name} must be contiguous in host memory, it is on {tensor.device}")


def check_call(ids: npt.NDArray[np.int64], hidden: torch.Tensor, num_experts: int) -> str | None:
    """What is wrong with a call's ids [n, k] and hidden states [n, H], naming rows; None if nothing is.

    An id past the experts is skipped silently by kt_kernel; one twice in a row is computed wrongly by it.
    """
    if ids.min() < -1 or ids.max() >= num_experts:
        rows = np.flatnonzero(((ids < -1) | (ids >= num_experts)).any(axis=1))
        return f"{_rows(rows)}: expert ids must be -1 to {num_experts - 1}, found {ids[rows[0]].tolist()}"
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        rows = np.flatnonzero(twice.any(axis=1))
        return f"{_rows(rows)}: an expert is chosen twice, {ids[rows[0]].tolist()}"
    return nonfinite_rows(hidden, "hidden states")


def nonfinite_rows(values: torch.Tensor, what: str) -> str | None:
    """Names the rows of [n, H] that hold NaN or infinity; None if there are none."""
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return None
    return f"{_rows(np.flatnonzero(~finite.all(dim=1).numpy()))}: {what} are NaN or infinite"


def _rows(rows: npt.NDArray[np.intp]) -> str:
    shown = ", ".join(str(int(row)) for row in rows[:8])
    return f"rows {shown}" + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
