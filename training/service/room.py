"""Memory for runs: on the CPU, and beside a GPU there for all but the routed experts."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from engine.architectures.config import ModelConfig
from engine.memory.costs import (
    kept_bytes,
    training_bytes,
    training_expert_bytes,
    training_run_bytes,
    training_run_expert_bytes,
)
from engine.memory.limits import cpu_memory
from training.service.runs import TunedRun

LEFT_FREE = 256 << 20  # bytes of each device's memory that no new adapter takes


class Room:
    """Bytes by device, "cpu" and "cuda", of a model on `device` whose micro-batches have so many tokens. `kept`: for
    what layers of one keep for their backward."""

    def __init__(self, config: ModelConfig, device: torch.device, micro_batch: int) -> None:
        self._config, self._device = config, device
        on_gpu = device.type != "cpu"
        memory = torch.cuda.mem_get_info(device)[1] if on_gpu else cpu_memory().limit_bytes
        self.kept = kept_bytes(memory)
        self._batch = {device.type: training_bytes(config, micro_batch, self.kept)}
        if on_gpu:
            self._batch["cpu"] = training_expert_bytes(config, micro_batch, self.kept)

    def of_run(self, rank: int, targets: Collection[str]) -> dict[str, int]:
        total = training_run_bytes(self._config, rank, targets)
        if self._device.type == "cpu":
            return {"cpu": total}
        experts = training_run_expert_bytes(self._config, rank, targets)
        return {self._device.type: total - experts, "cpu": experts}

    def free(self, runs: Iterable[TunedRun]) -> dict[str, int]:
        """For one more run, beside a micro-batch and what the `runs` are still to take."""
        free, runs = {"cpu": cpu_memory().free_bytes}, list(runs)
        if self._device.type != "cpu":
            free[self._device.type] = _free_on(self._device)
        return {
            device: size - LEFT_FREE - self._batch[device] - sum(run.unallocated(device) for run in runs)
            for device, size in free.items()
        }


def _free_on(gpu: torch.device) -> int:
    """What torch has not asked for, or has and does not use."""
    return torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
