"""tenants.yaml: what is wrong with it is said with its line, and no key is ever shown or kept."""

from __future__ import annotations

import gc
import io
import random
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.cli.main import main
from api.errors import ApiError
from api.tenants.file import read_tenants
from api.tenants.hashes import HashedKey, id_of, new_key
from api.tenants.keys import Keys
from api.tenants.record import Tenant
from engine.errors import UserError

KEY, STORED = new_key()
OLD = "kt-931378710b87$scrypt$14$8$1$c2FsdHNhbHQ=$aGFzaA=="


def write(folder: Path, text: str) -> str:
    path = folder / "tenants.yaml"
    path.write_text(text)
    return str(path)


def stored_for(tenant: Tenant) -> tuple[str, dict[HashedKey, Tenant]]:
    key, stored = new_key()
    return key, {stored: tenant}


def test_all_fields(tmp_path: Path) -> None:
    other, second = new_key()
    text = f"""
tenants:
  team-a:
    keys: [{STORED.line}]
    models: [base, law]
    default_model: law
    weight: 2
    requests_per_minute: 60
    tokens_per_minute: 1000
    max_concurrency: 4
    queue_share: 0.25
    priority_ceiling: 5
    max_context: 4096
    cache_salt: shared
  b:
    keys:
      - {second.line}
"""
    found = read_tenants(write(tmp_path, text))
    assert found[STORED] == Tenant("team-a", 2, frozenset({"base", "law"}), "law", 60, 1000, 4, 0.25, 5, 4096, "shared")
    assert found[second] == Tenant("b")
    assert second.matches(other.encode()) and not STORED.matches(other.encode())


LINES = {
    "tenants:\n  a:\n    keys: [x]\n    wieght: 2\n": (4, "wieght"),
    "tenants:\n  a:\n    weight: 0\n": (3, "weight"),
    "tenants:\n  a:\n    weight: .nan\n": (3, "weight"),
    "tenants:\n  a:\n    requests_per_minute: -1\n": (3, "requests_per_minute"),
    "tenants:\n  a:\n    requests_per_minute: 1.5\n": (3, "requests_per_minute"),
    "tenants:\n  a:\n    queue_share: 2\n": (3, "queue_share"),
    "tenants:\n  a:\n    keys:\n      - forgotten-to-hash\n": (4, "keys[0]"),
    f"tenants:\n  a:\n    keys: [{OLD}]\n": (3, "ktserve keys hash"),
    "tenants:\n  a b:\n    weight: 1\n": (2, "name"),
    "tenants:\n  a:\n    weight: 1\n  a:\n    weight: 2\n": (4, "twice"),
    "tenants:\n  a:\n    weight: 1\n    weight: 1\n": (4, "twice"),
    "tenants:\n  a: &x\n    weight: 1\n  b: *x\n": (2, "aliases"),
    "tenants: &x\n  a: *x\n": (1, "aliases"),
    "tenants:\n  a:\n    models: [b]\n    default_model: c\n": (4, "default_model"),
    "tenants:\n  a:\n   [x: y\n": (4, ""),
    "tenants:\n  ? [1, 2]\n  : b\n": (2, "name"),
    "tenants:\n  a:\n    weight: !!python/object:os.system 1\n": (3, "weight"),
    "- a\n": (1, "the file"),
    "": (1, "tenants"),
    "tenants: {}\n": (1, "tenants"),
    "tenants:\n  a:\n    weight: 1\n": (1, "key"),
    "[" * 5000: (1, ""),
}


