"""Learning runs of benchmarks: what is done is left alone, what was stopped is begun anew or gone on with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import runs

TRAINS = """
import sys
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--run-dir") + 1])
run.mkdir(exist_ok=True)
(run / "config.toml").touch()
(run / f"started-{len(list(run.iterdir()))}").write_text(" ".join(sys.argv[1:]))
print("a warning before it")
print("reached its limit (steps): 10 steps" if "--steps" in sys.argv else "stopped by a signal")
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    """In place of `pronghorn`: it keeps what it was called with."""
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    return (sys.executable, str(script))


def calls(run: Path) -> list[str]:
    return [path.read_text() for path in sorted(run.glob("started-*"))]


def test_a_run_that_reached_its_limit_is_not_made_again(tmp_path: Path, program: tuple[str, ...]) -> None:
    run = tmp_path / "out" / "one"
    for _ in range(2):
        said = runs.train(run, "gym:CartPole-v1", "--steps", "10", program=program)
        assert said == "reached its limit (steps): 10 steps"
    assert calls(run) == [f"train gym:CartPole-v1 --steps 10 --run-dir {run} --log.live off"]


@pytest.mark.parametrize("go_on", [True, False])
def test_a_run_that_was_stopped_goes_on_or_is_begun_anew(
    tmp_path: Path, program: tuple[str, ...], capsys: pytest.CaptureFixture[str], go_on: bool
) -> None:
    run = tmp_path / "one"
    assert runs.train(run, "gym:CartPole-v1", go_on=go_on, program=program) == ""
    assert "stopped by a signal" in capsys.readouterr().out
    assert runs.train(run, "gym:CartPole-v1", "--steps", "10", go_on=go_on, program=program)
    assert len(calls(run)) == (2 if go_on else 1)
    assert ("--resume" in calls(run)[-1]) == go_on


def test_the_first_error_of_a_lane_is_raised() -> None:
    done: list[int] = []
    with pytest.raises(ZeroDivisionError):
        runs.in_lanes(lambda number: done.append(1 // number), [1, 0, 1], 2)
    assert done == [1, 1]
