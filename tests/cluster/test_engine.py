"""Remote actors on a real Ray: training, lost actors and machines, no room, and nothing that stays behind.

Whole runs are processes of their own, as users start them. One of them is in the default suite.
"""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pronghorn.cluster.engine import RayEngine, _environment, _short_directory
from pronghorn.config_cluster import ClusterConfig
from pronghorn.errors import ClusterError, ConfigError, MissingExtraError
from pronghorn.training.metrics import read_metrics
from running import TESTS, assert_gone, children_of, env, has_ended, wait_for_metric

pytestmark = pytest.mark.timeout(900)  # Ray alone takes half a minute to start where every core is busy
WAIT_S = 300.0  # that a run may take to come to something on a busy machine
SMALL = ["--env.workers", "1", "--env.envs-per-worker", "4", "--learner.unroll-length", "16", "--learner.batch-unrolls",
         "8", "--learner.minibatches", "1", "--learner.lr", "3e-3", "--threads", "1", "--log.no-tensorboard",
         "--model.mlp-layers", "16", "--log.every-s", "0.5", "--log.live", "plain"]  # fmt: skip
TWO = ["--actors", "2", "--cluster.cpus-per-actor", "0.5"]


started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _no_run_goes_on() -> Iterator[None]:
    """Not even of a test that failed."""
    yield
    while started:
        process = started.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def start(run_dir: Path, *flags: str, env_id: str = env("Match"), cluster: str = "local") -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "pronghorn", "train", env_id, "--run-dir", str(run_dir), "--cluster", cluster]
    process = subprocess.Popen(
        [*argv, *SMALL, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent
    )
    started.append(process)
    return process


def end(process: subprocess.Popen[str]) -> str:
    """Stop a run in order; what it said."""
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 130, said
    return said


def directories() -> set[str]:
    """Those of local clusters."""
    return {path for place in {tempfile.gettempdir(), "/tmp"} for path in glob.glob(f"{place}/prh-*")}


def of_actors(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of a run's actors."""
    return [child for child in children_of(process) if child.name().startswith("ray::") and "Carried" in child.name()]


def last(run_dir: Path, name: str) -> Any:
    return read_metrics(run_dir)[-1][name]


# ------------------------------------------------------------ on a local cluster


def test_a_toy_is_learned_by_actors_on_a_local_ray(tmp_path: Path) -> None:
    before = directories()
    process = start(tmp_path / "run", *TWO, "--steps", "4000")
    wait_for_metric(tmp_path / "run", "remote_unrolls", 1, process, WAIT_S)
    children = children_of(process)
    listening = {c.laddr.ip for child in children for c in child.net_connections() if c.status == psutil.CONN_LISTEN}
    said = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 0, said
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    assert last(tmp_path / "run", "remote_unrolls") * 16 >= 4000
    assert (last(tmp_path / "run", "actors"), last(tmp_path / "run", "policy_lag_max") <= 16) == (2, True)
    assert last(tmp_path / "run", "return_mean") > 4.5  # random: 4
    assert "2 actors (2 on" in said
    assert_gone(children, 60.0)
    assert directories() <= before


@pytest.mark.slow
def test_a_killed_actor_is_replaced_and_learning_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, *TWO)
    wait_for_metric(run, "remote_unrolls", 50, process, WAIT_S)
    workers = [w for actor in of_actors(process) for w in actor.children(recursive=True)]
    victim = of_actors(process)[0]
    own = victim.children(recursive=True)
    assert own
    assert set(own) < set(workers)
    victim.kill()
    wait_for_metric(run, "actors_replaced", 1, process, WAIT_S)
    at = last(run, "steps")
    wait_for_metric(run, "actors", 2, process, WAIT_S)
    wait_for_metric(run, "steps", at + 5000, process, WAIT_S)
    assert_gone(own, 60.0)
    said = end(process)
    assert last(run, "unrolls_lost") > 0
    assert re.search(r"actor \d on .+ \(process \d+\) is gone: .*\n?", said)
    assert "1 of 10 replacements used" in said


@pytest.mark.slow
@pytest.mark.case("DST-05")
def test_a_stopped_actor_is_given_up_and_the_learner_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, *TWO, "--cluster.silent-s", "10")
    wait_for_metric(run, "remote_unrolls", 50, process, WAIT_S)
    zombie = of_actors(process)[0]
    zombie.suspend()
    wait_for_metric(run, "actors_replaced", 1, process, WAIT_S)
    wait_for_metric(run, "actors", 2, process, WAIT_S)
    if not has_ended(zombie):
        zombie.resume()
    at = last(run, "steps")
    wait_for_metric(run, "steps", at + 5000, process, WAIT_S)
    assert (last(run, "actors"), last(run, "actors_replaced")) == (2, 1)
    assert "said nothing for 10 s" in end(process)


