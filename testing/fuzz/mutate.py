"""Mutations of a file's bytes, as AFL makes them: bits, extremes in place of numbers, cuts, copies, splices."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from random import Random

Files = dict[str, bytes]  # a folder's content

_INTEGERS = [0, 1, -1, 127, 128, 255, 2**15 - 1, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1]
_TEXTS = [
    *(b"-1", b"0", b"1e999", b"1e-320", b"NaN", b"9" * 400, b"18446744073709551616", b"null", b"true", b"[]", b"{}"),
    *(b'""', b'"\\ud800"', b"[" * 2000, b'"' + b"x" * 5000 + b'"', b"0.5", b"[[0]]", b"{{", b"}}", b"{%", b"%}"),
]
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
_REGIONS = (64, 1024, 16384, 1 << 40)  # headers are more fragile than what follows


def mutated(seed: Files, others: Sequence[Files], rng: Random) -> Files:
    """One file of `seed` with one to six mutations, now and then absent, empty or another's."""
    name = rng.choice(sorted(seed))
    chance = rng.random()
    if chance < 0.02:
        return {other: data for other, data in seed.items() if other != name}
    if chance < 0.04:
        return {**seed, name: rng.choice([b"", rng.choice(list(rng.choice(others).values()))])}
    data = bytearray(seed[name])
    donor = rng.choice(others).get(name) or seed[name]
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        rng.choice(_MUTATIONS)(data, donor, rng)
    return {**seed, name: bytes(data)}


def _place(data: bytearray, rng: Random) -> int:
    return rng.randrange(max(1, min(len(data), rng.choice(_REGIONS))))


def _bit(data: bytearray, donor: bytes, rng: Random) -> None:
    if data:
        data[_place(data, rng)] ^= 1 << rng.randrange(8)


def _bytes(data: bytearray, donor: bytes, rng: Random) -> None:
    at, size = _place(data, rng), rng.randint(1, 16)
    data[at : at + size] = rng.randbytes(size)


def _binary_number(data: bytearray, donor: bytes, rng: Random) -> None:
    """A little-endian number of 1 to 8 bytes, integer or floating point, in place of what is there."""
    form = rng.choice("bhiqfd")
    if form in "fd":
        new = struct.pack(f"<{form}", rng.choice([0.0, -0.0, 1e-40, 1e30, float("inf"), float("nan")]))
    else:
        size = struct.calcsize(form)
        new = (rng.choice(_INTEGERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    at = _place(data, rng)
    data[at : at + len(new)] = new


def _text_number(data: bytearray, donor: bytes, rng: Random) -> None:
    """A number that is written out, replaced by an extreme."""
    start = _place(data, rng)
    found = _NUMBER.search(data, start, start + 4096)
    if found:
        data[found.start() : found.end()] = rng.choice(_TEXTS)


def _text(data: bytearray, donor: bytes, rng: Random) -> None:
    at = _place(data, rng)
    data[at : at + rng.choice([0, 0, 1, 4])] = rng.choice(_TEXTS)


def _cut_off(data: bytearray, donor: bytes, rng: Random) -> None:
    del data[_place(data, rng) :]


def _remove(data: bytearray, donor: bytes, rng: Random) -> None:
    at = _place(data, rng)
    del data[at : at + rng.choice([1, 8, 64, 4096])]


def _repeat(data: bytearray, donor: bytes, rng: Random) -> None:
    at, size = _place(data, rng), rng.choice([1, 8, 64, 4096])
    data[at:at] = data[at : at + size] * rng.choice([1, 2, 50])


def _splice(data: bytearray, donor: bytes, rng: Random) -> None:
    """The other file from some byte on, or a stretch of it."""
    at = _place(bytearray(donor), rng)
    if rng.random() < 0.5:
        data[at:] = donor[at:]
    else:
        to = _place(data, rng)
        data[to : to + 64] = donor[at : at + 64]


_MUTATIONS: list[Callable[[bytearray, bytes, Random], None]] = [
    *(_bit, _bytes, _binary_number, _text_number, _text_number, _text, _cut_off, _remove, _repeat, _splice)
]
