"""The command line: reads arguments, calls one function a command, turns errors into messages and exit codes.

torch is imported only by the commands that need it, and only after the arguments were checked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import tyro

from pronghorn import __version__
from pronghorn.config import Config, EnvConfig, replace, walk
from pronghorn.defaults import apply_preset, presets
from pronghorn.errors import ConfigError, PronghornError, UsageError
from pronghorn.flags import spelled
from pronghorn.launch import launch_of
from pronghorn.machine import take_share_of_cores
from pronghorn.rules import validate
from pronghorn.settings_file import from_toml, leaf_types

_USAGE = f"""Pronghorn {__version__}: deep reinforcement learning from pixels at the speed of the hardware.

  pronghorn train ENV [options]     train an agent, e.g. pronghorn train doom:basic --minutes 10
  pronghorn bench ENV               how close training comes to what this machine can do, and what limits it
  pronghorn eval RUN                play episodes and report the mean return with its uncertainty
  pronghorn match A B …             play games between runs, scripts and random: head-to-head results and ratings
  pronghorn record RUN --out F.mp4  write a video of the agent (needs no display)
  pronghorn watch RUN               show the agent playing in the terminal
  pronghorn report RUN … --out F    learning curves, throughput, video, populations: one HTML page
  pronghorn envs                    environments that can be named here
  pronghorn doctor                  what this machine offers and what is missing

`pronghorn COMMAND --help` explains each. Environments: doom:SCENARIO, atari:GAME, envpool:ID, gym:ID,
pettingzoo:FAMILY.GAME, module.path:function.
"""


@dataclass(frozen=True)
class TrainArgs:
    """Train one policy in ENV: doom:basic, atari:Pong, gym:CartPole-v1, my_package.envs:make; or several, by commas."""

    settings: Annotated[Config, tyro.conf.arg(name="")]
    config: Annotated[Optional[Path], tyro.conf.arg(metavar="FILE")] = None  # noqa: UP045
    """TOML file with settings; the command line wins over it, it wins over --preset."""
    resume: bool = False
    """Go on with the run in --run-dir; an empty directory starts fresh and says so."""


@dataclass(frozen=True)
class BenchArgs:
    """Measure each stage of training alone, then a training, in ENV and with settings as train takes them: the ceiling
    that this machine sets, the share of it that is reached, what limits, and what may help. Trains nothing to keep."""

    settings: Annotated[Config, tyro.conf.arg(name="")]
    config: Annotated[Optional[Path], tyro.conf.arg(metavar="FILE")] = None  # noqa: UP045
    """TOML file with settings, as train takes it."""
    seconds: float = 60.0
    """Seconds of training that are measured, from its first batch on; each stage alone gets a tenth of it."""
    tune: bool = False
    """First search faster settings (threads, workers, environments, groups, batch) by short trainings, for --minutes
    (5 unless given), and write them to --out. Batches of another size change learning, not only speed."""
    out: Annotated[Optional[Path], tyro.conf.arg(metavar="FILE")] = None  # noqa: UP045
    """TOML file that --tune writes, for train --config; bench.toml unless given. It must not exist."""
    json: bool = False
    """Print one JSON object; progress goes to the standard error."""


@dataclass(frozen=True)
class EvalArgs:
    """Play episodes with a trained policy and report the raw returns."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory; RUN:1 for policy 1 of a population, RUN:0@1000000 for a snapshot of self-play."""
    episodes: int = 100
    """Episodes to play; every environment plays a fixed share of them."""
    best: bool = False
    """Use the best evaluated checkpoint instead of the last one."""
    deterministic: bool = False
    """Take the most probable action instead of a sample."""
    random: bool = False
    """Also report a uniformly random policy's return, to read the score against."""
    seed: int = 1000
    """Seed of environments and actions."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class MatchArgs:
    """Play games between every two of several players, in half of them with sides swapped: head-to-head results with
    95 % intervals, and Elo ratings with standard errors."""

    players: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PLAYER")]
    """Run directories; random (uniform actions among those allowed); or functions of scripts, module.path:function or
    path/file.py:function, as docs/agents.md describes them."""
    games: int = 100
    """Games between every two players; every environment plays a fixed share of them."""
    env: str = ""
    """Environment to play in, where no player is a run, or runs were trained in different ones; else that of the runs.
    Its settings are those of the first run that was trained in it, else the defaults."""
    best: bool = False
    """Use the best evaluated checkpoints of runs instead of the last ones."""
    deterministic: bool = False
    """Take runs' most probable actions instead of samples."""
    seed: int = 1000
    """Seed of environments and actions."""
    json: bool = False
    """Print one JSON object; progress goes to the standard error."""