@pytest.mark.slow
def test_past_the_budget_the_run_saves_and_ends_with_the_actors_own_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, *TWO, "--cluster.restart-budget", "1")
    wait_for_metric(run, "updates", 20, process, WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < deadline:
        for actor in of_actors(process)[:1]:
            actor.kill()
        time.sleep(1.0)
    said = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 1, said
    assert re.search(r"pronghorn: actor \d on .+ is gone(?s:.*)budget of 1 restarts", said), said
    assert list((run / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_learner_that_ends_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    before, run = directories(), tmp_path / "run"
    process = start(run, *TWO)
    wait_for_metric(run, "updates", 5, process, WAIT_S)
    children = children_of(process)
    assert len(children) > 6
    process.send_signal(number)
    process.communicate(timeout=WAIT_S)
    assert_gone(children, 60.0)
    deadline = time.monotonic() + 30.0
    while directories() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert directories() <= before


@pytest.mark.slow
def test_an_environment_that_cannot_be_built_is_one_error_with_host_and_traceback(tmp_path: Path) -> None:
    process = start(tmp_path / "run", *TWO, env_id=env("Unbuildable", "toy_envs.py"))
    said = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 1, said
    assert re.search(r"pronghorn: actor \d on \S+ \(process \d+\) could not go on: .*", said), said
    assert "in __init__" in said  # the environment's own line
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.case("DST-02")
def test_too_many_actors_are_refused_within_seconds(tmp_path: Path) -> None:
    began = time.monotonic()
    process = start(tmp_path / "run", "--actors", "800")
    said = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 2, said
    assert "asked  available  in all" in said
    assert "800" in said
    assert time.monotonic() - began < WAIT_S


@pytest.mark.slow
@pytest.mark.case("DST-01")
def test_an_environment_registered_in_the_script_is_known_to_remote_actors(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n"
        "import pronghorn\n"
        "from pronghorn.config import replace\n"
        "from learnable_envs import Match\n"
        "if __name__ == '__main__':\n"
        "    pronghorn.register_env('mine', Match)\n"
        "    values = {'cluster.address': 'local', 'cluster.actors': 2, 'cluster.cpus_per_actor': 0.5, 'steps': 1000,\n"
        "              'env.workers': 1, 'env.envs_per_worker': 4, 'log.live': 'off', 'log.tensorboard': False}\n"
        "    result = pronghorn.train(replace(pronghorn.Config(env='mine', run_dir='run'), values))\n"
        "    print('steps', result.steps)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=2 * WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps 1" in done.stdout


@pytest.mark.slow
def test_the_learner_acts_for_environments_of_remote_actors(tmp_path: Path) -> None:
    """Central inference: an actor that is killed costs the unrolls of its rows, which begin anew on another."""
    run = tmp_path / "run"
    process = start(run, *TWO, "--cluster.inference", "learner")
    wait_for_metric(run, "steps", 1000, process, WAIT_S)
    of_actors(process)[0].kill()
    deadline = time.monotonic() + WAIT_S
    while not last(run, "unrolls_lost") and time.monotonic() < deadline:
        time.sleep(0.2)
    at = last(run, "steps")
    wait_for_metric(run, "steps", at + 6000, process, WAIT_S)
    assert last(run, "unrolls_lost") > 0
    assert last(run, "return_mean") > 4.5  # random: 4
    assert "acting for all of them here" in end(process)


# ------------------------------------------------------------ on a cluster of several machines (on one)


CLUSTER = """
import json, sys, time
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""


@pytest.fixture
def machines() -> Iterator[subprocess.Popen[str]]:
    """A cluster of a head without cores and two machines of one core; a line to its input takes a machine away."""
    variables = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=variables,
    )  # fmt: skip
    yield process
    children = children_of(process)
    process.communicate(timeout=WAIT_S)
    assert_gone(children, 60.0)


@pytest.mark.slow
def test_a_lost_machine_costs_its_actors_and_a_lost_learner_resumes(
    machines: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four actors on two machines: one machine goes, two actors go on. Then the learner is killed, and resumes."""
    assert machines.stdout is not None
    assert machines.stdin is not None
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    address, run = machines.stdout.readline().strip(), tmp_path / "run"
    flags = ["--actors", "4", "--cluster.cpus-per-actor", "0.5", "--checkpoint.every-s", "1"]
    process = start(run, *flags, cluster=address)
    wait_for_metric(run, "remote_unrolls", 100, process, WAIT_S)
    assert last(run, "actors") == 4
    machines.stdin.write("\n")
    machines.stdin.flush()
    assert machines.stdout.readline().strip() == "removed"
    deadline = time.monotonic() + WAIT_S
    while last(run, "actors") != 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    at = last(run, "steps")
    wait_for_metric(run, "steps", at + 3000, process, WAIT_S)
    assert last(run, "unrolls_lost") > 0
    process.kill()
    process.communicate(timeout=WAIT_S)
    saved = json.loads((sorted((run / "checkpoints").glob("[0-9]*"))[-1] / "state.json").read_text())
    process = start(run, *flags[2:], "--actors", "2", "--resume", cluster=address)
    deadline = time.monotonic() + WAIT_S
    while not [m for m in read_metrics(run) if m.get("event") == "resume"] and time.monotonic() < deadline:
        time.sleep(0.2)
    begun = next(m for m in read_metrics(run) if m.get("event") == "resume")["steps"]
    assert begun >= saved["learner"]["steps"] > 0
    wait_for_metric(run, "steps", begun + 3000, process, WAIT_S)
    end(process)


# ------------------------------------------------------------ without starting anything


class FakeRay:
    """What the engine asks Ray for, of machines with these numbers of cores."""

    def __init__(self, *cpus: float, free: float | None = None) -> None:
        self.cpus, self.free = cpus, sum(cpus) if free is None else free

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda **_: cls)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "NodeID": f"{i}" * 8, "NodeManagerAddress": f"10.0.0.{i}", "Resources": {"CPU": cpus}}
            for i, cpus in enumerate(self.cpus)
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": self.free}


def engine(ray: FakeRay, **values: Any) -> RayEngine:
    settings = ClusterConfig(address="local", **values)
    return RayEngine(ray, settings, SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ray", "each", "places"),
    [
        (FakeRay(2.0), 1.0, 2), (FakeRay(2.0), 0.3, 6), (FakeRay(3.0, 3.0), 2.0, 2), (FakeRay(4.0, free=1.5), 1.0, 1),
        (FakeRay(), 1.0, 0), (FakeRay(0.3), 0.1, 3),
    ],
    ids=["whole", "fractions", "no actor spans machines", "others are there", "no machine", "rounding"],
)  # fmt: skip
def test_room_is_what_fits_on_each_machine(ray: FakeRay, each: float, places: int) -> None:
    assert engine(ray, cpus_per_actor=each).room() == places


@pytest.mark.case("DST-02")
def test_a_request_that_cannot_be_met_says_what_was_asked_and_what_there_is() -> None:
    with pytest.raises(ConfigError) as info:
        engine(FakeRay(2.0), actors=8).require_room()
    said = str(info.value)
    assert "cluster.actors = 8: the cluster has room for 2 of 1 CPUs each" in said
    assert re.search(r"CPUs +8 +2 +2\n", said)
    assert re.search(r"actors +8 +2\n", said)
    assert re.search(r"CPUs of 10.0.0.0 000000 +2\n", said)
    assert "Ask for fewer (--actors 2), or for smaller ones that share cores (--cluster.cpus-per-actor 0.25)" in said


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1:1", "refused"), ("nonsense:port", "invalid literal"), ("[::1]:1", "")]
)
def test_a_cluster_that_is_not_there_is_one_error_at_once(address: str, why: str) -> None:
    with pytest.raises(ClusterError, match=rf"cannot join the Ray cluster .*{why}(?s:.*)--cluster local starts one"):
        RayEngine.open(ClusterConfig(address=address))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pronghorn-rl\[cluster\]'"):
        RayEngine.open(ClusterConfig(address="local"))


def test_paths_of_sockets_stay_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    directory = Path(_short_directory())
    assert directory.parent == Path("/tmp")
    directory.rmdir()


def test_variables_last_as_long_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_A", "before")
    monkeypatch.delenv("PRONGHORN_B", raising=False)
    with _environment({"PRONGHORN_A": "a", "PRONGHORN_B": "b"}):
        assert (os.environ["PRONGHORN_A"], os.environ["PRONGHORN_B"]) == ("a", "b")
    assert os.environ["PRONGHORN_A"] == "before"
    assert "PRONGHORN_B" not in os.environ


def test_nothing_of_ours_imports_ray_before_it_is_asked_for() -> None:
    code = "import sys, pronghorn.training.trainer, pronghorn.cluster.engine; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
