"""The folder of `--kv-disk`, opened for an engine."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import UserError
from engine.kv_disk.disk import KvDisk
from engine.kv_disk.files import BlockFiles, Bytes
from engine.kv_disk.identity import kv_identity
from engine.planning.kv_disk import KvDiskPlan
from engine.planning.placement import kt_method
from engine.planning.plan import EnginePlan
from scheduler.memory.disk import DiskBlocks


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

    def serve(self, plan: EnginePlan, planes: Sequence[Bytes], blocks: DiskBlocks) -> KvDisk:
        """For the KV cache that `planes` are, and the scheduler's `blocks`."""
        return KvDisk(self.files, planes, blocks, _identity(plan))


def _identity(plan: EnginePlan) -> bytes:
    config, choices = plan.config, sorted(plan.placement.choices.items())
    isa = ""
    if plan.placement.native(".self_attn") or plan.placement.native("_proj"):
        from native import _native

        isa = _native.choose_isa(config.isa or "")
    return kv_identity(
        plan.source,
        plan.max_model_len,
        (plan.precision, plan.expert_quantise, choices, kt_method(config, plan.placement), isa, config.deterministic),
    )
