"""The native kernels' packed format of a stored tensor (native/src/packing/format.hpp), and what it takes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from engine.errors import ModelFileError
from engine.files.model_file import Bytes, FileBytes, MadeBytes, ModelFile
from engine.weights.store import WeightTensor
from engine.weights.threads import made_ahead

QUANTISED_FORMATS = {"int8": "i8", "int4": "i4m"}  # by what `quantise` says; the same as Q8_0 and Q4_1
_FLOATS = ("F32", "F16", "BF16")


def plain_format(element_bytes: int, quantise: str | None) -> str:
    """How unquantised weights are packed; `element_bytes`: of one that is not made smaller."""
    return QUANTISED_FORMATS[quantise] if quantise else "f32" if element_bytes == 4 else "bf16"


def repacks(kind: str) -> bool:
    """Whether a type is quantised and has a packed format of its own, which holds it without loss. Other quantised
    types are dequantised and then held as unquantised weights are."""
    native: Any = importlib.import_module("native._native")
    return kind not in _FLOATS and bool(native.has_source_type(kind))


def packed_format(kind: str, plain: str) -> str:
    """`plain`: of unquantised weights. F16 is kept where it would become bf16: both are as large."""
    native: Any = importlib.import_module("native._native")
    return str(native.format_of(kind)) if keeps_own(kind, plain) else plain


def keeps_own(kind: str, plain: str) -> bool:
    """Whether a type is packed in a format that only it has."""
    return repacks(kind) or (kind == "F16" and plain == "bf16")


def exact(kind: str, plain: str) -> bool:
    """Whether packing loses nothing."""
    return keeps_own(kind, plain) or plain == "f32" or (plain == "bf16" and kind == "BF16")


def packed_bytes(weight: WeightTensor, plain: str) -> int:
    """Of a matrix [out, in]."""
    native: Any = importlib.import_module("native._native")
    return int(native.packed_size(packed_format(weight.type, plain), *weight.shape))


def sources(parts: Sequence[Bytes]) -> Iterator[tuple[ModelFile | None, list[int]]]:
    """What the kernels that pack read: runs of parts of one file, each with where its parts begin there; or None and
    addresses. The parts must outlive the packing; what is in memory must be contiguous. Bytes that must be made are
    runs of one part, made on threads ahead of their turn, and are gone when the next is asked for."""
    for key, run in groupby(parts, key=lambda data: data.file if isinstance(data, FileBytes) else type(data)):
        some = list(run)
        if key is MadeBytes:
            for made in made_ahead(some):
                yield None, [_address(made)]
            continue
        file = key if isinstance(key, ModelFile) else None
        yield file, [data.start if isinstance(data, FileBytes) else _address(data) for data in some]


def _address(data: Any) -> int:
    if not data.flags.c_contiguous:
        raise ValueError("weights in memory must be contiguous")
    return int(data.ctypes.data)


@contextmanager
def naming(file: ModelFile | None) -> Iterator[int]:
    """The descriptor that the kernels read, -1 for memory. ModelFileError with the file's name if they could not."""
    try:
        yield -1 if file is None else file.fd
    except RuntimeError as error:
        if file is None:
            raise
        raise ModelFileError(f"{file.path}: {error}", "model") from error
