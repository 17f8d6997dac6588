"""Run a scenario, print a table, write a page, fail where a limit was missed: `python -m ktserve loadtests`."""

from __future__ import annotations

from locust.env import Environment  # isort: skip  # patches the standard library: before all others

import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import gevent
from locust import argument_parser
from rich.console import Console
from rich.table import Table

from ktserve.launcher import program
from ktserve.openai_client import AnswerError, Server
from loadtests.child import ServerError
from loadtests.load.limits import Limit
from loadtests.load.options import Options, parse
from loadtests.load.recorder import Recorder, wait_until
from loadtests.load.records import Stage
from loadtests.load.scenarios import SCENARIOS
from loadtests.load.server import serving
from loadtests.load.traffic import Traffic
from loadtests.load.watch import Watch, held_table
from loadtests.report.document import machine
from loadtests.report.html import COLUMNS, page, row

_WORKERS_S = 120.0
_DRAIN_S = 60.0
_SHOWN_ERRORS = 5
_LOOKS = 30  # at a server that is watched
_OPEN = ("ktserve_num_requests_running ", "ktserve_num_requests_waiting ")
_NO_ERRORS = Limit("errors", None, 0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if a limit was missed; without one for errors, any error is too many."""
    options = parse(argv)
    if options.worker:
        return _work(options.worker)
    with contextlib.ExitStack() as stack:
        try:
            watch = None
            if options.host is None:
                started = stack.enter_context(serving(options.scenario, options.serve, options.adapters))
                traffic = replace(
                    options.traffic,
                    keys={**started.keys, **options.traffic.keys},
                    admin_key=started.admin_key,
                    adapter_path=started.adapter_path,
                )
                options = replace(options, host=started.url, traffic=traffic)
                if options.scenario == "soak":
                    every_s = options.duration_s * len(options.levels) / _LOOKS
                    watch = Watch(started.pid, Server(started.url, started.admin_key), every_s)
            for tenant, key in (options.traffic.keys or {"": ""}).items():
                if not Server(options.host or "", key, options.traffic.timeout_s).models():
                    raise AnswerError(f"it lists no models{f' for {tenant}' if tenant else ''}")
            stages = _run(options, stack)
            grown = watch.end() if watch else []
        except (AnswerError, ServerError, TimeoutError, OSError) as error:
            print(f"error: {options.host or 'server'}: {error}", file=sys.stderr)
            return 1
    return _report(options, stages, grown, watch)


def _run(options: Options, stack: contextlib.ExitStack) -> list[Stage]:
    environment = _environment(options.host or "", options.scenario)
    recorder = Recorder(environment)
    if options.workers or options.remote_workers:
        address, _, port = options.listen.rpartition(":")
        runner = environment.create_master_runner(address, int(port) or _free_port())
        stack.enter_context(_workers(options.workers, f"{address}:{runner.master_bind_port}"))
        print(f"workers connect to {address}:{runner.master_bind_port}", file=sys.stderr)
        expected = options.workers + options.remote_workers
        wait_until(lambda: len(runner.clients.ready) >= expected, _WORKERS_S, f"{expected} workers")
    else:
        runner = environment.create_local_runner()
    try:
        if options.ui is not None:
            return [_page_of_locust(environment, recorder, options)]
        return [_stage(environment, recorder, options, level) for level in options.levels]
    finally:
        runner.quit()


def _environment(host: str, scenario: str) -> Environment:
    parser = argument_parser.get_empty_argument_parser()
    argument_parser.setup_parser_arguments(parser)
    return Environment(user_classes=list(SCENARIOS[scenario]), host=host, parsed_options=parser.parse_args([]))


def _stage(environment: Environment, recorder: Recorder, options: Options, level: float) -> Stage:
    users, traffic, label = options.of_level(level)
    environment.parsed_options.load = traffic.row()  # goes to workers too
    runner = environment.runner
    before, began_s = len(recorder.answers), time.time()
    runner.start(users, spawn_rate=users)
    gevent.sleep(options.duration_s)
    took_s = time.time() - began_s
    runner.stop()
    recorder.settle()
    _drain(options.host or "", traffic)
    return Stage(label, began_s, took_s, recorder.answers[before:])


def _drain(host: str, traffic: Traffic) -> None:
    """Let a server of ours end what was cut off, so that the next stage begins with none of it; others have as long as
    it takes to say that they tell nothing."""
    api = Server(host, traffic.admin_key or next(iter(traffic.keys.values()), ""), traffic.timeout_s)

    def idle() -> bool:
        try:
            lines = api.get("/metrics").decode(errors="replace").splitlines()
        except (AnswerError, OSError):
            return True
        busy = [line for line in lines if line.startswith(_OPEN)]
        return not any(float(line.split()[1]) for line in busy)

    wait_until(idle, _DRAIN_S, "an idle server")


def _page_of_locust(environment: Environment, recorder: Recorder, options: Options) -> Stage:
    users, traffic, _ = options.of_level(options.levels[0])
    environment.parsed_options.load = traffic.row()
    environment.parsed_options.num_users = environment.parsed_options.spawn_rate = users
    web = environment.create_web_ui("127.0.0.1", options.ui)
    began_s = time.time()
    print(f"locust's page: http://127.0.0.1:{options.ui}; Ctrl-C ends", file=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        web.greenlet.join()
    web.stop()
    environment.runner.stop()
    recorder.settle()
    return Stage("locust's page", began_s, time.time() - began_s, recorder.answers)


def _work(master: str) -> int:
    address, _, port = master.rpartition(":")
    environment = _environment("", "chat")
    environment.user_classes = list({each: None for kinds in SCENARIOS.values() for each in kinds})
    Recorder(environment)
    runner = environment.create_worker_runner(address, int(port))
    runner.greenlet.join()
    return 0


@contextlib.contextmanager
def _workers(count: int, master: str) -> Iterator[None]:
    processes = [subprocess.Popen(program("loadtests", "--worker", master)) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _report(options: Options, stages: Sequence[Stage], grown: Sequence[str], watch: Watch | None) -> int:
    own = any(limit.metric == "errors" for limit in options.limits)
    limits = options.limits if own else (*options.limits, _NO_ERRORS)
    broken = [f"{stage.label}: {found}" for stage in stages for limit in limits if (found := limit.broken(stage))]
    broken += [f"the server: {line}" for line in grown]
    title = f"{options.scenario}, {options.traffic.arrival} arrivals, seed {options.traffic.seed}"
    console = Console(width=max(120, Console().width))
    table = Table(title=f"{title}, {options.duration_s:g} s a stage; milliseconds")
    for column in ("stage", "open", "group", *COLUMNS):
        table.add_column(column, justify="left" if column in ("stage", "group") else "right")
    for stage in stages:
        groups = sorted({answer.group for answer in stage.answers})
        for group in [*groups, None] if len(groups) != 1 else groups:
            some = [answer for answer in stage.answers if group in (None, answer.group)]
            opened = sum(answer.total_s for answer in some) / stage.duration_s
            table.add_row(stage.label, f"{opened:.1f}", group or "all", *row(some, stage.duration_s))
    console.print(table)
    for line in held_table(watch.seen) if watch else ():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    answers = [answer for stage in stages for answer in stage.answers]
    for outcome, count in Counter(answer.outcome for answer in answers if answer.failed).most_common(_SHOWN_ERRORS):
        console.print(f"failed {count}x: {outcome}", markup=False, highlight=False)
    if options.report:
        held = watch.seen if watch else ()
        options.report.write_text(page(title, stages, broken, held, _setting(options, stages)), encoding="utf-8")
        console.print(f"report: {options.report}", highlight=False)
    for line in broken:
        console.print(f"missed: {line}", markup=False, highlight=False)
    return 1 if broken else 0


def _setting(options: Options, stages: Sequence[Stage]) -> dict[str, str]:
    """What was run, where and when."""
    traffic = options.traffic
    began = time.gmtime(min((stage.began_s for stage in stages), default=time.time()))
    return {
        "server": options.host or "",
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", began),
        "measured from": machine(),
        "scenario": f"{options.scenario}, {options.duration_s:g} s a stage",
        "words of a prompt, median": str(traffic.prompt_words),
        "tokens of an answer, median": f"{traffic.answer_tokens}, at most {traffic.max_tokens}",
        "models": ", ".join(traffic.models) or "the server's",
    }


if __name__ == "__main__":
    sys.exit(main())
