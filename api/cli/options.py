"""Settings from four places, the first that knows one wins: flags, KTSERVE_* variables, a YAML file, defaults.

Flags, variables and keys are made from the fields of the settings' dataclasses. `_` and `-` are the same in a flag.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from api.config import ServeConfig
from engine.config import EngineConfig
from engine.errors import UserError
from ktserve.settings import Setting, settings_of
from ktserve.strict_yaml import YamlError, load

_PREFIX = "KTSERVE_"
_NOT_SETTINGS = {"KTSERVE_CONFIG"}
_PATHS = {"model", "gguf", "rules", "profile_dir", "adapters", "tokenizer", "chat_template", "generation_config"}
_PATHS |= {"api_keys_file", "admin_key_file", "tenants", "adapter_root", "usage_log", "expert_profile"}


def convert(setting: Setting, value: Any, where: str) -> Any:
    """A value as its type. Raises UserError that names `where` it was written."""
    if setting.many:
        return [_one(setting, item, where) for item in (value if isinstance(value, list) else [value])]
    return None if value is None and setting.optional else _one(setting, value, where)


def _one(setting: Setting, value: Any, where: str) -> Any:
    converted = setting.one(value)
    if converted is None:
        raise UserError(f"{where}: {setting.wanted} is expected, got {value!r}", setting.name)
    if allowed := setting.allowed(converted):
        message = f": {value!r} is not one of {allowed}" if setting.choices else f" {value}: allowed is {allowed}"
        raise UserError(f"{where}{message}", setting.name)
    return converted


def add_flags(parser: argparse.ArgumentParser, settings: Sequence[Setting]) -> None:
    """One group of flags for each group of settings; other servers' spellings are accepted and noted."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in settings:
        group = groups.setdefault(setting.group, parser.add_argument_group(setting.group))
        text = setting.help.replace("%", "%%")
        if setting.default not in (None, "", []) and "default" not in setting.help:
            shown = {True: "on", False: "off"}.get(setting.default, setting.default) if setting.kind is bool else None
            text += f" (default: {shown or setting.default})"
        options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text}
        if setting.kind is bool:
            group.add_argument(setting.flag, action=_Switch, **options)
        else:
            metavar = _metavar(setting)
            group.add_argument(setting.flag, action="append" if setting.many else "store", metavar=metavar, **options)
        for alias in setting.aliases:
            options["help"] = argparse.SUPPRESS
            group.add_argument("--" + alias.replace("_", "-"), action=_Alias, setting=setting, **options)


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "{" + ",".join(setting.choices) + "}"
    return {str: "TEXT", int: "N", float: "X"}[setting.kind]


class _Switch(argparse.BooleanOptionalAction):
    """--name and --no-name; argparse's own adds the default to the help."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: Any = None, help: str | None = None) -> None:
        super().__init__(option_strings, dest, default=default, help=help)


class _Alias(argparse.Action):
    """Another server's flag: sets the field and remembers what it means here."""

    def __init__(self, option_strings: Sequence[str], dest: str, setting: Setting, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self._setting = setting

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        note(namespace, f"{option_string} {values}: here {self._setting.flag} {values} ({self._setting.meaning})")


def note(namespace: argparse.Namespace, line: str) -> None:
    """Remember a line that tells the person what an accepted foreign flag means."""
    namespace.notes = [*getattr(namespace, "notes", []), line]


_ELSEWHERE = {
    "-m": "ktserve serve MODEL",
    "--hf-repo": "ktserve serve hf:ORG/REPO:QUANT",
    **dict.fromkeys(("-c", "--ctx-size"), "--max-model-len TOKENS, and --kv-cache-tokens for all requests together"),
    **dict.fromkeys(("-t", "--threads", "--threads-batch"), "--cpu-threads"),
    **dict.fromkeys(("-np", "--parallel"), "--max-num-seqs"),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), "--max-num-batched-tokens"),
    **dict.fromkeys(("-a", "--alias"), "--served-model-name"),
    **dict.fromkeys(
        ("-ngl", "--n-gpu-layers", "--gpu-layers", "-ot", "--override-tensor", "--cpu-moe", "--n-cpu-moe"),
        "nothing is needed, experts that do not fit the GPU stay on the CPU (--device, --gpu-experts)",
    ),
    **dict.fromkeys(("--lora", "--lora-modules"), "--adapters NAME=PATH"),
    "--jinja": "nothing is needed, the model's chat template is used",
    **dict.fromkeys(("-fa", "--flash-attn"), "nothing is needed"),
    "--gpu-memory-utilization": "--gpu-expert-memory",
    "--enable-lora": "--adapters NAME=PATH",
}  # flags of llama.cpp and vLLM, and what does their job


