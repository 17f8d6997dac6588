"""`ktserve ray deploy CONFIG.yaml`"""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from cluster.app import ClusterConfig, build
from cluster.front.ingress import ADMISSION, ASKED, PROXY_CALLBACK, PROXY_SETTING
from ktserve.arguments import OneLineParser

_PROXY_START_S = "300"
_EXAMPLE = """\
CONFIG.yaml:
  replicas: 3
  num_cpus: 16
  serve:
    model: /models/qwen3-30b-a3b-q4_k_m.gguf
    adapters: [law=/adapters/law, med=/adapters/med]
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if it could not be deployed, 2 for what makes no sense."""
    parser = OneLineParser(
        prog="ktserve ray", description="Replicas over a Ray cluster.", epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    below = parser.add_subparsers(required=True, metavar="COMMAND")
    deploy = below.add_parser("deploy", help="deploy, or update what was deployed under the name")
    deploy.add_argument("config", type=Path, metavar="CONFIG.yaml")
    deploy.add_argument("--address", default="auto", help="of the cluster (default: the one of this machine)")
    deploy.add_argument("--local", action="store_true", help="start a cluster on this machine, until Ctrl-C")
    deploy.add_argument("--name", default="ktserve")
    deploy.add_argument("--host", default="127.0.0.1", help="where the endpoint listens (default: 127.0.0.1)")
    deploy.add_argument("--port", type=int, default=8000)
    deploy.add_argument(
        "--proxies", choices=("head", "every"), default="head",
        help="nodes that listen (default: head); one that ends closes the connections that it has",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        ClusterConfig.read(args.config)
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"{args.config}: {error.strerror if isinstance(error, OSError) else error}")
    if args.local:  # Serve kills a proxy that takes longer to start; a cluster that runs has its own settings
        for name in ("READY_CHECK", "HEALTH_CHECK"):
            os.environ.setdefault(f"RAY_SERVE_PROXY_{name}_TIMEOUT_S", _PROXY_START_S)
    try:
        import ray
        from ray import serve
    except ImportError:
        print("error: Ray is not installed: pip install 'ktserve[ray]'", file=sys.stderr)
        return 1
    try:
        application = build({"config": str(args.config)})
    except ValueError as error:  # of what only Ray knows
        parser.error(f"{args.config}: {error}")
    bounded = {"env_vars": {PROXY_SETTING: PROXY_CALLBACK}}  # of Serve's proxies too, unless Serve runs already
    try:
        ray.init(address=None if args.local else args.address, log_to_driver=False, runtime_env=bounded)
    except ConnectionError as error:
        print(f"error: {error} (`ray start --head`, or --local)", file=sys.stderr)
        return 1
    location = {"head": "HeadOnly", "every": "EveryNode"}[args.proxies]
    serve.start(http_options={"host": args.host, "port": args.port}, proxy_location=location)
    serve.run(application, name=args.name)
    print(f"at http://{args.host}:{args.port}/v1")
    if not _bounded(args.host, args.port):
        print(
            f"note: Ray Serve runs without {PROXY_SETTING}={PROXY_CALLBACK}: its proxy holds bodies of any size",
            file=sys.stderr,
        )
    while args.local:
        try:
            time.sleep(3600)
        except KeyboardInterrupt:
            serve.shutdown()
            ray.shutdown()
            break
    return 0


def _bounded(host: str, port: int) -> bool:
    """Whether Serve's proxy has our middleware: else the front answers, with the header."""
    at = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    request = urllib.request.Request(f"http://{at}:{port}/", method="OPTIONS", headers={ADMISSION: ASKED})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return ADMISSION not in answer.headers


if __name__ == "__main__":
    sys.exit(main())