@pytest.mark.parametrize("text", LINES, ids=range(len(LINES)))
def test_errors_name_the_line(tmp_path: Path, text: str) -> None:
    line, word = LINES[text]
    with pytest.raises(UserError, match="--tenants") as caught:
        read_tenants(write(tmp_path, text))
    assert f"line {line}:" in str(caught.value) and word in str(caught.value)
    assert "forgotten" not in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"a:\n\xff")
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero"), tmp_path / "bytes"):
        with pytest.raises(UserError, match="--tenants"):
            read_tenants(str(path))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_damage_is_a_user_error_or_a_file_that_says_the_same(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    good = f"tenants:\n  a:\n    keys: [{STORED.line}]\n    weight: 2\n    models: [x, y]\n    queue_share: 0.5\n"
    text = list(good)
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(text))
        text[where : where + rng.randint(0, 3)] = rng.choice(
            ["", "\n", " ", ":", "-", "[", "'", "é", "\t", "0", "&", "*"]
        )
    try:
        found = read_tenants(write(tmp_path, "".join(text)))
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert all(isinstance(tenant, Tenant) for tenant in found.values())


@given(
    line=st.text() | st.from_regex(r"kt-[0-9a-f]{12}\$(scrypt\$14\$8\$1|sha256)\$[\w+/=]+\$[\w+/=]+", fullmatch=True)
)
def test_hash_lines_are_parsed_or_refused_unseen(line: str) -> None:
    try:
        assert HashedKey.parse(HashedKey.parse(line).line)
    except ValueError as error:
        assert len(line) < 20 or line not in str(error)


def test_a_line_is_what_is_stored_and_survives_yaml() -> None:
    assert HashedKey.parse(yaml.safe_load(f"[{STORED.line}]")[0]) == STORED
    assert id_of(KEY.encode()) == STORED.id and STORED.matches(KEY.encode()) and KEY not in STORED.line
    assert id_of(KEY.encode()[:-1]) is None


def test_stored_keys_identify() -> None:
    key, stored = stored_for(Tenant("a"))
    keys = Keys(["plain=b"], None, stored)
    assert keys.tenant(f"Bearer {key}").name == "a"
    assert keys.tenant("Bearer plain").name == "b"
    for wrong in (key[:-1] + "~", key[:-1], key[:16] + "x" * 43, "", KEY):
        with pytest.raises(ApiError) as caught:
            keys.tenant(f"Bearer {wrong}")
        assert caught.value.status == 401


def test_reloaded_keys() -> None:
    key, stored = stored_for(Tenant("a"))
    other_key, other = stored_for(Tenant("b"))
    (hashed,) = stored
    changed = Keys([], None, {hashed: Tenant("a", weight=3), **other}, before=Keys([], None, stored))
    assert changed.tenant(f"Bearer {key}").weight == 3
    assert changed.tenant(f"Bearer {other_key}").name == "b"
    gone = Keys([], None, other, before=changed)
    with pytest.raises(ApiError):
        gone.tenant(f"Bearer {key}")
    with pytest.raises(UserError, match="too"):
        Keys(["k=b"], None, other)


def test_a_key_is_hashed_again_and_what_is_none_is_refused_unseen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{KEY}\n"))
    assert main(["keys", "hash"]) == 0
    assert HashedKey.parse(capsys.readouterr().out.strip()).matches(KEY.encode())
    monkeypatch.setattr("sys.stdin", io.StringIO("no-key-of-ours\n"))
    assert main(["keys", "hash"]) == 1
    said = capsys.readouterr()
    assert "ktserve keys new" in said.err and "no-key-of-ours" not in said.out + said.err


def test_no_object_of_the_keys_holds_a_key() -> None:
    key, stored = stored_for(Tenant("a"))
    flag = "a-key-of-the-command-line"
    keys = Keys([flag], "the-admin-key", stored)
    keys.tenant(f"Bearer {key}")
    seen: set[int] = set()
    left: list[object] = [vars(keys)]
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, type) or callable(thing):
            continue
        seen.add(id(thing))
        data = thing.encode() if isinstance(thing, str) else thing if isinstance(thing, bytes) else b""
        assert not any(secret.encode() in data for secret in (key, flag, "the-admin-key"))
        left += gc.get_referents(thing)
