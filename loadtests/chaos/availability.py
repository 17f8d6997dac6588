"""How much of what well-behaved clients asked was answered, what the attack itself took away left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

RESTART_S = 30.0  # a restart on a busy machine takes at most that long; what is longer is the server's fault
_SOONEST_S = 0.5  # no engine serves again so soon: a good look before that is one at the old engine


@dataclass(frozen=True)
class Look:
    """One request, from its first byte to its end (loop times, seconds)."""

    began_s: float
    ended_s: float
    good: bool


@dataclass
class Availability:
    """`looks` by what was asked. `attacks`: (began, ended) of each kill (at once) and freeze, in loop times."""

    looks: dict[str, list[Look]] = field(default_factory=dict)
    attacks: list[tuple[float, float]] = field(default_factory=list)

    def add(self, what: str, look: Look) -> None:
        self.looks.setdefault(what, []).append(look)

    def share(self, of: Iterable[str], health: str) -> tuple[float, int]:
        """The share of good ones among those looks of these kinds that no outage of `outages` touches, and how many
        those are. (0, 0) without any. `health`: the kind whose looks say when the server serves again."""
        outages = self.outages(self.looks.get(health, []))
        seen = [look for what in of for look in self.looks.get(what, []) if not _touched(look, outages)]
        return (sum(look.good for look in seen) / len(seen), len(seen)) if seen else (0.0, 0)

    def outages(self, health: Sequence[Look]) -> list[tuple[float, float]]:
        """Of each attack: from its beginning to the end of the first good look at a server that can be back, at most
        `RESTART_S` after the attack's end."""
        found = []
        for began_s, ended_s in self.attacks:
            latest_s = ended_s + RESTART_S
            good_s = (look.ended_s for look in health if look.good and look.began_s >= ended_s + _SOONEST_S)
            found.append((began_s, min(latest_s, next(good_s, latest_s))))
        return found


def _touched(look: Look, outages: Iterable[tuple[float, float]]) -> bool:
    return any(look.began_s <= until_s and began_s <= look.ended_s for began_s, until_s in outages)
