"""Typed reading of configuration fields: each wrong value is refused by name. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import ModelFileError, shown

_LIMIT = (1 << 31) - 1
_LAYERS, _EXPERTS = 512, 4096  # tensors of all of them are named before a file is asked for any
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "block_count"), _LAYERS),
    **dict.fromkeys(("num_nextn_predict_layers", "nextn_predict_layers", "num_mtp_layers"), _LAYERS),
    **dict.fromkeys(("mtp_num_hidden_layers", "num_mtp_modules", "mtp_transformer_layers"), _LAYERS),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "expert_count"), _EXPERTS),
}
_MISSING = object()


class Fields:
    """A mapping from a file, read field by field. `where` begins each message, `joint` is between it and the name."""

    def __init__(self, values: Mapping[str, Any], where: str, joint: str = ": ") -> None:
        self.values, self.where, self.joint = values, where, joint

    def error(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.where}{self.joint}{name} {problem}", name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value, `default` where it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: Any = _MISSING, least: int = 1) -> int:
        value = self.get(name, default)
        if value is _MISSING:
            raise self.error(name, "is missing")
        most = _MOST.get(name, _LIMIT)
        if type(value) is not int or not least <= value <= most:
            raise self.error(name, f"is {shown(value)}; allowed is an integer from {least} to {most}")
        return value

    def number(self, name: str, default: Any = _MISSING, above: float = 0.0) -> float:
        value = self.get(name, default)
        if value is _MISSING:
            raise self.error(name, "is missing")
        if type(value) not in (int, float) or not above < value <= sys.float_info.max:  # an integer of any size
            raise self.error(name, f"is {shown(value)}; allowed is a finite number above {above:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise self.error(name, f"is {shown(value)}; allowed is true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"is {shown(value)}; allowed is a string")
        return value

    def token(self, name: str, vocab_size: int) -> int | None:
        """A token id, None if absent."""
        value = self.get(name)
        if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
            raise self.error(name, f"is {shown(value)}; allowed is a token id from 0 to {vocab_size - 1}")
        return value

    def tokens(self, name: str, vocab_size: int) -> tuple[int, ...] | None:
        """One token id or a list of them; None if absent."""
        value = self.get(name)
        if value is None:
            return None
        values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for item in values:
            if type(item) is not int or not 0 <= item < vocab_size:
                raise self.error(name, f"holds {shown(item)}; allowed are token ids from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(values))
