"""KTransformers' names of what can go wrong; each message says the cause and what to do. Torch-free."""

from __future__ import annotations

from engine.errors import UserError


class KTAMXError(UserError):
    """Base of the others."""


class KTAMXNotAvailableError(KTAMXError):
    """The kernels cannot run here: the extension is missing, or the CPU lacks AVX2."""


class KTAMXModelNotSupportedError(KTAMXError):
    """A model without routed experts, or of a family that is not in the registry."""


class KTAMXConfigError(KTAMXError):
    """A setting outside its range, or weights that do not go with one."""


class KTAMXForwardError(KTAMXError):
    """The experts' forward pass was given what it cannot compute."""


class KTAMXBackwardError(KTAMXError):
    """The experts' backward pass failed."""
