"""Shared by all tests: the acceptance cases that they may claim to cover."""

from __future__ import annotations

import contextlib
import signal
import tomllib
from pathlib import Path

import pytest
import torch

CASES: dict[str, str] = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())
_COVERED = pytest.StashKey[set[str]]()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tests' networks are tiny: threads that wait for each other would cost more than they compute."""
    torch.set_num_threads(1)


def pytest_configure() -> None:
    """Signals mean what they mean by default, also where the tests were started with them ignored (nohup, a background
    job of a script): the runs that they start inherit it.
    """
    for name in ("SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that names a case nobody knows is an error, not a silent extra. Runs before tests are deselected."""
    covered = config.stash.setdefault(_COVERED, set())
    for item in items:
        for mark in item.iter_markers("case"):
            for case in mark.args:
                if case not in CASES:
                    raise pytest.UsageError(f"{item.nodeid}: unknown case id {case!r}; tests/cases.toml lists them")
                covered.add(case)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """After `pytest --collect-only`: which cases have a test, and which have none yet."""
    covered = config.stash.get(_COVERED, set())
    if config.option.collectonly and covered:
        terminalreporter.write_line(f"cases with a test ({len(covered)} of {len(CASES)}): {' '.join(sorted(covered))}")
        terminalreporter.write_line(f"without: {' '.join(sorted(CASES.keys() - covered))}")
