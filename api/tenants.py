"""API keys: who asks, with what weight, and which models they may see."""

from __future__ import annotations

import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass

from api.errors import ApiError
from engine.errors import UserError


@dataclass(frozen=True)
class Tenant:
    """`models` None: all."""

    name: str = "default"
    weight: float = 1.0
    models: frozenset[str] | None = None

    def sees(self, model: str) -> bool:
        return self.models is None or model in self.models


class Keys:
    """Parsed `--api-key` values. Raises UserError for one that is malformed, without showing the key."""

    def __init__(self, api_keys: Sequence[str], admin_key: str | None) -> None:
        self._tenants = [_parse(value, number) for number, value in enumerate(api_keys, 1)]
        if len({key for key, _ in self._tenants}) != len(self._tenants):
            raise UserError("--api-key: a key is given twice", "api_key")
        if admin_key is not None and not admin_key:
            raise UserError("--admin-key: the key is empty", "admin_key")
        self._admin = admin_key.encode() if admin_key is not None else None

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    @property
    def named_models(self) -> set[str]:
        return {model for _, tenant in self._tenants for model in tenant.models or ()}

    def tenant(self, authorization: str | None) -> Tenant:
        """Whom an Authorization header stands for. Raises ApiError 401."""
        if not self._tenants:
            return Tenant()
        given = _bearer(authorization)
        found = None
        for key, tenant in self._tenants:  # all of them, so that the time tells nothing
            if hmac.compare_digest(key, given):
                found = tenant
        if found is None:
            what = "unknown API key" if given else "no API key: send 'Authorization: Bearer KEY'"
            raise ApiError(401, what, code="invalid_api_key")
        return found

    def is_admin(self, authorization: str | None) -> bool:
        return self._admin is not None and hmac.compare_digest(self._admin, _bearer(authorization))

    def check_admin(self, authorization: str | None) -> None:
        """Raises ApiError 401 or 403."""
        if self._admin is None:
            raise ApiError(
                403, "loading and unloading adapters is off: start the server with --admin-key", code="no_admin_key"
            )
        if not self.is_admin(authorization):
            raise ApiError(401, "the admin key is missing or wrong", code="invalid_api_key")


def _bearer(authorization: str | None) -> bytes:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip().encode() if scheme.lower() == "bearer" else b""


def _parse(value: str, number: int) -> tuple[bytes, Tenant]:
    key, equals, rest = value.partition("=")
    if not key or (equals and not rest):
        raise UserError(f"--api-key number {number}: expected KEY or KEY=TENANT[:WEIGHT[:MODEL,...]]", "api_key")
    if not equals:
        return key.encode(), Tenant()
    name, _, rest = rest.partition(":")
    weight_text, _, models_text = rest.partition(":")
    try:
        weight = float(weight_text) if weight_text else 1.0
    except ValueError:
        weight = math.nan
    if not (0 < weight < math.inf):
        raise UserError(f"--api-key number {number}: the weight {weight_text!r} is not a number above 0", "api_key")
    models = frozenset(model.strip() for model in models_text.split(",") if model.strip())
    return key.encode(), Tenant(name or "default", weight, models or None)
