"""The control groups that this process is in, v1 and v2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Folders with the controller's files, from our group up to the root of its hierarchy; True: of v2. `root` is
    where /proc and /sys are looked for.

    Inside a container a path may be one of the host, not below the mount: folders need not exist.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            mount, v2 = root / "sys/fs/cgroup", True
        elif controller in controllers.split(","):
            mount, v2 = root / "sys/fs/cgroup" / controller, False
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth]), v2


def read_text(path: Path) -> str:
    """Empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
