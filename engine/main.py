"""`python -m ktserve engine COMMAND`: the engine as a child process. People use `ktserve`."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import msgspec

from engine.config import EngineConfig
from engine.errors import UserError
from engine.exit_status import exit_status
from engine.null import is_null

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.messages import FromEngine, Ready
    from engine.steps.base import Tuner

MakeTuner = Callable[["EngineCore", Callable[["FromEngine"], None], EngineConfig], "Tuner"]


def main(argv: list[str] | None = None, make_tuner: MakeTuner | None = None) -> int:
    """Returns the exit status: 0, 1 for a mistake of the user's (said in one line), 2 for what `check` or `inspect`
    found wrong. `make_tuner`: what trains beside serving, for --fine-tuning."""
    parser = argparse.ArgumentParser(prog="ktserve engine")
    commands = parser.add_subparsers(dest="command", required=True)
    rank = commands.add_parser("rank")  # started by rank 0, of the settings of which it computes a part
    rank.add_argument("--orders", type=int, required=True, help="socket that rank 0 has made for it")
    rank.add_argument("--slots", type=int, required=True, help="another, for adapters")
    doctor = commands.add_parser("doctor")
    doctor.add_argument("--config-json", default="{}")
    doctor.add_argument("--quick", action="store_true")
    doctor.add_argument("--json", action="store_true")
    doctor.add_argument("--share")
    doctor.add_argument("--bench")
    commands.add_parser("families").add_argument("paths", nargs="*")
    for name in ("serve", "plan", "check", "inspect", "convert", "merge"):
        command = commands.add_parser(name)
        command.add_argument("--config-json", required=name not in ("inspect", "convert", "merge"), default="{}")
        if name == "serve":
            command.add_argument("--address", required=True)
            command.add_argument("--heartbeat", required=True, help="file that the api has made for it")
        if name in ("inspect", "convert", "merge"):
            command.add_argument("path")
            command.add_argument("--expert-scaling", default=None)
            command.add_argument("--expert-b-layout", default=None)
        if name == "convert":
            command.add_argument("--to", required=True)
        if name in ("convert", "merge"):
            command.add_argument("--out", required=True)
        if name == "plan":
            command.add_argument("--form", nargs=2, action="append", default=[], metavar=("LABEL", "PATH"))
        if name == "check":
            command.add_argument("--tokens", type=int, default=64, help="length of the prompt that is run")
            command.add_argument("--tolerance", type=float, default=None)
    args = parser.parse_args(argv)
    if args.command == "rank":
        _rank(args.orders, args.slots)
    if args.command == "families":
        return _families(args.paths)
    config = msgspec.json.decode(args.config_json, type=EngineConfig)
    return exit_status(lambda: _run(args, config, make_tuner))


def _run(args: argparse.Namespace, config: EngineConfig, make_tuner: MakeTuner | None) -> int:
    if args.command == "serve":
        return _serve(config, args.address, args.heartbeat, make_tuner)
    if args.command == "plan":
        return _plan(config, args.form)
    if args.command == "check":
        return _check(config, args.tokens, args.tolerance)
    if args.command == "convert":
        return _convert(config, args)
    if args.command == "merge":
        return _merge(config, args)
    if args.command == "doctor":
        from engine.diagnostics.doctor.report import doctor

        return doctor(config.model, quick=args.quick, as_json=args.json, share=args.share, bench=args.bench)
    return _inspect(config, args)


def _serve(config: EngineConfig, address: str, heartbeat: str, make_tuner: MakeTuner | None) -> int:
    from engine.launch.context import begin_context
    from engine.launch.process import EngineProcess
    from engine.lora.fork_server import ForkServer
    from engine.weights.ahead import read_ahead

    process = EngineProcess(address, heartbeat)

    def build(*args):  # type: ignore[no-untyped-def]  # torch is imported only once the socket is bound
        if is_null(config.model):
            from engine.launch.null.build import build_null

            return build_null(config, args[1])

        mapped = read_ahead(config)
        begin_context(config)
        readers = ForkServer()
        if config.adapters:
            readers.start()
        try:
            build = _imported()
            core, ready = build(*args, mapped, readers)
        finally:
            if mapped is not None:
                mapped.drop()
        if config.fine_tuning:
            if make_tuner is None:
                raise UserError("--fine-tuning: this program starts the engine alone", "fine_tuning")
            core.tuner = make_tuner(core, args[1], config)
        if core.runner.spare_cpus:  # on a worker's CPU this thread would make every step wait for that worker
            os.sched_setaffinity(0, core.runner.spare_cpus)
        return core, ready

    return process.serve(config, build)


def _imported() -> Callable[..., tuple[EngineCore, Ready]]:
    """What builds an engine. Imports make objects that stay: the collector would look at them all, several times."""
    gc.disable()
    try:
        from engine.launch.assemble import build
    finally:
        gc.enable()
    return build


def _rank(orders: int, slots: int) -> NoReturn:
    import socket
    from multiprocessing.connection import Connection

    from engine.launch.follower import serve

    serve(Connection(orders), socket.socket(fileno=slots))


def _families(paths: list[str]) -> int:
    """Print as JSON for each model: its family or null, and why no family serves it."""
    from engine.weights.open import open_model

    found: list[tuple[str | None, str]] = []
    for path in paths:
        try:
            found.append((open_model(path).config.architecture, ""))
        except UserError as error:
            found.append((None, str(error)))
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


def _plan(config: EngineConfig, forms: list[list[str]]) -> int:
    """The plan of `config`'s model, or a table of plans of several `forms`: label and path."""
    if forms:
        from engine.diagnostics.forms import forms_table

        print(forms_table(config, [(label, path) for label, path in forms]))
        return 0
    from engine.planning.plan import plan_engine

    plan = plan_engine(config)
    print("\n".join(plan.lines))
    plan.memory.check(config.force_memory_plan)
    return 0


