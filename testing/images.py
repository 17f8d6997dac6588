"""Tries a Dockerfile's steps where there is no Docker: in fresh Debian roots, one for each stage.

    python -m testing.images deploy/Dockerfile.cpu --folder /large/disk/images

Every `FROM` is a minimal Debian root, whatever it names: the output says so where that is another image. After the last
step the entry point runs as the image's user with its default command and a key; the health check and a question have
to succeed. Needs root and debootstrap. Layers, volumes and limits are Docker's and are not tried.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from loadtests.child import ServerError, wait_ready
from testing.debian import Debian, DebianError, new_folder

ROOT = Path(__file__).parents[1]
BASE = "debian:bookworm-slim"
INSTRUCTIONS = frozenset(
    {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER", "VOLUME"}
)
_URL = "http://127.0.0.1:8000"
_KEY = "a-key-of-this-trial"
_START_S = 600.0


@dataclass
class Stage:
    """An image while it is made."""

    debian: Debian
    user: str = "root"
    variables: dict[str, str] = field(default_factory=dict)
    words: dict[str, list[str]] = field(default_factory=dict)  # of HEALTHCHECK, ENTRYPOINT and CMD

    def expanded(self, value: str) -> str:
        known = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **self.variables}
        return re.sub(r"\$(\w+)", lambda found: known.get(found[1], ""), value)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Name and arguments of each, lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


def built(dockerfile: Path, folder: Path) -> Stage:
    """The last stage after all steps. DebianError for a step that fails or that is not known here."""
    fresh = Debian.made(folder / "base")
    stages: dict[str, Stage] = {}
    stage = Stage(fresh)
    for name, rest in instructions(dockerfile.read_text()):
        began = time.perf_counter()
        if name == "FROM":
            image, _, alias = rest.partition(" AS ")
            if image != BASE:
                print(f"          in place of {image}: {BASE}")
            stage = Stage(fresh.copy(folder / f"stage-{len(stages)}"))
            stages[alias or str(len(stages))] = stage
        elif name == "RUN":
            stage.debian.run(rest, user=stage.user, more=stage.variables)
        elif name == "COPY":
            _copy(stage, stages, rest)
        elif name == "USER":
            stage.user = rest
        elif name == "ENV":
            pairs = (word.partition("=") for word in shlex.split(rest))
            stage.variables |= {key: stage.expanded(value) for key, _, value in pairs}
        elif name in ("HEALTHCHECK", "ENTRYPOINT", "CMD"):
            stage.words[name] = json.loads(rest[rest.index("[") :])
        elif name not in INSTRUCTIONS:
            raise DebianError(f"{name} {rest}: not known here")
        print(f"{time.perf_counter() - began:7.1f} s  {name} {rest}", flush=True)
    return stage


def _copy(stage: Stage, stages: dict[str, Stage], rest: str) -> None:
    """`COPY . TO` (what git tracks; the ignored files are those of .dockerignore and more) and `COPY --from=STAGE`."""
    *options, source, to = rest.split()
    there = stage.debian.folder / to.lstrip("/")
    if options:
        shutil.copytree(stages[options[0].removeprefix("--from=")].debian.folder / source.lstrip("/"), there)
        return
    if source != ".":
        raise DebianError(f"COPY {rest}: not known here")
    for name in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, there / name)


def answered(stage: Stage) -> str:
    """The answer of the image's server to a question. DebianError if it does not come up, or its check fails."""
    (stage.debian.folder / "keys").write_text(f"{_KEY}\n")
    variables = stage.variables | {"KTSERVE_API_KEYS_FILE": "/keys"}
    words = [*stage.words["ENTRYPOINT"], *stage.words["CMD"]]
    with tempfile.NamedTemporaryFile("w+b") as log:
        process = stage.debian.start(words, log.file, user=stage.user, more=variables)
        try:
            wait_ready(process, f"{_URL}/health", _START_S)
            stage.debian.run(shlex.join(stage.words["HEALTHCHECK"]), user=stage.user, more=stage.variables)
            body = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
            headers = {"Authorization": f"Bearer {_KEY}"}
            answer = httpx.post(f"{_URL}/v1/chat/completions", json=body, headers=headers, timeout=60)
            return str(answer.json()["choices"][0]["message"]["content"])
        except (ServerError, httpx.HTTPError, KeyError) as error:
            raise DebianError(f"{shlex.join(words)}\n{error!r}:\n{Path(log.name).read_text()[-2000:]}") from None
        finally:
            process.kill()  # the namespace's processes end with it
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where roots are made; it must not be there")
    parser.add_argument("--keep", action="store_true", help="leave the roots there")
    args = parser.parse_args(argv)
    try:
        with new_folder(args.folder, keep=args.keep):
            args.folder.mkdir(parents=True)
            stage = built(args.dockerfile, args.folder)
            print(f"as {stage.user}: {answered(stage)}")
    except (DebianError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
