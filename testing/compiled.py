"""Compiles the kernels that tests launch for a GPU that is not here: Triton's interpreter takes code that its compiler
refuses, or makes slow.

    PYTHONPATH=.venv/triton python -m testing.compiled [--capability 90] TESTS

Tests run on the CPU and launch nothing, so what they compare is not looked at.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

ASKED = "KTSERVE_COMPILE_KERNELS"  # tests of kernels run without a GPU where this is set


# kernels that read adapters at addresses from memory: the compiler must be told what these are multiples of
_WIDE = ("lora_a", "lora_a_choices", "activate", "combine_lora")
_TWO_BYTES = re.compile(r"ld\.global\S*\.[bu]16\s")  # in PTX


class _Driver:
    """Of a GPU of one compute capability, which loads nothing."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _CompileOnly:
    """A pytest plugin. `compiled`: names and hashes of kernels; `refused`: name, what the compiler says; `narrow`: the
    most loads of two bytes in a kernel of that name."""

    def __init__(self, capability: int) -> None:
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        self.compiled: set[tuple[str, str]] = set()
        self.refused: list[tuple[str, str]] = []
        self.narrow: dict[str, int] = {}
        driver.set_active(_Driver(capability))
        launch: Any = JITFunction.run

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            try:
                made = launch(kernel, *args, grid=(1,), warmup=True, **options)
            except Exception as error:
                self.refused.append((kernel.__name__, str(error)))
                raise
            narrow = len(_TWO_BYTES.findall(made.asm["ptx"]))
            self.narrow[kernel.__name__] = max(narrow, self.narrow.get(kernel.__name__, 0))
            self.compiled.add((kernel.__name__, made.hash))
            return made

        patched: Any = JITFunction
        patched.run = compile_only

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        with suppress(Exception):
            yield


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="testing.compiled", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("tests", nargs="+")
    args = parser.parse_args(argv)
    os.environ[ASKED] = "1"
    plugin = _CompileOnly(args.capability)
    status = int(pytest.main(["-q", "-p", "no:schemathesis", "-p", "no:locust", *args.tests], plugins=[plugin]))
    kernels = {name for name, _ in plugin.compiled}
    print(f"{len(plugin.compiled)} variants of {len(kernels)} kernels compile for {args.capability}")
    for name in _WIDE:
        if (narrow := plugin.narrow.get(name)) != 0:
            print(f"{name}: {'not compiled' if narrow is None else f'{narrow} loads of two bytes a thread'}")
    for name, why in plugin.refused:
        print(f"refused: {name}: {why}")
    slow = any(plugin.narrow.get(name) != 0 for name in _WIDE)
    return 1 if plugin.refused or slow or not plugin.compiled else status


if __name__ == "__main__":
    sys.exit(main())
