"""`pronghorn bench`: the ceiling that the stages make together, the share of it that training reaches, faster settings.

docs/performance.md describes the method, so that another script can check it. Nothing here changes a run: `tune`
writes what it found to a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import platform
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import tomli_w
import torch

from pronghorn.bench.stages import WARM_UP_SHARE, acting_rows, measure, started
from pronghorn.config import Config, replace, walk
from pronghorn.defaults import resolve, resolve_env
from pronghorn.envs.registry import make_pool
from pronghorn.errors import ConfigError, PronghornError, UsageError
from pronghorn.limits import require_threads
from pronghorn.machine import available_cores, computes_bfloat16, pick_device
from pronghorn.settings_file import to_toml
from pronghorn.spec_file import ENV_FILE, spec_bytes
from pronghorn.training.checkpoint import write_atomically
from pronghorn.training.metrics import limiting_stage, read_metrics
from pronghorn.training.signals import EXIT_CODES
from pronghorn.types import EnvSpec

STAGE_SHARE = 0.1  # of the time that training is measured for, each stage is
NEEDED_CHANGES = 4  # of the count of steps, between which training's rate is taken
FIRST_BATCH_S = 600.0  # until training is given up
TUNING_MINUTES = 5.0
TRIAL_SHARE, MAX_TRIAL_S = 1 / 30, 15.0  # of the time for tuning, each trial measures
BETTER = 1.03  # a setting must be faster by this factor, twice, or noise would choose
LONG_UPDATE_S = 0.05  # on one core, from which more threads are worth a try
TUNED = ("threads", "env.envs_per_worker", "env.workers", "env.groups", "learner.batch_unrolls")
PRECISIONS = ("float32", "bfloat16")

Say = Callable[[str], None]
Record = dict[str, Any]
Setting = int | str


def bench(
    config: Config,
    *,
    seconds: float = 60.0,
    out: Path | None = None,
    minutes: float | None = None,
    say: Say = lambda _: None,
) -> Record:
    """Measure every stage alone, then a training of `seconds`; the record that --json prints.

    config: as `train` takes it, not resolved; its limits do not count.  out: tune first, for `minutes` (TUNING_MINUTES
    unless given), write the settings found to this TOML file, and measure with them.  say: told what goes on, a line
    at a time.
    Raises PronghornError: what `train` raises, a file that exists already, a time too short to tell a speed.
    """
    if out is not None:
        _require_new(out)
    if not seconds > 0.0:
        raise ConfigError("seconds", seconds, "must be greater than 0", "Leave it out for the default.")
    require_threads(config.threads)
    with _signals_raise(), tempfile.TemporaryDirectory(prefix="pronghorn-bench-") as name:
        folder, tuning = Path(name), Record()
        spec = _look_at(config)
        if spec.signatures:
            rule = "has several networks, and the stages of a bench are those of one"
            raise ConfigError("env.policies", config.env.policies, rule, "Bench with --env.pad-spaces, or not at all.")
        resolve(config, spec)  # refuses now what cannot be
        if out is not None:
            trials = Trials(config, spec, folder, 60.0 * (minutes or TUNING_MINUTES), say)
            config = replace(config, tune(config, spec, trials))
            spec = _with_rows_of(config, spec)
            write_atomically(out, settings_text(config).encode())
            say(f"settings for pronghorn train --config: {out}")
            tuning = {"trials": trials.records, "out": str(out)}
        return _measure_all(resolve(config, spec), spec, folder, seconds, say) | tuning


def _require_new(out: Path) -> None:
    if out.exists():
        raise UsageError(f"{out} exists already. Remove it, or name another file with --out.")
    if not os.access(out.absolute().parent, os.W_OK):
        raise UsageError(f"There is no directory {out.absolute().parent} that {out.name} can be written to.")


def _look_at(config: Config) -> EnvSpec:
    """What the environment looks like, from as few of them as there can be."""
    config = resolve_env(config)  # before their number is given, which says something about rows as well
    few = {"env.workers": 1, "env.envs_per_worker": len(config.env_names), "env.groups": 1}
    with contextlib.closing(make_pool(replace(config, few), seed=config.seed, ordered=False)) as pool:
        return pool.spec


def _measure_all(config: Config, spec: EnvSpec, folder: Path, seconds: float, say: Say) -> Record:
    _write(config, folder)
    write_atomically(folder / ENV_FILE, spec_bytes(spec))
    device, cores = pick_device(config.device).type, usable_cores()
    stages = _measure_stages(config, folder, cores, on_gpu=device != "cpu", seconds=STAGE_SHARE * seconds, say=say)
    stages["acting"]["rows"] = acting_rows(config, spec)
    stages["learning"]["samples"] = config.batch_samples
    say(f"training: {seconds:g} s from its first batch on ...")
    training = train_for(config, folder / "training", seconds)
    rates = {name: stage["steps_per_s"] for name, stage in stages.items() if "core_s_per_step" in stage}
    highest = ceiling(rates, beside=device != "cpu")
    record = {
        "env": config.env.id,
        "steps_per_s": training["steps_per_s"],
        "frames_per_s": training["steps_per_s"] * spec.frame_skip,
        "ceiling_steps_per_s": highest,
        "ceiling_frames_per_s": highest * spec.frame_skip,
        "fraction_of_ceiling": training["steps_per_s"] / highest,
        "limiting_stage": min(rates, key=lambda stage: rates[stage]),
        "stages": stages,
        "training": training,
        "machine": {
            "cores": len(cores),
            "device": device,
            "precision": config.precision,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "settings": to_toml(config),
    }
    return record | {"advice": advice(record)}


def _measure_stages(
    config: Config, folder: Path, cores: list[int], *, on_gpu: bool, seconds: float, say: Say
) -> dict[str, Record]:
    """Every stage alone; each of its copies' steps/s, their sum, and seconds of a core (or GPU) a step."""
    networks: list[int | None] = [None] if on_gpu else list(cores)

    def alone(stage: str, on: Sequence[int | None]) -> Record:
        say(f"{stage} alone, " + ("as in training" if list(on) == [None] else f"on {len(on)} core(s)") + " ...")
        copies = measure(stage, folder, on, seconds)
        return {"steps_per_s": sum(copies), "core_s_per_step": len(copies) / sum(copies), "copies": copies}

    whole = alone("transport", [None])["steps_per_s"]  # first: with all environments, it meets what is wrong with them
    one_core = alone("simulation", cores[:1])["steps_per_s"]
    simulation = alone("simulation", cores) | {"steps_per_s_one_core": one_core}
    return {
        "simulation": simulation,
        "acting": alone("acting", networks),
        "learning": alone("learning", networks),
        "transport": {"steps_per_s": whole, "share_of_simulation": whole / simulation["steps_per_s"]},
    }


