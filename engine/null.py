"""`--model null:OPTION=VALUE,...`: what a step of the engine without a model takes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.config import check_settings
from engine.errors import UserError
from ktserve.settings import option

PREFIX = "null:"
_MOST = 3_600_000.0


@dataclass(frozen=True)
class NullSettings:
    """A step takes `step_ms`, and `row_us` for each row and `token_us` for each of its tokens. Every answer is the same
    words; the end-of-sequence token follows after `answer` of them. An adapter takes `load_ms` into a slot."""

    step_ms: float = option(1.0, "of each step", group="Null", limits=(0.0, _MOST))
    row_us: float = option(0.0, "for each row of a step", group="Null", limits=(0.0, _MOST))
    token_us: float = option(0.0, "for each token of a step", group="Null", limits=(0.0, _MOST))
    load_ms: float = option(0.0, "of an adapter into its slot", group="Null", limits=(0.0, _MOST))
    answer: int = option(64, "tokens", group="Null", limits=(1, 1 << 24))


def is_null(model: str) -> bool:
    return model.startswith(PREFIX)


def null_settings(model: str) -> NullSettings:
    """Raises UserError."""
    kinds = {setting.name: int if setting.type == "int" else float for setting in fields(NullSettings)}
    values: dict[str, float] = {}
    for part in filter(None, model.removeprefix(PREFIX).split(",")):
        name, _, text = part.partition("=")
        if name not in kinds or name in values:
            why = "is given twice" if name in kinds else "is not an option"
            raise UserError(f"--model {model}: {name!r} {why}; options: {', '.join(kinds)}, each =NUMBER", "model")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise UserError(f"--model {model}: {name}={text} is not a number", "model") from None
    settings = NullSettings(**values)  # type: ignore[arg-type]  # an int for `answer`, by `kinds`
    try:
        check_settings(settings)
    except UserError as error:
        raise UserError(f"--model {model}: {str(error).removeprefix('--')}", "model") from None
    return settings
