"""Typed reading of a rule's kwargs. What an operator does not ask for is an error; what it only notes is noted."""

from __future__ import annotations

import re
from typing import Any

from rules.choice import Note
from rules.document import Item, RawRule
from rules.errors import RulesError

DEVICES = ("cpu", "cuda", "cuda:N")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_SIZE = re.compile(r"\d+(\.\d+)?\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)")


class Kwargs:
    """kwargs of one rule. Every getter checks the type and gives the default where the key is absent."""

    def __init__(self, raw: RawRule, allowed: tuple[str, ...]) -> None:
        self._raw = raw
        self.notes: list[Note] = []
        for key, item in raw.kwargs.items():
            if key not in allowed:
                known = allowed or ("no kwargs",)
                raise raw.error(f"unknown key for {raw.replace_class.value}", self._path(key), item.line, known)

    def _path(self, key: str) -> str:
        return f"replace.kwargs.{key}"

    def _get(self, key: str) -> Item | None:
        return self._raw.kwargs.get(key)

    def has(self, key: str) -> bool:
        return key in self._raw.kwargs

    def error(self, key: str, message: str, allowed: tuple[str, ...] = ()) -> RulesError:
        item = self._get(key)
        return self._raw.error(message, self._path(key), item.line if item else self._raw.replace_class.line, allowed)

    def note(self, key: str, text: str) -> None:
        """Say that a key changes nothing here, if the file has it."""
        item = self._get(key)
        if item is not None:
            self.notes.append(Note(self._raw.index + 1, item.line, self._path(key), text))

    def note_class(self, text: str) -> None:
        """Say what another software's class is here."""
        item = self._raw.replace_class
        self.notes.append(Note(self._raw.index + 1, item.line, "replace.class", text))

    def device(self, key: str, default: str, auto: bool = False) -> str:
        allowed = (*DEVICES, "auto") if auto else DEVICES
        item = self._get(key)
        if item is None:
            return default
        value = item.value
        if not isinstance(value, str) or not (_DEVICE.fullmatch(value.lower()) or (auto and value == "auto")):
            raise self.error(key, f"{_shown(value)} is not a device that ktserve knows", allowed)
        return value.lower()

    def word(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        """One of the allowed words; KTransformers writes a missing operator as the word None."""
        item = self._get(key)
        if item is None or item.value is None or item.value == "None":
            return default
        given = str(item.value).lower()  # KTransformers writes AMXINT8, and AMXInt8
        if isinstance(item.value, str) and (meant := [word for word in allowed if word.lower() == given]):
            return meant[0]
        raise self.error(key, f"unknown value {_shown(item.value)}", allowed)

    def count(self, key: str, default: int | str, auto: bool = False) -> int | str:
        """A whole number >= 0 (or "auto"); null means 0."""
        item = self._get(key)
        if item is None:
            return default
        value = 0 if item.value is None else item.value
        if auto and value == "auto":
            return "auto"
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, f"{_shown(value)}", ("a whole number >= 0", *(("auto",) if auto else ())))
        return value

    def size(self, key: str, default: str) -> str:
        item = self._get(key)
        if item is None:
            return default
        if item.value != "auto" and not (isinstance(item.value, str) and _SIZE.fullmatch(item.value)):
            raise self.error(key, f"{_shown(item.value)}", ("auto", "a size such as 8GiB"))
        return str(item.value)

    def transfer_map(self, key: str) -> dict[int, str]:
        """{layer: device}: from which layer on the hidden states live where."""
        item = self._get(key)
        if item is None or item.value is None:
            return {}
        if not isinstance(item.value, dict):
            raise self.error(key, f"{_shown(item.value)}", ("a mapping of layer numbers to devices",))
        layers: dict[int, str] = {}
        for layer, device in item.value.items():
            path = f"{self._path(key)}.{layer}"
            if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
                raise self._raw.error("a layer number is wanted", path, device.line, ("a whole number >= 0",))
            if not isinstance(device.value, str) or not _DEVICE.fullmatch(device.value.lower()):
                raise self._raw.error(f"{_shown(device.value)} is not a device", path, device.line, DEVICES)
            layers[layer] = device.value.lower()
        return layers


def _shown(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else repr(value)
