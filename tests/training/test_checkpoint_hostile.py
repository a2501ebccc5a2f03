"""Damaged and hostile files of a run: each load gives what was saved, or one error that names the file.

What is done to the files, and what a load may do, is in hostile_loads.py, which runs as a process with little memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import pronghorn.training.checkpoint as checkpoints
from hostile_loads import seal
from pronghorn.config import Config, replace
from pronghorn.errors import CheckpointError, ConfigError, UsageError
from pronghorn.evaluation.policy import load
from pronghorn.settings_file import from_toml
from pronghorn.training.trainer import train

TESTS = Path(__file__).parents[1]
SMALL: dict[str, Any] = {
    "env.workers": 1, "env.envs_per_worker": 4, "env.groups": 1, "learner.unroll_length": 8, "learner.batch_unrolls": 8,
    "learner.epochs": 1, "learner.minibatches": 1, "threads": 1, "model.mlp_layers": (8,), "model.core_size": 8,
    "model.core": "gru", "log.live": "off", "log.tensorboard": False, "env.pin": "off", "population.members": 2,
    "population.burn_in_frames": 300, "population.period_frames": 100, "selfplay.snapshot_weight": 0.5,
    "selfplay.add_every_steps": 200, "selfplay.size": 3, "checkpoint.every_updates": 4, "steps": 1_000,
    "precision": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies that played each other and their past, and two checkpoints of them."""
    path = tmp_path_factory.mktemp("hostile") / "run"
    game = f"{TESTS.parent / 'examples' / 'tag.py'}:Tag"
    train(replace(Config(env=game, run_dir=str(path)), SMALL))
    assert len(checkpoints.list_checkpoints(path / "checkpoints")) == 2
    return path


def spoil(run_dir: Path, seed: int, count: int) -> None:
    argv = [sys.executable, str(TESTS / "hostile_loads.py"), str(run_dir), str(seed), str(count)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["faults"], "\n".join(result["faults"][:5])
    assert result["seen"]["refused"] > result["seen"]["another"] > 0  # it did spoil, and forged files do load


@pytest.mark.case("RES-02")
def test_hundreds_of_spoilt_files_load_as_saved_or_are_refused_by_name(run_dir: Path) -> None:
    spoil(run_dir, 1, 130)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_twelve_thousand_spoilt_files_load_as_saved_or_are_refused_by_name(run_dir: Path) -> None:
    for seed in range(2, 8):
        spoil(run_dir, seed, 2000)


# ------------------------------------------------------------------------------------------ one by one


@pytest.fixture
def copy(run_dir: Path, tmp_path: Path) -> Path:
    """A run of one checkpoint, which may be spoilt."""
    subprocess.run(["cp", "-r", str(run_dir), str(tmp_path / "run")], check=True)
    older = checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    subprocess.run(["rm", "-r", str(older)], check=True)
    return tmp_path / "run"


def newest(run_dir: Path) -> Path:
    return checkpoints.list_checkpoints(run_dir / "checkpoints")[-1]


def test_a_changed_counter_in_the_state_is_noticed(copy: Path) -> None:
    """It is JSON as before, and of the right kind: only its checksum of itself tells."""
    state = newest(copy) / "state.json"
    text = state.read_text()
    steps = json.loads(text)["learner"]["steps"]
    state.write_text(text.replace(f'"steps": {steps}', f'"steps": {steps + 1}', 1))
    with pytest.raises(CheckpointError, match=r"state\.json .*differs from its own checksum"):
        checkpoints.load(newest(copy))


def test_a_checkpoint_of_the_format_before_has_no_checksum_of_its_state_and_loads(copy: Path) -> None:
    state = newest(copy) / "state.json"
    record = json.loads(state.read_text())
    del record["checksum"]
    state.write_text(json.dumps(record | {"format": 3}))
    assert checkpoints.load(newest(copy)).state["updates"] == record["updates"]
    state.write_text(json.dumps(record | {"format": 4}))
    with pytest.raises(CheckpointError, match="no checksum of itself"):
        checkpoints.load(newest(copy))
    state.write_text(json.dumps(record | {"format": 2}))
    with pytest.raises(CheckpointError, match=r"has format 2; this version reads the formats 3 and 4"):
        checkpoints.load(newest(copy))


def test_a_snapshots_name_cannot_lead_out_of_the_run(copy: Path) -> None:
    """A save links the files of snapshots into the new checkpoint, under the names that the old one had for them."""
    state = newest(copy) / "state.json"
    record = json.loads(state.read_text())
    record["sha256"]["snapshots/../../../../stolen.safetensors"] = "0" * 64
    state.write_bytes(seal(record))
    with pytest.raises(CheckpointError, match=r"state\.json .*checksums are of other files"):
        checkpoints.load(newest(copy), snapshots=True)


def test_a_run_whose_only_checkpoint_is_damaged_does_not_start_afresh(copy: Path) -> None:
    (newest(copy) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"No checkpoint could be read.*state\.json"):
        checkpoints.previous(copy, resume=True)
    assert (copy / "metrics.jsonl").stat().st_size > 0  # and nothing of it is removed


def test_a_link_in_the_place_of_a_partial_file_is_not_written_through(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / ".partial-config.toml").symlink_to(outside)
    checkpoints.write_atomically(tmp_path / "config.toml", b"ours")
    assert (outside.read_text(), (tmp_path / "config.toml").read_text()) == ("mine", "ours")


def test_a_pipe_is_refused_at_once(copy: Path) -> None:
    (newest(copy) / "weights.safetensors").unlink()
    os.mkfifo(newest(copy) / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: it is a directory, a pipe or a device"):
        load(copy)


def test_settings_that_ask_for_a_huge_network_take_no_memory(copy: Path) -> None:
    config = copy / "config.toml"
    text = config.read_text().replace("core_size = 8", "core_size = 2000000000")
    config.write_text(text)
    with pytest.raises(CheckpointError, match=r"does not fit the model"):
        load(copy)
    config.write_text(text.replace("core_layers = 1", "core_layers = 2000000000"))
    with pytest.raises(CheckpointError, match=r"config\.toml.*fewer tensors than that has layers"):
        load(copy)


@pytest.mark.parametrize(
    "text", ["seed = " + "9" * 5000, "seed = 0x" + "f" * 5000, "seed = 99999999999999999999", "minutes = nan",
             "x = " + "[" * 5000, "[" + "a." * 3000 + "a]", "[model]\nmlp_layers = ['a']", "run_dir = \"\\u0000\"",
             "[population]\nperturb = [1.0]", "seed = 1979-05-27", "\ufeffseed = 1", "y" * 100_000 + " = 1"],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_settings_of_any_shape_are_one_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=r"run\.toml") as caught:
        from_toml(tmp_path / "run.toml")
    assert len(str(caught.value)) < 2000


def test_a_value_of_any_size_can_be_told() -> None:
    assert len(str(ConfigError("seed", 10**5000, "is too large", "Lower it."))) < 200


def test_the_command_says_one_line(copy: Path) -> None:
    weights = newest(copy) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    argv = [sys.executable, "-m", "pronghorn", "eval", str(copy), "--episodes", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=copy.parent)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert str(weights) in done.stderr
