"""Weights are read, checked and made by all of the process's CPUs. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.files.model_file import Bytes, FileBytes, MadeBytes, whole
from native.topology import pool_groups

_T = TypeVar("_T")


def loading_threads() -> int:
    """As many as a pool of workers has: what affinity and cgroup grant, less what is left to other threads."""
    return sum(map(len, pool_groups()))


def in_order(calls: Iterable[Callable[[], _T]], most: int | None = None) -> Generator[_T, None, None]:
    """What the calls return, in their order. They are made on threads ahead of what is taken, at most `most` of them
    (default: two for each thread); a single one is made here. What one raises is raised in its turn; then, and when the
    iterator is closed, those that have begun end first and others are not made."""
    calls = iter(calls)
    first = list(islice(calls, 2))
    if len(first) < 2:
        yield from (call() for call in first)
        return
    count = loading_threads()
    most = most or 2 * count
    waiting: deque[Future[_T]] = deque()
    with ThreadPoolExecutor(count, thread_name_prefix="weights") as threads:
        try:
            for call in chain(first, calls):
                waiting.append(threads.submit(call))
                if len(waiting) >= most:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def made_ahead(parts: Sequence[Bytes]) -> Iterator[npt.NDArray[np.uint8] | FileBytes]:
    """The parts, in their order; bytes that must be made are made, on threads, a few parts ahead."""
    if not any(isinstance(data, MadeBytes) for data in parts):
        yield from (whole(data) for data in parts)
        return
    with closing(in_order((partial(whole, data) for data in parts), loading_threads())) as made:
        yield from made
