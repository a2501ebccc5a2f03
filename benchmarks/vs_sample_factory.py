"""Measures training throughput of Pronghorn and of Sample Factory 2.1.1 side by side on doom:basic.

The short form of vs_peers.py, for one peer and one work. Both train the same on the same cores: 160×120 rendered,
resized to 128×72 RGB, action repeat 4, convnet_simple + GRU 512, unrolls of 32 steps, 2048 samples a batch. Rounds are
interleaved, so that a slow spell of the machine meets both. It says nothing about learning: see docs/results for that.

    python benchmarks/vs_sample_factory.py --json result.json --install /tmp/sample-factory
    python benchmarks/vs_sample_factory.py --json result.json --peer-python /tmp/sample-factory/bin/python

Steady state: the rate between the first and the last change of the count of steps trained, from `--warmup` seconds
after the first batch to the end. Steps trained are counted alike: decisions that have entered training batches. Sample
Factory counts frames of whole batches, which are 4 a step, and says so every 5 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from peers import OUR_PACKAGES, OURS, PEERS, WORKS, install
from side_by_side import Run, machine, pin, rounds, versions

PEER = "sample-factory"
SIDES = {OURS: "ours", PEER: "theirs"}


def measure(args: argparse.Namespace, peer_python: str) -> list[Run]:
    """Both in every round. Raises RuntimeError if a run of either fails: there is no ratio then."""
    pythons = {OURS: args.python, PEER: peer_python}
    runs = []
    for done in rounds(WORKS["doom"].contenders, pythons, args.rounds, args.seconds - args.warmup, args.warmup):
        if not isinstance(done, Run):
            raise done[1]
        runs.append(done)
        print(f"round {done.round}/{args.rounds}: {SIDES[done.contender]} {done.steps_per_s:,.0f} steps/s", flush=True)
    return runs


def summarise(runs: list[Run], cores: list[int], args: argparse.Namespace, peer_python: str) -> dict[str, Any]:
    rates = {side: [each.steps_per_s for each in runs if SIDES[each.contender] == side] for side in SIDES.values()}
    ours, theirs = statistics.median(rates["ours"]), statistics.median(rates["theirs"])
    memory = {side: max(each.peak_memory_bytes for each in runs if SIDES[each.contender] == side) for side in rates}
    return {
        "ratio": ours / theirs,
        "ours_steps_per_s": ours,
        "theirs_steps_per_s": theirs,
        "rounds": [dict(zip(rates, each, strict=True)) for each in zip(*rates.values(), strict=True)],
        "commands": {SIDES[each.name]: each.shown() for each in WORKS["doom"].contenders},
        "seconds": args.seconds,
        "warmup_s": args.warmup,
        "cores": cores,
        "machine": machine(),
        "versions": {
            "ours": versions(args.python, OUR_PACKAGES),
            "theirs": versions(peer_python, PEERS[PEER].names),
        },
        "peak_memory_bytes": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="PATH", help="where the result is written")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each measures both (default: 3)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a run from its first batch (60)")
    parser.add_argument("--warmup", type=float, default=20.0, help="seconds cut from its beginning (20)")
    parser.add_argument("--cores", type=int, default=2, help="cores that both share (2)")
    parser.add_argument("--python", default=sys.executable, help="interpreter with Pronghorn (this one)")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter with Sample Factory 2.1.1")
    parser.add_argument("--install", type=Path, metavar="DIR", help="install Sample Factory there first")
    args = parser.parse_args()
    if not args.peer_python and not args.install:
        parser.error("give --peer-python PATH, or --install DIR to install Sample Factory")
    if args.seconds < args.warmup + 15:
        parser.error("--seconds must be at least 15 more than --warmup: the peer reports every 5 seconds")
    peer_python = install(PEERS[PEER], args.install) if args.install else args.peer_python
    for python in (args.python, peer_python):
        if shutil.which(python) is None:
            parser.error(f"{python}: no such program")
    cores = pin(args.cores)
    args.python, peer_python = os.path.abspath(args.python), os.path.abspath(peer_python)  # runs have own folders
    result = summarise(measure(args, peer_python), cores, args, peer_python)
    args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"ratio {result['ratio']:.2f}: ours {result['ours_steps_per_s']:,.0f} steps/s, "
          f"theirs {result['theirs_steps_per_s']:,.0f} steps/s → {args.json}")  # fmt: skip


if __name__ == "__main__":
    main()
