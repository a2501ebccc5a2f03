"""Losses that stay not finite: back to the last checkpoint, a bounded number of times; and what is never saved."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import pronghorn.training.checkpoint as checkpoints
from members import crew
from members import train as train_member
from pronghorn.config import Config, replace
from pronghorn.errors import CheckpointError, DivergedError
from pronghorn.training.checkpoint import load_latest, params_sha
from pronghorn.training.learner import Learner
from pronghorn.training.member import Member
from pronghorn.training.metrics import read_metrics
from pronghorn.training.rollback import Rollbacks
from pronghorn.training.trainer import train
from running import env

SMALL: dict[str, Any] = {
    "env.workers": 2, "env.envs_per_worker": 4, "learner.unroll_length": 16, "learner.batch_unrolls": 8,
    "learner.epochs": 1, "learner.minibatches": 1, "learner.lr": 3e-3, "threads": 1, "learner.max_skipped": 2,
    "model.mlp_layers": (16,), "log.every_s": 0.0, "checkpoint.every_updates": 4,
    "log.live": "off", "log.tensorboard": False, "env.pin": "off",
}  # fmt: skip

Breaks = Callable[[Learner], bool]


def config(run_dir: Path, **values: Any) -> Config:
    built: Config = replace(Config(env=env("Match"), run_dir=str(run_dir)), SMALL | values)
    return built


@pytest.fixture
def break_when(monkeypatch: pytest.MonkeyPatch) -> Callable[[Breaks], None]:
    """Let the loss of each optimiser step be nan for which the given function says so."""

    def patch(breaks: Breaks) -> None:
        real = Learner._update

        def update(self: Learner, step: Any) -> dict[str, float]:
            return real(self, step._replace(numbers=step.numbers * float("nan")) if breaks(self) else step)

        monkeypatch.setattr(Learner, "_update", update)

    return patch


def once_after(updates: int, count: int = 3) -> Breaks:
    """`count` optimiser steps in a row, the first time that a learner has made so many."""
    left = dict.fromkeys(range(8), count)

    def breaks(learner: Learner) -> bool:
        if learner.updates < updates or left[0] == 0:
            return False
        left[0] -= 1
        return True

    return breaks


def log_of(run_dir: Path) -> str:
    return (run_dir / "log.txt").read_text()


# ------------------------------------------------------------------------------------------ whole runs


@pytest.mark.case("FLT-12")
@pytest.mark.parametrize("max_lag", [0, 1, 16])
def test_a_run_goes_back_to_its_last_checkpoint_and_on(
    max_lag: int, tmp_path: Path, break_when: Callable[[Breaks], None]
) -> None:
    break_when(once_after(10))
    result = train(config(tmp_path / "run", steps=20 * 128, max_lag=max_lag))
    assert (result.reason, result.exit_code) == ("steps", 0)
    lines = read_metrics(tmp_path / "run")
    assert (lines[-1]["rollbacks"], lines[-1]["updates_skipped"]) == (1, 3)
    for name in ("steps", "updates", "iterations"):  # what was done was done
        assert [m[name] for m in lines] == sorted(m[name] for m in lines)
    assert lines[-1]["updates"] == 17  # of 20 batches three were skipped
    assert "3 optimiser steps in a row had a loss or gradient that is not finite" in log_of(tmp_path / "run")
    assert "checkpoints/000000000008 (1 of 3 rollbacks to it)" in log_of(tmp_path / "run")


@pytest.mark.case("FLT-12")
def test_what_goes_back_is_the_whole_policy(
    tmp_path: Path, break_when: Callable[[Breaks], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, normalisers, moments and an adapted learning rate are those of the file; steps and updates are not."""
    seen: list[tuple[Any, ...]] = []
    real = Member.go_back

    def go_back(self: Member, saved: Any, where: str) -> None:
        before = self.learner.steps, self.learner.updates
        real(self, saved, where)
        learner = self.learner
        seen.append((params_sha(learner.model.state_dict()), saved.state["params_sha"],
                     learner.hyper.lr, saved.state["learner"]["hyper"]["lr"],
                     before, (learner.steps, learner.updates)))  # fmt: skip
        for index, entries in learner.optimizer.state_dict()["state"].items():
            assert all(torch.equal(v, saved.optimizer["state"][index][k]) for k, v in entries.items())

    monkeypatch.setattr(Member, "go_back", go_back)
    break_when(once_after(10))
    train(config(tmp_path / "run", steps=14 * 128, **{"learner.lr_schedule": "kl_adaptive"}))
    ((sha, saved_sha, lr, saved_lr, before, after),) = seen
    assert (sha, lr, before) == (saved_sha, saved_lr, after)


