"""The ceiling by hand, training's rate by hand, the search on scripted speeds, whole commands that leave nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import pronghorn.bench.ceilings as ceilings
from pronghorn.bench.ceilings import (
    Setting,
    Trials,
    advice,
    bench,
    ceiling,
    search,
    settings_text,
    steady_part,
    summary,
    text,
    tune,
)
from pronghorn.cli import run
from pronghorn.config import Config, replace, walk
from pronghorn.defaults import VECTOR_ROWS, resolve
from pronghorn.errors import ConfigError, PronghornError, UsageError
from pronghorn.settings_file import from_toml
from pronghorn.types import EnvSpec
from running import assert_gone, env
from specs import VECTOR

SMALL = [
    "--env.workers", "1", "--env.envs-per-worker", "4", "--learner.unroll-length", "8", "--learner.batch-unrolls", "8",
    "--learner.minibatches", "1", "--learner.epochs", "1", "--model.mlp-layers", "8", "--threads", "1",
]  # fmt: skip


def line(time_s: float, steps: int, **more: Any) -> dict[str, Any]:
    shares = {"sampler: envs": 0.5, "sampler: act": 0.3, "sampler: record": 0.1, "sampler: slots": 0.0,
              "learner: wait": 0.6, "learner: train": 0.4}  # fmt: skip
    stages = {f"stages/{name}": share for name, share in shares.items()}
    return {"time_s": time_s, "steps": steps, "policy_lag_mean": 1.0, "policy_lag_max": 2} | stages | more


# ---------------------------------------------------------------- arithmetic


def test_the_ceiling_on_a_cpu_is_cores_over_the_core_seconds_of_a_step() -> None:
    """On 2 cores: 2, 4 and 8 core-ms a step, so 14 in all, and 2 / 0.014 steps a second."""
    rates = {"simulation": 1000.0, "acting": 500.0, "learning": 250.0}
    assert ceiling(rates, beside=False) == pytest.approx(2 / 0.014)
    assert ceiling(rates, beside=True) == 250.0


def test_training_is_counted_between_changes_of_its_steps_after_the_warm_up() -> None:
    lines = [line(0, 0), line(10, 100), line(11, 100), line(12, 200), line(14, 300, policy_lag_max=5), line(15, 300),
             line(18, 700), line(19, 700)]  # fmt: skip
    assert [each["time_s"] for each in steady_part(lines, 0.0)] == [10, 12, 14, 18]
    steady = steady_part(lines, 2.0)
    assert [each["time_s"] for each in steady] == [12, 14, 18]
    found = summary(steady)
    assert found["steps_per_s"] == pytest.approx((700 - 200) / (18 - 12))
    assert found["seconds"] == 6
    assert (found["policy_lag_mean"], found["policy_lag_max"]) == (1.0, 5)
    assert found["shares"]["learner: wait"] == pytest.approx(0.6)
    assert found["limiting_stage"] == "simulation"
    assert steady_part([], 1.0) == steady_part([line(1, 0)], 1.0) == []
    with pytest.raises(PronghornError, match=r"moved? 1 times.*--seconds"):
        summary(steady[:1])


def test_numbers_that_a_line_lacks_are_left_out_of_its_means() -> None:
    """Steps may have grown a moment before the iteration's report is there."""
    bare = {name: value for name, value in line(3, 30).items() if not name.startswith("policy")}
    assert summary([line(1, 10), line(2, 20), bare])["policy_lag_mean"] == 1.0


# ---------------------------------------------------------------- tuning

START = {"threads": 1, "env.envs_per_worker": 16, "learner.batch_unrolls": 32}


def scripted(settings: Mapping[str, Any]) -> float:
    """Fastest, 800, at 4 threads and 64 environments; the size of the batch does not matter."""
    away = abs(settings["threads"].bit_length() - 3) + abs(settings["env.envs_per_worker"].bit_length() - 7)
    return 800.0 / 2**away


def test_the_search_finds_the_best_of_scripted_speeds() -> None:
    assert search(START, {}, scripted) == {"threads": 4, "env.envs_per_worker": 64, "learner.batch_unrolls": 32}
    assert search(START, {"threads": 2}, scripted)["threads"] == 2
    assert search(START | {"threads": 32}, {}, scripted)["threads"] == 4  # halved


def test_the_search_exchanges_the_precision() -> None:
    start: dict[str, Setting] = {"threads": 1, "precision": "float32"}
    assert search(start, {"threads": 1}, lambda s: 300.0 if s["precision"] == "bfloat16" else 200.0) == {
        "threads": 1,
        "precision": "bfloat16",
    }
    assert search(start, {"threads": 1}, lambda s: 100.0 if s["precision"] == "bfloat16" else 200.0) == start


