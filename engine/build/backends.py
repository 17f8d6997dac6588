"""The backend objects that a plan names: one of a kind, shared by the layers that use it."""

from __future__ import annotations

from engine.build.plan import EnginePlan
from engine.model.load import Backends


def make_backends(plan: EnginePlan) -> Backends:
    """Those of the device that the plan places all but routed experts on."""
    if plan.placement.device == "cpu":
        from engine.build.cpu import cpu_backends

        return cpu_backends(plan)
    from engine.build.gpu import gpu_backends

    return gpu_backends(plan)
