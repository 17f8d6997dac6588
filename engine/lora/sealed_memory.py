"""An adapter on its way from one process to another: tensors in a sealed memory file, the rest in a message beside it.

The file cannot change or shrink once it is sealed, so the receiver may map it and no copy is made.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import replace
from hashlib import blake2b
from math import prod
from typing import Any

import msgspec
import torch

from engine.errors import EngineError
from engine.lora.adapter import AdapterWeights, ExpertLora

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 64
_DIGEST_BYTES = 16

_Parts = tuple[msgspec.Raw, dict[int, ExpertLora], list[str], str, bytes]  # of an adapter: `write_sealed`


def write_sealed(weights: AdapterWeights) -> tuple[bytes, int]:
    """(all but the tensors, a sealed memory file with them). Takes `weights.experts` apart as it goes, so that little
    more than one copy exists. A digest of what the adapter computes goes with it: names of files and warnings are left
    out. OSError if the file would pass RLIMIT_FSIZE."""
    file = os.memfd_create("adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    end, digest = 0, blake2b(digest_size=_DIGEST_BYTES)

    def place(value: Any) -> Any:
        nonlocal end
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"an adapter holds a {type(value).__name__}")
        content = memoryview(value.contiguous().view(torch.uint8).reshape(-1).numpy().data)
        digest.update(content)
        start, at = end, 0
        while at < len(content):
            at += os.pwrite(file, content[at:], start + at)
        end = -(-(start + at) // _ALIGNMENT) * _ALIGNMENT
        return _NAMES[value.dtype], list(value.shape), start

    encode = msgspec.msgpack.Encoder(enc_hook=place).encode
    experts = {layer: msgspec.Raw(encode(weights.experts.pop(layer))) for layer in list(weights.experts)}
    rest = encode(replace(weights, warnings=[], path=""))
    digest.update(encode((rest, experts)))
    head = encode((msgspec.Raw(rest), experts, weights.warnings, weights.path, digest.digest()))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return head, file


def map_sealed(head: bytes, file: int) -> AdapterWeights:
    """What `write_sealed` wrote; tensors are private views of the file, which may be closed. EngineError if it is not
    sealed or does not hold what `head` says."""
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise EngineError("an adapter was handed over in memory that may change")
    size = os.fstat(file).st_size
    # private: kernels before 6.7 refuse shared mappings of what is sealed against writing
    memory = mmap.mmap(file, size, access=mmap.ACCESS_COPY) if size else bytearray(1)

    def find(kind: type, value: Any) -> Any:
        dtype, shape, start = value
        return torch.frombuffer(memory, dtype=_DTYPES[dtype], count=prod(shape), offset=start).reshape(shape)

    try:
        rest, experts, warnings, path, digest = msgspec.msgpack.decode(head, type=_Parts, dec_hook=find)
        weights = msgspec.msgpack.decode(rest, type=AdapterWeights, dec_hook=find)
    except (msgspec.DecodeError, ValueError, RuntimeError, LookupError, TypeError) as error:
        raise EngineError(f"an adapter was not handed over as it was read: {error}") from error
    return replace(weights, experts=experts, warnings=warnings, path=path, digest=digest)