@pytest.mark.case("FLT-12", "ASY-06")
@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_deterministic_run_that_went_back_repeats_bit_by_bit(
    max_lag: int, tmp_path: Path, break_when: Callable[[Breaks], None]
) -> None:
    found = []
    for name in ("one", "other"):
        with pytest.MonkeyPatch.context() as patch:
            real, breaks = Learner._update, once_after(10)

            def update(
                self: Learner, step: Any, real: Any = real, breaks: Breaks = breaks
            ) -> dict[str, float]:
                report: dict[str, float]
                report = real(self, step._replace(numbers=step.numbers * float("nan")) if breaks(self) else step)
                return report

            patch.setattr(Learner, "_update", update)
            train(config(tmp_path / name, steps=18 * 128, max_lag=max_lag, deterministic=True))
        assert read_metrics(tmp_path / name)[-1]["rollbacks"] == 1
        found.append([m["params_sha"] for m in read_metrics(tmp_path / name)])
    assert found[0] == found[1]


@pytest.mark.case("FLT-12")
def test_rollbacks_that_do_not_help_end_the_run_and_leave_the_checkpoint(
    tmp_path: Path, break_when: Callable[[Breaks], None]
) -> None:
    break_when(lambda learner: learner.updates >= 6)
    with pytest.raises(DivergedError, match=r"2 rollbacks to .*000000000004 did not help") as info:
        train(config(tmp_path / "run", steps=100_000, **{"learner.max_rollbacks": 2}))
    assert "Lower --learner.lr" in str(info.value)
    assert read_metrics(tmp_path / "run")[-1]["rollbacks"] == 2
    saved = load_latest(tmp_path / "run" / "checkpoints")
    assert (saved.path.name, saved.state["learner"]["updates"]) == (f"{4:012d}", 4)


@pytest.mark.case("FLT-12")
def test_a_run_that_saved_nothing_yet_ends_with_its_error_and_keeps_what_it_has(
    tmp_path: Path, break_when: Callable[[Breaks], None]
) -> None:
    break_when(lambda learner: learner.updates >= 2)
    with pytest.raises(DivergedError, match=r"No checkpoint to go back to was saved yet\. Lower --learner\.lr"):
        train(config(tmp_path / "run", steps=100_000))
    assert load_latest(tmp_path / "run" / "checkpoints").state["learner"]["updates"] == 2


