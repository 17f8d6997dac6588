"""`python -m ktserve training CONFIG.yaml ...`: a training run as a process of its own. People use `ktserve train`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from engine.errors import UserError
from training.config import TrainConfig, load_config

ADMIN_KEY = "KTSERVE_PUBLISH_KEY"  # in the environment, where other users cannot read it


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 1 for a mistake of the user's or a run that could not go on, said in one line; 130 if it was
    stopped and saved."""
    parser = argparse.ArgumentParser(prog="ktserve train")
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--resume", nargs="?", const="true", metavar="DIR")
    parser.add_argument("--publish", metavar="URL")
    parser.add_argument("--skip-bad-rows", metavar="N")
    parser.add_argument("--finished", metavar="NAME", help="CONFIG.yaml is an adapter's folder: publish it as NAME")
    args = parser.parse_args(argv)
    try:
        if args.finished is not None:
            return _publish(Path(args.config), args.finished, args.publish, os.environ.pop(ADMIN_KEY, None))
        rows = [] if args.skip_bad_rows is None else [f"skip_bad_rows={args.skip_bad_rows}"]
        config = load_config(args.config, [*args.overrides, *rows])
        if args.resume:
            config = replace(config, resume_from_checkpoint=args.resume)
        return _run(config, args.publish, os.environ.pop(ADMIN_KEY, None))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _publish(folder: Path, name: str, url: str, key: str | None) -> int:
    from training.publish import check_server, publish

    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder}: no adapter: there is no adapter_config.json", "path")
    check_server(url, key)
    print(publish(url, key, name, folder), flush=True)
    return 0


def _run(config: TrainConfig, url: str | None, key: str | None) -> int:
    """Imports torch: by now the settings are known to be good."""
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY"):
        os.environ[name] = "1"  # TRL and accelerate would report their use
    # Calls that peft, TRL and transformers make among themselves.
    warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
    from training.loop.progress import StopOnSignal
    from training.publish import check_publish, publish
    from training.run import train

    if url is not None:
        for warning in check_publish(url, key, config):
            print(f"warning: {warning}", flush=True)
    stop = StopOnSignal()
    stop.install()
    outcome = train(config, stop=stop)
    if outcome.stopped:
        return 130
    if url is not None:
        for name, folder in outcome.folders.items():
            print(publish(url, key, name, folder), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
