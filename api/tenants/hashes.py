"""Keys as they are stored: `ID$sha256$SALT$DIGEST`, where ID is the beginning of the key.

A key holds 256 random bits, so nobody can guess one from a stolen file, however fast a digest is computed.
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
_LINE = re.compile(r"(kt-[0-9a-f]{12})\$sha256\$([\w+/=]+)\$([\w+/=]+)", re.ASCII)
_OLD = re.compile(r"kt-[0-9a-f]{12}\$scrypt\$.*", re.ASCII)
_SALT_BYTES = 16


@dataclass(frozen=True)
class HashedKey:
    """A key by its salted SHA-256: what tenants.yaml holds of it. `id` is its public part."""

    id: str
    salt: bytes
    digest: bytes

    @staticmethod
    def of(key: str) -> HashedKey:
        """Raises ValueError, without showing it, for what is no key of `ktserve keys new`."""
        name = id_of(key.encode())
        if name is None:
            raise ValueError("a key that `ktserve keys new` printed is expected")
        salt = secrets.token_bytes(_SALT_BYTES)
        return HashedKey(name, salt, _digest(key.encode(), salt))

    @staticmethod
    def parse(line: str) -> HashedKey:
        """Raises ValueError, whose text does not show the line: it may be a key that somebody forgot to hash."""
        if _OLD.fullmatch(line):
            raise ValueError(
                "scrypt hashes are no longer read: `ktserve keys hash` prints the new line of a key that you have, "
                "`ktserve keys new` makes another"
            )
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError("the hash line that `ktserve keys new` prints is expected")
        try:
            salt, digest = (base64.b64decode(found[i], validate=True) for i in (2, 3))
        except binascii.Error:
            raise ValueError("the salt or the hash is not base64") from None
        if len(salt) < 8 or len(digest) != hashlib.sha256().digest_size:
            raise ValueError("the salt has fewer than 8 bytes, or the hash has not 32")
        return HashedKey(found[1], salt, digest)

    @property
    def line(self) -> str:
        salt, digest = (base64.b64encode(part).decode() for part in (self.salt, self.digest))
        return f"{self.id}$sha256${salt}${digest}"

    def matches(self, key: bytes) -> bool:
        return hmac.compare_digest(self.digest, _digest(key, self.salt))


def id_of(key: bytes) -> str | None:
    """The public part of a key; None if it has not the form of one."""
    found = _KEY.fullmatch(key)
    return found[1].decode() if found else None


def new_key() -> tuple[str, HashedKey]:
    """A key, to be given away once, and what is stored of it."""
    key = f"kt-{secrets.token_hex(6)}-{secrets.token_urlsafe(32)}"
    return key, HashedKey.of(key)


def _digest(key: bytes, salt: bytes) -> bytes:
    return hashlib.sha256(salt + key).digest()
