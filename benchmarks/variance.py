"""What uneven step times cost: synchronous a2c and ppo beside asynchronous impala and appo (IMPALA's Table 1).

    python benchmarks/variance.py --json result.json

Environments sleep (benchmarks/sleeping_envs.py), so that steps overlap whatever the number of cores and the machine
does little else; step times have a mean of `--mean-ms` and the given variations (deviation over mean). Algorithms
differ in nothing that costs time but who waits for whom: one pass over batches of equal size, a network of two small
layers. A rate is that of steps trained between the first and the last change after the warm-up, the median of rounds;
`share` is that of what the environments could do if none ever waited.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from side_by_side import Contender, Run, machine, medians, pin, rounds

SLEEPING = Path(__file__).with_name("sleeping_envs.py")
ALGORITHMS = ("a2c", "ppo", "impala", "appo")
WORKERS, ENVS_PER_WORKER = 8, 4


def contender(algo: str, mean_ms: float, variation: float) -> Contender:
    """One training command."""
    arguments = (
        "-m", "pronghorn", "train", f"{SLEEPING}:Sleeping", "--algo", algo, "--env.args", "mean_ms", str(mean_ms),
        "variation", str(variation), "--env.workers", str(WORKERS), "--env.envs-per-worker", str(ENVS_PER_WORKER),
        "--learner.unroll-length", "20", "--learner.batch-unrolls", str(WORKERS * ENVS_PER_WORKER),
        "--learner.epochs", "1", "--learner.minibatches", "1", "--log.every-s", "0.5", "--run-dir", "{run}/run",
    )  # fmt: skip
    return Contender(algo, "pronghorn", arguments, metrics="run/metrics.jsonl")


def most_steps_per_s(mean_ms: float) -> float:
    """Of all workers, each of which steps one environment after the other."""
    return WORKERS * 1000.0 / mean_ms


def measure(variation: float, args: argparse.Namespace) -> dict[str, Any]:
    """All algorithms at one variation."""
    runs, contenders = [], [contender(algo, args.mean_ms, variation) for algo in ALGORITHMS]
    for done in rounds(contenders, {"pronghorn": args.python}, args.rounds, args.seconds, args.warmup):
        if not isinstance(done, Run):
            raise done[1]
        runs.append(done)
    rates = medians(runs)
    most = most_steps_per_s(args.mean_ms)
    return {"variation": variation, "steps_per_s": rates, "share": {k: v / most for k, v in rates.items()},
            "rounds": [(r.contender, r.round, r.steps_per_s) for r in runs]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has Pronghorn (this one)")
    parser.add_argument("--mean-ms", type=float, default=10.0)
    parser.add_argument("--variations", type=float, nargs="+", default=[0.0, 0.5, 1.0, 2.0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warmup", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    record: dict[str, Any] = {"cores": pin(2), "machine": machine(), "mean_ms": args.mean_ms, "found": []}
    print("| deviation / mean | " + " | ".join(ALGORITHMS) + " | appo / a2c |")
    print("|" + "---|" * (len(ALGORITHMS) + 2))
    for variation in args.variations:
        found = measure(variation, args)
        record["found"].append(found)
        rates, share = found["steps_per_s"], found["share"]
        cells = " | ".join(f"{rates[algo]:,.0f} ({share[algo]:.0%})" for algo in ALGORITHMS)
        print(f"| {variation:g} | {cells} | {rates['appo'] / rates['a2c']:.2f} |", flush=True)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
