"""The command `ktserve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from getpass import getpass
from pathlib import Path

import uvloop
from rich.console import Console

from api.cli.hub import add_commands, fetched, headers_only
from api.cli.options import Parser, add_flags, environment, note, resolve
from api.cli.train import ordered
from api.config import ServeConfig
from api.logs import JsonFormatter, RateLimit
from api.tenants.hashes import HashedKey, new_key
from api.version import project_version
from engine.config import EngineConfig
from engine.errors import KtserveError, UserError, shown
from engine.files.json_file import read_json
from ktserve.settings import Setting, settings_of

_EPILOG = """\
examples:
  ktserve serve                                        the demo model and its two adapters
  ktserve serve ~/models/Qwen3-30B-A3B                 a Hugging Face folder
  ktserve serve ~/models/qwen3-30b-a3b-q4_k_m.gguf     a GGUF file
  ktserve serve hf:ORG/REPO:Q4_K_M                     fetched from the Hugging Face hub (docs/hub.md)
  ktserve serve MODEL --adapters law=~/a --adapters med=~/b
  ktserve chat MODEL                                   talk to it in this terminal
  ktserve chat --url http://127.0.0.1:8000             talk to a server that runs
  ktserve plan MODEL --max-model-len 32768             what it would need; loads nothing
  ktserve doctor MODEL                                 what this machine is and what holds it back
  ktserve bench http://127.0.0.1:8000 --help           measure a server that runs
  ktserve loadtests --help                             load a server, or one of its own (docs/load.md)
  ktserve ray deploy CONFIG.yaml                       replicas over a Ray cluster (docs/scale-out.md)

Every setting can also be a variable (KTSERVE_MAX_NUM_SEQS=8) or a line of a YAML file (--config FILE,
'max_num_seqs: 8'). Flags win over variables, variables over the file.
"""
_SERVE = """\
examples:
  ktserve serve                                        the demo model and its two adapters
  ktserve serve MODEL --port 9000 --host 0.0.0.0 --api-keys-file ~/keys
      lines of the file: KEY=team-a:2 or KEY=team-b:1:base,law
  ktserve serve MODEL --adapters law=~/adapters/law --admin-key-file ~/admin-key
KTransformers' flags (--model_path, --gguf_path, --optimize_config_path, --cache_lens, --chunk_size,
--max_batch_size, --max_new_tokens, --backend_type, --cpu_infer) are accepted; what they mean here is printed.
"""
_TRAIN = """\
examples:
  ktserve train sft.yaml                               train; the adapter is in output_dir
  ktserve train sft.yaml learning_rate=1e-4 max_steps=200
  ktserve train sft.yaml --resume                      go on after Ctrl-C, a crash or a full disk
  ktserve train sft.yaml --publish http://localhost:8000 --admin-key-file ~/admin-key
