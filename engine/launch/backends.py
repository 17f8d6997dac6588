"""The backend objects that a plan names: one of a kind, shared by the layers that use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.load import Backends
from engine.planning.plan import EnginePlan

if TYPE_CHECKING:
    from native import _native


def make_backends(plan: EnginePlan, mapped: _native.MappedFiles | None = None) -> Backends:
    """Those of the device that the plan places all but routed experts on. `mapped`: as of `cpu_backends`."""
    if plan.placement.device == "cpu":
        from engine.launch.cpu import cpu_backends

        return cpu_backends(plan, mapped)
    from engine.launch.gpu import gpu_backends

    return gpu_backends(plan)
