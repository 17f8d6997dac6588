"""Models and adapters by their names on the hub: `hf:...` in settings, `ktserve pull`, `ktserve models`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from api.cli.options import Parser
from api.config import ServeConfig
from api.hub.names import HubName, is_hub_name, parse_name
from engine.config import EngineConfig
from engine.errors import UserError
from engine.units import format_bytes


def fetched(engine: EngineConfig, serve: ServeConfig, console: Console) -> EngineConfig:
    """The settings with paths for names on the hub; what is missing in the cache is fetched. UserError."""
    if not names_hub(engine):
        return engine
    from api.hub.fetch import fetch_adapter, fetch_beside, fetch_model, listing_of  # takes its time to be imported

    def model(name: HubName, field: str) -> Path:
        listing = listing_of(name, field, console)
        return (fetch_beside if _beside_alone(engine, field) else fetch_model)(listing, console)

    return _resolved(engine, serve, model, lambda name: fetch_adapter(listing_of(name, "adapters", console), console))


def headers_only(
    engine: EngineConfig, serve: ServeConfig, folder: Path, console: Console
) -> tuple[EngineConfig, list[tuple[str, str]]]:
    """The same for a memory plan: of what is not in the cache headers alone are fetched, into `folder`. The second:
    label and path of every form of the weights, if there are several and none is named. UserError."""
    if not names_hub(engine):
        return engine, _forms_here(engine)
    from api.hub.cache import whole_in_cache
    from api.hub.fetch import listing_of
    from api.hub.headers import write_headers
    from api.hub.listing import SAFETENSORS, Listing, Option, adapter_option, beside_option, choose, options

    forms: list[tuple[str, str]] = []

    def of(listing: Listing, option: Option) -> Path:
        return whole_in_cache(listing, option) or write_headers(listing, option, _new_folder(folder))

    def model(name: HubName, field: str) -> Path:
        listing = listing_of(name, field, console)
        if _beside_alone(engine, field):
            return of(listing, beside_option(listing))
        found = [option for option in options(listing) if not option.missing]
        if field == "gguf":
            found = [option for option in found if option.label != SAFETENSORS]
        if name.quant is not None or len(found) < 2:
            return of(listing, choose(listing))
        forms.extend((option.label, str(of(listing, option))) for option in found)
        return Path(forms[0][1])

    def adapter(name: HubName) -> Path:
        listing = listing_of(name, "adapters", console)
        return of(listing, adapter_option(listing))

    return _resolved(engine, serve, model, adapter), forms


def _forms_here(engine: EngineConfig) -> list[tuple[str, str]]:
    """Label and path of the GGUF models of a folder that has several of them and no safetensors."""
    from api.hub.listing import SAFETENSORS, HubFile, Listing, options

    folder = Path(os.path.expanduser(engine.model))
    if (
        not engine.model
        or engine.gguf is not None
        or not os.path.isdir(folder)
        or not os.access(folder, os.R_OK | os.X_OK)
    ):
        return []  # the engine says what is wrong with it
    files = {path.name: HubFile(path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file()}
    found = options(Listing(HubName(engine.model), "", files))
    if len(found) < 2 or any(option.label == SAFETENSORS for option in found):
        return []
    return [(option.label, str(folder / option.main)) for option in found]


def _beside_alone(engine: EngineConfig, field: str) -> bool:
    """Whether of the model only configuration and tokenizer are read: the weights are those of --gguf."""
    return field == "model" and engine.gguf is not None


def names_hub(engine: EngineConfig) -> bool:
    """Whether a setting is a name on the hub."""
    values = [engine.model, engine.gguf or "", *(text.partition("=")[2] for text in engine.adapters)]
    return any(map(is_hub_name, values))


def _new_folder(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


def _resolved(
    engine: EngineConfig,
    serve: ServeConfig,
    model: Callable[[HubName, str], Path],
    adapter: Callable[[HubName], Path],
) -> EngineConfig:
    if serve.tokenizer and is_hub_name(serve.tokenizer):
        raise UserError(f"--tokenizer {serve.tokenizer}: a folder is wanted: ktserve pull prints one", "tokenizer")
    changed: dict[str, object] = {}
    if is_hub_name(engine.model):
        name = parse_name(engine.model, "model")
        changed["model"] = str(model(name, "model"))
        changed["served_model_name"] = engine.served_model_name or name.served
    if engine.gguf is not None and is_hub_name(engine.gguf):
        path = model(parse_name(engine.gguf, "gguf"), "gguf")
        if path.is_dir():
            raise UserError(f"--gguf {engine.gguf}: holds safetensors; name one of GGUF", "gguf")
        changed["gguf"] = str(path)
    adapters = []
    for text in engine.adapters:
        name_there, _, path_there = text.partition("=")
        found = str(adapter(parse_name(path_there, "adapters"))) if is_hub_name(path_there) else path_there
        adapters.append(f"{name_there}={found}" if path_there else text)
    return dataclasses.replace(engine, adapters=adapters, **changed)  # type: ignore[arg-type]


def pull(names: Sequence[str], console: Console) -> int:
    """Fetch models, and print the path of each."""
    from api.hub.fetch import fetch_adapter, fetch_model, listing_of
    from api.hub.listing import is_adapter, options

    for text in names:
        listing = listing_of(parse_name(text if is_hub_name(text) else f"hf:{text}", "name"), "name", console)
        only_adapter = is_adapter(listing) and not options(listing)
        print((fetch_adapter if only_adapter else fetch_model)(listing, console))
    return 0


def models(console: Console) -> int:
    """Print what the cache holds."""
    from api.hub.cache import cache_folder, held_models

    found = held_models()
    if not found:
        print(f"{cache_folder()} holds no models; fetch one: ktserve pull hf:ORG/REPO")
        return 0
    from api.cli.child import read_families  # takes its time to be imported

    families = iter(read_families([str(held.path) for held in found if held.path is not None]))
    table = Table(box=None, pad_edge=False)
    for title in ("name", "size", "family", "serve it"):
        table.add_column(
            title, justify="right" if title == "size" else "left", overflow="fold", no_wrap=title == "size"
        )
    for held in found:
        family, why = next(families) if held.path is not None else (None, held.why)
        serve = why if family is None else f"ktserve serve {held.name}"
        table.add_row(str(held.name), format_bytes(held.num_bytes), family or "-", serve)
    Console(width=None if console.is_terminal else 200, markup=False, highlight=False).print(table)
    return 0


def add_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    """`pull` and `models`."""
    command = commands.add_parser(
        "pull", help="fetch models or adapters from the Hugging Face hub", description="fetch into the hub's cache"
    )
    command.add_argument("names", nargs="+", metavar="hf:ORG/REPO[:QUANT][@REV]", help="models or adapters")
    command.set_defaults(run=lambda args, console: pull(args.names, console))
    command = commands.add_parser(
        "models", help="what the hub's cache holds", description="what the cache holds: size, family, what serves it"
    )
    command.set_defaults(run=lambda args, console: models(console))