def ceiling(rates: Mapping[str, float], *, beside: bool) -> float:
    """Steps per second that the machine allows, from those of each stage alone on the whole machine.

    On a CPU the stages share the cores: cores / sum of core-seconds a step. With a GPU (beside) they run beside each
    other, and the slowest sets the pace.
    """
    # cores / sum_s (cores / rate_s) = 1 / sum_s (1 / rate_s)
    return min(rates.values()) if beside else 1.0 / sum(1.0 / rate for rate in rates.values())


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use: of its affinity mask, no more than its quota allows."""
    numbers = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return list(numbers)[: available_cores()]


def _write(config: Config, folder: Path) -> None:
    write_atomically(folder / "config.toml", tomli_w.dumps(to_toml(config)).encode())


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """What would end a run ends this by SystemExit, so that copies and files go; further signals wait for that."""

    def end(number: int, _frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(EXIT_CODES[signal.Signals(number)])

    # Background jobs inherit SIGINT ignored, as runs under nohup do SIGHUP; only the latter meant it.
    before = {n: h for n in EXIT_CODES if (h := signal.getsignal(n)) != signal.SIG_IGN or n == signal.SIGINT}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- training


def train_for(config: Config, folder: Path, seconds: float) -> Record:
    """Train with a resolved config in a process of its own, for `seconds` from its first batch on; what it did.

    Raises PronghornError if it trained too little to tell a speed, or what it raised itself.
    """
    folder.mkdir()
    run = {
        "run_dir": str(folder / "run"),
        "steps": None,
        "frames": None,
        "minutes": None,
        "learner.lr_schedule": "constant",  # the linear one needs a limit
        "eval.every_s": 0.0,
        "eval.until_return": None,
        "log.every_s": min(1.0, seconds / 40.0),  # no rate is more exact than the times of its ends
        "log.live": "off",
        "log.tensorboard": False,
        "log.wandb": False,
    }
    _write(replace(config, run), folder)
    memory, next_look, give_up = 0, 0.0, time.monotonic() + FIRST_BATCH_S
    with started("training", folder, [None], seconds) as (copy,):
        while True:
            time.sleep(min(0.5, seconds / 40.0))
            ended = copy.process.poll() is not None
            if copy.process.returncode:
                copy.hear()  # raises its error
            lines, now = read_metrics(folder / "run"), time.monotonic()
            steady = steady_part(lines, WARM_UP_SHARE * seconds)
            begun = [line["time_s"] for line in lines if line["steps"] > 0]
            span_s = begun[-1] - begun[0] if begun else 0.0
            if begun and not ended and now >= next_look:  # seldom: it takes some time itself
                memory, next_look = max(memory, memory_of(copy.process.pid)), now + seconds / 6.0
            enough = span_s >= seconds and (len(steady) >= NEEDED_CHANGES or span_s >= 4.0 * seconds)
            if ended or enough or (not begun and now > give_up):
                return summary(steady) | {"memory_bytes": memory}


def steady_part(lines: Sequence[Record], warm_up_s: float) -> list[Record]:
    """The lines of metrics.jsonl at which `steps` had grown, from `warm_up_s` after the first of them on."""
    grown = [line for before, line in pairwise([{"steps": 0}, *lines]) if line["steps"] > before["steps"]]
    return [line for line in grown if line["time_s"] >= grown[0]["time_s"] + warm_up_s]


def summary(steady: Sequence[Record]) -> Record:
    """Speed between the first and the last of these lines, and means over them. Raises PronghornError: too few."""
    if len(steady) < 2:
        raise PronghornError(f"Training was seen to move {len(steady)} times after its warm-up. Give more --seconds.")
    first, last = steady[0], steady[-1]
    shares = {name.removeprefix("stages/"): _mean(steady, name) for name in last if name.startswith("stages/")}
    return {
        "steps_per_s": (last["steps"] - first["steps"]) / (last["time_s"] - first["time_s"]),
        "seconds": last["time_s"] - first["time_s"],
        "limiting_stage": limiting_stage(shares),
        "shares": shares,
        "policy_lag_mean": _mean(steady, "policy_lag_mean"),
        "policy_lag_max": max((line.get("policy_lag_max", 0) for line in steady), default=0),
    }


def _mean(lines: Sequence[Record], name: str) -> float:
    """Over the lines that have it."""
    values = [line[name] for line in lines if name in line]
    return float(np.mean(values)) if values else 0.0


def memory_of(pid: int) -> int:
    """Bytes of a process and of all below it: proportional set size, which counts shared pages once (else unique)."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                info = each.memory_full_info()
                total += int(getattr(info, "pss", info.uss))
    return total


