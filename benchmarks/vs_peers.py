"""Measures training throughput of Pronghorn beside its peers: the same work on the same cores in one run.

    python benchmarks/vs_peers.py --work pong cartpole --install PEERS --json result.json
    python benchmarks/vs_peers.py --work doom --peers sample-factory --install PEERS --json result.json

Rounds alternate: each measures every contender once, in another order, so that a slow spell of the machine meets all.
A rate is that between the first and the last change of a contender's count of trained steps after the warm-up, never
one that it prints. What is counted alike: decisions that have entered training batches, each once. It says nothing
about learning: see docs/results for that. The works and what stands for each peer: benchmarks/peers.py.

Each peer gets a virtual environment of its own in a sub-folder of --install; one that is there is used again. A peer
that pip cannot install is reported as absent with pip's reason, one whose training fails as failed; the others go on,
and the exit code is 1. The result is written after every run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import OUR_PACKAGES, OURS, PEERS, WORKS, AbsentError, Work, install
from side_by_side import BENCHMARKS, Contender, Run, machine, medians, pin, rounds, versions

Record = dict[str, Any]


def install_all(peers: list[str], folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(interpreters by peer, reasons why a peer is absent)."""
    pythons: dict[str, str] = {}
    absent: dict[str, str] = {}
    for name in peers:
        print(f"installing {name}", flush=True)
        try:
            pythons[name] = install(PEERS[name], folder / name)
        except AbsentError as error:
            absent[name] = str(error)
            print(f"{name} is absent:\n{error}", flush=True)
    return pythons, absent


def measure(name: str, pythons: dict[str, str], args: argparse.Namespace, record: Record) -> None:
    """All rounds of one work; `record` has them so far after every run, and is written to --json each time."""
    work = WORKS[name]
    contenders = work.of(list(pythons))
    runs: list[Run] = []
    failed: dict[str, str] = {}
    for done in rounds(contenders, pythons, args.rounds, args.seconds, args.warmup):
        if isinstance(done, Run):
            runs.append(done)
            where = f"{name} round {done.round}/{args.rounds}"
            print(f"{where}: {done.contender} {done.steps_per_s:,.0f} steps/s", flush=True)
        else:
            contender, error = done
            if contender.name == OURS:
                raise error
            failed[contender.name] = str(error)
            print(f"{name}: {contender.name} failed: {error}", flush=True)
        record["works"][name] = summary(work, runs, failed) | {"commands": commands(contenders)}
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def summary(work: Work, runs: list[Run], failed: dict[str, str]) -> Record:
    """Medians of the rounds, how many times faster than each contender ours is, the most memory, and all runs."""
    steps_per_s = medians(runs)
    ours = steps_per_s.get(OURS)
    ratios = {name: ours / rate for name, rate in steps_per_s.items() if ours and name != OURS}
    memory = {name: max(each.peak_memory_bytes for each in runs if each.contender == name) for name in steps_per_s}
    return {
        "what": work.what,
        "steps_per_s": steps_per_s,
        "ratios": ratios,
        "peak_memory_bytes": memory,
        "failed": failed,
        "runs": [dataclasses.asdict(each) for each in runs],
    }


def commands(contenders: list[Contender]) -> dict[str, str]:
    return {each.name: each.shown() for each in contenders}


def conditions(pythons: dict[str, str], absent: dict[str, str], cores: list[int], args: argparse.Namespace) -> Record:
    """What holds for all works: how it was measured, where, and with which versions."""
    packages = {OURS: OUR_PACKAGES} | {name: PEERS[name].names for name in pythons if name != OURS}
    return {
        "rounds": args.rounds,
        "seconds": args.seconds,
        "warmup_s": args.warmup,
        "cores": cores,
        "machine": machine(),
        "commit": commit(),
        "versions": {name: versions(python, packages[name]) for name, python in pythons.items()},
        "absent": absent,
        "works": {},
    }


def commit() -> str:
    """Of this checkout; empty outside of one."""
    command = ["git", "-C", str(BENCHMARKS), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def text(name: str, record: Record) -> str:
    """A table of one work; the ratio is ours to theirs."""
    lines = [f"{name}: {record['what']}", "", "| | steps/s | ratio | memory, MiB |", "|---|---|---|---|"]
    for contender, rate in record["steps_per_s"].items():
        ratio = record["ratios"].get(contender)
        memory = record["peak_memory_bytes"][contender] / 2**20
        lines.append(f"| {contender} | {rate:,.0f} | {f'{ratio:.2f}' if ratio else ''} | {memory:,.0f} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="PATH", help="where the result is written")
    parser.add_argument("--install", type=Path, required=True, metavar="DIR", help="virtual environments of the peers")
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS), help="what is trained (all)")
    parser.add_argument("--peers", type=names, default=list(PEERS), metavar="A,B", help=f"of {', '.join(PEERS)} (all)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each measures every contender (3)")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds measured after the warm-up (120)")
    parser.add_argument("--warmup", type=float, default=30.0, help="seconds of warm-up from the first batch on (30)")
    parser.add_argument("--cores", type=int, default=2, help="cores that all share (2)")
    parser.add_argument("--python", default=sys.executable, help="interpreter with Pronghorn (this one)")
    args = parser.parse_args()
    taking_part = {each.peer for work in args.work for each in WORKS[work].contenders}
    args.peers = [name for name in args.peers if name in taking_part]
    if not args.peers:
        parser.error("none of --peers takes part in --work; benchmarks/peers.py tells which do")
    return args


def names(given: str) -> list[str]:
    """Peers, separated by commas. Raises ArgumentTypeError for one that nobody knows."""
    found = given.split(",")
    if unknown := [name for name in found if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return found


def main() -> int:
    args = parse()
    pythons, absent = install_all(args.peers, args.install)
    cores = pin(args.cores)  # after the installations, which may use all
    pythons = {OURS: os.path.abspath(args.python)} | pythons  # runs have folders of their own
    record = conditions(pythons, absent, cores, args)
    for name in args.work:
        measure(name, pythons, args, record)
    for name, found in record["works"].items():
        print(f"\n{text(name, found)}")
    return int(bool(absent) or any(found["failed"] for found in record["works"].values()))


if __name__ == "__main__":
    sys.exit(main())
