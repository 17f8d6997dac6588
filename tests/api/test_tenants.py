from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.config import ServeConfig
from api.errors import ApiError
from api.tenants.keys import Keys, keys_of
from api.tenants.record import Tenant
from engine.errors import UserError


def test_without_keys_everybody_is_the_default_tenant() -> None:
    keys = Keys([], None)
    assert keys.tenant(None) == keys.tenant("Bearer whatever") == Tenant("default", 1.0, None)
    assert not keys.required


def test_keys_resolve_to_tenants() -> None:
    keys = Keys(["k0", "k1=a", "k2=b:2.5", "k3=c:1:base,law", "k4=d::base"], None)
    assert keys.tenant("Bearer k0").name.startswith("key-")
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


def test_keys_without_names_are_tenants_of_their_own() -> None:
    keys = Keys(["k1", "k2", "k3=:2", "k4=::base"], None)
    tenants = [keys.tenant(f"Bearer k{number}") for number in range(1, 5)]
    assert len({tenant.name for tenant in tenants}) == 4
    assert not any("k1" in tenant.name for tenant in tenants) and tenants[2].weight == 2


@given(st.text(min_size=1).map(str.strip).filter(lambda key: key and "=" not in key and key.isprintable()))
def test_any_key_matches_as_utf8(key: str) -> None:
    """As the header comes: its bytes, read as Latin-1."""
    keys = Keys([f"{key}=a", "other"], key)
    header = f"Bearer {key}".encode().decode("latin-1")
    assert keys.tenant(header).name == "a" and keys.is_admin(header)


def test_keys_from_files(tmp_path: Path) -> None:
    keys_file, admin_file = tmp_path / "keys", tmp_path / "admin"
    keys_file.write_text("# ours\nk1=a:2\n\n  schlüssel=b\n")
    admin_file.write_text("root\n")
    keys = keys_of(ServeConfig(api_key=["k3=c"], api_keys_file=str(keys_file), admin_key_file=str(admin_file)))
    assert [keys.tenant(f"Bearer {key}").name for key in ("k1", "k3")] == ["a", "c"]
    assert keys.is_admin("Bearer root")
    admin_file.write_text("two\nlines\n")
    for config in (
        ServeConfig(api_keys_file=str(tmp_path / "none")),
        ServeConfig(api_keys_file=str(tmp_path)),
        ServeConfig(admin_key_file=str(admin_file)),
        ServeConfig(admin_key="x", admin_key_file=str(keys_file)),
    ):
        with pytest.raises(UserError):
            keys_of(config)
    keys_file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        keys_of(ServeConfig(api_keys_file=str(keys_file)))
    keys_file.write_text("# nothing yet\n")
    with pytest.raises(UserError, match="no key"):
        keys_of(ServeConfig(api_keys_file=str(keys_file)))


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
