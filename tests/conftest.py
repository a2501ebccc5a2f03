"""Shared by all tests: the cases that they may claim to cover, their order, and what they must not leave behind."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import tomllib
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from leftovers import Leftovers

CASES: dict[str, str] = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())
_COVERED = pytest.StashKey[set[str]]()
_LEFTOVERS = pytest.StashKey[Leftovers]()
_FOUND = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tests' networks are tiny: threads that wait for each other would cost more than they compute."""
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in a random order")


def pytest_configure(config: pytest.Config) -> None:
    """Signals mean what they mean by default, also where the tests were started with them ignored (nohup, a background
    job of a script): the runs that they start inherit it.
    """
    for name in ("SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    if not config.option.collectonly:
        config.stash[_LEFTOVERS] = Leftovers()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A session that leaves something behind has failed, whatever its tests said."""
    leftovers = session.config.stash.get(_LEFTOVERS, None)
    interrupted = session.exitstatus == pytest.ExitCode.INTERRUPTED  # its last test still holds what it had
    found = leftovers.found() if leftovers and not interrupted else []
    session.config.stash[_FOUND] = found
    if found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that names a case nobody knows is an error, not a silent extra. Runs before tests are deselected."""
    covered = config.stash.setdefault(_COVERED, set())
    for item in items:
        for mark in item.iter_markers("case"):
            for case in mark.args:
                if case not in CASES:
                    raise pytest.UsageError(f"{item.nodeid}: unknown case id {case!r}; tests/cases.toml lists them")
                covered.add(case)
    if config.option.shuffle is not None:
        items[:] = shuffled(items, config.option.shuffle)


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Files in a random order, and the tests of each in one: what a file sets up once is set up once."""
    rng = random.Random(seed)
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    files = list(by_file.values())
    rng.shuffle(files)
    for tests in files:
        rng.shuffle(tests)
    return [item for tests in files for item in tests]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was left behind. After `pytest --collect-only`: which cases have a test, and which have none yet."""
    for text in config.stash.get(_FOUND, []):
        terminalreporter.write_line(f"LEFT BEHIND: {text}", red=True)
    covered = config.stash.get(_COVERED, set())
    if config.option.collectonly and covered:
        terminalreporter.write_line(f"cases with a test ({len(covered)} of {len(CASES)}): {' '.join(sorted(covered))}")
        terminalreporter.write_line(f"without: {' '.join(sorted(CASES.keys() - covered))}")
