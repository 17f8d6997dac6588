from __future__ import annotations

import pytest

from api.errors import ApiError
from api.tenants import Keys, Tenant
from engine.errors import UserError


def test_without_keys_everybody_is_the_default_tenant() -> None:
    keys = Keys([], None)
    assert keys.tenant(None) == keys.tenant("Bearer whatever") == Tenant("default", 1.0, None)
    assert not keys.required


def test_keys_resolve_to_tenants() -> None:
    keys = Keys(["k0", "k1=a", "k2=b:2.5", "k3=c:1:base,law", "k4=d::base"], None)
    assert keys.tenant("Bearer k0") == Tenant("default")
    assert keys.tenant("bearer k1") == Tenant("a")
    assert keys.tenant("Bearer  k2") == Tenant("b", 2.5)
    assert keys.tenant("Bearer k3") == Tenant("c", 1.0, frozenset({"base", "law"}))
    assert keys.tenant("Bearer k4") == Tenant("d", 1.0, frozenset({"base"}))
    assert keys.tenant("Bearer k4").sees("base") and not keys.tenant("Bearer k4").sees("law")
    assert keys.named_models == {"base", "law"}


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer k", "Basic k0", "k0", "Bearer k0x", "Bearer é"]
)
def test_other_headers_are_401(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        Keys(["k0"], None).tenant(header)
    assert caught.value.status == 401
    assert caught.value.headers()["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("value", ["", "=a", "k=", "k=a:x", "k=a:0", "k=a:-1", "k=a:inf", "k=a:nan"])
def test_malformed_keys_are_refused_without_showing_them(value: str) -> None:
    with pytest.raises(UserError) as caught:
        Keys(["first", value], None)
    assert "number 2" in str(caught.value)


def test_equal_keys_and_empty_admin_key_are_refused() -> None:
    with pytest.raises(UserError, match="twice"):
        Keys(["k=a", "k=b"], None)
    with pytest.raises(UserError, match="empty"):
        Keys([], "")


def test_admin() -> None:
    with pytest.raises(ApiError) as caught:
        Keys(["k"], None).check_admin("Bearer k")
    assert caught.value.status == 403 and "--admin-key" in str(caught.value)
    with pytest.raises(ApiError) as caught:
        Keys(["k"], "root").check_admin("Bearer k")
    assert caught.value.status == 401
    Keys(["k"], "root").check_admin("Bearer root")
