"""The comparison with peers without any peer: counters on lines that they printed, rates and ratios by hand, and runs
of small stand-ins that must leave nothing behind.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import peers
import side_by_side
import vs_peers
import vs_sample_factory
from peers import OURS, PEERS, WORKS, AbsentError, Peer, Work, install, reason
from running import has_ended
from side_by_side import BENCHMARKS, Contender, Run, in_turn, measured, read_metrics, rounds, steady_part, train

CONTENDERS = {f"{name}-{each.name}": (name, each) for name, work in WORKS.items() for each in work.contenders}

# as they were printed: a line that holds a count, and lines that hold none
SAMPLE_FACTORY = (
    "\x1b[36m[2026-11-30 11:01:55,007][09359] Fps is (10 sec: 0.0, 60 sec: 272.8, 300 sec: 139.1). "
    "Total num frames: 16384. Throughput: 0: 75.2. Samples: 8320. Policy #0 lag: (min: 1.0, avg: 1.0, max: 1.0)\x1b[0m"
    "\n"
)
NO_COUNT = (
    "\x1b[36m[2026-11-30 11:01:55,320][09359] Avg episode reward: [(0, '-1.658')]\x1b[0m\n",
    "\x1b[36m(SingleAgentEnvRunner pid=8204)\x1b[0m [Powered by Stella]\n",
    "2026-11-30 10:56:03,840 WARNING util.py:62 -- Install gputil for GPU system monitoring.\n",
    "(pid=7) at steps 16384\n",
)


def stand_in(name: str, code: str) -> Contender:
    return Contender(name, name, ("-c", code))


COUNTING = "import time\nfor n in range(10**6):\n    print('steps', n * {by}, flush=True)\n    time.sleep(0.02)\n"

# ---------------------------------------------------------------- who takes part


@pytest.mark.parametrize(("name", "contender"), CONTENDERS.values(), ids=CONTENDERS)
def test_a_contender_is_complete(name: str, contender: Contender) -> None:
    assert contender.peer in (OURS, *PEERS)
    command = contender.command("/somewhere/python", Path("/some/run"))
    assert not any("{" in argument for argument in command)
    assert all(Path(each).is_file() for each in command if each.endswith(".py"))
    assert str(BENCHMARKS) not in contender.shown()
    assert contender.shown().startswith("python ")


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_a_work_begins_with_ours_and_names_everyone_once(work: Work) -> None:
    names = [each.name for each in work.contenders]
    assert names[0] == OURS
    assert len(set(names)) == len(names) > 1
    assert work.of([])[0].name == OURS
    assert [each.peer for each in work.of(["sample-factory"])] == [OURS, "sample-factory"]


def test_packages_have_names_without_versions_and_extras() -> None:
    assert Peer(("torch==2.13.0", "numpy<2"), ("ray[rllib]==2.60.0", "ale-py")).names == [
        "torch", "numpy", "ray", "ale-py",
    ]  # fmt: skip


# ---------------------------------------------------------------- counting


@pytest.mark.parametrize(("name", "contender"), CONTENDERS.values(), ids=CONTENDERS)
def test_the_count_is_read_from_the_lines_that_hold_it(name: str, contender: Contender) -> None:
    assert [contender.steps_in(line) for line in NO_COUNT] == [None] * len(NO_COUNT)
    if contender.peer == "sample-factory":
        assert contender.steps_in(SAMPLE_FACTORY) == (16384 if name == "cartpole" else 4096)
    elif contender.peer == OURS:
        assert contender.metrics == "run/metrics.jsonl"
    else:
        assert contender.steps_in("steps 16384\n") == 16384


def test_whole_lines_of_our_metrics_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"time_s": 1.5, "steps": 10, "more": 1}\n{"time_s": 2.5, "steps": 20}\n{"time_s": 3.5, "st')
    assert read_metrics(path) == [(1.5, 10), (2.5, 20)]


def test_a_rate_is_taken_between_changes_of_the_count_after_the_warm_up() -> None:
    curve = [(0.0, 0), (10.0, 100), (11.0, 100), (12.0, 200), (14.0, 300), (15.0, 300), (18.0, 700), (19.0, 700)]
    assert steady_part(curve, 0.0) == [(10.0, 100), (12.0, 200), (14.0, 300), (18.0, 700)]
    steady = steady_part(curve, 2.0)
    assert steady == [(12.0, 200), (14.0, 300), (18.0, 700)]
    assert measured("a", 1, steady, 5) == Run(1, "a", (700 - 200) / (18 - 12), 6.0, 500, 3, 5)
    assert steady_part([], 1.0) == steady_part([(1.0, 0)], 1.0) == []


def test_too_few_changes_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"changed only 2 times.*--seconds"):
        measured("a", 1, [(1.0, 10), (2.0, 20)], 0)


# ---------------------------------------------------------------- rounds


def test_every_second_round_goes_backwards_and_each_pair_begins_one_further_on() -> None:
    contenders = [stand_in(name, "") for name in "abc"]
    orders = ["".join(each.name for each in in_turn(contenders, number)) for number in range(1, 7)]
    assert orders == ["abc", "cba", "bca", "acb", "cab", "bac"]


def test_who_fails_is_reported_with_its_output_and_the_others_go_on() -> None:
    broken = stand_in("broken", "print('no such game'); raise SystemExit(3)")
    contenders = [stand_in("one", COUNTING.format(by=8)), broken]
    done = list(rounds(contenders, {"one": sys.executable, "broken": sys.executable}, 2, 0.3, 0.0))
    ran, failures = [x for x in done if isinstance(x, Run)], [x for x in done if not isinstance(x, Run)]
    assert [(each.round, each.contender) for each in ran] == [(1, "one"), (2, "one")]
    assert all(each.steps_per_s > 0 and each.changes >= 3 and each.peak_memory_bytes > 0 for each in ran)
    assert all(each.steps % 8 == 0 and each.steps_per_s == each.steps / each.seconds for each in ran)
    [(contender, error)] = failures
    assert contender is broken
    assert "code 3" in str(error)
    assert "no such game" in str(error)


# ---------------------------------------------------------------- nothing is left

LEAVES_THINGS = """
import mmap, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
path = f"/dev/shm/pronghorn_test_{os.environ['MARK']}"
with open(path, "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
print("left", os.getpid(), child.pid, path, os.environ["TMPDIR"], flush=True)
for n in range(10**6):
    print("steps", n, flush=True)
    time.sleep(0.02)
"""


def test_a_run_leaves_no_process_no_shared_memory_and_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MARK", tmp_path.name + tmp_path.parent.name)
    seen: list[str] = []

    class Spying(Contender):
        def steps_in(self, line: str) -> int | None:
            seen.extend([line] if line.startswith("left") else [])
            return super().steps_in(line)

    curve, memory_bytes = train(Spying("a", "a", ("-c", LEAVES_THINGS)), sys.executable, 0.3, 0.0)
    assert len(curve) > 3
    assert memory_bytes > 0
    [[_, parent, child, shared, folder]] = [line.split() for line in seen]
    for pid in (int(parent), int(child)):
        assert has_ended(pid)
    assert not Path(shared).exists()
    assert not Path(folder).exists()


def test_shared_memory_of_others_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(side_by_side, "SHARED_MEMORY", tmp_path)
    (tmp_path / "torch_1_2").write_text("")
    train(stand_in("a", COUNTING.format(by=1)), sys.executable, 0.1, 0.0)
    assert (tmp_path / "torch_1_2").exists()


# ---------------------------------------------------------------- installing

PIP_SAYS = """Looking in links: somewhere
ERROR: Could not find a version that satisfies the requirement peer==9 (from versions: 1.0, 2.0)
ERROR: No matching distribution found for peer==9
"""


def fake_venv(folder: Path, code: int, says: str) -> None:
    """An interpreter that answers as pip would."""
    (folder / "bin").mkdir(parents=True)
    (folder / "says").write_text(says)
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho $@ >> {folder}/asked\ncat {folder}/says\nexit {code}\n")
    python.chmod(0o755)


def test_an_absent_peer_is_reported_with_the_reason_that_pip_gave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_venv(tmp_path / "sb3", 1, PIP_SAYS)
    fake_venv(tmp_path / "cleanrl", 0, "")
    pythons, absent = vs_peers.install_all(["sb3", "cleanrl"], tmp_path)
    assert pythons == {"cleanrl": str(tmp_path / "cleanrl" / "bin" / "python")}
    assert list(absent) == ["sb3"]
    assert absent["sb3"].splitlines() == PIP_SAYS.splitlines()[1:]
    assert "No matching distribution found for peer==9" in capsys.readouterr().out


def test_pip_is_asked_once_and_again_when_the_packages_are_others(tmp_path: Path) -> None:
    fake_venv(tmp_path / "peer", 0, "")
    asked = tmp_path / "peer" / "asked"
    for _ in range(2):
        install(Peer(("torch==1",), ("peer", "game")), tmp_path / "peer")
    assert asked.read_text().splitlines() == [
        "-m pip install --quiet torch==1", "-m pip install --quiet peer game",
    ]  # fmt: skip
    install(Peer((), ("peer==2",)), tmp_path / "peer")
    assert asked.read_text().splitlines()[2:] == ["-m pip install --quiet peer==2"]


def test_without_an_error_line_the_reason_is_the_end_of_the_output() -> None:
    assert reason("a\nb\n\nc\nd\ne\nf\n") == "b\nc\nd\ne\nf"
    assert issubclass(AbsentError, Exception)


# ---------------------------------------------------------------- results


def run_of(number: int, name: str, steps_per_s: float, memory: int) -> Run:
    return Run(number, name, steps_per_s, 10.0, round(10 * steps_per_s), 5, memory)


def test_a_ratio_is_that_of_the_medians() -> None:
    """Ours 100, 300, 200: 200. The peer's 50, 40, 10: 40."""
    work = Work("a task", (stand_in(OURS, ""), stand_in("peer", "")))
    rates = {OURS: (100.0, 300.0, 200.0), "peer": (50.0, 40.0, 10.0)}
    runs = [run_of(n + 1, name, rate, 7 - n) for name, all_rates in rates.items() for n, rate in enumerate(all_rates)]
    found = vs_peers.summary(work, runs, {"other": "it broke"})
    assert found["steps_per_s"] == {OURS: 200.0, "peer": 40.0}
    assert found["ratios"] == {"peer": 5.0}
    assert found["peak_memory_bytes"] == {OURS: 7, "peer": 7}
    assert found["failed"] == {"other": "it broke"}
    assert len(found["runs"]) == 6
    assert "| peer | 40 | 5.00 | 0 |" in vs_peers.text("work", found)
    assert vs_peers.summary(work, [], {})["ratios"] == {}


def test_the_whole_comparison_writes_every_run_and_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contenders = (
        Contender(OURS, OURS, ("-c", COUNTING.format(by=8))),
        Contender("slow", "sb3", ("-c", COUNTING.format(by=4))),
        Contender("missing", "cleanrl", ("-c", "")),
    )
    monkeypatch.setitem(peers.WORKS, "pong", Work("a task", contenders))
    monkeypatch.setattr(vs_peers, "install_all", lambda *_: ({"sb3": sys.executable}, {"cleanrl": "no wheel"}))
    monkeypatch.setattr(vs_peers, "pin", lambda _: [0])
    out = tmp_path / "result.json"
    given = ["--work", "pong", "--peers", "sb3,cleanrl", "--rounds", "2", "--seconds", "0.2", "--warmup", "0.1"]
    monkeypatch.setattr(sys, "argv", ["vs_peers.py", *given, "--install", str(tmp_path), "--json", str(out)])
    assert vs_peers.main() == 1  # a peer is absent
    found = json.loads(out.read_text())
    assert found["absent"] == {"cleanrl": "no wheel"}
    assert found["versions"].keys() == {OURS, "sb3"}
    assert found["cores"] == [0]
    pong = found["works"]["pong"]
    assert [(each["round"], each["contender"]) for each in pong["runs"]] == [
        (1, OURS), (1, "slow"), (2, "slow"), (2, OURS),
    ]  # fmt: skip
    assert pong["ratios"]["slow"] == pong["steps_per_s"][OURS] / pong["steps_per_s"]["slow"]
    assert pong["commands"].keys() == {OURS, "slow"}


def test_unknown_peers_and_peers_without_a_part_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["vs_peers.py", "--install", "x", "--json", "y", "--work", "doom", "--peers"]
    for given, says in (("nobody", "unknown: nobody"), ("cleanrl", "none of --peers takes part")):
        monkeypatch.setattr(sys, "argv", [*needed, given])
        with pytest.raises(SystemExit):
            vs_peers.parse()
        assert says in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*needed, "sample-factory,cleanrl"])
    assert vs_peers.parse().peers == ["sample-factory"]


