from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from pronghorn import machine
from pronghorn.config import Config, EnvConfig
from pronghorn.envs import registry
from pronghorn.envs.registry import list_envs, make_env, make_pool, register_env, resolve
from pronghorn.errors import ConfigError, EnvError, MissingExtraError, UnknownEnvError, UsageError
from pronghorn.types import Event

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")


@pytest.fixture(autouse=True)
def no_registered_names(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def a_function(): ...


def config(env_id, **env):
    return Config(env=EnvConfig(**({"id": env_id, "workers": 1, "envs_per_worker": 1, "groups": 1} | env)))


def test_a_doom_scenario():
    pytest.importorskip("vizdoom")
    env = resolve("doom:basic", {"frame_skip": 2})
    assert (env.backend, env.kind, env.target, env.kwargs) == ("worker", "doom", "basic", {"frame_skip": 2})


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("doom:basicc", "no Doom scenario 'basicc'. Did you mean: doom:basic"),
        ("gym:CartPol-v1", "CartPol-v1 is not registered in Gymnasium; near: CartPole-v1"),
        ("gym:CartPole-v7", "near: CartPole-v1"),
        ("CartPole-v1", "no environment 'CartPole-v1'. Did you mean: gym:CartPole-v1"),
        ("basic", "Did you mean: doom:basic"),
        ("zzzzzzzz", "`pronghorn envs` lists the names"),
        ("doom:", "'doom:' lacks the name"),
        ("dmlab:explore", "DeepMind Lab levels are not supported in this version"),
        ("pettingzoo:pistonball_v6", "no PettingZoo game 'pistonball_v6'. Did you mean: .*butterfly.pistonball_v6"),
        ("pettingzoo:butterfly.pistonball", "Did you mean: pettingzoo:butterfly.pistonball_v6"),
        ("pettingzoo:mpe.simple_spread_v3", "pip install mpe2, and name mpe2.simple_spread_v3:parallel_env"),
        ("pettingzoo:", "Example: pettingzoo:butterfly.pistonball_v6"),
        ("envpool:", "'envpool:' lacks the name behind the colon. Example: envpool:CartPole-v1"),
        ("no_such_module:make", "there is no module 'no_such_module' on the import path"),
        ("no/such/file.py:make", "there is no file .*no/such/file.py"),
        ("gym:no_such_package:Maze-v0", "no package 'no_such_package' to import"),
        ("gym:mine/Maze-v0", "nothing has registered the namespace 'mine'"),
    ],
)
@pytest.mark.case("ENV-10")
def test_a_wrong_name_is_told_the_nearest(name, match):
    before = time.monotonic()
    with pytest.raises(UnknownEnvError, match=match):
        resolve(name)
    assert time.monotonic() - before < 1.0


def test_atari_games_go_by_the_title_or_by_the_rom():
    pytest.importorskip("ale_py")
    assert resolve("atari:SpaceInvaders").target == "space_invaders"
    assert resolve("atari:space_invaders").target == "space_invaders"
    assert resolve("atari:spaceinvaders").target == "space_invaders"
    assert resolve("atari:Pong").backend == "atari"
    with pytest.raises(UnknownEnvError, match="Did you mean: atari:Pong"):
        resolve("atari:Pongg")


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("doom:basic", "vizdoom", "doom"), ("atari:Pong", "ale_py", "atari"),
     ("envpool:Pong-v5", "envpool", "envpool"), ("pettingzoo:sisl.pursuit_v5", "pettingzoo", "pettingzoo"),
     ("gym:ALE/Pong-v5", "ale_py", "atari"),
     ("gym:MiniGrid-Empty-5x5-v0", "minigrid", "minigrid")],
)  # fmt: skip
@pytest.mark.case("ENV-10")
def test_an_absent_package_names_its_extra(monkeypatch, name, module, extra):
    real = registry.importlib.util.find_spec
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None if name == module else real(name))
    with pytest.raises(MissingExtraError, match=rf"pip install 'pronghorn-rl\[{extra}\]'"):
        resolve(name)


def test_what_another_interpreter_has_is_not_looked_up_here():
    assert resolve("gym:TheirOwn-v3", python="/usr/bin/python3").target == "TheirOwn-v3"
    assert resolve("their_module:make", python="/usr/bin/python3").target == "their_module:make"