# ---------------------------------------------------------------- tuning


class Trials:
    """Short trainings with one choice of settings or another, as many as fit into the time.

    records: of each, its settings, steps_per_s, and error if it could not be.
    """

    def __init__(self, config: Config, spec: EnvSpec, folder: Path, budget_s: float, say: Say) -> None:
        self.config, self.spec, self.folder, self.say = config, spec, folder, say
        self.seconds, self._end_s = min(MAX_TRIAL_S, TRIAL_SHARE * budget_s), time.monotonic() + budget_s
        self._longest_s = 0.0
        self.records: list[Record] = []

    def __call__(self, settings: Mapping[str, Setting]) -> float:
        """Steps per second; 0 where the settings cannot be, and once there is no time for another trial."""
        began = time.monotonic()
        if self.records and began + self._longest_s > self._end_s:
            return 0.0
        record: Record = {"settings": dict(settings), "steps_per_s": 0.0}
        try:
            config = replace(self.config, settings)
            resolved = resolve(config, _with_rows_of(config, self.spec))
            trained = train_for(resolved, self.folder / f"trial{len(self.records)}", self.seconds)
            record["steps_per_s"] = trained["steps_per_s"]
        except PronghornError as error:
            if not self.records:  # the settings that were asked for
                raise
            record["error"] = str(error)
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        self.records.append(record)
        shown = ", ".join(f"{name} {value}" for name, value in settings.items())
        self.say(f"trial {len(self.records)}: {shown}: " + record.get("error", f"{record['steps_per_s']:,.0f} steps/s"))
        return float(record["steps_per_s"])