def _check(config: EngineConfig, tokens: int, tolerance: float | None) -> int:
    from dataclasses import replace

    from engine.diagnostics.check import check_model
    from engine.launch.backends import make_backends
    from engine.launch.rank_plans import each_rank
    from engine.planning.plan import plan_engine

    plan_engine(config)  # refuses what serving would; what follows is as small as one prompt
    config = replace(config, max_num_batched_tokens=tokens, max_num_seqs=1, max_model_len=None)
    config = replace(config, kv_cache_tokens=max(tokens, 16) + 16, kv_cache_memory=None, kv_disk=None)
    whole = plan_engine(config).without_streaming()
    print("\n".join(whole.placement.lines))
    vocabulary = whole.source.config.vocab_size
    prompt = [(7919 * i + 13) % vocabulary for i in range(tokens)]  # any tokens do: layers are compared, not answers
    for plan in each_rank(whole):
        if plan.shard.size > 1:
            print(f"rank {plan.shard.rank} of {plan.shard.size}, by itself")
        first = check_model(plan.source, make_backends(plan), prompt, print, tolerance, plan.expert_quantise)
        if first is not None:
            print(f"first divergence: {first.place}: {first.note}")
            return 2
    print("the embedding, every layer and the head agree with the reference")
    return 0


def _inspect(config: EngineConfig, args: argparse.Namespace) -> int:
    from engine.lora.files.folder import NO_MEMORY, out_of_memory
    from engine.lora.files.inspect import describe
    from engine.lora.reader_process import limit_this_process

    model, tables, path = None, None, args.path
    if config.model:
        from engine.lora.files.whole import base_tables
        from engine.weights.open import open_model

        source = open_model(config.model, config.gguf)
        model, tables = source.config, base_tables(source)
    elif args.expert_scaling is not None or args.expert_b_layout is not None:
        raise UserError(
            "--expert-scaling and --expert-b-layout are of the check against a model: give --model", "model"
        )
    try:
        found = describe(
            path,
            model,
            expert_scaling=args.expert_scaling,
            expert_b_layout=args.expert_b_layout,
            max_rank=config.max_adapter_rank,
            tables=tables,
            opened=limit_this_process(),
        )
    except Exception as error:
        if out_of_memory(error):
            raise UserError(f"{path}: it {NO_MEMORY}", "path") from error
        raise
    print(found.text)
    return 2 if found.refused else 0


def _convert(config: EngineConfig, args: argparse.Namespace) -> int:
    from engine.lora.files.convert import convert
    from engine.lora.reader_process import limit_this_process

    print(
        convert(
            args.path,
            args.to,
            args.out,
            config.model or None,
            expert_scaling=args.expert_scaling,
            expert_b_layout=args.expert_b_layout,
            opened=limit_this_process(),
        )
    )
    return 0


def _merge(config: EngineConfig, args: argparse.Namespace) -> int:
    from engine.lora.merge import merge

    scaling, layout = args.expert_scaling, args.expert_b_layout
    print(merge(config.model, args.path, args.out, expert_scaling=scaling, expert_b_layout=layout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
