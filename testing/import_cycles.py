"""Reports files that import each other in a circle, among all top-level packages given; `make lint` runs it.

python -m testing.import_cycles api engine scheduler ...
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set

import grimp


def circles(imports: Mapping[str, Set[str]]) -> list[list[str]]:
    """Circles that between them touch every module that is in one; the first module of each is repeated at its end.
    `imports`: the modules that each module imports."""
    found: list[list[str]] = []
    settled: set[str] = set()
    for module in sorted(imports):
        if module not in settled and (circle := _shortest(module, imports)):
            found.append(circle)
            settled |= set(circle)
    return found


def _shortest(start: str, imports: Mapping[str, Set[str]]) -> list[str] | None:
    came_from: dict[str, str] = {}
    queue = [start]
    for module in queue:
        for target in sorted(imports[module]):
            if target == start:
                way = [module]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return [*reversed(way), start]
            if target not in came_from:
                came_from[target] = module
                queue.append(target)
    return None


def main(packages: list[str]) -> int:
    graph = grimp.build_graph(*packages, cache_dir=None)
    found = circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    for circle in found:
        print("import circle: " + " -> ".join(circle), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
