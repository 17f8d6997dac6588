"""tenants.yaml: who there is, with hashed keys. Every error names the line.

tenants:
  team-a:
    keys: [HASH_LINE, ...]        # from `ktserve keys new`
    models: [base, law]           # default: all
    weight: 2
    requests_per_minute: 60
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from api.tenants.hashes import HashedKey
from api.tenants.record import Tenant
from engine.errors import UserError
from ktserve.strict_yaml import YamlError, compose

_MOST_BYTES = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_Place = tuple[str | int, ...]
_Text = Annotated[str, Field(min_length=1, max_length=200)]
_Limit = Annotated[int, Field(ge=1, le=2**40)]


def tenant_name(name: str) -> str:
    """Raises ValueError for one that is not possible."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a tenant's name has 1 to 64 of A-Z a-z 0-9 . _ -, not {name[:80]!r}")
    return name


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    keys: list[str] = Field(default=[], max_length=1000)
    models: list[_Text] | None = None
    default_model: _Text | None = None
    weight: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_concurrency: _Limit | None = None
    queue_share: Annotated[float, Field(gt=0, le=1)] | None = None
    priority_ceiling: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    max_context: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    fine_tuning_jobs: Annotated[int, Field(ge=0, le=2**31)] | None = None
    fine_tuning_tokens: _Limit | None = None
    fine_tuned_models: Annotated[int, Field(ge=0, le=2**31)] | None = None

    def tenant(self, name: str) -> Tenant:
        limits = self.model_dump(exclude={"keys", "models"})
        return Tenant(name=name, models=None if self.models is None else frozenset(self.models), **limits)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tenants: dict[Annotated[str, AfterValidator(tenant_name)], _Entry] = Field(min_length=1)


def read_tenants(path: str) -> dict[HashedKey, Tenant]:
    """Each key's tenant. Raises UserError with file and line; no error shows what stands in place of a key."""
    return _Reader(path).read()


class _Reader:
    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: dict[_Place, int] = {}

    def read(self) -> dict[HashedKey, Tenant]:
        try:
            node = compose(self._bytes(), max_bytes=_MOST_BYTES)
        except YamlError as error:
            raise self._error(str(error), error.line) from None
        if node is None:
            raise self._error("'tenants:' with a tenant below it is expected", 1)
        try:
            entries = _File.model_validate(self._data(node, ())).tenants
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = tuple(part for part in first["loc"] if part != "[key]")
            raise self._error(f"{_dotted(place)}: {first['msg']}", self._line(place)) from None
        return self._keys(entries)

    def _keys(self, entries: Mapping[str, _Entry]) -> dict[HashedKey, Tenant]:
        found: dict[HashedKey, Tenant] = {}
        ids: set[str] = set()
        for name, entry in entries.items():
            tenant, place = entry.tenant(name), ("tenants", name)
            if tenant.default_model is not None and not tenant.sees(tenant.default_model):
                there: _Place = (*place, "default_model")
                raise self._error(f"{_dotted(there)}: it is not among the tenant's models", self._line(there))
            for number, line in enumerate(entry.keys):
                there = (*place, "keys", number)
                try:
                    key = HashedKey.parse(line)
                except ValueError as error:
                    raise self._error(f"{_dotted(there)}: {error}", self._line(there)) from None
                if key.id in ids:
                    raise self._error(f"{_dotted(there)}: the key {key.id} is there twice", self._line(there))
                ids.add(key.id)
                found[key] = tenant
        if not found:
            raise self._error("no tenant has a key: `ktserve keys new --tenant NAME` prints the lines of one", 1)
        return found

    def _bytes(self) -> bytes:
        try:
            path = Path(self._path)
            if not stat.S_ISREG(path.stat().st_mode):
                raise self._error("it is not a file", None)
            with path.open("rb") as file:
                return file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise self._error(error.strerror or "it cannot be read", None) from None

    def _data(self, node: yaml.Node, place: _Place) -> Any:
        """The node as Python's objects; where each of them stands is remembered."""
        self._lines[place] = line = node.start_mark.line + 1
        if isinstance(node, yaml.SequenceNode):
            return [self._data(item, (*place, number)) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise self._error("a name is expected", key.start_mark.line + 1)
                inner = (*place, key.value)
                if key.value in found:
                    raise self._error(f"{_dotted(inner)}: it is there twice", key.start_mark.line + 1)
                found[key.value] = self._data(value, inner)
                self._lines[inner] = key.start_mark.line + 1
            return found
        try:
            value = yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError):
            raise self._error(f"{_dotted(place)}: a text or a number is expected", line) from None
        return value

    def _line(self, place: _Place) -> int:
        while place and place not in self._lines:
            place = place[:-1]
        return self._lines.get(place, 1)

    def _error(self, text: str, line: int | None) -> UserError:
        return UserError(f"--tenants {self._path}{'' if line is None else f', line {line}'}: {text}", "tenants")


def _dotted(place: _Place) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:80]}" for part in place)
    return text.removeprefix(".") or "the file"
