"""Several schedulers, each with its own clock, behind the routing policy of docs/scale-out.md.

python -m loadtests.simulate.cluster --replicas 8 --adapters 200 --rate 16
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cluster.routing.policy import Affinity, Policy
from ktserve.plot import Line, plot
from loadtests.simulate.cost import MEASURED, StepCost, fitted
from loadtests.simulate.report import Limits, summary
from loadtests.simulate.run import Outcome, Simulation, Slots
from loadtests.simulate.traces import Trace, adapters
from scheduler.config import SchedulerConfig

Route = Callable[[Mapping[str, int], str], str]
POLICIES = ("affinity", "least", "random")


def run(trace: Trace, count: int, config: SchedulerConfig, cost: StepCost, load_s: float, route: Route) -> Outcome:
    """Each conversation goes to the replica that `route` names for (open requests of each, adapter), and stays."""
    replicas = {str(i): Simulation(config, cost, load_s) for i in range(count)}
    for replica in replicas.values():
        replica.begin(trace)
    for number, conversation in sorted(enumerate(trace), key=lambda item: item[1].start_s):
        for replica in replicas.values():
            replica.advance(conversation.start_s)
        opened = {name: replica.open_requests for name, replica in replicas.items()}
        adapter = str(conversation.adapter) if conversation.adapter else ""
        replicas[route(opened, adapter)].arrive(number)
    found = []
    for replica in replicas.values():
        replica.advance(float("inf"))
        found.append(replica.outcome())
    stats: dict[str, float | int] = {}
    for outcome in found:
        for key, value in outcome.stats.items():
            stats[key] = stats.get(key, 0) + value
    requests = [seen for outcome in found for seen in outcome.requests]
    refused = sum(outcome.refused for outcome in found)
    worst = max(found, key=lambda outcome: outcome.gap.largest)
    steps = sum(outcome.steps for outcome in found)
    slots = Slots(sum(outcome.slots.uses for outcome in found), sum(outcome.slots.cold for outcome in found))
    return Outcome(max(outcome.seconds for outcome in found), steps, requests, refused, worst.gap, slots, stats)


def router(policy: str, slots: int, slack: int, seed: int) -> Route:
    """One of POLICIES."""
    if policy == "random":
        rng = random.Random(f"route {seed}")
        return lambda opened, adapter: rng.choice(sorted(opened))
    if policy == "least":
        return lambda opened, adapter: min(opened, key=lambda name: (opened[name], name))
    affinity = Policy(Affinity(slots=slots, host=max(64, slots), slack=slack))

    def route(opened: Mapping[str, int], adapter: str) -> str:
        chosen = affinity.rank(opened, adapter, ())[0]
        affinity.sent(chosen, adapter, ())
        return chosen

    return route


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--rate", default="16", help="requests a second over all replicas; several with commas")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--slack", type=int, default=8, help="of the policy (docs/scale-out.md)")
    parser.add_argument("--load-ms", type=float, default=50.0)
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write TTFT P50 against the rate, as SVG")
    args = parser.parse_args(argv)
    try:
        rates = [float(rate) for rate in args.rate.split(",")]
    except ValueError:
        parser.error(f"--rate {args.rate}: write numbers with commas between")
    if min(args.replicas, args.adapters, args.slots, args.slack) < 1 or min(*rates, args.seconds) <= 0:
        parser.error("--replicas, --adapters, --slots, --slack, --rate and --seconds must be above 0")
    config = SchedulerConfig(
        num_blocks=4096, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=65536, max_queue=4096,
        num_adapter_slots=args.slots, eos_token_ids=(),
    )  # fmt: skip
    points: dict[str, list[tuple[float, float]]] = {policy: [] for policy in args.policy or POLICIES}
    for rate in rates:
        trace = adapters(args.seed, args.seconds, rate, args.adapters)
        for policy, own in points.items():
            route = router(policy, args.slots, args.slack, args.seed)
            outcome = run(trace, args.replicas, config, fitted(MEASURED), args.load_ms / 1000, route)
            found = summary(outcome, Limits())
            shown = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "goodput_s", "tokens_s", "slot_hits", "refused")
            print(json.dumps({"rate": rate, "policy": policy, **{key: found[key] for key in shown}}), flush=True)
            own.append((rate, found["ttft_p50_ms"] / 1000))
    if args.plot:
        title = f"{args.replicas} replicas, {args.adapters} adapters (simulated)"
        lines = [Line(policy, own) for policy, own in points.items()]
        drawn = plot(lines, title=title, x="requests a second", y="TTFT P50, s")
        args.plot.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
