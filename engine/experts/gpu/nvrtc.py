"""CUDA C++ compiled at run time, for the GPU that is there, and launched: by NVRTC and the driver, which torch ships or
links to. A compilation takes a few tenths of a second.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.errors import EngineError

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97  # CUdevice_attribute
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@functools.cache
def _library() -> Any:
    """Torch's stub that links to both libraries: their functions are found through it."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
    except OSError as error:
        raise EngineError(f"this torch comes without NVRTC, which compiles kernels: {error}") from error


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise EngineError(f"{what}: CUDA error {code} ({(text.value or b'unknown').decode()})")


def compiled(text: str, name: str, architecture: str) -> bytes:
    """The machine code of C++; `architecture`: as "sm_90". EngineError with the compiler's words."""
    nvrtc, program = _library(), ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None):
        raise EngineError(f"{name}: NVRTC takes no program")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"--disable-warnings"]
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            raise EngineError(f"{name} for {architecture}: {_read(program, 'ProgramLog').decode(errors='replace')}")
        return _read(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, part: str) -> bytes:
    nvrtc, size = _library(), ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{part}Size")(program, ctypes.byref(size))
    held = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{part}")(program, held)
    return held.raw


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of NVIDIA's GPUs."""
    return torch.cuda.get_device_capability(device)


def shared_bytes_of_blocks(device: torch.device) -> int:
    """Shared memory that a block of threads may have."""
    found, index = ctypes.c_int(), torch.cuda.current_device() if device.index is None else device.index
    code = _library().cuDeviceGetAttribute(ctypes.byref(found), _MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, index)
    _check(code, "shared memory of a block")
    return found.value


class Kernel:
    """A function `name` of C++ `text` on a GPU, whose blocks compute so many columns with so many threads and bytes
    of dynamic shared memory.

    `early`: it may start while the kernel before it in the stream still runs, if that allows it
    (griddepcontrol.launch_dependents), and then waits for it by itself (griddepcontrol.wait).
    """

    def __init__(
        self,
        text: str,
        name: str,
        device: torch.device,
        *,
        columns: int,
        threads: int,
        shared_bytes: int,
        early: bool,
    ) -> None:
        major, minor = capability(device)
        code = compiled(text, name, f"sm_{major}{minor}")
        self.columns = columns
        self._name, self._device = name, device
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()  # makes the context
            _check(_library().cuModuleLoadData(ctypes.byref(self._module), code), name)
        _check(_library().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), name)
        limit = _MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(_library().cuFuncSetAttribute(self._function, limit, shared_bytes), name)
        attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        self._config = _Config(shared_bytes=shared_bytes, num_attributes=int(early))
        self._config.block[:] = threads, 1, 1
        self._config.attributes = ctypes.pointer(attribute)

    def launch(self, grid: tuple[int, int], arguments: Sequence[torch.Tensor | None]) -> None:
        """On the device's current stream; arguments are addresses."""
        pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in arguments]
        addresses = (ctypes.c_void_p * len(pointers))(*map(ctypes.addressof, pointers))
        self._config.grid[:] = *grid, 1
        self._config.stream = torch.cuda.current_stream(self._device).cuda_stream
        _check(_library().cuLaunchKernelEx(ctypes.byref(self._config), self._function, addresses, None), self._name)