@pytest.mark.parametrize("fast", [True, False])
def test_precisions_are_tried_where_there_is_a_choice(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(ceilings, "computes_bfloat16", lambda device: fast)
    tried: list[Mapping[str, Setting]] = []
    config = replace(Config(env="gym:Acrobot-v1"), {"env.workers": 1, "env.envs_per_worker": 4})
    tune(config, VECTOR, lambda settings: float(len(tried.append(settings) or settings)))
    assert {s.get("precision") for s in tried} == ({"float32", "bfloat16"} if fast else {None})


def test_rows_that_are_stepped_as_one_are_tuned_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """CartPole's 512 rows an environment: more of them are found faster, and the size of the batch goes with them."""
    config, made = Config(env="gym:CartPole-v1"), list[Config]()

    def train_for(config: Config, folder: Path, seconds: float) -> dict[str, Any]:
        made.append(config)
        return {"steps_per_s": float(min(config.env.vector_rows, 4 * VECTOR_ROWS))}

    monkeypatch.setattr(ceilings, "train_for", train_for)
    spec = ceilings._look_at(config)
    assert spec.rows_per_env == VECTOR_ROWS
    found = tune(config, spec, Trials(config, spec, Path(), 1e9, lambda _: None))
    assert "env.envs_per_worker" not in found
    assert found["env.vector_rows"] == 4 * VECTOR_ROWS
    assert all(c.env.vector_rows for c in made)
    assert made[0].num_envs == 2
    assert made[0].learner.batch_unrolls == 2 * VECTOR_ROWS


def test_the_search_believes_no_noise() -> None:
    """A little faster, and faster once only: neither is taken. Nor is anything once the time is over."""
    assert search(START, {}, lambda s: 100.0 + 2.0 * (s != START)) == START
    asked: list[Mapping[str, Setting]] = []

    def lucky(settings: Mapping[str, Setting]) -> float:
        asked.append(settings)
        return 200.0 if asked.count(settings) == 1 and settings != START else 100.0

    assert search(START, {}, lucky) == START
    assert asked.count(START) == 2  # so that the others are not measured against one lucky number
    left = [100.0, 100.0, 200.0]
    assert search(START, {}, lambda s: left.pop(0) if left else 0.0) == START


def test_trials_end_with_the_time_and_name_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(ceilings, "train_for", lambda config, folder, seconds: {"steps_per_s": 10.0 * config.threads})
    config = replace(Config(env="gym:CartPole-v1"), {"env.workers": 1, "env.envs_per_worker": 8})
    trials = Trials(config, VECTOR, tmp_path, 300.0, said.append)
    assert trials.seconds == 10.0
    assert trials({"threads": 2}) == 20.0
    assert trials({"env.groups": 9}) == 0.0
    assert "must be at most env.envs_per_worker = 8" in trials.records[1]["error"]
    assert said[0] == "trial 1: threads 2: 20 steps/s"
    over = Trials(config, VECTOR, tmp_path, 0.0, said.append)
    assert (over({"threads": 2}), over({"threads": 1})) == (20.0, 0.0)  # one is always made
    assert len(over.records) == 1
    with pytest.raises(ConfigError):  # the settings that were asked for cannot be
        Trials(config, VECTOR, tmp_path, 300.0, said.append)({"env.groups": 9})


def test_the_file_holds_what_differs_and_resolves_to_the_same(tmp_path: Path) -> None:
    given = replace(
        Config(env="gym:CartPole-v1"),
        {"algo": "impala", "env.envs_per_worker": 8, "threads": 1, "minutes": 3.0, "model.mlp_layers": (32,)},
    )
    file = tmp_path / "bench.toml"
    file.write_text(settings_text(given))
    assert "minutes" not in file.read_text()
    assert "rho_clip" not in file.read_text()
    read = from_toml(file, Config(env="gym:CartPole-v1"))
    assert resolve(read, VECTOR) == resolve(replace(given, {"minutes": None}), VECTOR)


# ---------------------------------------------------------------- the record, with scripted measurements


@pytest.fixture
def scripted_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores; trainings that are as fast as their settings say, all other stages at fixed speeds."""
    speeds = {"transport": 900.0, "simulation": 500.0, "acting": 250.0, "learning": 125.0}
    monkeypatch.setattr(ceilings, "usable_cores", lambda: [0, 1])
    monkeypatch.setattr(ceilings, "measure", lambda stage, folder, cores, seconds: [speeds[stage]] * len(cores))

    def train_for(config: Config, folder: Path, seconds: float) -> dict[str, Any]:
        steady = [line(0, 0), line(1, config.env.envs_per_worker)]
        return summary(steady) | {"memory_bytes": 2**20}

    monkeypatch.setattr(ceilings, "train_for", train_for)


@pytest.mark.case("PRF-01")
def test_the_record_by_hand(scripted_machine: None) -> None:
    config = replace(Config(env="gym:CartPole-v1"), {"env.workers": 1, "env.envs_per_worker": 71})
    record = bench(config)
    assert record["ceiling_steps_per_s"] == pytest.approx(1.0 / (1 / 1000 + 1 / 500 + 1 / 250))
    assert record["steps_per_s"] == record["frames_per_s"] == 71.0
    assert record["fraction_of_ceiling"] == pytest.approx(71.0 / record["ceiling_steps_per_s"])
    assert record["limiting_stage"] == "learning"
    assert record["stages"]["learning"]["core_s_per_step"] == pytest.approx(2 / 250)
    assert record["stages"]["simulation"]["copies"] == [500.0, 500.0]
    assert record["stages"]["transport"]["share_of_simulation"] == pytest.approx(0.9)
    shown = text(record)
    for part in ("gym:CartPole-v1 on 2 cores", "143 steps/s", "50% of the ceiling", "learning costs most", "1 MiB",
                 "90% of simulation", "8.000", "learner: wait 60%, learner: train 40%, sampler: envs 50%",
                 "sampler: act 30%, sampler: record 10%", "may help    Learning is most of the work"):  # fmt: skip
        assert part in shown, part


@pytest.mark.case("PRF-07")
def test_tuning_writes_the_best_of_the_trials(scripted_machine: None, tmp_path: Path) -> None:
    out, said = tmp_path / "bench.toml", list[str]()
    config = replace(Config(env="gym:CartPole-v1"), {"env.workers": 1, "env.envs_per_worker": 4, "threads": 1})
    record = bench(config, out=out, minutes=1e-9, say=said.append)
    assert len(record["trials"]) == 1  # no time for a second
    out.unlink()
    record = bench(config, out=out, minutes=0.5, say=said.append)
    fastest = max(record["trials"], key=lambda trial: trial["steps_per_s"])
    read = from_toml(out)
    found = dict(walk(read))
    assert {name: found[name] for name in fastest["settings"]} == fastest["settings"]
    assert read.env.envs_per_worker > 4
    assert record["settings"]["env"]["envs_per_worker"] == read.env.envs_per_worker  # measured with what was found
    assert resolve(read, VECTOR).env.id == "gym:CartPole-v1"
    with pytest.raises(UsageError, match="exists already"):
        bench(config, out=out)


def test_the_hints_follow_from_the_numbers(scripted_machine: None) -> None:
    record = bench(replace(Config(env="gym:CartPole-v1"), {"env.workers": 1, "env.envs_per_worker": 71}))
    joined = " ".join(record["advice"])
    assert "The learner waits for data 60%" in joined
    assert "Learning uses 1 of 2 cores" in joined
    many = record | {"settings": record["settings"] | {"learner": {"epochs": 4, "minibatches": 1000}}}
    assert "Learning uses" not in " ".join(advice(many))  # 18 ms each: too short to share among threads
    assert "--tune" in joined
    crowd = record["settings"] | {"env": record["settings"]["env"] | {"workers": 8}}
    assert "8 workers share 2 cores" in " ".join(advice(record | {"settings": crowd}))
    good = record | {"fraction_of_ceiling": 0.95, "limiting_stage": "simulation"}
    assert advice(good) == ["Simulation is most of the work: what helps is a cheaper environment or a longer action "
                            "repeat."]  # fmt: skip
    stages = record["stages"]
    slow = {"simulation": stages["simulation"] | {"steps_per_s_one_core": 900.0},
            "transport": {"steps_per_s": 500.0, "share_of_simulation": 0.5}}  # fmt: skip
    shown = advice(good | {"limiting_stage": "acting", "stages": stages | slow})
    assert "rows at a time" in shown[0]
    assert shown[1].startswith("Transport slows simulation down")
    assert "2 cores simulate 1.1 times as fast as one" in shown[2]


def test_a_gpu_is_measured_by_one_copy_and_the_slowest_stage(
    scripted_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu:
        type = "cuda"

    monkeypatch.setattr(ceilings, "pick_device", lambda name: Gpu)
    record = bench(replace(Config(env="gym:CartPole-v1"), {"env.workers": 1, "env.envs_per_worker": 8}))
    assert record["stages"]["acting"]["copies"] == [250.0]
    assert record["stages"]["simulation"]["copies"] == [500.0, 500.0]
    assert record["ceiling_steps_per_s"] == 125.0


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--out", "x.toml"], "add --tune"),
        (["--run-dir", "x"], "--run-dir does not apply"),
        (["--seconds", "0"], "seconds = 0.0: must be greater than 0"),
        (["--tune", "--out", "/no/such/place/x.toml"], "There is no directory /no/such/place"),
        (["--learner.minibatches", "7"], "must divide"),
        (["--threads", "0"], "threads = 0: must be greater than 0"),
        (["--threads", "1000000"], "threads = 1000000: must be at most"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_wrong_usage_is_refused_at_once(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError) as info:
        run(["bench", "gym:CartPole-v1", "--env.workers", "1", "--env.envs-per-worker", "2", *flags])
    assert said in str(info.value)
    assert info.value.exit_code == 2


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir()
    argv = [sys.executable, "-m", "pronghorn", "bench", env("Match"), *SMALL, *flags]
    environment = os.environ | {"TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment
    )


def left_in(folder: Path) -> list[Path]:
    """What is left of ours among the temporary files; torch may make a cache of its own there."""
    return list((folder / "tmp").glob("*pronghorn*"))


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def wait_for_copies(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes below the command, once a copy has workers."""
    assert process.stderr is not None
    process.stderr.readline()  # the first stage begins
    deadline = time.monotonic() + 60
    while len(family(process)) < 3 and time.monotonic() < deadline:  # a copy, its pool's keeper and worker
        time.sleep(0.05)
    return family(process)


@pytest.mark.case("PRF-01")
@pytest.mark.timeout(240)
def test_the_command_prints_one_json_object_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "--json", "--seconds", "2")
    out, said = process.communicate(timeout=230)
    assert process.returncode == 0, said
    assert "simulation alone" in said
    record = json.loads(out)
    assert len(out.splitlines()) == 1
    for name in ("steps_per_s", "frames_per_s", "ceiling_steps_per_s", "fraction_of_ceiling"):
        assert isinstance(record[name], float)
        assert record[name] > 0.0
    stages = record["stages"]
    assert record["limiting_stage"] in ("simulation", "acting", "learning")
    assert stages.keys() == {"simulation", "acting", "learning", "transport"}
    cost = sum(stages[name]["core_s_per_step"] for name in ("simulation", "acting", "learning"))
    assert record["ceiling_steps_per_s"] == pytest.approx(record["machine"]["cores"] / cost)
    assert record["fraction_of_ceiling"] == pytest.approx(record["steps_per_s"] / record["ceiling_steps_per_s"])
    assert all(len(stages[name]["copies"]) == record["machine"]["cores"] for name in ("acting", "learning"))
    assert record["training"]["memory_bytes"] > 50 * 2**20
    assert 0 <= record["training"]["policy_lag_mean"] <= record["training"]["policy_lag_max"] <= 16
    assert record["settings"]["env"]["envs_per_worker"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmp"]
    assert left_in(tmp_path) == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=lambda x: signal.Signals(x).name if isinstance(x, signal.Signals) else None,
)
def test_a_bench_that_is_stopped_leaves_no_process(tmp_path: Path, number: int, code: int) -> None:
    process = start(tmp_path, "--seconds", "4")
    below = wait_for_copies(process)
    assert below
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert_gone(below, within_s=30.0)
    if number != signal.SIGKILL:  # which lets nobody clean up
        assert left_in(tmp_path) == []


