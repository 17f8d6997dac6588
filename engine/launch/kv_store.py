"""The folder of `--kv-disk`, opened for an engine, and what tells the KV of one model from that of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import torch

from engine.architectures.config import ModelConfig
from engine.attention.base import BLOCK_SIZE, CacheBackend
from engine.attention.delta import DeltaBackend
from engine.device import Arrival
from engine.errors import UserError
from engine.files.model_file import ModelFile
from engine.kv_disk.disk import KvDisk, disk_threads
from engine.kv_disk.files import BlockFiles
from engine.kv_disk.units import DeviceUnits, HostUnits, Units
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
        self,
        plan: EnginePlan,
        blocks: DiskBlocks,
        launched: Callable[[], Arrival],
        backends: Sequence[CacheBackend],
    ) -> KvDisk:
        """For what `backends` keep, and the scheduler's `blocks`. `launched`: as `KvDisk` takes it."""
        paged = [each for each in backends if not isinstance(each, DeltaBackend)]
        nets = [each for each in backends if isinstance(each, DeltaBackend)]
        units = [_units(each, plan.placement.device) for each in (paged, nets) if each]
        return KvDisk(self.files, blocks, _identity(plan), launched, *units)


def _units(backends: Sequence[CacheBackend], device: str) -> Units:
    if device == "cpu":
        return HostUnits([plane for each in backends for plane in each.host_planes()])
    return DeviceUnits([plane for each in backends for plane in each.device_planes()], disk_threads())


def _identity(plan: EnginePlan) -> bytes:
    config, choices = plan.config, sorted(plan.placement.choices.items())
    machine = ""
    if plan.placement.device != "cpu":
        machine = torch.cuda.get_device_name(plan.placement.device)
    elif plan.placement.native(".self_attn") or plan.placement.native("_proj"):
        from native import _native

        machine = _native.choose_isa(config.isa or "")
    return _digest(
        plan.source,
        plan.max_model_len,
        (
            plan.precision,
            plan.expert_quantise,
            choices,
            kt_method(config, plan.placement),
            machine,
            config.deterministic,
        ),
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