"""
_RAW = argparse.RawDescriptionHelpFormatter


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def build_parser() -> Parser:
    """All subcommands. `args.run` is what the chosen one calls with the arguments."""
    parser = Parser(
        prog="ktserve",
        description="Serve Qwen3-MoE, Qwen2-MoE or Mixtral and many adapters side by side.",
        epilog=_EPILOG,
        formatter_class=_RAW,
    )
    parser.others = ("bench", "loadtests", "ray")  # ktserve/__main__.py starts them
    parser.add_argument("--version", action="version", version=f"ktserve {project_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    engine, serve = settings_of(EngineConfig), settings_of(ServeConfig)
    text = [s for s in serve if s.group == "Text" or s.name in ("engine_command", "log_level")]

    def add(name: str, help: str, settings: list[Setting], epilog: str | None = None) -> Parser:
        usage = f"ktserve {name} [MODEL] [--flag VALUE ...]"
        command: Parser = commands.add_parser(
            name, help=help, description=help, usage=usage, epilog=epilog, formatter_class=_Help
        )
        _add_common(command, settings)
        return command

    command = add("serve", "serve over HTTP, as OpenAI's API does", engine + serve, _SERVE)
    command.add_argument("--backend-type", choices=("ktransformers", "balance_serve"), help=argparse.SUPPRESS)
    command.add_argument("--architectures", help=argparse.SUPPRESS)
    command.set_defaults(run=_serve)
    command = add("chat", "talk to the model in this terminal", engine + text)
    command.add_argument("--adapter", help="adapter to start with")
    command.add_argument("--system", help="system prompt")
    command.add_argument("--url", metavar="URL", help="talk to this running server instead; no model is loaded")
    command.add_argument("--key-file", metavar="FILE", help="file with the key for --url")
    command.set_defaults(run=_chat)
    command = add("plan", "print the memory plan and the placement; loads nothing", engine)
    command.add_argument(
        "--train",
        nargs="+",
        metavar=("CONFIG.yaml", "key=value"),
        help="the memory plan of a training run instead, with settings over those of its file",
    )
    command.set_defaults(run=_plan, child="plan", path=None)
    command = add(
        "check", "read all that serving reads; compare the backends with the reference by layer", engine + text
    )
    command.set_defaults(run=_child, child="check", path=None)
    command = commands.add_parser(
        "doctor",
        help="what this machine is, what holds it back, and what to do",
        description="what this machine is, what holds it back, and what to do (docs/doctor.md)",
        formatter_class=_Help,
    )
    command.add_argument("model_path", nargs="?", default="", metavar="MODEL", help="measure the disk where it lies")
    command.add_argument("--quick", action="store_true", help="measure nothing")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--bench", metavar="FILE", help="add what `ktserve bench --quick --json FILE` measured")
    command.add_argument(
        "--share",
        metavar="FILE",
        help="write JSON without names and paths, for a bug report; without --bench and --quick, measure the rates of "
        "MODEL (default: the demo model) first",
    )
    command.set_defaults(run=_doctor)
    command = commands.add_parser(
        "train",
        help="fine-tune an adapter on the weights that are served",
        description="fine-tune an adapter on the weights that are served",
        epilog=_TRAIN,
        formatter_class=_Help,
    )
    command.add_argument("file", metavar="CONFIG.yaml", help="LLaMA-Factory's names and KTransformers'")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="settings over those of the file")
    command.add_argument("--resume", nargs="?", const="true", metavar="DIR", help="resume from the newest checkpoint")
    command.add_argument("--publish", metavar="URL", help="load the result into this running server")
    command.add_argument("--skip-bad-rows", metavar="N", help="leave out so many rows of data that cannot be read")
    _add_admin_key(command)
    command.set_defaults(run=_train)
    add_commands(commands)
    adapters = commands.add_parser("adapters", help="look at adapters", description="look at adapters")
    below = adapters.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    inspect = below.add_parser(
        "inspect", help="an adapter's format, tensors and whether it fits", formatter_class=_Help
    )
    inspect.add_argument("path", metavar="PATH", help="the adapter's folder")
    inspect.add_argument("--model", default="", help="check it against this model", metavar="TEXT")
    _add_open_settings(inspect)
    inspect.set_defaults(run=_child, child="inspect")
    convert = below.add_parser("convert", help="write an adapter in another form", formatter_class=_Help)
    convert.add_argument("path", metavar="PATH", help="the adapter's folder")
    convert.add_argument(
        "--to",
        required=True,
        choices=("peft", "kt-fused", "gguf"),
        help="keys per expert, fused tensors, llama.cpp's file",
    )
    convert.add_argument("--out", required=True, metavar="DIR", help="folder to write; of gguf the .gguf file")
    convert.add_argument("--model", default="", help="its base; default: what the adapter names", metavar="TEXT")
    _add_open_settings(convert)
    convert.set_defaults(run=_child, child="convert")
    merge = below.add_parser("merge", help="write a base with an adapter merged into it", formatter_class=_Help)
    merge.add_argument("model", metavar="BASE", help="the base's folder, with safetensors")
    merge.add_argument("path", metavar="ADAPTER", help="the adapter's folder")
    merge.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    _add_open_settings(merge)
    merge.set_defaults(run=_child, child="merge")
    published = below.add_parser("publish", help="load an adapter into a running server", formatter_class=_Help)
    published.add_argument("path", metavar="DIR", help="the adapter's folder")
    published.add_argument("url", metavar="URL", help="the server")
    published.add_argument("--name", metavar="NAME", help="its name there; default: the folder's")
    _add_admin_key(published)
    published.set_defaults(run=_publish)
    keys = commands.add_parser("keys", help="make API keys", description="make API keys")
    below = keys.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    new = below.add_parser("new", help="print a new key, and its line for tenants.yaml", formatter_class=_Help)
    new.add_argument("--tenant", metavar="NAME", help="whose key it is to be")
    new.set_defaults(run=_new_key)
    hashed = below.add_parser("hash", help="read a key and print its line for tenants.yaml", formatter_class=_Help)
    hashed.set_defaults(run=_hash_key)
    return parser


def _add_common(command: Parser, settings: list[Setting]) -> None:
    command.add_argument("model_path_or_none", nargs="?", metavar="MODEL", help="same as --model")
    command.add_argument("--config", metavar="FILE", help="YAML file with settings, under the flags' names")
    add_flags(command, settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 for a mistake of the user's or an engine that could not start; 130 after Ctrl-C; 143 after
    SIGTERM before anything was served."""
    console = Console(stderr=True)
    try:
        args = build_parser().parse_args(ordered(sys.argv[1:] if argv is None else argv))
        return int(args.run(args, console))
    except KtserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:  # SIGTERM before anything was served
        return 143