def tune(config: Config, spec: EnvSpec, trial: Callable[[Mapping[str, Setting]], float]) -> dict[str, Setting]:
    """The settings of TUNED that `trial` finds fastest, searched from those that the config resolves to.

    Rows that one environment steps as a whole are searched instead of a worker's environments, and the precision where
    there is a choice: where the processor has no instructions for bfloat16 it is many times slower.
    """
    chosen, cores = dict(walk(resolve(config, spec))), len(usable_cores())
    names = [n.replace("envs_per_worker", "vector_rows") if chosen["env.vector_rows"] else n for n in TUNED]
    most = {"threads": max(cores, chosen["threads"]), "env.workers": 2 * cores, "env.groups": 4}
    free = computes_bfloat16(config.device) and not config.deterministic
    return search({n: chosen[n] for n in names + ["precision"] * free}, most, trial)


def search(
    start: Mapping[str, Setting], most: Mapping[str, int], trial: Callable[[Mapping[str, Setting]], float]
) -> dict[str, Setting]:
    """Coordinate search: each setting in turn is doubled, or halved, as long as that is faster; until nothing is.

    A precision is exchanged for the other one.
    most: upper limits.  trial: the speed with these settings, 0 if there is none.
    """
    best, best_speed = dict(start), (trial(start) + trial(start)) / 2.0
    moves = deque((name, factor) for name in start for factor in (2.0, 0.5))
    tried, failed = [best], 0
    while failed < len(moves):
        name, factor = moves[0]
        candidate = best | {name: _moved(best[name], factor, most.get(name, math.inf))}
        speed = 0.0
        if candidate not in tried:
            tried.append(candidate)
            speed = _speed_if_over(BETTER * best_speed, candidate, trial)
        if speed:
            best, best_speed, failed = candidate, speed, 0  # and the same move again
        else:
            moves.rotate(-1)
            failed += 1
    return best


def _moved(value: Setting, factor: float, most: float) -> Setting:
    """The next value to try; the same where that is out of bounds, 1 and `most`."""
    if isinstance(value, str):
        return PRECISIONS[value == PRECISIONS[0]]
    moved = int(factor * value)
    return moved if 1 <= moved <= most else value


def _with_rows_of(config: Config, spec: EnvSpec) -> EnvSpec:
    """The spec of environments that step as many rows as a whole as the config says."""
    return dataclasses.replace(spec, rows_per_env=config.env.vector_rows) if config.env.vector_rows else spec


def _speed_if_over(
    least: float, settings: Mapping[str, Setting], trial: Callable[[Mapping[str, Setting]], float]
) -> float:
    """Mean speed of two trials that are both over `least`; 0 if one is not."""
    speeds: list[float] = []
    while len(speeds) < 2:
        speeds.append(trial(settings))
        if speeds[-1] <= least:
            return 0.0
    return sum(speeds) / 2.0


def settings_text(config: Config) -> str:
    """A file for `pronghorn train --config`: the settings that differ from what nobody gave."""
    tree = to_toml(replace(config, {"run_dir": "", "minutes": None}), beyond=Config())
    return "# Found by pronghorn bench --tune, for pronghorn train --config.\n" + tomli_w.dumps(tree)


# ---------------------------------------------------------------- in words


def advice(record: Record) -> list[str]:
    """What may help, by plain rules from the numbers of a record."""
    settings, env, stages = record["settings"], record["settings"]["env"], record["stages"]
    return [*_advice_on_ceiling(record["limiting_stage"], settings, stages), *_advice_on_share(record, settings, env)]


def _advice_on_ceiling(limiting: str, settings: Record, stages: Mapping[str, Record]) -> Iterator[str]:
    n, env = settings["learner"], settings["env"]
    if limiting == "learning":
        updates = n["epochs"] * n["minibatches"]
        yield (
            f"Learning is most of the work: {n['epochs']} pass(es) over each sample, {updates} update(s) a batch. "
            "Fewer --learner.epochs or --learner.minibatches or a smaller network are faster, and change learning."
        )
    elif limiting == "acting":
        yield (
            f"Acting is most of the work, {stages['acting']['rows']} rows at a time: more --env.envs-per-worker "
            f"({env['envs_per_worker']} now) make larger, cheaper batches of it."
        )
    else:
        yield "Simulation is most of the work: what helps is a cheaper environment or a longer action repeat."
    if stages["transport"]["share_of_simulation"] < 0.8:
        yield (
            "Transport slows simulation down by a fifth or more: more --env.envs-per-worker "
            f"({env['envs_per_worker']} now) make fewer, larger deliveries."
        )


