"""From an empty Debian root to an answer of the demo model: each step as it is typed, and the time that it takes.

    python -m benchmarks.first_answer --folder /large/disk/root --wheel dist/ktserve-*.whl
    python -m benchmarks.first_answer --folder /large/disk/root --source

As root, with debootstrap. --wheel installs where no compiler is; --source builds the kernels by `make`. The variable
DEBIAN_BINDS shows the root what pip's configuration on this machine names (testing/debian.py). The transcript is
printed; --out FILE keeps it, and `python -m benchmarks.report.pages` puts it into docs/running.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import record
from benchmarks.client import free_port
from loadtests.child import ServerError, wait_ready
from testing.debian import Debian, DebianError, new_folder

ROOT = Path(__file__).parents[1]
QUESTION = "What is 2 + 3?"
_SHOWN_LINES = 12  # the last of what a step prints
_START_S = 900.0


@dataclass(frozen=True)
class Step:
    """What was typed, seconds until it had ended (of a server: until it answered), the end of what it printed."""

    command: str
    seconds: float
    said: str


def steps(debian: Debian, wheel: Path | None) -> Iterator[Step]:
    """`wheel` None: from the source tree at /src. The files that it needs lie in the root already. DebianError for the
    first that fails."""
    if wheel is not None:
        program = "/opt/ktserve/bin/ktserve"
        commands = [
            "apt-get update -qq && apt-get install -qq --no-install-recommends python3-venv curl",
            "python3 -m venv /opt/ktserve",
            f"/opt/ktserve/bin/pip install -q -c constraints.txt {wheel.name}",
        ]
    else:
        program = ".venv/bin/ktserve"
        commands = [
            "apt-get update -qq && apt-get install -qq --no-install-recommends make g++ python3-dev python3-venv curl",
            "make setup",
        ]
    cwd = "/src"
    for command in commands:  # what they print is of this machine's mirrors
        yield replace(_timed(debian, command, cwd), said="")
    yield _timed(debian, f"{program} doctor --quick", cwd)
    port = free_port()
    command = f"{program} serve --port {port}"
    with _served(debian, command, cwd, port) as step:
        yield step
        body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": QUESTION}]})
        asked = f"curl -s http://127.0.0.1:{port}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
        answer = _timed(debian, asked, cwd)
        if "2 + 3 = 5" not in answer.said:
            raise DebianError(f"{asked}\nanswered: {answer.said}")
        yield answer


def _timed(debian: Debian, command: str, cwd: str) -> Step:
    began = time.perf_counter()
    said = debian.run(command, cwd=cwd)
    return Step(command, round(time.perf_counter() - began, 1), _end(said))


@contextmanager
def _served(debian: Debian, command: str, cwd: str, port: int) -> Iterator[Step]:
    """The server while it runs."""
    with tempfile.NamedTemporaryFile("w+b") as log:
        began = time.perf_counter()
        process = debian.start(["sh", "-c", f"exec {command}"], log.file, user="root", more={}, cwd=cwd)
        try:
            wait_ready(process, f"http://127.0.0.1:{port}/health", _START_S)
            seconds = time.perf_counter() - began
            yield Step(command, round(seconds, 1), _end(Path(log.name).read_text()))
        except ServerError as error:
            raise DebianError(f"{command}\n{error}:\n{Path(log.name).read_text()[-2000:]}") from None
        finally:
            process.kill()  # the namespace's processes end with it
            process.wait()


def _end(said: str) -> str:
    return "\n".join(said.strip().splitlines()[-_SHOWN_LINES:])


def transcript(found: Sequence[Step]) -> str:
    """Markdown."""
    lines = ["```"]
    for step in found:
        lines += [f"$ {step.command}", *([step.said] if step.said else []), f"# {step.seconds:g} s", ""]
    lines[-1] = f"# together {sum(step.seconds for step in found):.0f} s"
    return "\n".join([*lines, "```"])


def _prepare(folder: Path, wheel: Path | None) -> Debian:
    """A root with what is installed in /src."""
    debian = Debian.made(folder)
    (folder / "src").mkdir()
    if wheel is not None:
        shutil.copy(wheel, folder / "src")
        shutil.copy(ROOT / "constraints.txt", folder / "src")
        return debian
    tree = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder / "src")], input=tree, check=True)
    return debian


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the root to make; it must not be there")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--wheel", type=Path, help="of `make wheel`, made by the Python that Debian has")
    which.add_argument("--source", action="store_true", help="build this tree's last commit instead")
    parser.add_argument("--keep", action="store_true", help="leave the root there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results, e.g. benchmarks/results/first-answer.json")
    args = parser.parse_args(argv)
    found: list[Step] = []
    try:
        with new_folder(args.folder, keep=args.keep):
            debian = _prepare(args.folder, args.wheel)
            for step in steps(debian, args.wheel):
                print(f"{step.seconds:7.1f} s  {step.command}", flush=True)
                found.append(step)
    except (DebianError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(transcript(found))
    if args.out is not None:
        record.write(args.out, {"steps": [asdict(step) for step in found]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
