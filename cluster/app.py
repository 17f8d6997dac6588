"""Replicas of the server as an application of Ray Serve: `ktserve ray deploy CONFIG.yaml`, or
`serve run cluster.app:build config=CONFIG.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cluster.front.gateway import config_of
from cluster.routing.policy import Affinity
from cluster.scaling.first_tokens import LEAST_S, MOST_S
from engine.errors import UserError
from ktserve.strict_yaml import YamlError, load

_LEAST = {
    "replicas": 1, "num_cpus": 0, "num_gpus": 0, "max_open": 1, "fronts": 1, "drain_s": 0, "surge_percent": 0
}  # fmt: skip
_TARGET = "ttft_target_s"


@dataclass(frozen=True)
class ClusterConfig:
    """Lines of CONFIG.yaml. `serve`: settings of `ktserve serve`, the same for each replica. `autoscaling`: of Ray
    Serve, instead of `replicas`, and `ttft_target_s`, in which nine of ten first tokens are to come. `max_open`:
    requests at a replica at once. `drain_s`: for the requests of a replica that an update or the autoscaler ends.
    `surge_percent`: replicas that an update may start beside those that it will end, for which there must be room.
    `routing`: of `Affinity`. `fronts_on`: "head" or "any" node; a node that ends takes the streams of its fronts
    with it."""

    serve: dict[str, Any]
    replicas: int = 1
    autoscaling: dict[str, Any] | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_open: int = 64
    fronts: int = 1
    fronts_on: str = "head"
    drain_s: float = 600.0
    surge_percent: int = 0
    routing: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise ValueError(f"{name} is {value!r}, must be a number of at least {least}")
        if not isinstance(self.surge_percent, int) or self.surge_percent > 100:
            raise ValueError(f"surge_percent is {self.surge_percent!r}, must be a whole number of at most 100")
        if self.fronts_on not in ("head", "any"):
            raise ValueError(f"fronts_on is {self.fronts_on!r}, must be head or any")
        if not isinstance(self.serve, dict):
            raise ValueError("serve must be settings of `ktserve serve`: NAME: VALUE")
        if taken := {"host", "port", "config"} & self.serve.keys():
            raise ValueError(f"serve has {', '.join(sorted(taken))}: each replica chooses its own")
        try:
            config_of(self.serve)
        except UserError as error:
            raise ValueError(str(error)) from None
        if self.autoscaling is not None:
            self._check_autoscaling(self.autoscaling)
        unknown = self.routing.keys() - {each.name for each in fields(Affinity)}
        if unknown:
            raise ValueError(f"routing has {', '.join(sorted(unknown))}: there is {[f.name for f in fields(Affinity)]}")
        Affinity(**self.routing)

    def _check_autoscaling(self, said: Any) -> None:
        if self.replicas != 1:
            raise ValueError("replicas and autoscaling: name one of them")
        if not isinstance(said, dict):
            raise ValueError(f"autoscaling is {said!r}, must be NAME: VALUE")
        target = said.get(_TARGET, LEAST_S)
        if isinstance(target, bool) or not isinstance(target, int | float) or not LEAST_S <= target < MOST_S:
            raise ValueError(f"{_TARGET} is {target!r}, must be seconds from {LEAST_S:g} to less than {MOST_S:g}")
        if _TARGET in said and "policy" in said:
            raise ValueError(f"autoscaling has {_TARGET} and policy: name one of them")

    @staticmethod
    def read(path: Path) -> ClusterConfig:
        """ValueError for what makes no sense, OSError for a file that cannot be read."""
        try:
            said = load(path.read_bytes())
        except YamlError as error:
            raise ValueError(f"{path}{f', line {error.line}' if error.line else ''}: {error}") from None
        return ClusterConfig.of(said)

    @staticmethod
    def of(said: Any) -> ClusterConfig:
        known = [each.name for each in fields(ClusterConfig)]
        if not isinstance(said, dict) or "serve" not in said:
            raise ValueError("the file must be NAME: VALUE, with `serve:` among the names")
        if unknown := said.keys() - set(known):
            raise ValueError(f"unknown: {', '.join(sorted(map(str, unknown)))}; there is {', '.join(known)}")
        return ClusterConfig(**said)


def build(args: dict[str, Any]) -> Any:
    """The application, from {"config": FILE} or from the file's own names. Raises ImportError without Ray, ValueError
    for what makes no sense."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from cluster.front.endpoint import DIRECTORY, ENGINES, asgi
    from cluster.replicas.directory import Directory
    from cluster.replicas.engine import Engine
    from cluster.routing.router import AffinityRouter

    config = ClusterConfig.read(Path(args["config"])) if args.keys() == {"config"} else ClusterConfig.of(args)
    scale: dict[str, Any] = {"num_replicas": config.replicas}
    if config.autoscaling is not None:
        scale = {"autoscaling_config": _autoscaling(config.autoscaling)}
    if config.surge_percent:
        scale |= {"max_surge_percent": config.surge_percent}
    engines = serve.deployment(
        name=ENGINES,
        max_ongoing_requests=config.max_open,
        graceful_shutdown_timeout_s=config.drain_s,
        ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRouter,
            request_router_kwargs=config.routing,
            request_routing_stats_period_s=1.0,
        ),
        **scale,
    )(Engine)
    on_head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    directory = serve.deployment(
        name=DIRECTORY,
        max_ongoing_requests=100_000,
        ray_actor_options=on_head,  # it lives as long as the cluster
    )(Directory).bind()
    front = serve.deployment(
        name="front",
        num_replicas=config.fronts,
        graceful_shutdown_timeout_s=config.drain_s,
        max_ongoing_requests=100_000,
        ray_actor_options=on_head if config.fronts_on == "head" else {"num_cpus": 0},
    )(serve.ingress(asgi(config.serve))())
    first_tokens = _TARGET in (config.autoscaling or {})
    return front.bind(engines.bind(config.serve, directory, first_tokens), directory)


def _autoscaling(said: dict[str, Any]) -> Any:
    """Serve's own. ValueError for names and values that it does not take."""
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    own = {name: value for name, value in said.items() if name != _TARGET}
    known = AutoscalingConfig.model_fields.keys()
    if unknown := own.keys() - known:
        raise ValueError(f"autoscaling has {', '.join(sorted(unknown))}: there is {', '.join([_TARGET, *known])}")
    if _TARGET in said:
        function, target_s = "cluster.scaling.policy:ByFirstTokens", float(said[_TARGET])
        own["policy"] = AutoscalingPolicy(policy_function=function, policy_kwargs={_TARGET: target_s})
    return AutoscalingConfig(**own)
