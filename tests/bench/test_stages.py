"""The stages, each a generator of steps made of training's own parts, and the processes that they run in."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.bench.stages import STAGES, ConstantPolicy, MadeUpPool, acting_rows, measure, started
from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.envs.registry import make_pool
from pronghorn.errors import PronghornError
from pronghorn.settings_file import to_toml
from pronghorn.spec_file import ENV_FILE, spec_bytes
from pronghorn.training.checkpoint import write_atomically
from pronghorn.training.metrics import read_metrics
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec
from running import assert_gone, env

SMALL: dict[str, Any] = {
    "env.workers": 1, "env.envs_per_worker": 4, "env.pin": "off", "threads": 1, "model.mlp_layers": (8,),
    "learner.unroll_length": 4, "learner.batch_unrolls": 8, "learner.minibatches": 2,
}  # fmt: skip
MIXED = EnvSpec(
    {
        "image": LeafSpec((40, 48, 3), "uint8", "image", "hwc", 0.0, 255.0),
        "code": LeafSpec((2,), "int64", "discrete", n=(3, 5)),
        "action_mask": LeafSpec((4,), "uint8", "mask"),
        "flags": LeafSpec((6,), "int8", "binary"),
        "x": LeafSpec((2,), "float32", "vector"),
    },
    ActionSpec((4,), (-1.0,), (1.0,)),
)


def settings(name: str, **values: Any) -> tuple[Config, EnvSpec]:
    config = replace(Config(env=name), SMALL | values)
    with contextlib.closing(make_pool(config, seed=0, ordered=False)) as pool:
        return resolve(config, pool.spec), pool.spec


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Match", {}),
        ("Match", {"algo": "ppo"}),
        ("Match", {"algo": "a2c", "max_lag": 1, "learner.minibatches": 1, "model.core": "gru", "model.core_size": 4}),
        ("Masked", {"model.last_action": True, "model.last_reward": True}),
        ("Aim", {"learner.replay_fraction": 0.5, "learner.minibatches": 1, "learner.epochs": 1}),
    ],
    ids=["appo", "turns", "overlapped-memory", "masked-history", "continuous-replay"],
)
def test_every_stage_yields_the_steps_that_it_did(name: str, values: dict[str, Any]) -> None:
    config, spec = settings(env(name), **values)
    for stage, make in STAGES.items():
        with contextlib.closing(make(config, spec)) as work:
            steps = [next(work) for _ in range(60)]
        if stage == "acting":
            assert set(steps) == {acting_rows(config, spec)} == {2}  # 4 rows in 2 groups
        elif stage == "learning":
            assert set(steps) == {config.fresh_unrolls * 4}  # unrolls of 4 steps
        else:
            assert set(steps) <= {0, 2, 4}  # whole groups of two
            assert sum(steps) >= 60  # of which many batches were made and freed


def test_transport_goes_on_whatever_the_sizes() -> None:
    """A batch that is much larger than the rows, and one that is much smaller: neither side waits for the other."""
    for unrolls in (1, 64):
        config, spec = settings(env("Match"), **{"learner.batch_unrolls": unrolls, "learner.minibatches": 1})
        with contextlib.closing(STAGES["transport"](config, spec)) as work:
            assert sum(next(work) for _ in range(600)) > 3 * config.batch_samples


def test_what_is_made_up_lies_in_the_space() -> None:
    pool = MadeUpPool(MIXED, 500)
    first, ready = pool.recv(0.0), pool.recv(0.0)
    assert set(first.event.tolist()) == {0}
    assert set(ready.event.tolist()) == {1, 2}
    assert (ready.event == 2).tolist() == ready.terminated.tolist() == ready.episode_over.tolist()
    for name, leaf in MIXED.observation.items():
        assert ready.obs[name].shape == (500, *leaf.shape)
        assert ready.obs[name].dtype == leaf.dtype
    assert ready.obs["image"].min() < 10
    assert ready.obs["image"].max() > 245
    assert ready.obs["code"].max(axis=0).tolist() == [2, 4]
    assert ready.obs["code"].min() == 0
    assert set(ready.obs["flags"].flat) == {0, 1}
    assert ready.obs["action_mask"].min() == 1


def test_the_constant_policy_says_the_same_to_everything() -> None:
    pool = MadeUpPool(MIXED, 3)
    obs = {name: torch.from_numpy(leaf).unsqueeze(0) for name, leaf in pool.recv(0.0).obs.items()}
    policy = ConstantPolicy(MIXED)
    out = policy(obs, policy.initial_state(3), torch.zeros(1, 3, dtype=torch.bool))
    assert not out.params.any()
    assert not out.values.any()
    distribution = policy.distribution(out.params[0], {name: leaf[0] for name, leaf in obs.items()})
    actions = distribution.log_prob(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1))
    assert actions.tolist() == pytest.approx([actions[0].item()] * 3)


# ---------------------------------------------------------------- processes


def folder_of(config: Config, spec: EnvSpec, path: Path) -> Path:
    write_atomically(path / "config.toml", tomli_w.dumps(to_toml(config)).encode())
    write_atomically(path / ENV_FILE, spec_bytes(spec))
    return path


def test_copies_are_measured_together_and_end(tmp_path: Path) -> None:
    config, spec = settings(env("Match"))
    core = min(os.sched_getaffinity(0))
    rates = measure("acting", folder_of(config, spec, tmp_path), [core, core], 0.2)
    assert len(rates) == 2
    assert min(rates) > 0.0


def test_a_copy_that_fails_says_why_with_its_code(tmp_path: Path) -> None:
    config, spec = settings(env("Match"))
    broken = replace(config, {"env.id": env("Unbuildable", "toy_envs.py")})
    with pytest.raises(PronghornError, match="no licence found") as info:
        measure("simulation", folder_of(broken, spec, tmp_path), [None], 0.2)
    assert info.value.exit_code == 1


def test_a_copy_that_dies_is_noticed(tmp_path: Path) -> None:
    config, spec = settings(env("Match"))
    with started("acting", folder_of(config, spec, tmp_path), [None], 0.2) as (copy,):
        assert copy.hear() == {"ready": True}
        os.kill(copy.process.pid, signal.SIGKILL)
        with pytest.raises(PronghornError, match="acting: the process ended with code -9"):
            copy.hear()
    assert copy.process.returncode == -9


def test_a_training_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    config, spec = settings(env("Match"))
    config = replace(config, {"run_dir": str(tmp_path / "run"), "log.live": "off", "log.every_s": 0.2})
    with started("training", folder_of(config, spec, tmp_path), [None], 0.2) as (copy,):
        deadline = time.monotonic() + 60
        while not read_metrics(tmp_path / "run") and time.monotonic() < deadline:
            time.sleep(0.1)
        below = psutil.Process(copy.process.pid).children(recursive=True)
        assert len(below) == 3  # the keeper, the worker, and who looks on whether the process itself still runs
    assert copy.process.returncode == 0  # it saved and ended by itself
    assert_gone(below)
