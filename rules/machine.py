"""What a machine has, as far as placement cares. The engine finds it out; rules only judge it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Machine:
    """`gpu_count` GPUs if `gpu`; `native`, `kt`, `flashinfer`: whether that package loads here.
    `reasons` says why not, by the same names, for messages."""

    gpu: bool = False
    native: bool = False
    kt: bool = False
    flashinfer: bool = False
    gpu_count: int = 1
    reasons: dict[str, str] = field(default_factory=dict)

    def missing(self, backend: str) -> str | None:
        """Why a backend cannot run here; None if it can."""
        if backend in ("gpu", "hybrid", "flashinfer") and not self.gpu:
            return self._because("gpu", "this machine has no GPU that torch can use")
        if backend == "flashinfer" and not self.flashinfer:
            return self._because("flashinfer", "the package flashinfer is not installed")
        if backend == "native" and not self.native:
            return self._because("native", "the extension of ktserve's own kernels is not built")
        if backend == "kt" and not self.kt:
            return self._because("kt", "the package kt_kernel does not load here")
        return None

    def _because(self, name: str, otherwise: str) -> str:
        return self.reasons.get(name) or otherwise


def default_rules(machine: Machine) -> str:
    """The shipped rules that suit a machine. `kt` is never a default: it cannot serve expert adapters."""
    if machine.gpu and machine.native and machine.flashinfer:
        return "gpu-cpu-experts"
    if machine.native:
        return "cpu"
    return "reference"