def _advice_on_share(record: Record, settings: Record, env: Record) -> Iterator[str]:
    machine, stages, waits = record["machine"], record["stages"], record["training"]["shares"]
    low, n = record["fraction_of_ceiling"] < 0.85, settings["learner"]
    update_s = stages["learning"]["core_s_per_step"] * stages["learning"]["samples"] / (n["epochs"] * n["minibatches"])
    if low and settings["max_lag"] == 0:
        yield "Acting and learning take turns: --max-lag 1 lets them overlap."
    elif low and waits["learner: wait"] > 0.2:
        yield (
            f"The learner waits for data {waits['learner: wait']:.0%} of its time: more --env.envs-per-worker "
            f"({env['envs_per_worker']} now) or --env.workers ({env['workers']} now) may help."
        )
    if env["workers"] > machine["cores"]:
        yield f"{env['workers']} workers share {machine['cores']} cores: as many as cores are bound to one each."
    # Shared among threads, the arithmetic of a short update costs more than it saves.
    if low and machine["device"] == "cpu" and settings["threads"] < machine["cores"] and update_s > LONG_UPDATE_S:
        yield f"Learning uses {settings['threads']} of {machine['cores']} cores: a higher --threads may help."
    speed_up = stages["simulation"]["steps_per_s"] / stages["simulation"]["steps_per_s_one_core"]
    if speed_up < 0.7 * machine["cores"]:
        yield (
            f"{machine['cores']} cores simulate {speed_up:.1f} times as fast as one: they are shared with other work, "
            "or are threads of fewer cores."
        )
    if low:
        yield "--tune tries these settings by short trainings."


def text(record: Record) -> str:
    """The record as a table."""
    machine, settings, training = record["machine"], record["settings"], record["training"]
    env, n = settings["env"], settings["learner"]
    shares = sorted(training["shares"].items(), key=lambda share: (share[0].split(":")[0], -share[1]))
    lines = [
        f"{record['env']} on {machine['cores']} cores, networks on the {machine['device']} in {machine['precision']}",
        f"{env['workers']} workers x {env['envs_per_worker']} environments in {env['groups']} groups, batches of "
        f"{n['batch_unrolls']} unrolls x {n['unroll_length']} steps, {settings['threads']} thread(s)",
        "",
        f"{'stage alone':14}{'steps/s':>10}{'core-ms a step':>18}",
        *(_stage_text(name, stage) for name, stage in record["stages"].items()),
        "",
        f"ceiling     {record['ceiling_steps_per_s']:,.0f} steps/s ({record['ceiling_frames_per_s']:,.0f} frames/s)",
        f"training    {record['steps_per_s']:,.0f} steps/s ({record['frames_per_s']:,.0f} frames/s), "
        f"{record['fraction_of_ceiling']:.0%} of the ceiling, over {training['seconds']:.0f} s",
        f"limits      {record['limiting_stage']} costs most a step; the threads of training wait for "
        f"{training['limiting_stage']}",
        f"time        {', '.join(f'{name} {share:.0%}' for name, share in shares)}",
        f"policy lag  {training['policy_lag_mean']:.2f} iterations, at most {training['policy_lag_max']}",
        f"memory      {training['memory_bytes'] / 2**20:,.0f} MiB (PSS of all processes)",
    ]
    return "\n".join([*lines, *(f"may help    {hint}" for hint in record["advice"])])


def _stage_text(name: str, stage: Record) -> str:
    note = {
        "simulation": "one core {steps_per_s_one_core:,.0f}",
        "acting": "{rows} rows at a time",
        "learning": "batches of {samples:,} samples",
        "transport": "{share_of_simulation:.0%} of simulation",
    }[name]
    cost = f"{1e3 * stage['core_s_per_step']:18.3f}" if "core_s_per_step" in stage else 18 * " "
    return f"{name:14}{stage['steps_per_s']:10,.0f}{cost}   {note.format(**stage)}"
