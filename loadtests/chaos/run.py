"""Minutes of chaos against a server of its own: floods, hang-ups, half-open and slow clients, bad bodies, adapter churn
with broken folders, engine kills and freezes. Ends with status 1 if a promise of docs/robustness.md was broken.

    make chaos [ARGS="--minutes 2 --seed 7 --family deepseek_v3"]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from demo.paths import demo_adapters
from ktserve.launcher import module_of_checkout
from loadtests.chaos.actors import ACTORS, HANG_S, HEALTH, PATIENT, WELL_BEHAVED, Attack, observer
from loadtests.chaos.forms import batches, forms
from loadtests.chaos.server import serving
from loadtests.chaos.training import ended_jobs, jobs, remove_models, runs
from loadtests.chaos.watch import Held, answers, held, ready
from loadtests.child import ServerError
from loadtests.http import Server

_ADMIN, _KEYS = "chaos-admin", ("chaos-flood", "chaos-patient")
_SERVE = (
    *("--max-num-seqs", "16", "--max-queue", "64", "--kv-cache-tokens", "16384", "--max-adapter-slots", "4"),
    *("--engine-hang-s", str(HANG_S), "--log-level", "warning", "--pack-cache", "off", "--request-timeout-s", "60"),
    "--allow-any-adapter-path",
)
_TRAIN = ("--fine-tuning", "--training-share", "0.2")
_SETTLE_S = 60.0
_JOBS_S = 120.0  # until all jobs have ended, when nothing else runs
_ANSWERED, _HEALTHY = 0.60, 0.85  # shares of what is asked, its own kills left out, that are to be 200
_METRICS_FACTOR = 2.0  # outcomes and models that had not occurred before
_MEMORY_FACTOR = 1.5
_LOG_BYTES_A_MINUTE = 256 * 1024
_SPARE_MIB = 64.0  # of an allocator, on top of the factor


@dataclass(frozen=True)
class _Served:
    """What is attacked. `flags`: that name the model and its adapters, none for the demo. Copies of the first adapter
    are broken and loaded."""

    title: str = "the demo model"
    name: str = "demo"
    adapters: dict[str, Path] = field(default_factory=demo_adapters)
    flags: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", help="a tiny random model of it instead of the demo: deepseek_v3, gpt_oss, ...")
    parser.add_argument("--out", type=Path, help="file for the summary, as Markdown")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ktchaos-") as folder:
        try:
            served = _Served() if args.family is None else _made(args.family, Path(folder))
        except subprocess.CalledProcessError as error:
            print(error.stderr, end="", file=sys.stderr)
            return 2
        summary, broken = asyncio.run(_chaos(args.minutes, args.seed, served, Path(folder)))
    print(summary)
    if args.out:
        args.out.write_text(summary + "\n", encoding="utf-8")
    for line in broken:
        print(f"broken: {line}")
    return 1 if broken else 0


def _made(family: str, folder: Path) -> _Served:
    """A tiny model of the family in `folder`, with an adapter. By a process of its own: what attacks needs no torch.
    Raises CalledProcessError."""
    command = module_of_checkout("testing.models.served", family, str(folder))
    subprocess.run(command, check=True, capture_output=True, text=True)
    adapter = folder / "adapter"
    return _Served(family, "model", {"own": adapter}, (str(folder / "model"), "--adapters", f"own={adapter}"))


@contextlib.contextmanager
def _attackable(log: Path, flags: Sequence[str]) -> Iterator[tuple[int, Server, bool]]:
    """As `serving`, and whether it trains: without training if the server says that it cannot train this model."""
    with contextlib.ExitStack() as stack:
        try:
            pid, server = stack.enter_context(serving(log, [*flags, *_TRAIN], _ADMIN))
            trains = True
        except ServerError as error:
            if _TRAIN[0] not in str(error):
                raise
            pid, server = stack.enter_context(serving(log, flags, _ADMIN))
            trains = False
        yield pid, server, trains


async def _chaos(minutes: float, seed: int, served: _Served, folder: Path) -> tuple[str, list[str]]:
    keys = folder / "keys"
    keys.write_text("".join(f"{key}={key}\n" for key in _KEYS))
    flags = [*served.flags, *_SERVE, "--api-keys-file", str(keys), "--data-dir", str(folder / "data")]
    with _attackable(folder / "server.log", flags) as (pid, admin, trains):
        target, other = (dataclasses.replace(admin, key=key) for key in _KEYS)
        models = [served.name, *served.adapters]
        server = psutil.Process(pid)
        first_answers = await answers(target, models)
        before = await held(server, admin)
        attack = Attack(
            target, other, admin, server, models, next(iter(served.adapters.values())), folder, random.Random(seed),
            asyncio.get_running_loop().time() + minutes * 60,
        )  # fmt: skip
        health_s: list[float] = []
        actors = (*ACTORS, forms, batches, *((jobs, runs) if trains else ()))
        await asyncio.gather(*(actor(attack) for actor in actors), observer(attack, health_s))
        serves = await ready(target, _SETTLE_S)
        ends = await ended_jobs(attack, _JOBS_S) if trains else {}
        await remove_models(attack)
        after = await _settled(server, admin)
        last_answers = await answers(target, models)
        log_bytes = (folder / "server.log").stat().st_size
    broken = _broken(attack, before, after, serves, first_answers == last_answers)
    broken += [f"job {job}: {end}" for job, end in ends.items() if end not in ("succeeded", "cancelled")]
    if log_bytes > _LOG_BYTES_A_MINUTE * max(minutes, 1):
        broken.append(f"the log has {log_bytes} bytes")
    title = f"{served.title}, {minutes:g} minutes, seed {seed}"
    summary = _summary(attack, title, before, after, health_s, log_bytes, first_answers == last_answers)
    trained = f"Jobs: {_counts(Counter(ends.values()))}." if trains else "This model is not trained beside serving."
    return f"{summary}\n\n{trained}", broken


async def _settled(server: psutil.Process, target: Server) -> Held:
    """What is held once nothing runs any more, or after a minute."""
    for _ in range(int(_SETTLE_S)):
        now = await held(server, target)
        if not (now.running or now.waiting or now.blocks_used or now.slots_used):
            break
        await asyncio.sleep(1)
    await asyncio.sleep(5)  # connections that the attackers left are closed
    return await held(server, target)


def _shares(attack: Attack) -> list[tuple[str, float, int, float]]:
    """Of what is to be answered with 200: its name, the share that was, of how many, and the share that is asked."""
    availability = attack.tally.availability
    return [
        ("well-behaved requests", *availability.share(WELL_BEHAVED, HEALTH), _ANSWERED),
        ("looks at /health", *availability.share((HEALTH,), HEALTH), _HEALTHY),
    ]


def _broken(attack: Attack, before: Held, after: Held, serves: bool, same: bool) -> list[str]:
    unanswered = {
        f"{share:.0%} of {count:,} {what} were answered 200, at least {least:.0%} are to be": share >= least
        for what, share, count, least in _shares(attack)
    }
    checks = unanswered | {
        f"{attack.tally.total('never')} requests never ended": attack.tally.total("never") == 0,
        "the server did not serve again": serves,
        "greedy answers differ": same,
        "requests are left": after.running == after.waiting == 0,
        "blocks are left": after.blocks_used == 0,
        "adapter slots are left": after.slots_used == 0,
        "the api's memory grew": after.api_mib <= before.api_mib * _MEMORY_FACTOR + _SPARE_MIB,
        "the engine's memory grew": after.engine_mib <= before.engine_mib * _MEMORY_FACTOR + _SPARE_MIB,
        "descriptors are left": after.files <= before.files + 16,
        "threads are left": after.threads <= before.threads + 16,
        "/metrics grew": after.metrics_kib <= before.metrics_kib * _METRICS_FACTOR,
        "a tenant within its share was refused": not attack.tally.ends.get(PATIENT, Counter())["429"],
        "internal errors": not any("500" in end.split() for ends in attack.tally.ends.values() for end in ends),
    }
    return [what for what, holds in checks.items() if not holds]


def _summary(
    attack: Attack, title: str, before: Held, after: Held, health_s: list[float], log_bytes: int, same: bool
) -> str:
    lines = [f"{title}: {attack.tally.total():,} requests", "", "| requests | how they ended |", "|---|---|"]
    for actor, ends in sorted(attack.tally.ends.items()):
        lines.append(f"| {actor} | {_counts(ends)} |")
    lines += ["", "| held | before | after |", "|---|---|---|"]
    lines += [f"| {name} | {value:.0f} | {after.rows()[name]:.0f} |" for name, value in before.rows().items()]
    kinds = sorted(set(attack.deaths))
    deaths = ", ".join(f"{kind} {attack.deaths.count(kind)} times" for kind in kinds) or "left alone"
    health_ms = [1000 * value for value in sorted(health_s)]
    high_ms, same_or_not = health_ms[int(len(health_ms) * 0.99)], "the same" if same else "DIFFERENT"
    lines += [
        "",
        f"The engine was {deaths}. `/health`: median {statistics.median(health_ms):.0f} ms, 99% < {high_ms:.0f} ms, "
        f"longest {health_ms[-1]:.0f} ms (attackers and server share the CPUs). Log: {log_bytes / 1024:.0f} KiB. "
        f"Greedy answers before and after: {same_or_not}.",
        "",
        "| answered 200, own kills left out | of | share | at least |",
        "|---|---|---|---|",
        *(f"| {what} | {count:,} | {share:.0%} | {least:.0%} |" for what, share, count, least in _shares(attack)),
    ]
    return "\n".join(lines)


def _counts(ends: Counter[str]) -> str:
    return ", ".join(f"{count:,} x {end}" for end, count in sorted(ends.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    sys.exit(main())
