"""`hf:ORG/REPO[:QUANT][@REV]`: how a model or an adapter on the hub is named."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import UserError, shown

PREFIX = "hf:"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"hf:(?P<repo>{_PART}/{_PART})(?::(?P<quant>[^@:]+))?(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?")


@dataclass(frozen=True)
class HubName:
    """`quant` is a quantisation as file names have it (Q4_K_M) or None; `revision` a branch, a tag or a commit."""

    repo: str
    quant: str | None = None
    revision: str = "main"

    def __str__(self) -> str:
        quant = "" if self.quant is None else f":{self.quant}"
        return f"{PREFIX}{self.repo}{quant}" + ("" if self.revision == "main" else f"@{self.revision}")

    def of_quant(self, quant: str) -> HubName:
        return HubName(self.repo, quant, self.revision)

    @property
    def served(self) -> str:
        """The base model's name in the API."""
        return self.repo.partition("/")[2]


def is_hub_name(text: str) -> bool:
    return text.startswith(PREFIX)


def parse_name(text: str, field: str) -> HubName:
    """UserError naming `field` for anything but `hf:ORG/REPO[:QUANT][@REV]`."""
    match = _NAME.fullmatch(text)
    if match is None or ".." in text:
        where = shown(text) if field == "name" else f"--{field} {shown(text)}"
        raise UserError(f"{where}: write hf:ORG/REPO, hf:ORG/REPO:QUANT or hf:ORG/REPO@REVISION", field)
    return HubName(match["repo"], match["quant"], match["revision"] or "main")
