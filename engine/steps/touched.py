"""How many distinct experts each step touches, by layer, as the expert backends count them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.device import to_host
from engine.experts.capabilities import TouchedExperts
from engine.model.causal_lm import CausalLM


@dataclass(frozen=True)
class _Counted:
    """A backend's counts and those of the model's layers that are its own."""

    counts: torch.Tensor
    layers: list[int]


class TouchedCounter:
    """Of the backends that count; a step is all that is launched on the runner's stream between `begin` and `end`. No
    step waits for it. Counts on a CPU are set to zero before a step. Those on a GPU only grow, because setting them to
    zero would be a launch in each step: a step's own are what they have grown by since the one before."""

    def __init__(self, model: CausalLM) -> None:
        self._counted = []
        for backend in model.expert_backends:
            if (touched := backend.capability(TouchedExperts)) is not None:
                layers = [index for index, mlp in model.sparse.items() if mlp.backend is backend]
                self._counted.append(_Counted(touched.counts, layers))
        self._started = False  # before, graphs are captured and kernels tried
        self._before = [torch.zeros(counted.counts.shape, dtype=torch.int64) for counted in self._counted]

    def begin(self) -> None:
        for counted in self._counted:
            if counted.counts.device.type == "cpu" or not self._started:
                counted.counts.zero_()
        self._started = True

    def end(self) -> list[torch.Tensor]:
        """For `by_layer`, once the stream has got here."""
        on_cpu = (counted.counts.device.type == "cpu" for counted in self._counted)
        return [c.counts.clone() if cpu else to_host(c.counts) for c, cpu in zip(self._counted, on_cpu, strict=True)]

    def by_layer(self, counts: list[torch.Tensor]) -> dict[int, int]:
        """Distinct experts by layer, of those that are counted, in order of layers. Once for each step, in the order of
        steps; what a step that failed has added to a GPU's counts is the next one's."""
        found: dict[int, int] = {}
        for place, (counted, values) in enumerate(zip(self._counted, counts, strict=True)):
            of = values
            if counted.counts.device.type != "cpu":
                of, self._before[place] = values - self._before[place], values.clone()
            numbers = of.tolist()
            found |= {layer: numbers[layer] for layer in counted.layers}
        return dict(sorted(found.items()))
