"""The bridge to CUDA without a GPU: the caller plays the stream's part, the poller thread and its words are real."""

from __future__ import annotations

import torch

from engine.experts.base import ExpertTask
from engine.experts.bridge.backend import CudaBridge
from engine.experts.capabilities import HotPart
from engine.experts.gpu.index import add_touched


class HostBridge(CudaBridge):
    """Does at once, in torch, what the stream's two kernels do; `device` is the CPU."""

    def _launch_post(self, task: ExpertTask, hot: HotPart | None) -> None:
        b, channel = task.buffers, task.handle
        n, host = int(b.bsz), channel.host
        host.bsz.copy_(b.bsz)
        for name in ("ids", "weights", "slots", "hidden"):
            getattr(host, name)[:n] = getattr(b, name)[:n]
        add_touched(channel.touched, b.bsz, b.ids, self._config.num_experts)
        if hot is not None:
            ids = host.ids[:n]
            hot.uses.add_(torch.bincount(ids[ids >= 0], minlength=hot.uses.numel()))
            ids[(ids >= 0) & (hot.place[host.slots[:n].long()[:, None], ids.clamp(min=0)] >= 0)] = -1
        self._bridge.post(channel.number)

    def _launch_wait(self, task: ExpertTask, hot: HotPart | None) -> None:
        channel, n = task.handle, int(task.buffers.bsz)
        answered = self._bridge.wait(channel.number, self._timeout_s) == 0
        result = channel.host.out[:n] if answered else torch.zeros_like(channel.host.out[:n])
        task.buffers.out[:n] = result if hot is None else result.float() + hot.extra[:n]
