"""Imports point one way, worker-side code needs nothing of ours but its siblings, and the file count stays small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "pronghorn"
FILES = sorted(SRC.rglob("*.py"))

# A module may import modules of lower layers, and of its own package; listed from low to high.
LAYERS = [
    {"errors"},
    {"types", "machine", "config_cluster", "config_population"},
    {"untrusted"},
    {"config", "ops", "envworker"},
    {"population"},
    {"rules", "limits", "settings_file", "launch", "spec_file"},
    {"defaults", "flags", "doctor"},
    {"models", "envs"},
    {
        "training.metrics",
        "training.live",
        "training.signals",
        "training.stall",
        "training.watchdog",
        "training.sentinel",
        "training.device",
        "training.store",
        "training.acting",
        "training.graphed",
        "training.optimizers",
        "training.player",
        "training.checkpoint",
        "training.world",
        "training.rounds",
        "training.beginning",
    },
    {
        "training.sampler",
        "training.pieces",
        "training.learner",
        "training.guests",
        "training.seats",
        "training.own_player",
        "evaluation",
    },
    {"training.member"},
    {"training.league"},
    {"cluster"},
    {"training.parts", "training.rollback"},
    {"training.saving"},
    {"training.reporting"},
    {"training.trainer"},
    {"bench"},
    {"cli"},
    {"__main__"},
]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


def layer_of(module: str) -> int:
    for rank, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return rank
    raise AssertionError(f"{module} has no layer")


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pronghorn."):
            found.add((node.module or "").removeprefix("pronghorn."))
        elif isinstance(node, ast.Import):
            found |= {n.name.removeprefix("pronghorn.") for n in node.names if n.name.startswith("pronghorn.")}
    return found


@pytest.mark.parametrize("path", [f for f in FILES if f.name != "__init__.py"], ids=module_of)
def test_imports_point_down(path: Path) -> None:
    module = module_of(path)
    for imported in imports_of(path):
        same_package = imported.split(".")[0] == module.split(".")[0] and layer_of(imported) == layer_of(module)
        assert layer_of(imported) < layer_of(module) or same_package, f"{module} imports {imported}"


def test_ops_and_models_know_no_config_and_no_process() -> None:
    for path in [*(SRC / "ops").glob("*.py"), *(SRC / "models").glob("*.py")]:
        tops = {i.split(".")[0] for i in imports_of(path)}
        assert tops <= {"ops", "models", "types", "errors"}, path


def test_a_population_knows_only_numbers() -> None:
    """It decides, the trainer acts: no torch, no process, no thread, no file, no clock, no other generator."""
    banned = {"torch", "os", "io", "sys", "time", "pathlib", "random", "threading", "subprocess", "multiprocessing"}
    for path in (SRC / "population").glob("*.py"):
        known = {"population", "config", "config_population", "types", "errors"}
        assert {i.split(".")[0] for i in imports_of(path)} <= known, path
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert not {name.split(".")[0] for name in names} & banned, path
        assert not any(isinstance(node, ast.Name) and node.id == "open" for node in nodes), path


def test_at_most_104_source_files() -> None:
    """50, and 54: `bench` has two sides, what a measured process does, and what starts it and counts; passes of a
    network in pieces are neither its shape nor its losses; a population is four questions that are asked apart: who
    meets whom, who is stronger, who is copied, and how a hyper-parameter moves; and agents that take turns are stepped
    in another way than those that act at once, what both ways share steps neither, and one form for unlike spaces knows
    no steps at all; a GPU is its order of work (device), acting on it (apart from what the sampler records), and
    optimiser steps as graphs (apart from what they compute); and a Doom match is the engines that play it, the players
    as rows of an environment, and the rewards that those of one player share. One policy's rows are apart from the rows
    of all (player, sampler). Games between players (match) are no episodes of one policy, and who can be a player
    (players) no matter of how games are dealt and counted. Of several policies, one in training (member) is apart from
    what they do to each other (league), from those that only act (guests) and from who sits where (seats); their
    settings lie beneath those who decide by them; and a page draws charts for runs and for populations. Optimisers
    know no loss. What agents with spaces of their own see of a delivery (own_rows) is needed by who trains them
    (own_player) and who evaluates. What returns say (scores), who plays rows (at_rows) and pictures (video) are no
    matter of which episodes are played (evaluate).
    Several learners are who they are (launch), what they add up (world), what they decide together before each
    iteration (rounds), and what they begin with (beginning).
    The trainer runs threads; what they work with (parts), what a run writes down of its state
    (saving) and what it says of itself (reporting) are built, saved and said elsewhere. Of a cluster, the block that
    carries unrolls (wire) is apart from who fills it (actor) and who takes it (remote_sampler) into memory or a GPU
    (intake); which actors live (crew) is no matter of what they send, and only one file knows Ray (engine).
    Who acts here for environments elsewhere has a pool (remote_pool) of hosts that are told every action (env_host).
    What a policy may go back to (rollback) is asked by no other part. Files that anybody may have written are read in
    one way (untrusted), whatever is in them; env.json is a file like config.toml (spec_file). A watchdog knows
    stages by name only; a doctor asks and decides nothing. What ends a process from
    outside (sentinel) is a program.
    """
    assert len([f for f in FILES if f.name != "__init__.py"]) <= 104


def test_importing_the_package_or_the_settings_imports_no_torch() -> None:
    code = "import sys, pronghorn, pronghorn.config, pronghorn.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_sorted_and_resolve() -> None:
    import pronghorn

    assert pronghorn.__all__ == sorted(pronghorn.__all__)
    for name in pronghorn.__all__:
        assert getattr(pronghorn, name) is not None
