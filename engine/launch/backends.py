"""The backend objects that a plan names: one of a kind, shared by the layers that use it."""

from __future__ import annotations

from engine.model.load import Backends
from engine.planning.plan import EnginePlan


def make_backends(plan: EnginePlan) -> Backends:
    """Those of the device that the plan places all but routed experts on."""
    if plan.placement.device == "cpu":
        from engine.launch.cpu import cpu_backends

        return cpu_backends(plan)
    from engine.launch.gpu import gpu_backends

    return gpu_backends(plan)
