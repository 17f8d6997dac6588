"""Whether a run's micro-batches are worth the copying of a layer's weights to a GPU, and from how many rows on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.architectures.config import ModelConfig
from engine.experts.capabilities import PackedWeights
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.source import PackedSource
from engine.experts.streamed.layers import LayerStream, fastest_of_two
from engine.experts.streamed.threshold import threshold as break_even
from training.experts.base import TrainableExperts
from training.experts.streamed.experts import StreamedTrainableExperts, Streams

_PROBE_ROWS = (64, 256, 1024, 4096)


@dataclass(frozen=True)
class Choice:
    """`threshold`: rows of a micro-batch from which weights are streamed, None: never; `line`: about it, for people."""

    threshold: int | None
    line: str


@dataclass(frozen=True)
class Streaming:
    """Where a run may stream weights to. `least`: rows of a micro-batch from which it does, None: measured; `most`:
    rows of the largest."""

    device: torch.device
    least: int | None
    most: int

    def layers(
        self, inner: Mapping[int, TrainableExperts], packed: PackedWeights, model: ModelConfig, dtype: torch.dtype, *,
        keep: bool,
    ) -> tuple[Mapping[int, TrainableExperts], str]:  # fmt: skip
        """(the layers, which stream what is large enough; a line about it). `inner`: those that compute on the CPU,
        over the `packed` weights; all of them are pinned if any micro-batch is large enough."""
        sizes = Sizes.of(model)
        source = PackedSource(packed, sizes, self.device)
        choice = self._choose(inner, source, sizes, dtype)
        if choice.threshold is None:
            source.close()
            return inner, choice.line
        for layer in model.sparse_layers:
            source.add(layer)
        stream = LayerStream(source, model.sparse_layers, sizes, dtype, self.device, plain=True)
        streams = Streams(stream, model.sparse_layers, sizes, dtype, self.device, choice.threshold)
        made = {index: StreamedTrainableExperts(layer, streams, index, keep=keep) for index, layer in inner.items()}
        return made, choice.line

    def _choose(
        self, inner: Mapping[int, TrainableExperts], source: PackedSource, sizes: Sizes, dtype: torch.dtype
    ) -> Choice:
        found, how = self.least, "stream_min_tokens"
        if found is None:
            found, how = self._measure(inner, source, sizes, dtype)
        if found is None or found > self.most:
            begins = "never" if found is None else f"at {found:,}"
            return Choice(
                None,
                f"experts: every micro-batch on the CPU: the largest has {self.most:,} tokens, streaming to "
                f"{self.device} begins {begins} ({how})",
            )
        return Choice(
            found,
            f"experts: micro-batches of {found:,} tokens and more on {self.device}, a layer's weights copied there at "
            f"a time; smaller ones on the CPU ({how}); the largest has {self.most:,}",
        )

    def _measure(
        self, inner: Mapping[int, TrainableExperts], source: PackedSource, sizes: Sizes, dtype: torch.dtype
    ) -> tuple[int | None, str]:
        """On the first layer: the CPU's forward and backward of growing batches against two copies, which take longer
        than what a GPU computes meanwhile."""
        layer = min(inner)
        source.add(layer)
        stream = LayerStream(source, (layer,), sizes, dtype, self.device, plain=True)
        copy_s = stream.copy_seconds(layer)
        cpu_s: dict[int, float] = {}
        for rows in sorted({min(rows, self.most) for rows in _PROBE_ROWS}):
            cpu_s[rows] = _step_seconds(inner[layer], sizes, rows, dtype)
            if cpu_s[rows] > 2 * copy_s:
                break
        rows, seconds = max(cpu_s.items())
        return break_even(cpu_s, 2 * copy_s), (
            f"measured: a layer's copy {copy_s * 1e3:.1f} ms, {rows:,} tokens on the CPU {seconds * 1e3:.1f} ms"
        )


def _step_seconds(experts: TrainableExperts, sizes: Sizes, rows: int, dtype: torch.dtype) -> float:
    """Forward and backward of one layer on the CPU."""
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(rows, sizes.experts, generator=g).topk(sizes.top_k).indices
    hidden = torch.randn(rows, sizes.hidden, generator=g).to(dtype).requires_grad_()
    weights = torch.full((rows, sizes.top_k), 1 / sizes.top_k)
    slots = torch.zeros(rows, dtype=torch.int32)

    def run() -> None:
        out = experts.forward(hidden, ids, weights, slots, {})
        torch.autograd.grad(out, hidden, torch.ones_like(out))

    return fastest_of_two(run, torch.device("cpu"))
