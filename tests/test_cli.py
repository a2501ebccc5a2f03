"""The command line as a user meets it: clear messages, codes, and speed of refusal; evaluation, video and report."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pronghorn.cli import main, parse_train, run
from pronghorn.config import Config, replace
from pronghorn.errors import CheckpointError, ConfigError, PronghornError, UnknownEnvError, UsageError
from pronghorn.training.trainer import train

TESTS = Path(__file__).parent


def pronghorn(*argv: str, timeout_s: float = 60.0) -> tuple[int, str, float]:
    """(exit code, all output, seconds) of a command run as a process."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pronghorn", *argv], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["train", "doom:basik"], 2, "doom:basic"),
        (["train", "gym:CartPol-v1"], 2, "CartPole"),
        (["train", "no_such_module:make"], 2, "no module"),
        (["train", "gym:CartPole-v1", "--learner.lr", "-1"], 2, "must be greater than 0"),
        (["train", "gym:CartPole-v1", "--learner.lrr", "1"], 2, "--learner.lr"),
        (["train", "gym:CartPole-v1", "--preset", "sf-dom"], 2, "Did you mean 'sf-doom'"),
        (["train"], 2, "No environment was named"),
        (["train", "doom"], 2, "Example: doom:basic"),
        (["train", "gym:CartPole-v1", "--seed", "-1"], 2, "seed = -1: must not be negative"),
        (["train", "gym:CartPole-v1", "--model.core-size", "0"], 2, "model.core_size = 0: must be greater than 0"),
        (["train", "gym:CartPole-v1", "--model.mlp-layers", "0"], 2, "model.mlp_layers = 0: must be greater than 0"),
        (["train", "gym:CartPole-v1", "--max-lag", "-1"], 2, "more runs free"),
        (["tarin", "doom:basic"], 2, "no command 'tarin'"),
        (["eval", "/no/such/run"], 2, "no run directory"),
        (["match", "/no/such/run", "random"], 2, "There is no run directory '/no/such/run'. A player is"),
    ],
    ids=lambda x: "-".join(x[:2]) if isinstance(x, list) else None,
)
def test_a_wrong_command_is_one_clear_message_in_seconds(argv: list[str], code: int, text: str) -> None:
    returned, output, seconds = pronghorn(*argv)
    assert returned == code, output
    assert text in output
    assert "Traceback" not in output
    assert seconds < 10  # under 5 on an idle machine


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--learner.unroll-length", "10000000000"], "GiB are free"),
        (["--model.core", "gru", "--model.core-size", "1000000"], "does not fit into memory"),
        (["--learner.minibatches", "7"], "must divide"),
        (["--log.wandb"], "pronghorn-rl[wandb]"),
        (["--threads", "1000000"], "threads = 1000000: must be at most"),
        (["--env.workers", "1000000"], "env.workers = 1000000: "),
        (["--env.envs-per-worker", "10000000000"], "env.workers = 1: with 10,000,000,000 environments"),
    ],
)
def test_a_start_that_fails_is_one_message_and_leaves_nothing_behind(
    flags: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    small = ["--env.workers", "1", "--env.envs-per-worker", "2", "--log.live", "off"]
    with pytest.raises(PronghornError) as info:
        run(["train", "gym:CartPole-v1", "--run-dir", str(tmp_path / "run"), *small, *flags])
    assert text in str(info.value)
    assert not (tmp_path / "run").exists()


def test_a_start_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    one = ["--env.workers", "1", "--env.envs-per-worker", "1"]
    with pytest.raises(PronghornError, match="no licence found"):
        run(["train", f"{TESTS / 'toy_envs.py'}:Unbuildable", "--run-dir", str(tmp_path), *one])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_steps_may_be_written_as_powers_of_ten() -> None:
    assert parse_train(["gym:CartPole-v1", "--steps", "2e6", "--frames", "1.5e3"])[1].steps == 2_000_000
    assert parse_train(["gym:CartPole-v1", "--steps", "2e6", "--frames", "1.5e3"])[1].frames == 1_500


def test_the_environment_of_the_command_line_wins_over_that_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "bench.toml"
    file.write_text('threads = 1\n[env]\nid = "gym:CartPole-v1"\nworkers = 3\n')
    alone, named = (parse_train([*name, "--config", str(file)])[1] for name in ([], ["gym:Acrobot-v1"]))
    assert (alone.env.id, alone.env.workers, alone.threads) == ("gym:CartPole-v1", 3, 1)
    assert (named.env.id, named.env.workers, named.threads) == ("gym:Acrobot-v1", 3, 1)


@pytest.mark.parametrize("command", ["train", "bench", "eval", "match", "record", "watch", "report", "doctor"])
def test_every_command_explains_itself(command: str) -> None:
    code, output, _ = pronghorn(command, "--help")
    assert code == 0
    assert "usage: pronghorn " + command in output
    assert len(output.splitlines()) > 5


def test_a_connection_that_breaks_in_training_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reader of the output that went away is one; a service of the run that did is not."""

    def train(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("pronghorn.training.trainer.train", train)
    with pytest.raises(RuntimeError, match="connection broke"):
        main(["train", "gym:CartPole-v1", "--run-dir", str(tmp_path / "run")])


def test_every_setting_is_explained() -> None:
    _, output, _ = pronghorn("train", "doom:basic", "--help")
    joined = " ".join(output.replace("│", " ").split())
    for words in ("--learner.unroll-length", "consecutive decisions", "--env.python", "another Python interpreter",
                  "--max-lag", "Largest policy lag in iterations"):  # fmt: skip
        assert words in joined


def test_a_missing_extra_names_the_one_command() -> None:
    code = (
        "import sys; sys.modules['ale_py'] = None\n"
        "from pronghorn.cli import main\n"
        "main(['train', 'atari:Pong', '--run-dir', '/tmp/never-made'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install 'pronghorn-rl[atari]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("/tmp/never-made").exists()


def test_an_unknown_environment_leaves_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UnknownEnvError):
        train(Config(env="gym:Nothing-v0", run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "cartpole"
    values = {
        "run_dir": str(run_dir), "steps": 2_000, "env.workers": 1, "env.envs_per_worker": 4, "log.live": "off",
        "learner.unroll_length": 16, "learner.batch_unrolls": 8, "learner.minibatches": 2,
    }  # fmt: skip
    train(replace(Config(env="gym:CartPole-v1"), values))
    return run_dir


@pytest.mark.case("EVL-08", "EVL-05", "EVL-09")
def test_eval_plays_exactly_the_episodes_asked_for_and_repeats(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p.name: p.read_bytes() for p in next((trained / "checkpoints").iterdir()).iterdir()}
    results = []
    for _ in range(2):
        assert run(["eval", str(trained), "--episodes", "13", "--json", "--random"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    first = results[0]
    assert first["episodes"] == 13 == len(first["returns"])
    assert {"mean", "stderr", "median", "iqm", "iqm_ci95", "checkpoint", "policy", "random_mean"} <= first.keys()
    assert first["policy"] == "sampled"
    assert first["iqm_ci95"][0] <= first["iqm"] <= first["iqm_ci95"][1]
    assert 15 < first["random_mean"] < 35  # a random policy on CartPole
    assert {p.name: p.read_bytes() for p in next((trained / "checkpoints").iterdir()).iterdir()} == before
    assert run(["eval", str(trained), "--episodes", "3", "--deterministic"]) == 0
    assert "deterministic actions" in capsys.readouterr().out


@pytest.mark.case("EVL-01", "EVL-04")
def test_record_writes_a_video_without_a_display(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from imageio_ffmpeg import count_frames_and_secs

    monkeypatch.delenv("DISPLAY", raising=False)
    pytest.importorskip("pygame")
    out = tmp_path / "videos" / "agent.mp4"
    assert run(["record", str(trained), "--out", str(out), "--seconds", "0.5"]) == 0
    assert count_frames_and_secs(str(out))[0] == 25  # decodes every frame
    with pytest.raises(UsageError, match="at least one frame"):
        run(["record", str(trained), "--out", str(out), "--seconds", "0"])
    assert sorted(p.name for p in out.parent.iterdir()) == ["agent.mp4"]


def test_a_video_of_an_environment_of_several_rows(tmp_path: Path) -> None:
    from imageio_ffmpeg import count_frames_and_secs

    env, run_dir, out = f"{TESTS}/toy_envs.py:vector_cart_poles", tmp_path / "run", tmp_path / "agent.mp4"
    sizes = ["--env.workers", "1", "--env.envs-per-worker", "1", "--learner.unroll-length", "16", "--steps", "64"]
    assert run(["train", env, "--run-dir", str(run_dir), *sizes]) == 0
    assert run(["record", str(run_dir), "--out", str(out), "--seconds", "0.2"]) == 0
    assert count_frames_and_secs(str(out))[0] == 10


def test_report_is_one_page_and_a_picture(trained: Path, tmp_path: Path) -> None:
    out, curve = tmp_path / "report.html", tmp_path / "curve.png"
    assert run(["report", str(trained), "--out", str(out), "--curve", str(curve)]) == 0
    assert "<svg" in out.read_text()
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_tables_of_flags_are_added_to_those_of_a_file_or_of_the_run_that_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    table = '[env]\nid = "doom:duel"\nargs = {timeout_tics = "2100", bots = "0"}\n'
    table += '[population]\nranges = {lr = "1..2"}\n'
    for file, argv in (
        (tmp_path / "settings.toml", ["--config", str(tmp_path / "settings.toml")]),
        (run_dir / "config.toml", ["--resume", "--run-dir", str(run_dir)]),
    ):
        file.write_text(table)
        same = parse_train(["doom:duel", "--env.args", "timeout_tics", "2100", *argv])[1]
        assert same.env.args == {"timeout_tics": "2100", "bots": "0"}
        more = parse_train(["doom:duel", "--env.args", "bots", "1", "width", "64", *argv])[1]
        assert more.env.args == {"timeout_tics": "2100", "bots": "1", "width": "64"}
        assert more.population.ranges == {"lr": "1..2"}


def test_resume_with_another_environment_is_refused(trained: Path) -> None:
    for env in ("gym:Acrobot-v1", "doom:basic"):
        with pytest.raises(ConfigError, match=f"env.id = '?{env}'?: cannot change when a run is resumed"):
            run(["train", env, "--run-dir", str(trained), "--resume", "--steps", "100"])


def test_a_video_of_an_unknown_kind_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in .mp4.*Try .*agent.mp4"):
        run(["record", str(trained), "--out", str(tmp_path / "agent.foo")])
    assert list(tmp_path.iterdir()) == []


def test_eval_says_when_the_newest_checkpoint_was_damaged(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    (last,) = (run_dir / "checkpoints").iterdir()
    newer = last.with_name(f"{int(last.name) + 1:012d}")
    shutil.copytree(last, newer)
    (newer / "weights.safetensors").write_bytes(b"no")
    assert run(["eval", str(run_dir), "--episodes", "1"]) == 0
    assert "Passed over a damaged checkpoint" in capsys.readouterr().err


@pytest.mark.case("RES-02")
def test_eval_of_an_unreadable_checkpoint_is_one_message(trained: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(trained, broken)
    next((broken / "checkpoints").iterdir()).joinpath("weights.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="differs from its checksum"):
        run(["eval", str(broken), "--episodes", "1"])
    with pytest.raises(PronghornError, match=r"not a run directory: it has no config\.toml"):
        run(["eval", str(tmp_path), "--episodes", "1"])


def test_doctor_and_envs_print_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) in (0, 1)  # of a machine that lacks something, too
    assert "cores" in capsys.readouterr().out
    assert run(["envs"]) == 0
    listed = capsys.readouterr().out
    assert "doom:basic" in listed
    assert "gym:CartPole-v1" in listed