def _settings(args: argparse.Namespace) -> tuple[EngineConfig, ServeConfig, list[str]]:
    positional = getattr(args, "model_path_or_none", None)
    if positional is not None:
        if hasattr(args, "model"):
            raise UserError(f"the model is given twice: {positional} and {args.model}", "model")
        args.model = positional
    backend = getattr(args, "backend_type", None)
    if backend == "ktransformers":
        if hasattr(args, "max_num_seqs") and str(args.max_num_seqs) != "1":
            raise UserError(
                "--backend-type ktransformers is one request at a time; drop it or --max-num-seqs", "backend_type"
            )
        args.max_num_seqs = "1"
        note(args, "--backend-type ktransformers: here --max-num-seqs 1 (one request at a time)")
    elif backend == "balance_serve":
        note(args, "--backend-type balance_serve: here the only mode (continuous batching)")
    for flag, replacement in (("api_key", "--api-keys-file FILE"), ("admin_key", "--admin-key-file FILE")):
        if hasattr(args, flag):
            shown = flag.replace("_", "-")
            note(args, f"warning: --{shown}: others can read the key in the list of processes; use {replacement}")
    engine, serve, notes = resolve(args, environment())
    if (architecture := getattr(args, "architectures", None)) is not None:
        _check_architecture(engine.model, architecture)
        notes.append(f"note: --architectures {architecture}: read from the model's own files here")
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RateLimit())
    handler.setFormatter(
        JsonFormatter() if serve.log_format == "json" else logging.Formatter("%(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=serve.log_level.upper(), handlers=[handler])
    if serve.access_log and serve.log_level == "warning":
        notes.append("note: --access-log changes nothing: --log-level warning leaves its lines out")
    if not serve.access_log:
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # whoever sends a broken form is told so
    return engine, serve, notes


def _check_architecture(model: str, named: str) -> None:
    """KTransformers builds the class that this names. UserError if the folder's config.json names another."""
    file = Path(os.path.expanduser(model)) / "config.json"
    classes = read_json(file).get("architectures") if file.is_file() else None
    if classes and named not in classes:
        raise UserError(f"--architectures is {named}, and {file} says {shown(classes)}", "architectures")


def _serve(args: argparse.Namespace, console: Console) -> int:
    from api.cli.early import serve

    engine, config, notes = _settings(args)
    engine = fetched(engine, config, console)
    return uvloop.run(serve(engine, config, notes, console))


def _chat(args: argparse.Namespace, console: Console) -> int:
    from api.cli.chat import chat, chat_with_server

    if args.url is not None:
        if args.model_path_or_none is not None or hasattr(args, "model"):
            raise UserError("--url talks to the models of its server: leave out the model", "url")
        if given := _given(args, *settings_of(EngineConfig), *settings_of(ServeConfig)):
            raise UserError(f"--url talks to a server that runs, with settings of its own: leave out {given[0]}", "url")
        where = {"adapter": args.adapter, "system": args.system}
        return asyncio.run(chat_with_server(args.url, args.key_file, console, **where))
    if args.key_file is not None:
        raise UserError("--key-file is for --url", "key_file")
    engine, config, notes = _settings(args)
    engine = fetched(engine, config, console)
    return asyncio.run(chat(engine, config, notes, console, adapter=args.adapter, system=args.system))


def _given(args: argparse.Namespace, *settings: Setting) -> list[str]:
    """The flags of settings that stand in the command."""
    given = [setting.flag for setting in settings if hasattr(args, setting.name)]
    return given + ([] if args.config is None else ["--config"])


def _add_admin_key(command: Parser) -> None:
    command.add_argument("--admin-key", metavar="KEY", help="the server's; others can read it in the list of processes")
    command.add_argument("--admin-key-file", metavar="FILE", help="file with the server's admin key")


def _add_open_settings(command: Parser) -> None:
    """What some adapters' files leave open (docs/adapters.md)."""
    scalings, layouts = "alpha/r, alpha/sqrt(r) or peft", "rank_major or grouped_by_expert"
    command.add_argument("--expert-scaling", metavar="TEXT", help=f"how the trainer scaled LoRA on experts: {scalings}")
    command.add_argument("--expert-b-layout", metavar="TEXT", help=f"the order of lora_B on fused experts: {layouts}")


def _publish(args: argparse.Namespace, console: Console) -> int:
    from api.cli.train import publish_adapter

    where = {"admin_key": args.admin_key, "admin_key_file": args.admin_key_file}
    return publish_adapter(args.path, args.url, name=args.name, **where)


def _train(args: argparse.Namespace, console: Console) -> int:
    from api.cli.train import train

    where = {"publish": args.publish, "admin_key": args.admin_key, "admin_key_file": args.admin_key_file}
    return train(args.file, args.overrides, resume=args.resume, skip_bad_rows=args.skip_bad_rows, **where)


def _new_key(args: argparse.Namespace, console: Console) -> int:
    if args.tenant is not None:
        from api.tenants.file import tenant_name

        try:
            tenant_name(args.tenant)
        except ValueError as error:
            raise UserError(f"--tenant: {error}", "tenant") from None
    key, stored = new_key()
    print(f"key (shown once): {key}")
    if args.tenant is None:
        print(f"stored as:        {stored.line}")
    else:
        print(f"tenants:\n  {args.tenant}:\n    keys:\n      - {stored.line}")
    return 0


def _hash_key(args: argparse.Namespace, console: Console) -> int:
    """Of a key on stdin; a terminal does not show it."""
    key = getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    try:
        print(HashedKey.of(key.strip()).line)
    except ValueError as error:
        raise UserError(str(error), "key") from None
    return 0


def _plan(args: argparse.Namespace, console: Console) -> int:
    if args.train is None:
        return _child(args, console)
    given = _given(args, *settings_of(EngineConfig))
    given += [] if args.model_path_or_none is None else [args.model_path_or_none]
    if given:
        raise UserError(f"--train takes all settings from its file: write {given[0]} there, or as key=value", "train")
    from api.cli.child import run_training_plan

    return run_training_plan(*args.train)


def _doctor(args: argparse.Namespace, console: Console) -> int:
    from api.cli.child import measured_rates, run_child

    more = [f"--{name}" for name in ("quick", "json") if getattr(args, name)]
    more += [f"--{name}={value}" for name in ("share", "bench") if (value := getattr(args, name)) is not None]
    model = os.path.expanduser(args.model_path)
    if args.share is not None and args.bench is None and not args.quick:
        if os.path.lexists(args.share):
            raise UserError(f"--share {args.share}: the file is there already; name another", "share")
        print("measuring tokens a second on a server of its own ... (--quick leaves it out)", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="ktserve-doctor-") as folder:
            more.append(f"--bench={measured_rates(model, Path(folder))}")
            return run_child("doctor", None, EngineConfig(model=model), ServeConfig(), more)
    return run_child("doctor", None, EngineConfig(model=model), ServeConfig(), more)


def _child(args: argparse.Namespace, console: Console) -> int:
    from api.cli.child import run_child

    engine, config, notes = _settings(args)
    for line in notes:
        print(line, file=sys.stderr)
    own = ("to", "out", "expert_scaling", "expert_b_layout")
    more = [f"--{name.replace('_', '-')}={value}" for name in own if (value := getattr(args, name, None)) is not None]
    if args.child == "plan":
        with tempfile.TemporaryDirectory(prefix="ktserve-headers-") as folder:
            engine, forms = headers_only(engine, config, Path(folder), console)
            more += [word for label, path in forms for word in ("--form", label, path)]
            return run_child("plan", None, engine, config, more)
    return run_child(args.child, args.path, fetched(engine, config, console), config, more)


if __name__ == "__main__":
    sys.exit(main())
