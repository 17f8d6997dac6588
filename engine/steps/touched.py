"""How many distinct experts each step touches, by layer, as the expert backends count them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.device import to_host
from engine.experts.capabilities import TouchedExperts
from engine.model.causal_lm import CausalLM


@dataclass(frozen=True)
class _Counted:
    """A backend's counts and those of the model's layers that are its own. `host`: the counts, if they are there."""

    counts: torch.Tensor
    layers: list[int]
    host: NDArray[np.int64] | None


class TouchedCounter:
    """Of the backends that count; a step is all that is launched on the runner's stream between `begin` and `end`. No
    step waits for it. Counts on a CPU are set to zero before a step, and read through numpy: behind a step's weights
    torch's code is out of every cache. Those on a GPU only grow, because setting them to zero would be a launch in each
    step: a step's own are what they have grown by since the one before."""

    def __init__(self, model: CausalLM) -> None:
        self._counted = []
        for backend in model.expert_backends:
            if (touched := backend.capability(TouchedExperts)) is not None:
                layers = [index for index, mlp in model.sparse.items() if mlp.backend is backend]
                counts = touched.counts
                host = counts.numpy() if counts.device.type == "cpu" else None
                self._counted.append(_Counted(counts, layers, host))
        self._started = False  # before, graphs are captured and kernels tried
        self._before = [torch.zeros(counted.counts.shape, dtype=torch.int64) for counted in self._counted]

    def begin(self) -> None:
        for counted in self._counted:
            if counted.host is not None:
                counted.host.fill(0)
            elif not self._started:
                counted.counts.zero_()
        self._started = True

    def end(self) -> list[list[int] | torch.Tensor]:
        """For `by_layer`, once the stream has got here."""
        return [to_host(c.counts) if c.host is None else c.host.tolist() for c in self._counted]

    def by_layer(self, counts: list[list[int] | torch.Tensor]) -> dict[int, int]:
        """Distinct experts by layer, of those that are counted, in order of layers. Once for each step, in the order of
        steps; what a step that failed has added to a GPU's counts is the next one's."""
        found: dict[int, int] = {}
        for place, (counted, values) in enumerate(zip(self._counted, counts, strict=True)):
            if isinstance(values, torch.Tensor):
                grown, self._before[place] = values - self._before[place], values.clone()
                values = grown.tolist()
            found |= {layer: values[layer] for layer in counted.layers}
        return found if len(counts) < 2 else dict(sorted(found.items()))
