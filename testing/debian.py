"""A fresh Debian root to try what people are told to type: made by debootstrap, entered by chroot in namespaces.

Needs root and debootstrap. pip's configuration is that of this machine: its PIP_* variables are passed on, and the
files and folders that DEBIAN_BINDS names (with colons between) are seen there at the same places, such as certificates.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

SUITE = "bookworm"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Mounts end with the namespace; --kill-child ends all processes in it with this one's child, which has to stay root:
# Linux forgets that signal when a process becomes another user.
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")


class DebianError(Exception):
    """The root cannot be made or entered, or a command in it failed."""


@contextmanager
def new_folder(folder: Path, *, keep: bool) -> Iterator[None]:
    """What is made at `folder` is removed in the end, unless it is kept. DebianError if it is there already."""
    if folder.exists():
        raise DebianError(f"--folder {folder}: it is there already")
    try:
        yield
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Debian:
    """`folder` holds the root. `binds`: absolute paths of this machine, seen there read-only. `environment`: variables
    of all that runs there."""

    folder: Path
    binds: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def made(cls, folder: Path) -> Debian:
        """A new minimal one in `folder`, which must not be there. Raises DebianError."""
        for tool in ("debootstrap", "unshare", "chroot"):
            if shutil.which(tool) is None:
                raise DebianError(f"{tool} is not here: apt-get install debootstrap util-linux")
        if os.geteuid() != 0:
            raise DebianError("only root can make a Debian root: use sudo")
        done = subprocess.run(
            ["debootstrap", "--variant=minbase", SUITE, str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DebianError(f"debootstrap failed: {(done.stdout + done.stderr).strip()[-500:]}")
        variables = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        binds = filter(None, os.environ.get("DEBIAN_BINDS", "").split(":"))
        return cls(folder, tuple(map(Path, binds)), variables)

    def copy(self, folder: Path) -> Debian:
        """Another root with the same content."""
        subprocess.run(["cp", "-a", str(self.folder), str(folder)], check=True)
        return Debian(folder, self.binds, self.environment)

    def command(
        self, words: Sequence[str], *, user: str = "root", more: Mapping[str, str] | None = None, cwd: str = "/"
    ) -> list[str]:
        """What runs `words` there, as this machine's root types it. `more`: variables."""
        variables = {"PATH": _PATH, "HOME": "/root" if user == "root" else f"/home/{user}", "LANG": "C.UTF-8"}
        variables |= {"DEBIAN_FRONTEND": "noninteractive", **self.environment, **(more or {})}
        at = shlex.quote(str(self.folder))
        script = [
            "set -e",
            "mount --make-rprivate /",
            f"mount -t proc proc {at}/proc",
            f"mount --rbind /sys {at}/sys",
            f"mount --rbind /dev {at}/dev",
        ]
        for path in (Path("/etc/resolv.conf"), *self.binds):
            there = f"{at}{shlex.quote(str(path))}"
            made = f"mkdir -p {there}" if path.is_dir() else f"mkdir -p $(dirname {there}); touch {there}"
            script.append(f"{made}; mount --bind {shlex.quote(str(path))} {there}; mount -o remount,bind,ro {there}")
        inside = shlex.join(
            ["env", "-i", *(f"{k}={v}" for k, v in variables.items()), "sh", "-c", 'cd "$0" && exec "$@"']
        )
        script.append(f"chroot --userspec={user} {at} {inside} {shlex.join([cwd, *words])} || exit $?")
        script.append("exit 0")  # a shell's last command would take its place
        return [*_UNSHARE, "sh", "-c", "\n".join(script)]

    def run(
        self,
        command: str,
        *,
        user: str = "root",
        more: Mapping[str, str] | None = None,
        cwd: str = "/",
    ) -> str:
        """A shell's command line there; what it printed. Raises DebianError if it fails."""
        words = self.command(["sh", "-c", command], user=user, more=more, cwd=cwd)
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise DebianError(f"{command}\nended with status {done.returncode}:\n{done.stdout[-2000:]}")
        return done.stdout

    def start(
        self, words: Sequence[str], output: IO[bytes], *, user: str, more: Mapping[str, str], cwd: str = "/"
    ) -> subprocess.Popen[bytes]:
        """A program there; killing it ends all of its processes."""
        return subprocess.Popen(
            self.command(words, user=user, more=more, cwd=cwd), stdout=output, stderr=output, start_new_session=True
        )