def test_looking_a_name_up_imports_neither_torch_nor_the_environment():
    code = (
        "import sys\nfrom pronghorn.envs.registry import resolve\n"
        "for name in sys.argv[1:]:\n    resolve(name, python='python')\n"
        "print([m for m in ('torch', 'vizdoom', 'ale_py', 'gymnasium', 'toy_envs') if m in sys.modules])"
    )
    names = ["doom:basic", "pettingzoo:sisl.pursuit_v5", f"{TOYS}:Counter", "gym:CartPole-v1"]
    result = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_files_are_named_by_their_absolute_path(monkeypatch):
    monkeypatch.chdir(Path(TOYS).parent)
    assert resolve("toy_envs.py:Counter").target == f"{TOYS}:Counter"


def test_modules_of_the_current_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "my_maze_module.py").write_text(Path(TOYS).read_text())
    monkeypatch.chdir(tmp_path)
    pool = make_pool(config("my_maze_module:Counter"), seed=1, ordered=False, evaluation=True)
    assert pool.recv(10.0).event.tolist() == [Event.FIRST]
    assert "not pinned" in pool.describe()
    pool.close()


@pytest.mark.parametrize(("name", "package"), [("atari:Pong", "ale_py"), ("envpool:CartPole-v1", "envpool")])
def test_another_interpreter_for_what_runs_inside_the_trainer_is_refused(name, package):
    pytest.importorskip(package)
    other = config(name, python=sys.executable)
    for build in (lambda: make_pool(other, seed=1, ordered=False), lambda: make_env(other, seed=1)):
        with pytest.raises(ConfigError, match=f"env.python = .*{name} runs inside the trainer.* Leave it out"):
            build()


def test_an_evaluation_beside_training_starts_with_few_files_left(monkeypatch):
    monkeypatch.setattr(machine, "free_files", lambda: 12)
    make_pool(config(f"{TOYS}:Counter"), seed=1, ordered=False, evaluation=True).close()
    with pytest.raises(ConfigError, match="needs 50 open files, and 12 more may be opened"):
        make_pool(config(f"{TOYS}:Counter"), seed=1, ordered=False)


def test_registered_names_come_first_and_are_suggested():
    register_env("my_maze", "json:dumps")
    env = resolve("my_maze", {"size": 3})
    assert (env.name, env.kind, env.target, env.kwargs) == ("my_maze", "call", "json:dumps", {"size": 3})
    with pytest.raises(UnknownEnvError, match="Did you mean: my_maze"):
        resolve("my_mase")
    register_env("dumps", json.dumps)
    assert resolve("dumps").target == "json:dumps"


@pytest.mark.parametrize("target", [lambda: None, (lambda: lambda: None)(), 3])
def test_what_a_worker_cannot_import_is_refused(target):
    with pytest.raises(UsageError, match="cannot be imported by a worker process"):
        register_env("mine", target)


@pytest.mark.parametrize("name", ["", "a:b", "a,b"])
def test_names_must_not_look_like_others(name):
    with pytest.raises(UsageError, match="register_env: the name"):
        register_env(name, "json:dumps")


SCRIPT = """
import sys
import gymnasium
import numpy as np
from gymnasium import spaces
from pronghorn.config import Config, EnvConfig
from pronghorn.envs.registry import make_pool, register_env

class Maze(gymnasium.Env):
    observation_space, action_space = spaces.Discrete(9), spaces.Discrete(2)
    def __init__(self, start=0):
        self.start = start
    def reset(self, *, seed=None, options=None):
        return self.start, {}
    def step(self, action):
        return 1, 0.0, False, False, {}

class Mazes(gymnasium.vector.VectorEnv):
    single_observation_space, single_action_space = Maze.observation_space, Maze.action_space
    def __init__(self, num_envs, render_mode=None):
        self.num_envs = num_envs
    def reset(self, *, seed=None, options=None):
        return np.zeros(self.num_envs, int), {}

if __name__ == "__main__":
    register_env("maze", Maze)
    gymnasium.register("Mine-v0", Maze, max_episode_steps=2, kwargs={"start": 5})
    gymnasium.register("Many-v0", Maze, vector_entry_point=Mazes)
    pool = make_pool(Config(env="gym:Many-v0"), seed=1, ordered=False)
    print(pool.num_rows, pool.spec.rows_per_env)
    pool.close()
    for name in ("maze", "gym:Mine-v0"):
        pool = make_pool(Config(env=EnvConfig(id=name, workers=2, envs_per_worker=1)), seed=1, ordered=True)
        print(name, pool.recv(10.0).obs["obs"].tolist())
        for _ in range(2):
            pool.send(np.arange(2), np.zeros((2, 1), int), np.zeros((2, 0), np.float32))
            ready = pool.recv(10.0)
        print(ready.truncated.tolist())
        pool.close()
"""