@pytest.mark.case("FLT-12")
def test_what_is_not_finite_is_never_saved_and_the_run_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight overflows just before a save, in a place where losses stay finite: refused, and the policy goes back."""
    real, broken = Learner._update, [True]

    def update(self: Learner, step: Any) -> dict[str, float]:
        report = real(self, step)
        if broken[0] and self.updates == 8:
            broken[0] = False
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] = float("inf")
        return report

    monkeypatch.setattr(Learner, "_update", update)
    assert train(config(tmp_path / "run", steps=20 * 128)).reason == "steps"
    last = read_metrics(tmp_path / "run")[-1]
    assert (last["saves_failed"], last["rollbacks"]) == (1, 1)
    log = log_of(tmp_path / "run")
    assert re.search(r"A number in \S+ of policy 0 is not finite: such a checkpoint is not saved", log)
    assert "checkpoints/000000000004 (1 of 3" in log_of(tmp_path / "run")
    saved = load_latest(tmp_path / "run" / "checkpoints")
    assert all(tensor.isfinite().all() for tensor in saved.weights.values())


@pytest.mark.case("FLT-12")
def test_an_end_that_would_save_what_is_not_finite_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Learner._update

    def update(self: Learner, step: Any) -> dict[str, float]:
        report = real(self, step)
        if self.updates == 6:  # the run's last
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] = float("nan")
        return report

    monkeypatch.setattr(Learner, "_update", update)
    with pytest.raises(CheckpointError, match="is not finite: such a checkpoint is not saved"):
        train(config(tmp_path / "run", steps=6 * 128))
    assert [p.name for p in checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")] == [f"{4:012d}"]


# ------------------------------------------------------------------------------------------ one of several policies


@pytest.fixture
def saved_crew(tmp_path: Path) -> tuple[Any, list[Member], Path]:
    """Two members that trained, were saved, and trained on."""
    sampler, members = crew(2)
    for member in members:
        train_member(sampler, member, 2)
    first, *others = [member.saved() for member in members]
    checkpoints.save(tmp_path / "checkpoints", 4, *first, keep=2, others=others)
    for member in members:
        train_member(sampler, member, 2)
    return sampler, members, tmp_path


@pytest.mark.case("FLT-12")
def test_a_population_goes_on_when_one_of_it_breaks(tmp_path: Path, break_when: Callable[[Breaks], None]) -> None:
    breaks = once_after(10)
    break_when(lambda learner: learner.seed != 0 and breaks(learner))  # the second policy's
    values = {"population.members": 2, "checkpoint.every_updates": 6}
    assert train(config(tmp_path / "run", steps=40 * 128, **values)).reason == "steps"
    last = read_metrics(tmp_path / "run")[-1]
    assert (last["rollbacks"], last["saves_failed"]) == (1, 0)
    assert "policy 1: 3 optimiser steps in a row" in log_of(tmp_path / "run")
    states = load_latest(tmp_path / "run" / "checkpoints").policies
    assert [one.state["num_rollbacks"] for one in states] == [0, 1]


def test_only_the_member_that_broke_goes_back(saved_crew: tuple[Any, list[Member], Path]) -> None:
    sampler, members, run_dir = saved_crew
    shas = [params_sha(member.model.state_dict()) for member in members]
    sampler.step()
    voided = members[0].store.num_voided
    Rollbacks(run_dir, 3).undo(members[1], DivergedError("broken"))
    assert params_sha(members[0].model.state_dict()) == shas[0]
    saved = load_latest(run_dir / "checkpoints").policies[1]
    assert params_sha(members[1].model.state_dict()) == saved.state["params_sha"] != shas[1]
    assert (members[1].num_rollbacks, members[1].lineage, members[0].lineage) == (1, 1, 0)
    for member in members:  # both train on, the second on unrolls of the weights that it has now
        train_member(sampler, member, 2)
    assert (members[0].store.num_voided - voided, members[1].store.num_voided > 0) == (0, True)
    assert members[1].player.acting.version > saved.state["learner"]["version"]


def test_a_member_that_became_another_does_not_go_back_to_what_it_was(
    saved_crew: tuple[Any, list[Member], Path],
) -> None:
    _, members, run_dir = saved_crew
    members[1].become(members[0])
    sha = params_sha(members[1].model.state_dict())
    with pytest.raises(DivergedError, match="Policy 1 was replaced by another's since the last checkpoint"):
        Rollbacks(run_dir, 3).undo(members[1], DivergedError("broken"))
    assert params_sha(members[1].model.state_dict()) == sha


def test_the_count_begins_anew_with_a_newer_checkpoint(saved_crew: tuple[Any, list[Member], Path]) -> None:
    sampler, members, run_dir = saved_crew
    rollbacks, member = Rollbacks(run_dir, 1), members[0]
    rollbacks.undo(member, DivergedError("broken"))
    with pytest.raises(DivergedError, match="1 rollbacks to"):
        rollbacks.undo(member, DivergedError("broken"))
    train_member(sampler, member, 1)
    first, *others = [one.saved() for one in members]
    checkpoints.save(run_dir / "checkpoints", 9, *first, keep=2, others=others)
    assert json.loads((run_dir / "checkpoints" / f"{9:012d}" / "state.json").read_text())["num_rollbacks"] == 1
    rollbacks.undo(member, DivergedError("broken"))
    assert member.num_rollbacks == 2


def test_a_damaged_checkpoint_is_passed_over_and_none_is_an_error(
    saved_crew: tuple[Any, list[Member], Path],
) -> None:
    _, members, run_dir = saved_crew
    (path,) = checkpoints.list_checkpoints(run_dir / "checkpoints")
    (path / "weights.safetensors").write_bytes(b"no")
    with pytest.raises(DivergedError, match=r"cannot be gone back to: No checkpoint could be read"):
        Rollbacks(run_dir, 3).undo(members[0], DivergedError("broken"))
