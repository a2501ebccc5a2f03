"""Checkpoints: whole or absent, verified, no pickle; damaged ones are passed over by name, foreign ones refused."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import pronghorn.training.checkpoint as c
from pronghorn.errors import CheckpointError, RunDirError
from pronghorn.untrusted import sealed_json


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def save(directory: Path, updates: int, keep: int = 2) -> Path:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return c.save(directory, updates, net.state_dict(), optimizer.state_dict(), {"learner": {"steps": 7}}, keep=keep)


@pytest.mark.case("RES-01", "RES-20")
def test_round_trip_of_weights_optimiser_and_state(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    loaded = c.load(path)
    net = model()
    c.load_weights(net, loaded.weights, "here")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
    optimizer.load_state_dict(loaded.optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state_dict()["state"][0]["step"] == 1
    assert loaded.state["learner"] == {"steps": 7}
    assert c.params_sha(net.state_dict()) == c.params_sha(loaded.weights)
    assert {p.name for p in path.iterdir()} == {"weights.safetensors", "optimizer.safetensors", "state.json"}


@pytest.mark.case("RES-06")
def test_only_the_newest_are_kept_and_numbers_sort_as_numbers(tmp_path: Path) -> None:
    for updates in (9, 10, 100, 1000):
        save(tmp_path, updates)
    assert [int(p.name) for p in c.list_checkpoints(tmp_path)] == [100, 1000]


@pytest.mark.case("RES-03")
def test_a_save_that_was_killed_is_neither_loaded_nor_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    real, calls = c._write_durably, []

    def dies_in_the_middle(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(data[: len(data) // 2])
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(c, "_write_durably", dies_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert c.load_latest(tmp_path).state["updates"] == 1
    save(tmp_path, 3)
    assert [p.name for p in tmp_path.glob(".*")] == []


@pytest.mark.case("RES-03")
def test_a_save_may_be_killed_before_any_of_its_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that replaces the only checkpoint: afterwards there is that one or the new one, whole."""
    calls, dies_at = 0, 0

    def killed_in_time(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def operation(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == dies_at:
                if name == "rmtree":  # half of it is done
                    next(Path(args[0]).iterdir()).unlink()
                raise KeyboardInterrupt
            return real(*args, **options)

        monkeypatch.setattr(owner, name, operation)

    for owner, name in ((c, "_write_durably"), (c, "_sync_directory"), (Path, "rename"), (c.shutil, "rmtree")):
        killed_in_time(owner, name)
    for dies_at in range(1, 100):  # read by the operations
        directory, calls = tmp_path / str(dies_at), -100
        save(directory, 1, keep=1)
        calls = 0
        with contextlib.suppress(KeyboardInterrupt):
            save(directory, 1, keep=1)
        died, calls = calls >= dies_at, -100
        assert c.load_latest(directory).state["updates"] == 1
        save(directory, 2, keep=1)
        assert [p.name for p in directory.iterdir()] == [f"{2:012d}"]
        if not died:
            break
    assert 8 < dies_at < 20


@pytest.mark.case("RES-02")
@pytest.mark.parametrize("damage", ["truncated", "zero bytes", "pickle", "missing", "state is a list", "newer format"])
def test_damage_is_named_and_an_older_checkpoint_is_used_with_a_word(damage: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    broken = save(tmp_path, 2)
    weights, state = broken / "weights.safetensors", broken / "state.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-3])
    elif damage == "zero bytes":
        weights.write_bytes(b"")
    elif damage == "pickle":
        weights.write_bytes(pickle.dumps({"weight": 1}))
    elif damage == "missing":
        weights.unlink()
    elif damage == "state is a list":
        state.write_text("[]")
    else:
        state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match=str(broken)):
        c.load(broken)
    said: list[str] = []
    assert c.load_latest(tmp_path, warn=said.append).state["updates"] == 1
    assert len(said) == 1
    assert str(broken) in said[0]


def test_a_checksum_that_fits_a_hostile_file_still_executes_nothing(tmp_path: Path) -> None:
    """A pickle with a right checksum: refused by the safetensors reader."""
    path = save(tmp_path, 1)
    evil = pickle.dumps(print)
    (path / "weights.safetensors").write_bytes(evil)
    state = json.loads((path / "state.json").read_text())
    state["sha256"]["weights.safetensors"] = c.hashlib.sha256(evil).hexdigest()
    del state["checksum"]
    (path / "state.json").write_bytes(sealed_json(state))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        c.load(path)


def test_weights_of_another_model_load_not_at_all(tmp_path: Path) -> None:
    loaded = c.load(save(tmp_path, 1))
    other = torch.nn.Linear(3, 5)
    before = c.params_sha(other.state_dict())
    with pytest.raises(CheckpointError, match=r"does not fit the model.*\(2, 3\) != \(5, 3\)"):
        c.load_weights(other, loaded.weights, "it")
    assert c.params_sha(other.state_dict()) == before


def test_a_full_disk_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(c, "_write_durably", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*intact"):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []  # no half-written one takes up what room there is


def test_an_unwritable_run_directory_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="Cannot write the run directory"), c.locked(tmp_path / "file" / "run"):
        pass


# ------------------------------------------------------------------------------------------ several policies


def policy(seed: int) -> c.SavedPolicy:
    torch.manual_seed(seed)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return c.SavedPolicy(dict(net.state_dict()), optimizer.state_dict(), {"learner": {"steps": seed}})


def save_several(
    directory: Path, updates: int, snapshots: dict[str, c.Frozen], count: int = 3, keep: int = 2
) -> Path:
    first, *others = [policy(i) for i in range(count)]
    return c.save(directory, updates, *first, keep=keep, others=others, snapshots=snapshots)


def test_policies_and_frozen_ones_come_back_each_as_itself(tmp_path: Path) -> None:
    frozen = {f"0@{i}": c.Frozen(policy(10 + i).weights) for i in range(2)}
    path = save_several(tmp_path, 7, frozen)
    loaded = c.load(path, snapshots=True)
    assert [one.state["learner"]["steps"] for one in loaded.policies] == [0, 1, 2]
    for i, one in enumerate(loaded.policies):
        assert c.params_sha(one.weights) == c.params_sha(policy(i).weights)
        for name, moment in one.optimizer["state"][0].items():
            assert torch.equal(moment, policy(i).optimizer["state"][0][name])
    assert list(loaded.snapshots) == ["0@0", "0@1"]
    for name, one in loaded.snapshots.items():
        assert c.params_sha(one.weights) == c.params_sha(frozen[name].weights)
        assert c.params_sha(c.load_snapshot(path, name)) == c.params_sha(frozen[name].weights)
    assert c.load(path).snapshots == {}  # they are not read where nobody asks
    assert {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} == {
        "weights.safetensors", "optimizer.safetensors", "state.json",
        *(f"policies/{i}/{kind}.safetensors" for i in (1, 2) for kind in ("weights", "optimizer")),
        "snapshots/0@0.safetensors", "snapshots/0@1.safetensors",
    }  # fmt: skip


def test_a_frozen_policy_is_written_once_and_outlives_the_checkpoints_that_held_it(tmp_path: Path) -> None:
    """Ten saves that keep two: its file is one and the same, and the disk holds it once. An evicted one is gone."""
    frozen = {"0@0": c.Frozen(policy(10).weights), "0@1": c.Frozen(policy(11).weights)}
    inode = (save_several(tmp_path, 1, frozen) / "snapshots" / "0@0.safetensors").stat().st_ino
    del frozen["0@1"]
    for updates in range(2, 11):
        frozen["0@0"].weights["weight"].fill_(updates)  # who writes what must never be written: the file is not touched
        path = save_several(tmp_path, updates, frozen)
    assert [int(p.name) for p in c.list_checkpoints(tmp_path)] == [9, 10]
    file = path / "snapshots" / "0@0.safetensors"
    assert (file.stat().st_ino, file.stat().st_nlink) == (inode, 2)
    assert frozen["0@0"].file == file
    assert c.params_sha(c.load(path, snapshots=True).snapshots["0@0"].weights) == c.params_sha(policy(10).weights)
    assert c.snapshot_names(c.load(path).state) == ["0@0"]
    # and a run that resumed links it on
    resumed = dict(c.load(path, snapshots=True).snapshots)
    again = save_several(tmp_path, 11, resumed)
    assert (again / "snapshots" / "0@0.safetensors").stat().st_ino == inode


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(c.os, "link", none)
    frozen = {"0@0": c.Frozen(policy(10).weights)}
    one, other = (save_several(tmp_path, updates, frozen) for updates in (1, 2))
    files = [path / "snapshots" / "0@0.safetensors" for path in (one, other)]
    assert files[0].stat().st_ino != files[1].stat().st_ino
    assert c.params_sha(c.load(other, snapshots=True).snapshots["0@0"].weights) == c.params_sha(policy(10).weights)


def test_a_save_again_at_the_same_update_keeps_the_frozen_ones(tmp_path: Path) -> None:
    frozen = {"0@0": c.Frozen(policy(10).weights)}
    save_several(tmp_path, 5, frozen, keep=1)
    path = save_several(tmp_path, 5, frozen, keep=1)
    assert c.params_sha(c.load_snapshot(path, "0@0")) == c.params_sha(policy(10).weights)


def test_a_save_that_fails_leaves_frozen_policies_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = {"0@0": c.Frozen(policy(10).weights)}
    first = save_several(tmp_path, 1, frozen)
    frozen["0@9"] = c.Frozen(policy(11).weights)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(c, "_write_durably", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_several(tmp_path, 2, frozen)
    monkeypatch.undo()
    assert (frozen["0@0"].file, frozen["0@9"].file) == (first / "snapshots" / "0@0.safetensors", None)
    path = save_several(tmp_path, 3, frozen)
    assert c.snapshot_names(c.load(path, snapshots=True).state) == ["0@0", "0@9"]


@pytest.mark.parametrize("file", ["policies/1/weights", "policies/2/optimizer", "snapshots/0@0"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damage_of_any_policys_file_is_named_and_the_checkpoint_before_is_used(
    file: str, damage: str, tmp_path: Path
) -> None:
    save_several(tmp_path, 1, {"0@0": c.Frozen(policy(10).weights)})
    broken = save_several(tmp_path, 2, {"0@0": c.Frozen(policy(11).weights)}) / f"{file}.safetensors"
    data = broken.read_bytes()
    broken.unlink()
    if damage == "cut":
        broken.write_bytes(data[:-1])
    said: list[str] = []
    assert c.load_latest(tmp_path, said.append, snapshots=True).state["updates"] == 1
    assert len(said) == 1
    assert str(broken) in said[0]


def test_a_snapshot_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = save_several(tmp_path, 1, {"0@5": c.Frozen(policy(10).weights)})
    with pytest.raises(CheckpointError, match=r"holds no snapshot '0@6'\. It holds: 0@5"):
        c.load_snapshot(path, "0@6")
    bare = save(tmp_path / "other", 1)
    with pytest.raises(CheckpointError, match=r"holds no snapshot '0@6'\. It holds: none"):
        c.load_snapshot(bare, "0@6")


def test_what_a_run_wrote_before_its_first_checkpoint_is_not_mixed_with_a_new_one(tmp_path: Path) -> None:
    names = ("metrics.jsonl", "population.jsonl", "ratings.jsonl")
    for name in names:
        (tmp_path / name).write_text('{"round": 0, "steps": 5}\n')
    assert c.previous(tmp_path, resume=True) is None
    assert not any((tmp_path / name).exists() for name in names)
