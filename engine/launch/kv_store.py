"""The folder of `--kv-disk`, opened for an engine, and what tells the KV of one model from that of all others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from engine.architectures.config import ModelConfig
from engine.attention.base import BLOCK_SIZE
from engine.errors import UserError
from engine.files.model_file import ModelFile
from engine.kv_disk.disk import KvDisk
from engine.kv_disk.files import BlockFiles, Bytes
from engine.ops.rope import inverse_frequencies
from engine.planning.kv_disk import KvDiskPlan
from engine.planning.placement import kt_method
from engine.planning.plan import EnginePlan
from engine.weights.store import WeightSource
from scheduler.memory.disk import DiskBlocks

_VERSION = 1  # of what blocks hold: to be raised when an attention backend lays them out otherwise
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file


class KvStore:
    """The folder, locked, and what is in it. Opened before weights are read, so that a folder that cannot be used is
    said at once: UserError."""

    def __init__(self, plan: KvDiskPlan) -> None:
        self.plan = plan
        self.files = BlockFiles(plan.folder, "kv_disk_dir")
        try:
            self.stored = self.files.scan()
        except OSError as error:
            self.files.close()
            raise UserError(f"--kv-disk-dir {plan.folder}: {error.strerror}", "kv_disk_dir") from None

    def serve(
        self, plan: EnginePlan, planes: Sequence[Bytes], state_planes: Sequence[Bytes], blocks: DiskBlocks
    ) -> KvDisk:
        """For the KV cache that `planes` are, the states that `state_planes` are, and the scheduler's `blocks`."""
        return KvDisk(self.files, planes, blocks, _identity(plan), state_planes)


def _identity(plan: EnginePlan) -> bytes:
    config, choices = plan.config, sorted(plan.placement.choices.items())
    isa = ""
    if plan.placement.native(".self_attn") or plan.placement.native("_proj"):
        from native import _native

        isa = _native.choose_isa(config.isa or "")
    return _digest(
        plan.source,
        plan.max_model_len,
        (plan.precision, plan.expert_quantise, choices, kt_method(config, plan.placement), isa, config.deterministic),
    )


def _digest(source: WeightSource, max_model_len: int, computed_by: Iterable[object]) -> bytes:
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
