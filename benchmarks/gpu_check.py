"""What a GPU does for training here: whether its graphs act and learn as single operations do, and how fast all is.

    bash benchmarks/gpu_check.sh --json gpu.json          with packages that the machine lacks from a folder of wheels
    python benchmarks/gpu_check.py --json gpu.json        where all are installed

Parts, in this order: `parity` of acting and learning, with and without graphs, on the same numbers; `sampler`, what a
row costs the sampler itself; `synthetic`, training on an environment without simulator, which shows the system's own
limit; `doom` and `atari`, `pronghorn bench` of each, training beside pure simulation on all cores. About seven minutes.
What cannot be measured is said, and is null in the JSON. The exit code is 1 if parity fails; speeds never decide it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pronghorn.training.parts as parts
import pronghorn.training.trainer as trainer
from pronghorn.bench.ceilings import bench, steady_part, summary
from pronghorn.bench.stages import ConstantPolicy, MadeUpPool
from pronghorn.config import Config, replace
from pronghorn.defaults import GPU_THREADS, resolve
from pronghorn.errors import PronghornError
from pronghorn.evaluation.policy import build_model, make_actor
from pronghorn.machine import available_cores, limit_threads, pick_device
from pronghorn.training.acting import Acted, Acting, GraphActing, Snapshot
from pronghorn.training.device import make_queue
from pronghorn.training.graphed import StepGraphs
from pronghorn.training.learner import Learner
from pronghorn.training.metrics import EpisodeTracker, read_metrics
from pronghorn.training.player import Player, Publisher
from pronghorn.training.sampler import Sampler
from pronghorn.training.store import make_store, stored_leaves
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec
from stages import DOOM, ReplayedPool, filled_store

Record = dict[str, Any]

SYNTHETIC = EnvSpec({"obs": LeafSpec((72, 96, 3), "uint8", "image", "hwc", 0, 255)}, ActionSpec((3, 3)), frame_skip=4)
MIXED = EnvSpec(
    {
        "view": LeafSpec((64, 64, 3), "uint8", "image", "hwc", 0, 255),
        "code": LeafSpec((2,), "int64", "discrete", n=(3, 5)),
        "action_mask": LeafSpec((5,), "uint8", "mask"),
        "x": LeafSpec((4,), "float32", "vector"),
    },
    ActionSpec((2, 3), (-1.0,), (1.0,)),
)
NETWORKS: dict[str, tuple[EnvSpec, Record]] = {
    "doom, GRU": (DOOM, {}),
    "several leaves, LSTM, masks, continuous": (MIXED, {"model.core": "lstm", "model.last_action": True,
                                                        "model.last_reward": True}),
}  # fmt: skip
SMALL = {"model.core_size": 8, "model.conv_features": 8, "learner.unroll_length": 4}
LIMITS = {"float32": 1e-3, "bfloat16": 5e-2}  # of differences against 1 + |value|
OTHER_ACTIONS = 0.01  # share of rows, where rounding moved a border past the draw
TARGETS = (
    ("doom", "frames_per_s", 250_000.0, "training, frames/s"),
    ("doom", "share_of_simulation", 0.8, "training / pure simulation on all cores"),
    ("synthetic", "frames_per_s", 1_000_000.0, "training, frames/s"),
)


@dataclass(frozen=True)
class Check:
    """What was asked for."""

    device: torch.device
    seconds: float
    rows: int
    small: bool

    def config(self, spec: EnvSpec, num_rows: int, **values: Any) -> Config:
        """The defaults for such an environment, on the device, with the rows in one group."""
        fixed = {"device": self.device.type, "env.workers": 1, "env.envs_per_worker": num_rows, "env.groups": 1,
                 "threads": min(GPU_THREADS, available_cores())}  # fmt: skip
        name = f"{Path(__file__).with_name('trivial_envs.py')}:Single"  # one that there is; it is never made
        return resolve(replace(Config(env=name), fixed | (SMALL if self.small else {}) | values), spec)


# ---------------------------------------------------------------- parity


def parity(check: Check) -> Record:
    """Every network with graphs and without, on the same numbers."""
    return {name: compared(check, spec, values) for name, (spec, values) in NETWORKS.items()}


def compared(check: Check, spec: EnvSpec, values: Record) -> Record:
    config = check.config(spec, check.rows, **values)
    acting, learning = compare_acting(check, config, spec), compare_learning(check, config, spec)
    worst = max(acting["difference"], learning["difference"])
    passed = worst <= LIMITS[config.precision] and acting["other_actions"] <= OTHER_ACTIONS
    return {"precision": config.precision, "limit": LIMITS[config.precision], "passed": passed,
            "acting": acting, "learning": learning}  # fmt: skip


def compare_acting(check: Check, config: Config, spec: EnvSpec) -> Record:
    """Batches of several sizes for the same rows: log-probs, values and states, where the actions are the same."""
    leaves, pool = stored_leaves(spec, config.model), MadeUpPool(spec, check.rows)
    batches = [{name: pool.make_up(leaf) for name, leaf in leaves.items()} for _ in range(4)]
    torch.manual_seed(0)
    actor = make_actor(config, spec, check.device)
    ways: dict[str, GraphActing] = {}
    for name in ("off", "on"):
        own = copy.deepcopy(actor)
        store = make_store(config, pool, own.state_size, check.device)
        ways[name] = GraphActing(own, store, check.rows, leaves, graphs=name, queue=make_queue(check.device))
        ways[name].seed(1)
    difference, others, count = 0.0, 0, 0
    for number, obs in enumerate(batches):
        rows = np.arange(max(1, check.rows >> number))
        some = {name: leaf[: len(rows)] for name, leaf in obs.items()}
        one, other = (way.act(some, rows, rows % 3 == number, rows) for way in ways.values())
        same = same_actions(one, other)
        others, count = others + int((~same).sum()), count + len(rows)
        difference = max(difference, *(apart(getattr(one, n)[same], getattr(other, n)[same])
                                       for n in ("log_prob", "value", "continuous")))  # fmt: skip
    obs, rows = batches[0], np.arange(check.rows)
    times = {name: timed(lambda way=way: way.act(obs, rows, rows < 0, rows)) for name, way in ways.items()}
    return {"difference": difference, "other_actions": others / count, "rows": check.rows,
            "ms_single": 1e3 * times["off"], "ms_graph": 1e3 * times["on"]}  # fmt: skip


def same_actions(one: Acted, other: Acted) -> np.ndarray:
    return (one.discrete == other.discrete).all(1)


def compare_learning(check: Check, config: Config, spec: EnvSpec) -> Record:
    """Three iterations on the same batch: what is reported, and the weights afterwards."""
    config = replace(config, {"graphs": "off", "threads": 1})
    torch.manual_seed(0)
    one = Learner(config, build_model(config.model, spec).to(check.device))
    other = copy.deepcopy(one)
    rough = config.precision == "bfloat16"
    other._graphs = StepGraphs(other._parameters, make_queue(check.device), graphs="on", rough=rough)
    store, slots = filled_store(config, spec, one.model.state_size, check.device)
    batch, difference = store.gather(slots, 0), 0.0
    for _ in range(3):
        expected, seen = one.iterate(batch), other.iterate(batch)
        difference = max(difference, *(apart(np.array(expected[n]), np.array(seen[n])) for n in ("loss", "entropy")))
    weights = [apart(a.detach().float().cpu().numpy(), b.detach().float().cpu().numpy())
               for a, b in zip(one._parameters, other._parameters, strict=True)]  # fmt: skip
    updates = config.updates_per_iteration
    return {"difference": max(difference, *weights), "samples_an_update": batch.num_samples // updates,
            "ms_single": 1e3 * timed(lambda: one.iterate(batch)) / updates,
            "ms_graph": 1e3 * timed(lambda: other.iterate(batch)) / updates}  # fmt: skip


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """The largest |a - b| / (1 + |a|); infinite where one is not a number."""
    difference = np.abs(one - other) / (1.0 + np.abs(one))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))


def timed(work: Callable[[], object], least_s: float = 0.2) -> float:
    """Seconds a call, of at least three; each waits for the device."""
    work()
    count, start = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - start < least_s:
        work()
        count += 1
    return (time.perf_counter() - start) / count


# ---------------------------------------------------------------- the sampler itself


class FreePool(ReplayedPool):
    """An environment without simulator: all rows are ready as soon as they were answered."""

    NUM_DELIVERIES = 3

    def state(self) -> list[str]:
        return []


def sampler(check: Check) -> Record:
    """What a step of `Sampler.step` costs a row with pixels, uploads included, under a policy without arithmetic."""
    return {f"{rows} rows": sampled(check, rows) for rows in (check.rows, 4 * check.rows, 16 * check.rows)}


def sampled(check: Check, rows: int) -> Record:
    config, pool = check.config(SYNTHETIC, rows), FreePool(SYNTHETIC, rows)
    limit_threads(config.acting_threads)
    policy = ConstantPolicy(SYNTHETIC).to(check.device)
    store, leaves = make_store(config, pool, 0, check.device), stored_leaves(SYNTHETIC, config.model)
    acting: Acting = GraphActing(policy, store, rows, leaves, graphs="on", queue=make_queue(check.device))
    tracker = EpisodeTracker(rows, pool.tasks, pool.task_ids)
    collector = Sampler(pool, [Player(pool, store, acting, Publisher(Snapshot.of(policy, 0)), tracker)], seed=0)

    def step() -> None:
        collector.step()
        if (slots := store.take(0, 0.0)) is not None:
            store.release(slots)

    seconds = timed(step, min(1.0, check.seconds))
    return {"us_a_row": 1e6 * seconds / rows, "ms_a_batch": 1e3 * seconds, "steps_per_s": rows / seconds}


# ---------------------------------------------------------------- training


def synthetic(check: Check) -> Record:
    """Training with rows that cost nothing, in this process."""
    rows = 8 * check.rows
    config = check.config(SYNTHETIC, rows)

    def make_pool(*_args: Any, **_options: Any) -> MadeUpPool:
        return FreePool(SYNTHETIC, rows)

    real, parts.make_pool = parts.make_pool, make_pool
    try:
        with tempfile.TemporaryDirectory(prefix="pronghorn-gpu-") as name:
            folder, ended = Path(name) / "run", threading.Event()
            quiet = {"run_dir": str(folder), "log.live": "off", "log.tensorboard": False,
                     "log.every_s": check.seconds / 40.0}  # fmt: skip
            threading.Thread(target=stop_after, args=(folder, check.seconds, ended), daemon=True).start()
            try:
                trainer.train(replace(config, quiet))
            finally:
                ended.set()
            lines = read_metrics(folder)
            said = [line for line in (folder / "log.txt").read_text().splitlines() if "WARNING" in line]
    finally:
        parts.make_pool = real
    steady = summary(steady_part(lines, 0.25 * check.seconds))
    return {**steady, "frames_per_s": steady["steps_per_s"] * SYNTHETIC.frame_skip, "rows": rows, "warnings": said}


def stop_after(folder: Path, seconds: float, ended: threading.Event) -> None:
    """Tell a training of this process to stop, once it has trained for so long after its warm-up, by its metrics."""
    give_up = time.monotonic() + FIRST_BATCH_S
    while not ended.wait(0.1):
        steady = steady_part(read_metrics(folder), 0.25 * seconds)
        enough = len(steady) > 3 and steady[-1]["time_s"] - steady[0]["time_s"] >= seconds
        if enough or (not steady and time.monotonic() > give_up):
            os.kill(os.getpid(), signal.SIGTERM)  # it saves, and ends
            return


def simulated(name: str, package: str) -> Callable[[Check], Record]:
    """`pronghorn bench` of an environment with the default settings: its stages alone, and training."""

    def measure(check: Check) -> Record:
        if find_spec(package) is None:
            raise PronghornError(f"{package} is not installed here")
        config = replace(Config(env=name), {"device": check.device.type} | (SMALL if check.small else {}))
        record = bench(config, seconds=check.seconds, say=lambda text: print(f"  {name}: {text}", flush=True))
        simulation = record["stages"]["simulation"]["steps_per_s"]
        frames = record["frames_per_s"] / record["steps_per_s"]
        return record | {"simulation_frames_per_s": simulation * frames,
                         "share_of_simulation": record["steps_per_s"] / simulation}  # fmt: skip

    return measure


PARTS: dict[str, Callable[[Check], Record]] = {
    "parity": parity,
    "sampler": sampler,
    "synthetic": synthetic,
    "doom": simulated("doom:basic", "vizdoom"),
    "atari": simulated("atari:Pong", "ale_py"),
}
FIRST_BATCH_S = 90.0  # until a training is given up
LONGEST_S = {"doom": 240.0, "atari": 150.0}  # what is left of --minutes must be as much, or the part is left out


# ---------------------------------------------------------------- the report


def measure(check: Check, name: str, until: float) -> Record:
    """One part, if there is time for it; one that fails is null and says why."""
    print(f"{name} ...", flush=True)
    left = until - time.monotonic()
    try:
        if left < LONGEST_S.get(name, 0.0) * min(1.0, 0.2 + check.seconds / 45.0):
            raise PronghornError(f"left out: {left:.0f} s remain of --minutes")
        result = PARTS[name](check)
    except (PronghornError, RuntimeError, OSError) as error:
        print(f"  not measured: {error}", flush=True)
        return {name: None, f"{name}_error": str(error)}
    print("\n".join(lines_of(name, result)), flush=True)
    return {name: result}


def lines_of(name: str, result: Record) -> list[str]:
    """What a person reads of a part."""
    if name == "parity":
        return [line for net, seen in result.items() for line in parity_lines(net, seen)]
    if name == "sampler":
        return [
            f"  {rows}: {seen['us_a_row']:.2f} us a row, {seen['ms_a_batch']:.2f} ms a batch, "
            f"{seen['steps_per_s']:,.0f} steps/s"
            for rows, seen in result.items()
        ]
    lines = [f"  training: {result['steps_per_s']:,.0f} steps/s, {result['frames_per_s']:,.0f} frames/s"]
    if "simulation_frames_per_s" in result:
        lines.append(
            f"  simulation alone: {result['simulation_frames_per_s']:,.0f} frames/s on all cores, of which training "
            f"reaches {100 * result['share_of_simulation']:.0f} %; slowest stage alone: {result['limiting_stage']}"
        )
    return [*lines, *(f"  {text}" for text in result.get("warnings", []))]


def parity_lines(network: str, seen: Record) -> list[str]:
    acting, learning = seen["acting"], seen["learning"]
    return [
        f"  {network}, {seen['precision']}: {'same' if seen['passed'] else 'DIFFERENT'} (limit {seen['limit']:g}): "
        f"acting {acting['difference']:.1e} apart, {100 * acting['other_actions']:.2f} % other actions; "
        f"learning {learning['difference']:.1e} apart",
        f"    ms as single operations and by graph: {acting['rows']} rows act in {acting['ms_single']:.2f}, "
        f"{acting['ms_graph']:.2f}; an update of {learning['samples_an_update']} samples "
        f"{learning['ms_single']:.1f}, {learning['ms_graph']:.1f}",
    ]


def targets(record: Record) -> list[Record]:
    """Each target with what was seen; None where it was not measured."""
    rows = []
    for part, key, wanted, what in TARGETS:
        seen = (record.get(part) or {}).get(key)
        rows.append({"part": part, "what": what, "wanted": wanted, "seen": seen,
                     "met": None if seen is None else seen >= wanted})  # fmt: skip
    return rows


def machine(device: torch.device) -> Record:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none: the CPU stands in for it"
    return {"gpu": name, "cores": available_cores(), "torch": torch.__version__, "python": sys.version.split()[0]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the script, not a GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these (default: all)")
    parser.add_argument("--seconds", type=float, default=45.0, help="that each training is measured for (45)")
    parser.add_argument("--rows", type=int, default=256, help="rows of parity; others take multiples (256)")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no long part is begun (8)")
    parser.add_argument("--small", action="store_true", help="tiny networks, to try the script")
    args = parser.parse_args(argv)
    started = time.monotonic()
    check = Check(pick_device(args.device), args.seconds, args.rows, args.small)
    record: Record = {"machine": machine(check.device), "seconds": args.seconds}
    print(", ".join(f"{key} {value}" for key, value in record["machine"].items()), flush=True)
    for part in args.parts:
        record |= measure(check, part, started + 60.0 * args.minutes)
        record |= {"targets": targets(record), "took_s": time.monotonic() - started}
        if args.json:  # after each part, so that what was measured is not lost
            args.json.write_text(json.dumps(record, indent=2, default=float) + "\n", encoding="utf-8")
    for row in record["targets"]:
        seen = "not measured" if row["seen"] is None else f"{row['seen']:,.2f}"
        word = {None: "", True: ": met", False: ": missed"}[row["met"]]
        print(f"{row['part']}, {row['what']}: {seen} (target {row['wanted']:,.2f}){word}")
    if "parity" not in args.parts:
        return 0
    return 0 if record["parity"] and all(r["passed"] for r in record["parity"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
