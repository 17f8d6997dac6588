"""ktserve train: the run is a process of its own, whose output is ours."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from api.client.process import child_environment
from engine.errors import UserError
from ktserve.launcher import die_with_parent, program

TRAINING_COMMAND = program("training")
_NEEDED = ("torch", "transformers", "peft", "accelerate")
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_WITH_VALUE = ("--publish", "--admin-key", "--admin-key-file", "--skip-bad-rows")
_PUBLISH_KEY = "KTSERVE_PUBLISH_KEY"


def train(
    config: str,
    overrides: Sequence[str],
    *,
    resume: str | None = None,
    publish: str | None = None,
    admin_key: str | None = None,
    admin_key_file: str | None = None,
    skip_bad_rows: str | None = None,
) -> int:
    """The run's exit status. Ctrl-C and SIGTERM reach it: it saves and ends. UserError for packages that are missing
    and settings of this command that contradict one another."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"training needs {', '.join(missing)}: pip install 'ktserve[train]'", "train")
    key = _key(publish, admin_key, admin_key_file)
    argv = [*TRAINING_COMMAND, config, *overrides]
    argv += [] if resume is None else [f"--resume={resume}"]
    argv += [] if publish is None else [f"--publish={publish}"]
    argv += [] if skip_bad_rows is None else [f"--skip-bad-rows={skip_bad_rows}"]
    return _wait(argv, key)


def publish_adapter(
    path: str, url: str, *, name: str | None = None, admin_key: str | None = None, admin_key_file: str | None = None
) -> int:
    """Loads a finished adapter into a running server, under `name` or its folder's. The exit status."""
    folder = Path(os.path.expanduser(path)).resolve()
    argv = [*TRAINING_COMMAND, str(folder), f"--finished={name or folder.name}", f"--publish={url}"]
    return _wait(argv, _key(url, admin_key, admin_key_file))


def ordered(argv: Sequence[str]) -> list[str]:
    """A command line of `train` whose overrides may stand anywhere: behind the file, and `--resume` with its folder or
    with none, since argparse reads words behind flags as something else. Other command lines as they are."""
    if not argv or argv[0] != "train":
        return list(argv)
    words: list[str] = []
    flags: list[str] = []
    rest = list(argv[1:])
    while rest:
        word = rest.pop(0)
        flag = word.replace("_", "-")
        if flag == "--resume":
            takes = bool(rest) and not rest[0].startswith("-") and not _OVERRIDE.match(rest[0]) and bool(words)
            flags.append(f"--resume={rest.pop(0) if takes else 'true'}")
        elif flag in _WITH_VALUE and rest:
            flags += [flag, rest.pop(0)]
        else:
            (flags if word.startswith("-") else words).append(word)
    return ["train", *words, *flags]


def _wait(argv: Sequence[str], key: str | None) -> int:
    """The exit status of a process that ends with this one, however that ends."""
    environment = child_environment() | ({} if key is None else {_PUBLISH_KEY: key})
    child = subprocess.Popen(argv, env=environment, preexec_fn=die_with_parent())
    # A terminal's Ctrl-C goes to both processes; a signal to this one alone is passed on.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    status = child.wait()
    return status if status >= 0 else 128 - status


def _key(publish: str | None, key: str | None, file: str | None) -> str | None:
    if publish is None and (key or file):
        raise UserError("--admin-key without --publish: there is no server to give it to", "admin_key")
    if key and file:
        raise UserError("--admin-key and --admin-key-file: one or the other", "admin_key")
    if file is None:
        return key or os.environ.get("KTSERVE_ADMIN_KEY")
    try:
        return Path(os.path.expanduser(file)).read_text().strip()
    except OSError as error:
        raise UserError(f"--admin-key-file {file}: {error.strerror}", "admin_key_file") from None
