"""Traffic through the real scheduler in simulated time.

python -m loadtests.simulate chat --rate 0.5 --seconds 600
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from loadtests.simulate.cost import MEASURED, LaneCost, fitted, measured_steps
from loadtests.simulate.report import Limits, summary
from loadtests.simulate.run import Simulation
from loadtests.simulate.traces import TRACES
from scheduler.config import SchedulerConfig


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.simulate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", choices=TRACES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="of arrivals (default: 300)")
    parser.add_argument("--rate", type=float, default=0.5, help="conversations a second (default: 0.5)")
    parser.add_argument("--steps", type=Path, help="steps.jsonl of --profile-dir to fit the cost of a step to")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--kv-cache-tokens", type=int, default=65536)
    parser.add_argument(
        "--state-tokens",
        type=int,
        default=0,
        help="of a model with states: a snapshot takes the memory of so many tokens",
    )
    parser.add_argument(
        "--snapshot-share", type=float, help="of the cache, that snapshots may take, with --state-tokens (default: 1)"
    )
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step at most (default: 512)")
    parser.add_argument("--mixed-chunk", type=int, help="prefill tokens beside decode rows at most")
    parser.add_argument("--itl-target-ms", type=float)
    parser.add_argument(
        "--lane-tokens", type=int, help="a lane of long prompts, for prompts of so many tokens together (default: none)"
    )
    parser.add_argument("--lane-chunk", type=int, default=32768, help="tokens of a step there at most (default: 32768)")
    parser.add_argument("--lane-pass-ms", type=float, default=1100.0, help="of a step there at least (default: 1100)")
    parser.add_argument("--lane-token-us", type=float, default=40.0, help="of a token there (default: 40)")
    parser.add_argument(
        "--lane-slower", type=float, default=1.6, help="how much longer other steps take meanwhile (default: 1.6)"
    )
    parser.add_argument("--adapter-slots", type=int, default=8)
    parser.add_argument("--overtake-s", type=float, default=15.0)
    parser.add_argument("--slot-patience-s", type=float, default=4.0)
    parser.add_argument("--load-ms", type=float, default=50.0, help="of an adapter into a slot (default: 50)")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--ttft-limit-ms", type=float, default=10_000.0, help="of a good request (default: 10000)")
    parser.add_argument("--itl-limit-ms", type=float, default=500.0, help="of a good request (default: 500)")
    args = parser.parse_args(argv)
    if args.seconds <= 0 or args.rate <= 0 or args.load_ms < 0 or args.state_tokens < 0:
        parser.error("--seconds and --rate must be above 0, --load-ms and --state-tokens at least 0")
    if args.lane_pass_ms <= 0 or args.lane_token_us < 0 or args.lane_slower < 1:
        parser.error("--lane-pass-ms must be above 0, --lane-token-us at least 0, --lane-slower at least 1")
    share = 1.0 if args.snapshot_share is None else args.snapshot_share
    if not 0 <= share <= 1:
        parser.error("--snapshot-share must be 0 to 1")
    if args.snapshot_share is not None and not args.state_tokens:
        parser.error("--snapshot-share is of models with states: give --state-tokens as well")
    blocks, snapshot_blocks = args.kv_cache_tokens // 16, -(-args.state_tokens // 16)
    try:
        cost = fitted(measured_steps(args.steps) if args.steps else MEASURED)
        config = SchedulerConfig(
            num_blocks=blocks,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.chunk,
            max_model_len=args.kv_cache_tokens,
            max_queue=4096,
            num_adapter_slots=args.adapter_slots,
            eos_token_ids=(),
            prefix_caching=not args.no_prefix_caching,
            itl_target_s=None if args.itl_target_ms is None else args.itl_target_ms / 1000,
            mixed_chunk=args.mixed_chunk,
            lane_tokens=args.lane_tokens,
            lane_budget=None if args.lane_tokens is None else args.lane_chunk,
            overtake_s=args.overtake_s,
            slot_patience_s=args.slot_patience_s,
            num_states=args.max_num_seqs if snapshot_blocks else 0,
            num_snapshots=int(share * blocks) // snapshot_blocks if snapshot_blocks else 0,
            snapshot_blocks=snapshot_blocks,
        )
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    began = time.perf_counter()
    lane = None
    if args.lane_tokens is not None:
        lane = LaneCost(args.lane_pass_ms / 1e3, args.lane_token_us / 1e6, args.lane_slower)
    simulation = Simulation(config, cost, args.load_ms / 1000, lane)
    outcome = simulation.run(TRACES[args.trace](args.seed, args.seconds, args.rate))
    found = summary(outcome, Limits(args.ttft_limit_ms / 1000, args.itl_limit_ms / 1000))
    print(json.dumps(found, indent=1))
    print(f"{outcome.seconds:.0f} s of traffic in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
