"""API keys: who asks."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from api.config import ServeConfig
from api.errors import ApiError
from api.tenants.file import read_tenants
from api.tenants.hashes import HashedKey, id_of
from api.tenants.record import Tenant
from engine.errors import UserError

_TINKER = b"tml-"


class Keys:
    """Parsed `--api-key` values and a tenants file's hashes. Keys are kept as digests alone. A key without a tenant's
    name is a tenant of its own. Raises UserError for one that is malformed, without showing the key.
    """

    _given: list[tuple[bytes, Tenant]]  # the command line's

    def __init__(
        self,
        api_keys: Sequence[str],
        admin_key: str | None,
        stored: Mapping[HashedKey, Tenant] | None = None,
        in_file: Sequence[str] = (),
        before: Keys | None = None,
    ) -> None:
        """`in_file`: keys of --api-keys-file. `before`: the keys until now; those of the command line are theirs.
        Requests in flight keep the tenant they have."""
        numbered = enumerate((*api_keys, *in_file), 1)
        parsed = [_parse(value, number) for number, value in numbered]
        self._given = parsed[: len(api_keys)] if before is None else before._given
        self._tenants = [*self._given, *parsed[len(api_keys) :]]
        if len({digest for digest, _ in self._tenants}) != len(self._tenants):
            raise UserError("--api-key: a key is given twice", "api_key")
        if admin_key is not None and not admin_key:
            raise UserError("--admin-key: the key is empty", "admin_key")
        self._stored = dict(stored or {})
        names = {tenant.name for _, tenant in self._tenants}
        if both := sorted({tenant.name for tenant in self._stored.values()} & names):
            raise UserError(f"--tenants: {both[0]} is a tenant of --api-key or --api-keys-file too", "tenants")
        self._by_id = {key.id: key for key in self._stored}
        self._admin = _digest(admin_key.encode()) if admin_key is not None else None
        if before is not None:
            self._admin = self._admin or before._admin

    @property
    def required(self) -> bool:
        return bool(self._tenants or self._stored)

    @property
    def count(self) -> int:
        return len(self._tenants) + len(self._stored)

    @property
    def tenants(self) -> list[Tenant]:
        return list(dict.fromkeys([tenant for _, tenant in self._tenants] + list(self._stored.values())))

    @property
    def named_models(self) -> set[str]:
        return {model for tenant in self.tenants for model in tenant.models or ()}

    def tenant(self, authorization: str | None) -> Tenant:
        """Whom an Authorization header stands for. Tinker's clients take no key without their own prefix: it may stand
        before any. Raises ApiError 401."""
        if not self.required:
            return Tenant()
        given = _bearer(authorization)
        found = self._tenant(given) or (self._tenant(given[len(_TINKER) :]) if given.startswith(_TINKER) else None)
        if found is None:
            what = "unknown API key" if given else "no API key: send 'Authorization: Bearer KEY'"
            raise ApiError(401, what, code="invalid_api_key")
        return found

    def _tenant(self, given: bytes) -> Tenant | None:
        stored = self._by_id.get(id_of(given) or "")
        if stored is not None and stored.matches(given):
            return self._stored[stored]
        found, digest = None, _digest(given)
        for known, tenant in self._tenants:  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def named(self, name: str) -> Tenant | None:
        """The tenant of that name, with what all of its keys may see; None if there is no key of it any more."""
        if not self.required:
            return Tenant() if name == Tenant().name else None
        found = [tenant for tenant in self.tenants if tenant.name == name]
        seen = [tenant.models for tenant in found if tenant.models is not None]
        return replace(found[0], models=frozenset.intersection(*seen) if seen else None) if found else None

    def is_admin(self, authorization: str | None) -> bool:
        return self._admin is not None and hmac.compare_digest(self._admin, _digest(_bearer(authorization)))

    def check_admin(self, authorization: str | None, what: str = "loading and unloading adapters") -> None:
        """Raises ApiError 401 or 403."""
        if self._admin is None:
            raise ApiError(
                403, f"{what} is off: start the server with --admin-key-file or KTSERVE_ADMIN_KEY", code="no_admin_key"
            )
        if not self.is_admin(authorization):
            raise ApiError(401, "the admin key is missing or wrong", code="invalid_api_key")


def keys_of(config: ServeConfig, before: Keys | None = None) -> Keys:
    """From the settings and the files they name, in place of those `before`. Raises UserError."""
    admin_key, in_file = config.admin_key, []
    if config.api_keys_file is not None:
        in_file = _lines(config.api_keys_file, "api_keys_file")
        if not in_file:
            raise UserError(f"--api-keys-file {config.api_keys_file}: there is no key in it", "api_keys_file")
    if config.admin_key_file is not None:
        if admin_key is not None:
            raise UserError("--admin-key and --admin-key-file exclude each other", "admin_key_file")
        found = _lines(config.admin_key_file, "admin_key_file")
        if len(found) != 1:
            raise UserError(
                f"--admin-key-file {config.admin_key_file}: one line with the key is expected, got {len(found)}",
                "admin_key_file",
            )
        (admin_key,) = found
    stored = read_tenants(config.tenants) if config.tenants is not None else {}
    return Keys(config.api_key, admin_key, stored, in_file, before)


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """The Authorization header, or what it would be for an X-Api-Key."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {key}" if key else None)


def _lines(path: str, field: str) -> list[str]:
    """A file's lines without comments (#) and empty ones."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        hint = "; make a key for it: ktserve keys new" if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"--{field.replace('_', '-')} {path}: {reason}{hint}", field) from None
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(authorization: str | None) -> bytes:
    """The key's bytes; ASGI's headers are bytes read as Latin-1."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.encode("latin-1", "replace").strip() if scheme.lower() == "bearer" else b""


def _parse(value: str, number: int) -> tuple[bytes, Tenant]:
    key, equals, rest = value.partition("=")
    if not key or (equals and not rest):
        raise UserError(f"--api-key number {number}: expected KEY or KEY=TENANT[:WEIGHT[:MODEL,...]]", "api_key")
    digest = _digest(key.encode())
    own_name = f"key-{digest.hex()[:12]}"
    if not equals:
        return digest, Tenant(own_name)
    name, _, rest = rest.partition(":")
    weight_text, _, models_text = rest.partition(":")
    try:
        weight = float(weight_text) if weight_text else 1.0
    except ValueError:
        weight = math.nan
    if not (0 < weight < math.inf):
        raise UserError(f"--api-key number {number}: the weight {weight_text!r} is not a number above 0", "api_key")
    models = frozenset(model.strip() for model in models_text.split(",") if model.strip())
    return digest, Tenant(name or own_name, weight, models or None)
