"""A job's files become samples: by a program of its own, which checks them whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import msgspec

from api.client.process import child_environment
from api.prepare.job import TextSettings
from api.tuning.records import JobError, JobRecord
from api.tuning.service import Tuning
from ktserve.launcher import die_with_parent, program


class Checked(msgspec.Struct, frozen=True):
    """What the program prints."""

    examples: int = 0
    tokens: int = 0
    learnt: int = 0
    errors: list[str] = []


async def check_file(tuning: Tuning, job: JobRecord, name: str, text: TextSettings, longest: int) -> Checked:
    """`name`: "training" or "validation". Its samples are in the job's folder afterwards, if there is no error.
    RuntimeError if the program fails."""
    file_id = job.training_file if name == "training" else job.validation_file
    assert file_id is not None
    link = tuning.folder(job.id) / f"{name}.jsonl"
    await tuning.batches.in_thread(_link, tuning.batches.path(file_id), link)
    asked = {
        "model": text.model,
        "gguf": text.gguf,
        "chat_template": text.chat_template,
        "trust_control_tokens": text.trust_control_tokens,
        "path": str(link),
        "out": str(link.with_suffix("")),
        "method": job.asked.method,
        "longest": longest // 2 if job.asked.method == "dpo" else longest,
    }
    process = await asyncio.create_subprocess_exec(
        *program("tuning-data", msgspec.json.encode(asked).decode()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
        preexec_fn=die_with_parent() if sys.platform == "linux" else None,
    )
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the program that reads {name}_file ended with status {process.returncode}")
    return msgspec.json.decode(printed.splitlines()[-1], type=Checked)


def error_of(checked: Checked, name: str) -> JobError:
    """Of a file with errors."""
    more = len(checked.errors) - 1
    message = checked.errors[0] + (f" (and {more} more: the events list them)" if more else "")
    return JobError(f"invalid_{name}_file", message, f"{name}_file")


def _link(file: Path, link: Path) -> None:
    link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    os.symlink(file.resolve(), link)
