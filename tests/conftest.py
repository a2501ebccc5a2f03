"""Shared by all tests: the list of acceptance cases that tests may claim to cover."""

from __future__ import annotations

import re

import pytest

_FAMILIES = ("ENV", "SPA", "EPI", "RNN", "COR", "ASY", "FLT", "RES", "SHM", "PRF", "MAS", "PBT", "DST", "EVL", "CLI")
_CASE = re.compile(rf"^({'|'.join((*_FAMILIES, 'LOG'))})-\d\d$")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that names a case nobody knows is an error, not a silent extra."""
    for item in items:
        for mark in item.iter_markers("case"):
            for case in mark.args:
                if not _CASE.match(case):
                    raise pytest.UsageError(f"{item.nodeid}: unknown case id {case!r}")