@dataclass(frozen=True)
class RecordArgs:
    """Write a video (mp4) of a trained policy. Works without a display."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory; RUN:1 for policy 1 of a population, RUN:0@1000000 for a snapshot of self-play."""
    out: Path
    """Video file to write."""
    seconds: float = 20.0
    """Length of the video."""
    best: bool = False
    """Use the best evaluated checkpoint instead of the last one."""
    deterministic: bool = False
    """Take the most probable action instead of a sample."""
    seed: int = 1
    """Seed of environment and actions."""


@dataclass(frozen=True)
class WatchArgs:
    """Show a trained policy playing, in the terminal."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory; RUN:1 for policy 1 of a population, RUN:0@1000000 for a snapshot of self-play."""
    episodes: int = 3
    """Episodes to show."""
    best: bool = False
    """Use the best evaluated checkpoint instead of the last one."""
    deterministic: bool = False
    """Take the most probable action instead of a sample."""
    seed: int = 1
    """Seed of environment and actions."""


@dataclass(frozen=True)
class ReportArgs:
    """Write one self-contained HTML page about one run or several."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN")]
    """Run directories."""
    out: Path = Path("report.html")
    """Page to write."""
    curve: Annotated[Optional[Path], tyro.conf.arg(metavar="FILE")] = None  # noqa: UP045
    """Also write the learning curve of the first run as a picture (PNG)."""


@dataclass(frozen=True)
class DoctorArgs:
    """What this machine offers to a run, what one of default size needs, and what to fix; code 1 if something would
    stop a run. Removes shared memory that dead game engines left."""

    run_dir: Path = Path("runs")
    """Where runs are to be: its disk is looked at."""
    json: bool = False
    """Print one JSON object."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    _open_closed_descriptors()
    try:
        try:
            code: str | int | None = run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as end:  # the parser's: --help, or a wrong option
            code = end.code
        _flush()
        sys.exit(code)
    except PronghornError as error:
        _say_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `pronghorn envs | head`
        _discard_output()
        sys.exit(0)


def run(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; the exit code."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train, "bench": _bench, "eval": _eval, "match": _match, "record": _record, "watch": _watch,
        "report": _report, "envs": _envs, "doctor": _doctor,
    }  # fmt: skip
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"pronghorn {__version__}")
        return 0
    if argv[0] not in commands:
        raise UsageError(f"There is no command '{argv[0]}'. Commands: {', '.join(commands)}. See pronghorn --help.")
    return commands[argv[0]](list(argv[1:]))


# ---------------------------------------------------------------- commands


def _train(argv: list[str]) -> int:
    started_at = _process_start()
    if _option(argv, "--preset") == "list":
        for name, values in sorted(presets().items()):
            print(f"{name:16} " + ", ".join(f"{k.removeprefix('learner.')}={v}" for k, v in values.items()))
        return 0
    args, config = parse_train(argv)
    _check(config)
    _quiet_thread_pools()
    launch = launch_of(os.environ)
    if launch.local_size > 1:
        take_share_of_cores(launch.local_rank, launch.local_size)  # before torch counts them
    from pronghorn.training.trainer import train

    try:
        result = train(config, resume=args.resume, started_at=started_at, launch=launch)
    except BrokenPipeError as error:  # a service's connection, say; the reader of our output is the trainer's matter
        raise RuntimeError("A connection broke while the run trained") from error
    try:
        if launch.leads:
            _say_result(result, config)
        _flush()
    except OSError:  # nobody reads it any more: the code still says how the run ended
        _discard_output()
    return result.exit_code


def parse_train(argv: list[str]) -> tuple[TrainArgs, Config]:
    """The arguments of `train` and the whole configuration that they give, not yet resolved."""
    args: TrainArgs = _parse_with_settings(TrainArgs, argv, "train")
    return args, args.settings


def _check(config: Config) -> None:
    """Refuse what can be refused before torch is imported."""
    validate(config)
    from pronghorn.envs.registry import resolve as resolve_name

    for name in config.env_names:
        resolve_name(name, python=config.env.python or None)