def test_an_environment_that_cannot_be_built_is_one_message(tmp_path: Path) -> None:
    broken = env("Unbuildable", "toy_envs.py")
    with pytest.raises(PronghornError, match="no licence found"):
        run(["bench", broken, *SMALL])


def test_what_is_wrong_in_training_is_raised(tmp_path: Path) -> None:
    """The one thing that no stage meets before: a training that ends by an error of its own."""
    config = replace(Config(env=env("Match")), {"env.workers": 1, "env.envs_per_worker": 2, "threads": 1})
    spec = ceilings._look_at(config)
    assert isinstance(spec, EnvSpec)
    resolved = replace(resolve(config, spec), {"threads": 10**6})
    with pytest.raises(PronghornError, match="threads = 1000000") as info:
        ceilings.train_for(resolved, tmp_path / "training", 0.5)
    assert info.value.exit_code == 2


@pytest.mark.timeout(60)
def test_several_networks_of_unlike_agents_are_refused() -> None:
    """Their stages are not those of one network, which would be the number that is printed."""
    config: Config = replace(Config(env=env("Field", "unlike_games.py")), {"env.policies": "by_spaces"})
    with pytest.raises(ConfigError, match=r"env.policies.*has several networks"):
        ceilings.bench(config, seconds=1.0)
