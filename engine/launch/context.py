"""A GPU's context, made by the driver while Python imports torch, which waits for it otherwise. Torch-free."""

from __future__ import annotations

import ctypes
import threading

from engine.config import EngineConfig

_DRIVER = "libcuda.so.1"


def begin_context(config: EngineConfig) -> None:
    """Of the first GPU, on a thread, if steps will run there where there is one: rules may say otherwise, and a context
    takes memory of the GPU. Torch finds it, or says why there is none."""
    if config.device == "cuda" or (config.device == "auto" and config.rules is None):
        threading.Thread(target=_make, name="context", daemon=True).start()


def _make() -> None:
    """Calls of the driver, which Python's lock is not held in. The context is kept as long as the process."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return  # no GPU here
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
