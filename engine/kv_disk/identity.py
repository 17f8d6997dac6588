"""What tells the KV of one model, and of one way to compute it, from that of all others."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from engine.architectures.config import ModelConfig
from engine.attention.base import BLOCK_SIZE
from engine.files.model_file import ModelFile
from engine.ops.rope import inverse_frequencies
from engine.weights.store import WeightSource

_VERSION = 1  # of what blocks hold: to be raised when an attention backend lays them out otherwise
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file


def kv_identity(source: WeightSource, max_model_len: int, computed_by: Iterable[object]) -> bytes:
    """32 bytes. `computed_by`: precision, backends, whatever else decides a block's bytes; their `repr` counts.

    Of the weights' files, names, sizes, times of change and evenly spaced samples count: files that differ in all
    samples' gaps alone, and have another's time and size, would be taken for those.
    """
    digest = blake2b(digest_size=32)
    digest.update(repr((_VERSION, BLOCK_SIZE, source.identity, source.config, *computed_by)).encode())
    digest.update(_rope(source.config, max_model_len))
    for file in source.files:
        for sample in _samples(file):
            digest.update(sample)
    return digest.digest()


def _rope(config: ModelConfig, max_model_len: int) -> bytes:
    """Dynamic scaling depends on the longest length, not on the configuration alone."""
    tables = (inverse_frequencies(rotation, max_model_len) for rotation in config.rotations)
    return b"".join(angles.numpy().tobytes() + repr(factor).encode() for angles, factor in tables)


def _samples(file: ModelFile) -> Iterable[bytes]:
    size = min(_SAMPLE_BYTES, file.size)
    last = file.size - size
    return (file.read(last * i // (_SAMPLES - 1), size).tobytes() for i in range(_SAMPLES))
