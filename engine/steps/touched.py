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
    step waits for it: what is read is on its way to the host behind the step, before the next one sets it to zero."""

    def __init__(self, model: CausalLM) -> None:
        self._counted = []
        for backend in model.expert_backends:
            if (touched := backend.capability(TouchedExperts)) is not None:
                layers = [index for index, mlp in model.sparse.items() if mlp.backend is backend]
                self._counted.append(_Counted(touched.counts, layers))

    def begin(self) -> None:
        for counted in self._counted:
            counted.counts.zero_()

    def end(self) -> list[torch.Tensor]:
        """For `by_layer`, once the stream has got here."""
        on_cpu = (counted.counts.device.type == "cpu" for counted in self._counted)
        return [c.counts.clone() if cpu else to_host(c.counts) for c, cpu in zip(self._counted, on_cpu, strict=True)]

    def by_layer(self, counts: list[torch.Tensor]) -> dict[int, int]:
        """Distinct experts by layer, of those that are counted, in order of layers."""
        found: dict[int, int] = {}
        for counted, values in zip(self._counted, counts, strict=True):
            of = values.tolist()
            found |= {layer: of[layer] for layer in counted.layers}
        return dict(sorted(found.items()))
