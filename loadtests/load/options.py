"""The flags of a load test."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ktserve.arguments import OneLineParser
from loadtests.load.limits import FORMS, Limit
from loadtests.load.scenarios import SCENARIOS
from loadtests.load.traffic import ARRIVALS, Traffic

_EXAMPLES = """\
examples:
  python -m ktserve loadtests --scenario chat --users 1,4,16 --duration 30 --report chat.html
  python -m ktserve loadtests --scenario tenants --limit ttft.p95/quiet=500 -- --max-num-seqs 8
  python -m ktserve loadtests --scenario adapters --adapters 64 --arrival bursts --rate 4
  python -m ktserve loadtests --host http://127.0.0.1:8000 --workers 4
Without --host a server is started (and ended) on a free port; what follows -- goes to `ktserve serve`.
"""


@dataclass(frozen=True)
class Options:
    """`levels`: users of each stage, or rates of new conversations a second where arrivals are open."""

    scenario: str
    host: str | None
    levels: tuple[float, ...]
    users: int
    duration_s: float
    traffic: Traffic
    limits: tuple[Limit, ...]
    adapters: int
    report: Path | None
    workers: int
    remote_workers: int
    listen: str
    worker: str | None
    ui: int | None
    serve: list[str] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return self.traffic.arrival != "closed"

    def of_level(self, level: float) -> tuple[int, Traffic, str]:
        """Users, their traffic and the name of a stage."""
        if not self.open:
            return int(level), self.traffic, f"{level:g} users"
        classes = SCENARIOS[self.scenario]
        paced = sum(each.weight for each in classes if each.paced) / sum(each.weight for each in classes)
        return self.users, replace(self.traffic, rate=level / (self.users * paced)), f"{level:g}/s"


def parse(argv: Sequence[str] | None) -> Options:
    """Ends the program with a line for what is wrong."""
    default = Traffic()
    parser = OneLineParser(
        prog="ktserve loadtests",
        description="Load an OpenAI-compatible server and fail where it misses its limits.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--scenario", choices=SCENARIOS, default="chat")
    add("--host", help="URL of a server that runs, e.g. http://127.0.0.1:8000")
    add("--users", help="users at the same time; several, with commas, are stages (default: 8, or one of each kind)")
    add("--arrival", choices=ARRIVALS, default=default.arrival, help="closed: a user waits for the answer")
    add("--rate", help="new conversations a second where arrivals are open; several are stages (default: 1)")
    add("--duration", type=float, default=60, help="seconds of a stage (default: 60)")
    add("--seed", type=int, default=default.seed)
    add("--prompt-words", type=int, default=default.prompt_words, help="median of a turn (default: %(default)s)")
    add("--answer-tokens", type=int, default=default.answer_tokens, help="median (default: %(default)s)")
    add("--max-tokens", type=int, default=default.max_tokens, help="longest answer (default: %(default)s)")
    add("--long-words", type=int, default=default.long_words, help="longest of long_prefill (default: %(default)s)")
    add("--timeout", type=float, default=default.timeout_s, help="seconds without a byte (default: 300)")
    add("--models", help="names with commas, the base first (default: what /v1/models lists)")
    add("--api-key", help="key to send")
    add("--key", action="append", default=[], metavar="TENANT=KEY", help="of tenants: quiet, heavy and flood")
    add("--admin-key", default="", help="for churn and soak")
    add("--adapter-path", default="", help="folder of the adapter that churn and soak load, as the server sees it")
    add("--adapters", type=int, default=0, help="names for the demo's adapter at the server that is started, 0 to 64")
    add("--limit", action="append", default=[], metavar="METRIC[/GROUP]=VALUE", help=f"fail beyond it: {FORMS}")
    add("--report", type=Path, metavar="FILE", help="write an HTML page with plots")
    add("--workers", type=int, default=0, help="locust workers as processes of this machine")
    add("--remote-workers", type=int, default=0, help="wait for so many that others start with --worker")
    add("--listen", default="127.0.0.1:0", metavar="ADDRESS:PORT", help="for workers (default: a free port here)")
    add("--worker", metavar="ADDRESS:PORT", help="be a worker of a load test that listens there")
    add("--ui", type=int, nargs="?", const=8089, metavar="PORT", help="locust's page, until Ctrl-C (default: 8089)")
    add("serve", nargs="*", help="flags for the server that is started, after --")
    args = parser.parse_args(argv)
    try:
        return _options(args)
    except ValueError as error:
        parser.error(str(error))


def _options(args: argparse.Namespace) -> Options:
    for name in ("duration", "prompt_words", "answer_tokens", "max_tokens", "long_words", "timeout"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    for name in ("workers", "remote_workers", "adapters"):
        if not 0 <= getattr(args, name) <= 64:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: 0 to 64")
    is_open, kinds = args.arrival != "closed", len(SCENARIOS[args.scenario])
    if args.rate and not is_open:
        raise ValueError("--rate: users of a closed run wait for answers; add --arrival poisson or bursts")
    if args.host and (args.serve or args.adapters):
        raise ValueError("--adapters and flags after -- are of a server that is started; --host names one that runs")
    users = _levels(args.users or str(max(8, kinds)), "--users", whole=True)
    if min(users) < kinds:
        raise ValueError(f"--users {min(users):g}: {args.scenario} has {kinds} kinds of users, one of each is needed")
    if is_open and len(users) > 1:
        raise ValueError("--users: one number where arrivals are open; stages are by --rate")
    keys = {"": args.api_key} if args.api_key else {}
    for text in args.key:
        tenant, found, key = text.partition("=")
        if not found or not key:
            raise ValueError(f"--key {text}: write TENANT=KEY")
        keys[tenant] = key
    if args.scenario == "tenants" and args.host and {"quiet", "heavy", "flood"} - keys.keys():
        raise ValueError("--scenario tenants: --key quiet=KEY, --key heavy=KEY and --key flood=KEY are needed")
    if args.scenario in ("churn", "soak") and args.host and not args.adapter_path:
        raise ValueError(f"--scenario {args.scenario}: --adapter-path is needed (and the server's --admin-key, if any)")
    traffic = Traffic(
        seed=args.seed, arrival=args.arrival, prompt_words=args.prompt_words, answer_tokens=args.answer_tokens,
        max_tokens=args.max_tokens, long_words=args.long_words, timeout_s=args.timeout, keys=keys,
        models=[name for name in (args.models or "").split(",") if name], admin_key=args.admin_key,
        adapter_path=args.adapter_path,
    )  # fmt: skip
    return Options(
        scenario=args.scenario, host=args.host, levels=_levels(args.rate or "1", "--rate") if is_open else users,
        users=int(users[0]), duration_s=args.duration, traffic=traffic, adapters=args.adapters, report=args.report,
        limits=tuple(Limit.parse(text) for text in args.limit), workers=args.workers,
        remote_workers=args.remote_workers, listen=args.listen, worker=args.worker, ui=args.ui, serve=args.serve,
    )  # fmt: skip


def _levels(text: str, flag: str, *, whole: bool = False) -> tuple[float, ...]:
    try:
        found = tuple(float(int(part)) if whole else float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text}: write numbers with commas between") from None
    if not all(0 < level < float("inf") for level in found):
        raise ValueError(f"{flag} {text}: all must be above 0")
    return found