def _parse_with_settings(cls: Any, argv: list[str], command: str) -> Any:
    """Arguments of a command that takes an environment and every setting of a run."""
    types = {name.removeprefix("settings."): hint for name, hint in leaf_types(cls).items()}
    argv = spelled(argv, types)
    name = argv[0] if argv and not argv[0].startswith("-") else ""
    base = Config(env=EnvConfig(id=name))
    saved = _saved_config(argv, base)
    if saved is not None:
        if name and name != saved.env.id:
            raise ConfigError("env.id", name, f"cannot change when a run is resumed (it was {saved.env.id!r})",
                              "Start a new run in another --run-dir.")  # fmt: skip
        base = saved
    elif preset := _option(argv, "--preset"):
        base = apply_preset(base, preset)
    if file := _option(argv, "--config"):
        base = from_toml(Path(file), base)
        base = replace(base, {"env.id": name}) if name else base
    # The parser splits a table that is not empty into a flag for each key that it has, and takes no others: it gets
    # empty ones, and what it read is added to those of the base.
    tables = {name: table for name, table in walk(base) if isinstance(table, dict) and table}
    default = cls(settings=replace(base, {name: {} for name in tables}))
    args = tyro.cli(cls, prog=f"pronghorn {command} ENV", args=argv[1:] if name else argv, default=default)
    read = dict(walk(args.settings))
    return dataclasses.replace(args, settings=replace(args.settings, {k: {**v, **read[k]} for k, v in tables.items()}))


def _saved_config(argv: list[str], base: Config) -> Config | None:
    """The configuration of the run that --resume goes on with."""
    if "--resume" not in argv:
        return None
    run_dir = Path(_option(argv, "--run-dir") or base.run_path)
    path = run_dir / "config.toml"
    return from_toml(path) if path.is_file() else None


def _bench(argv: list[str]) -> int:
    args: BenchArgs = _parse_with_settings(BenchArgs, argv, "bench")
    if _option(argv, "--run-dir"):
        raise UsageError("--run-dir does not apply: bench trains in a temporary directory, which it removes.")
    if args.out and not args.tune:
        raise UsageError("--out is the file that --tune writes: add --tune.")
    if args.settings.cluster.address:
        raise UsageError("--cluster does not apply: bench measures this machine alone.")
    _check(args.settings)
    _quiet_thread_pools()
    from pronghorn.bench.ceilings import bench, text

    out = (args.out or Path("bench.toml")) if args.tune else None
    minutes = args.settings.minutes if _option(argv, "--minutes") else None  # that of a file is a limit of its run
    record = bench(
        args.settings, seconds=args.seconds, out=out, minutes=minutes, say=lambda line: print(line, file=sys.stderr)
    )
    print(json.dumps(record) if args.json else text(record))
    return 0


def _eval(argv: list[str]) -> int:
    args = _parse(EvalArgs, argv, "eval")
    policy, run_dir = _load(args.run, best=args.best)
    from pronghorn.evaluation.evaluate import evaluate, random_return

    if args.episodes < 1:
        raise UsageError(f"--episodes {args.episodes}: must be at least 1.")
    result = evaluate(policy, policy.config, episodes=args.episodes, seed=args.seed, deterministic=args.deterministic)
    assert result is not None
    random = random_return(policy.config, policy, episodes=args.episodes, seed=args.seed) if args.random else None
    result.write(run_dir / "eval" / f"{Path(policy.checkpoint).name}-{result.policy}-{args.seed}.json")
    keys = ("mean", "stderr", "median", "iqm", "iqm_ci95", "episodes", "returns", "checkpoint", "policy", "per_task",
            "human_normalized")  # fmt: skip
    if args.json:
        record = {k: getattr(result, k) for k in keys}
        print(json.dumps(record if random is None else {**record, "random_mean": random}))
        return 0
    print(
        f"{args.run}: mean return {result.mean:.4g} ± {result.stderr:.2g} (standard error), {result.episodes} episodes"
    )
    print(f"  interquartile mean {result.iqm:.4g}, 95 % interval {result.iqm_ci95[0]:.4g} to {result.iqm_ci95[1]:.4g}")
    print(
        f"  median {result.median:.4g}, episode length {result.episode_length_mean:.4g} steps, {result.policy} actions"
    )
    print(f"  checkpoint {result.checkpoint}")
    if len(result.per_task) > 1:
        print("".join(f"  {task}: {value:.4g}\n" for task, value in result.per_task.items()), end="")
    for task, score in result.human_normalized.items():
        print(f"  {task}: {score:.4g} % of human (0 %: random)")
    if random is not None:
        print(f"  a random policy: {random:.4g}")
    return 0


def _match(argv: list[str]) -> int:
    args = _parse(MatchArgs, argv, "match")
    _quiet_thread_pools()
    from pronghorn.evaluation.match import match_config, play_matches, table
    from pronghorn.evaluation.players import load_player

    players = [load_player(text, best=args.best, deterministic=args.deterministic) for text in args.players]
    config = match_config(players, args.env)
    ratings = play_matches(
        players, config, games=args.games, seed=args.seed, say=lambda line: print(line, file=sys.stderr)
    )
    if args.json:
        print(json.dumps({"env": config.env.id, "seed": args.seed, **ratings.to_json()}))
        return 0
    print(f"{config.env.id}: {args.games} games a pair, each player on each side in half of them")
    print(table(ratings))
    return 0