def test_the_short_form_keeps_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = (
        Contender(OURS, OURS, ("-c", COUNTING.format(by=8))),
        Contender("sample-factory", "sample-factory", ("-c", COUNTING.format(by=4))),
    )
    monkeypatch.setitem(peers.WORKS, "doom", Work("a task", contenders))
    args = argparse.Namespace(rounds=2, seconds=0.4, warmup=0.2, python=sys.executable)
    runs = vs_sample_factory.measure(args, sys.executable)
    found = vs_sample_factory.summarise(runs, [0, 1], args, sys.executable)
    assert found["ratio"] == found["ours_steps_per_s"] / found["theirs_steps_per_s"]
    assert [each.keys() for each in found["rounds"]] == [{"ours", "theirs"}] * 2
    assert found["ours_steps_per_s"] == sum(each["ours"] for each in found["rounds"]) / 2
    kept = {"ratio", "ours_steps_per_s", "theirs_steps_per_s", "rounds", "commands", "seconds", "warmup_s", "cores",
            "machine", "versions"}  # fmt: skip
    assert kept <= found.keys()
    assert found["commands"].keys() == found["versions"].keys() == {"ours", "theirs"}


def test_the_short_form_keeps_its_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["vs_sample_factory.py", "--help"])
    with pytest.raises(SystemExit):
        vs_sample_factory.main()
    shown = capsys.readouterr().out
    for flag in ("--json", "--rounds", "--seconds", "--warmup", "--cores", "--python", "--peer-python", "--install"):
        assert flag in shown