@pytest.mark.case("ENV-06")
@pytest.mark.case("DST-01")
def test_what_only_the_script_registered_travels_to_the_workers(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "1024 512",
        "maze [0, 0]",
        "[False, False]",
        "gym:Mine-v0 [5, 5]",
        "[True, True]",
    ]


def test_rows_that_step_as_one_need_a_vector_entry_point():
    with pytest.raises(ConfigError, match=r"env.vector_rows = 8: gym:Acrobot-v1 has no vector entry point"):
        make_pool(Config(env=EnvConfig(id="gym:Acrobot-v1", vector_rows=8)), seed=1, ordered=False)


@pytest.mark.case("ENV-06")
def test_an_id_that_cannot_travel_is_refused_with_the_fix():
    gymnasium.register("Local-v0", lambda: None)
    try:
        with pytest.raises(UsageError, match="top level of a module"):
            resolve("gym:Local-v0")
    finally:
        del gymnasium.registry["Local-v0"]


def test_the_list_of_environments():
    names = {listing.name: listing for listing in list_envs()}
    assert {"doom:basic", "gym:CartPole-v1", "envpool:<Id>"} <= set(names)
    assert names["gym:CartPole-v1"].extra == ""
    absent = registry.Listing("doom:x", "Walk.", "doom")
    assert str(absent).split(None, 1) == ["doom:x", "Walk.  (absent: pip install 'pronghorn-rl[doom]')"]
    assert all(listing.summary for listing in names.values())


def test_arguments_of_the_environment_and_of_the_adapter():
    one = config(
        "x",
        args={"length": "3", "rate": "0.5", "name": "flat", "names": "['a']", "adapter.frame_skip": "2", "on": "true"},
        obs_keys=("image",),
        image_layout="hwc",
    )
    kwargs, options = registry._arguments(one)
    assert kwargs == {"length": 3, "rate": 0.5, "name": "flat", "names": ["a"], "on": True}
    assert options == {"frame_skip": 2, "obs_keys": ["image"], "image_layout": "hwc"}


def test_a_pool_from_a_config():
    names = f"{TOYS}:Counter,{TOYS}:RandomWalk"
    pool = make_pool(config(names, envs_per_worker=4, groups=2, args={"length": "3"}), seed=1, ordered=True)
    try:
        assert pool.num_rows == 4
        assert pool.tasks == (f"{TOYS}:Counter", f"{TOYS}:RandomWalk")
        assert pool.recv(10.0).rows.tolist() == [0, 1]
    finally:
        pool.close()


def test_an_atari_pool_from_a_config():
    pytest.importorskip("ale_py")
    pool = make_pool(config("atari:Pong", envs_per_worker=2), seed=1, ordered=True)
    try:
        ready = pool.recv(10.0)
        assert ready.rows.tolist() == [0, 1]
        assert ready.obs["obs"].dtype == np.uint8
    finally:
        pool.close()
    with pytest.raises(ConfigError, match=r"env.args = 'lifeloss': Atari has no such argument. It has: .*life_loss"):
        make_pool(config("atari:Pong", args={"lifeloss": "true"}), seed=1, ordered=True)


def test_a_game_of_pettingzoo_from_a_config():
    """Two archers and two knights, who are rows of one environment."""
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    name = "pettingzoo:butterfly.knights_archers_zombies_v11"
    assert name in {listing.name for listing in list_envs()}
    env = make_env(config(name), seed=1, render=True)
    try:
        ready = env.receive()
        assert ready.event.tolist() == [Event.FIRST] * 4
        answer(env, ready)
        assert env.receive().event.tolist() == [Event.STEP] * 4
        assert env.render().shape == (720, 1280, 3)
    finally:
        env.close()


def test_games_in_turns_from_a_config():
    """Of tic-tac-toe's two players one acts, and the other waits."""
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    name = "pettingzoo:classic.tictactoe_v3"
    assert {listing.name: listing.summary for listing in list_envs()}[name] == "PettingZoo, in turns"
    env = make_env(config(name), seed=1, render=True)
    try:
        assert env.receive().event.tolist() == [Event.FIRST, Event.INACTIVE]
        assert env.render().shape == (1000, 1000, 3)
    finally:
        env.close()


@pytest.mark.case("MAS-13")
def test_padding_and_team_rewards_from_a_config():
    name = f"{TOYS}:Squad"
    with pytest.raises(EnvError, match=r"spaces of 'a' and 'b' differ.* Pad shorter vectors.*: --env.pad-spaces"):
        make_env(config(name), seed=1)
    env = make_env(config(name, pad_spaces=True, team_reward="sum"), seed=1)
    try:
        assert env.spec.observation["x"].shape == (4,)
        answer(env, env.receive())
        assert env.receive().reward.tolist() == [3, 3, 3]  # each of three got 1
    finally:
        env.close()