def _record(argv: list[str]) -> int:
    args = _parse(RecordArgs, argv, "record")
    policy, _ = _load(args.run, best=args.best)
    from pronghorn.evaluation.video import record

    count = record(
        policy, policy.config, args.out, seconds=args.seconds, seed=args.seed, deterministic=args.deterministic
    )
    print(f"{args.out}: {count} frames")
    return 0


def _watch(argv: list[str]) -> int:
    args = _parse(WatchArgs, argv, "watch")
    policy, _ = _load(args.run, best=args.best)
    from pronghorn.evaluation.video import watch

    watch(policy, policy.config, seed=args.seed, deterministic=args.deterministic, episodes=args.episodes)
    return 0


def _report(argv: list[str]) -> int:
    args = _parse(ReportArgs, argv, "report")
    from pronghorn.evaluation.report import plot_curve, write_report

    if not args.runs:
        raise UsageError("No run was named. Example: pronghorn report runs/doom_basic --out report.html")
    write_report(list(args.runs), args.out)
    print(f"report   {args.out}")
    if args.curve:
        plot_curve(args.runs[0], args.curve)
        print(f"curve    {args.curve}")
    return 0


@dataclass(frozen=True)
class EnvsArgs:
    """List the environments that can be named here."""


def _envs(argv: list[str]) -> int:
    _parse(EnvsArgs, argv, "envs")
    from pronghorn.envs.registry import list_envs

    for line in list_envs():
        print(line)
    return 0


def _doctor(argv: list[str]) -> int:
    args = _parse(DoctorArgs, argv, "doctor")
    _quiet_thread_pools()
    from pronghorn.doctor import checks, table, to_json

    found = checks(args.run_dir)
    print(json.dumps(to_json(found)) if args.json else table(found))
    return int(any(check.status == "problem" for check in found))


# ---------------------------------------------------------------- small parts


def _parse(cls: Any, argv: list[str], command: str) -> Any:
    return tyro.cli(cls, prog=f"pronghorn {command}", args=spelled(argv, leaf_types(cls)))


def _load(run: str, *, best: bool) -> tuple[Any, Path]:
    """The policy that RUN or RUN:1 or RUN:0@1000000 names, and the run's directory."""
    _quiet_thread_pools()
    from pronghorn.evaluation.policy import load_named, split_run

    run_dir, _ = split_run(run)
    if not run_dir.is_dir():
        raise UsageError(f"There is no run directory {run_dir}.")
    return load_named(run, best=best), run_dir


def _option(argv: Sequence[str], name: str) -> str:
    """The value of `name VALUE` or `name=VALUE`, before the real parse (it decides the defaults that --help shows)."""
    for i, token in enumerate(argv):
        if token == name and i + 1 < len(argv):
            return argv[i + 1]
        if token.startswith(name + "="):
            return token.split("=", 1)[1]
    return ""


def _process_start() -> float:
    """When this process started, in seconds since the epoch."""
    import psutil

    try:
        return float(psutil.Process().create_time())
    except psutil.Error:
        return time.time()


def _open_closed_descriptors() -> None:
    """Give closed standard streams (`>&-`) the null device, or the next file opened would get what is written there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard_output() -> None:
    """Let the rest of the output go nowhere; else the interpreter fails to flush it at its end."""
    from pronghorn.training.live import discard

    discard(sys.stdout.fileno())


def _quiet_thread_pools() -> None:
    """Let idle OpenMP threads sleep instead of spinning: two pools that spin on two cores cost both. Before torch."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def _say_error(error: PronghornError) -> None:
    """Of several learners each says its own; what is wrong with the command is said once."""
    rank = os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    if rank == "0" or not isinstance(error, UsageError):
        print(f"pronghorn: {'' if rank == '0' else f'learner {rank}: '}{error}", file=sys.stderr)


def _say_result(result: Any, config: Config) -> None:
    score = "no episode ended" if result.return_mean is None else f"training return {result.return_mean:.4g}"
    if result.eval_mean is not None:
        score = f"evaluated return {result.eval_mean:.4g}, " + score
    how = {"signal": "stopped by a signal, saved", "return": "reached the return asked for"}.get(
        result.reason,
        f"reached its limit ({result.reason})" if result.reason != "finished already" else "finished already",
    )
    print(f"{how}: {result.steps:,} steps ({result.frames:,} frames) in {result.seconds:,.0f} s; {score}")
    print(f"next:  pronghorn eval {result.run_dir}")
    print(f"       pronghorn record {result.run_dir} --out {result.run_dir}/videos/agent.mp4")
    print(f"       pronghorn train {config.env.id} --run-dir {result.run_dir} --resume --minutes 10")
