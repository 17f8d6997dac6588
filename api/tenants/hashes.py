"""Keys as they are stored: `ID$scrypt$LOG2_N$R$P$SALT$HASH`, where ID is the beginning of the key.

A key holds 256 random bits, so scrypt only has to make guessing at a stolen file expensive, not at a weak password.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

_KEY = re.compile(rb"(kt-[0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_LINE = re.compile(r"(kt-[0-9a-f]{12})\$scrypt\$(\d{1,2})\$(\d{1,2})\$(\d)\$([\w+/=]+)\$([\w+/=]+)", re.ASCII)
_LOG2_N, _R, _P = 14, 8, 1  # 16 MiB, some 40 ms
_MOST_LOG2_N, _MOST_R, _MOST_P = 17, 16, 4  # 256 MiB
_SALT_BYTES, _HASH_BYTES = 16, 32


@dataclass(frozen=True)
class HashedKey:
    """A key by its scrypt hash: what tenants.yaml holds of it. `id` is its public part."""

    id: str
    log2_n: int
    r: int
    p: int
    salt: bytes
    digest: bytes

    @staticmethod
    def parse(line: str) -> HashedKey:
        """Raises ValueError, whose text does not show the line: it may be a key that somebody forgot to hash."""
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError("the hash line that `ktserve keys new` prints is expected")
        log2_n, r, p = (int(found[i]) for i in (2, 3, 4))
        if not (1 <= log2_n <= _MOST_LOG2_N and 1 <= r <= _MOST_R and 1 <= p <= _MOST_P):
            raise ValueError(
                f"scrypt's parameters are {log2_n}, {r} and {p}; up to {_MOST_LOG2_N}, {_MOST_R} and {_MOST_P} are "
                "possible"
            )
        try:
            salt, digest = (base64.b64decode(found[i], validate=True) for i in (5, 6))
        except binascii.Error:
            raise ValueError("the salt or the hash is not base64") from None
        if len(salt) < 8 or len(digest) != _HASH_BYTES:
            raise ValueError(f"the salt or the hash is too short (8 and {_HASH_BYTES} bytes)")
        return HashedKey(found[1], log2_n, r, p, salt, digest)

    @property
    def line(self) -> str:
        salt, digest = (base64.b64encode(part).decode() for part in (self.salt, self.digest))
        return f"{self.id}$scrypt${self.log2_n}${self.r}${self.p}${salt}${digest}"

    def matches(self, key: bytes) -> bool:
        """Takes tens of milliseconds and `128 * N * r` bytes."""
        return hmac.compare_digest(self.digest, _scrypt(key, self.salt, self.log2_n, self.r, self.p))


def id_of(key: bytes) -> str | None:
    """The public part of a key; None if it has not the form of one."""
    found = _KEY.fullmatch(key)
    return found[1].decode() if found else None


def new_key() -> tuple[str, HashedKey]:
    """A key, to be given away once, and what is stored of it."""
    name = f"kt-{secrets.token_hex(6)}"
    key, salt = f"{name}-{secrets.token_urlsafe(32)}", secrets.token_bytes(_SALT_BYTES)
    return key, HashedKey(name, _LOG2_N, _R, _P, salt, _scrypt(key.encode(), salt, _LOG2_N, _R, _P))


def _scrypt(key: bytes, salt: bytes, log2_n: int, r: int, p: int) -> bytes:
    room = 128 * r * (2**log2_n + p + 2) + 2**20
    return hashlib.scrypt(key, salt=salt, n=2**log2_n, r=r, p=p, maxmem=room, dklen=_HASH_BYTES)