class Parser(argparse.ArgumentParser):
    """Flags with `_` or `-`, no abbreviations, suggestions for unknown flags and commands, errors in one line.
    `others`: commands that are started elsewhere."""

    others: Sequence[str] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            known = [*action.choices, *self.others]
            if value.startswith("hf:") or os.path.exists(value):
                self.error(f"{value} is no command: ktserve serve {value}")
            self.error(f"unknown command {value!r}{near(value, known)}; there are {', '.join(known)}")
        super()._check_value(action, value)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        args = [_dashes(arg) for arg in args] if args is not None else None
        namespace, unknown = super().parse_known_args(args, namespace)
        flags = [arg for arg in unknown if arg.startswith("-")]
        if flags:
            flag = flags[0].partition("=")[0]
            ours = _ELSEWHERE.get(flag)
            self.error(f"unknown flag {flag}{f'; here: {ours}' if ours else near(flag, self._option_string_actions)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (try: {self.prog} --help)")


def _dashes(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value


def near(word: str, known: typing.Iterable[str]) -> str:
    """'; did you mean X?' or nothing."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def resolve(namespace: argparse.Namespace, environ: Mapping[str, str]) -> tuple[EngineConfig, ServeConfig, list[str]]:
    """The settings, and notes to print. Raises UserError for a wrong value or unknown key."""
    settings = settings_of(EngineConfig) + settings_of(ServeConfig)
    notes = list(getattr(namespace, "notes", []))
    values: dict[str, Any] = {}
    path = getattr(namespace, "config", None) or environ.get("KTSERVE_CONFIG")
    if path:
        values.update(_from_file(Path(path), settings, notes))
    values.update(_from_environment(environ, settings, notes))
    for setting in settings:
        if hasattr(namespace, setting.name):
            values[setting.name] = convert(setting, getattr(namespace, setting.name), setting.flag)

    for name in _PATHS & set(values):
        values[name] = _expanded(values[name])

    def build(owner: type) -> Any:
        return owner(**{s.name: values[s.name] for s in settings if s.owner is owner and s.name in values})

    return build(EngineConfig), build(ServeConfig), notes


def _expanded(value: Any) -> Any:
    """A path, or NAME=PATH, with `~` as the shell would have it (it leaves the one after `=` alone)."""
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    if not isinstance(value, str):
        return value
    name, equals, path = value.partition("=~")
    return f"{name}={os.path.expanduser('~' + path)}" if equals else os.path.expanduser(value)


class _PlainLoader(yaml.SafeLoader):
    """YAML 1.2's booleans, true and false alone: `pack_cache: off` is the word."""


_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _from_file(path: Path, settings: Sequence[Setting], notes: list[str]) -> dict[str, Any]:
    try:
        content = load(path.read_bytes(), loader=_PlainLoader)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror or error}", "config") from None
    except YamlError as error:
        where = path if error.line is None else f"{path}, line {error.line}"
        raise UserError(f"--config {where}: {error}", "config") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: 'name: value' lines are expected", "config")
    by_name = {s.name: s for s in settings}
    by_alias = {alias: s for s in settings for alias in s.aliases}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        setting = by_name.get(name) or by_alias.get(name)
        if setting is None:
            raise UserError(f"--config {path}: unknown setting {key!r}{near(name, by_name)}", "config")
        if setting.name in values:
            raise UserError(f"--config {path}: {setting.name} is given twice", "config")
        if name in by_alias:
            notes.append(f"{key} in {path}: here {setting.name} ({setting.meaning})")
        values[setting.name] = convert(setting, value, f"{path}: {key}")
    return values


def _from_environment(environ: Mapping[str, str], settings: Sequence[Setting], notes: list[str]) -> dict[str, Any]:
    by_variable = {_PREFIX + s.name.upper(): s for s in settings}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or variable in _NOT_SETTINGS:
            continue
        setting = by_variable.get(variable)
        if setting is None:
            notes.append(f"{variable} is not a setting{near(variable, by_variable)}")
            continue
        # several values: one a line (an api key's models are separated by commas already)
        value = [line for line in text.splitlines() if line] if setting.many else text
        values[setting.name] = convert(setting, value, variable)
    return values


def environment() -> Mapping[str, str]:
    return os.environ
