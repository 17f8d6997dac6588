"""Programs in a root of their own: here this machine's."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import psutil
import pytest

from testing.debian import Debian, DebianError
from testing.processes import gone
from testing.waiting import eventually

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can enter a root, with unshare"
)
HERE = Debian(Path("/"))


@pytest.fixture(autouse=True)
def _allowed() -> None:
    try:
        HERE.run("true")
    except DebianError as error:
        pytest.skip(f"no namespaces here: {error}")


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_what_was_started_ends_when_it_is_killed(user: str) -> None:
    """Whatever user it has become."""
    with tempfile.TemporaryFile() as output:
        process = HERE.start(["sleep", "1000.25"], output, user=user, more={})
        found: list[psutil.Process] = []

        def started() -> bool:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.extend([child] if child.cmdline() == ["sleep", "1000.25"] else [])
            return bool(found)

        eventually(started, "it was not started")
        process.kill()
        process.wait()
        eventually(lambda: gone(found[0].pid), "it outlives what it was started by")


def test_a_command_says_what_it_printed_and_how_it_ended() -> None:
    assert HERE.run("id -un; echo $A", user="nobody", more={"A": "b c"}) == "nobody\nb c\n"
    with pytest.raises(DebianError, match="ended with status 3:\nx"):
        HERE.run("echo x; exit 3")