def test_back_ends_do_not_mix():
    pytest.importorskip("ale_py")
    with pytest.raises(ConfigError, match="must share a back end"):
        make_pool(config(f"atari:Pong,{TOYS}:Counter"), seed=1, ordered=False)


def answer(env, ready):
    num = len(ready.rows)
    env.pool.send(ready.rows, np.zeros((num, env.spec.action.num_discrete), np.int64), np.zeros((num, 0), np.float32))


def test_a_single_environment_for_videos():
    env = make_env(config(f"{TOYS}:Counter", envs_per_worker=4, args={"length": "2"}), seed=1)
    try:
        assert env.receive().rows.tolist() == [0]
        assert env.render() is None
    finally:
        env.close()


def test_a_single_environment_draws_when_asked():
    env = make_env(config("gym:CartPole-v1"), seed=1, render=True)
    try:
        env.receive()
        assert env.render().shape == (400, 600, 3)
    finally:
        env.close()


def test_how_an_episode_ended_is_drawn_before_the_reset_of_the_same_step():
    """Episodes of four steps, which are drawn; the second step loses a life, which is no end."""
    env = make_env(config(f"{TOYS}:LifeLoss"), seed=1)
    shown = []
    try:
        for _ in range(10):
            ready = env.receive()
            ending, now = env.render_ending(), env.render()
            shown.append((None if ending is None else int(ending[0, 0, 0]), int(now[0, 0, 0])))
            answer(env, ready)
    finally:
        env.close()
    episode = [(None, 1), (None, 2), (None, 3), (4, 0)]
    assert shown == [(None, 0), *episode, *episode, (None, 1)]


def test_an_image_observation_stands_in_for_a_picture(tmp_path):
    (tmp_path / "camera.py").write_text(
        "import numpy as np\nfrom gymnasium import Env, spaces\n\nclass Camera(Env):\n"
        "    observation_space, action_space = spaces.Box(0, 255, (2, 20, 24), np.uint8), spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.stack([np.full((20, 24), 7, np.uint8), np.full((20, 24), 9, np.uint8)]), {}\n"
        "    def render(self):\n        return None\n"
    )
    env = make_env(config(f"{tmp_path}/camera.py:Camera"), seed=1, render=True)
    try:
        env.receive()
        frame = env.render()
        assert frame.shape == (20, 24, 3)
        assert np.all(frame == 9)  # the newest of the stack
    finally:
        env.close()


def test_a_lost_single_environment_is_an_error():
    env = make_env(config(f"{TOYS}:Failing", args={"how": "kill", "at": "1"}), seed=1)
    try:
        answer(env, env.receive())
        with pytest.raises(EnvError, match="was killed by SIGKILL"):
            env.receive()
    finally:
        env.close()


def test_of_several_rows_what_the_environment_draws_is_shown():
    env = make_env(config(f"{TOYS}:vector_cart_poles"), seed=1, render=True)
    try:
        ready = env.receive()
        assert ready.rows.tolist() == [0, 1]
        before = env.render()
        answer(env, ready)
        env.receive()
        assert before.shape == (400, 600, 3)
        assert (env.render() != before).any()
    finally:
        env.close()


def test_the_picture_of_a_row_that_waits_stays(tmp_path):
    """Next-step auto-reset: while the first row waits, its last image observation is shown."""
    (tmp_path / "cameras.py").write_text(
        "import numpy as np\nfrom gymnasium import Env, spaces\nfrom gymnasium.vector import SyncVectorEnv\n\n"
        "class Camera(Env):\n"
        "    observation_space, action_space = spaces.Box(0, 255, (20, 24, 3), np.uint8), spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n        self.t = 0\n        return self.see(), {}\n"
        "    def step(self, action):\n        self.t += 1\n        return self.see(), 0.0, self.t == 2, False, {}\n"
        "    def see(self):\n        return np.full((20, 24, 3), 10 * self.t, np.uint8)\n\n"
        "def make():\n    return SyncVectorEnv([Camera, Camera])\n"
    )
    env = make_env(config(f"{tmp_path}/cameras.py:make"), seed=1, render=True)
    shown = []
    try:
        for _ in range(5):
            ready = env.receive()
            shown.append(int(env.render()[0, 0, 0]))
            answer(env, ready)
    finally:
        env.close()
    assert shown == [0, 10, 10, 0, 10]
