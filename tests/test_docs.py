"""The documentation stays true: functions that it names exist, the frame's path is short, code blocks compile."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAME = re.compile(r"`(pronghorn(?:\.\w+)+):([\w.]+)`")


def resolve(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_name_in_the_docs_resolves(page: Path) -> None:
    for module, name in NAME.findall(page.read_text()):
        assert resolve(module, name) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_compile(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        compile(block, str(page), "exec")


def test_a_frame_passes_at_most_16_functions_and_700_lines() -> None:
    rows = re.findall(r"^\| \d+ \| `(pronghorn[\w.]+):([\w.]+)`", (ROOT / "docs/life_of_a_frame.md").read_text(), re.M)
    functions = [inspect.unwrap(resolve(module, name)) for module, name in rows]
    assert 10 <= len(functions) <= 16
    assert sum(len(inspect.getsourcelines(f)[0]) for f in functions) <= 700


def test_every_test_that_a_page_names_exists() -> None:
    pattern = r"`(tests/[\w/]+\.py)::(\w+)`"
    named = {found for page in PAGES for found in re.findall(pattern, page.read_text())}
    assert named
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.M), f"{file}::{test}"


def test_the_shell_commands_of_the_readme_exist() -> None:
    from pronghorn.cli import run

    with pytest.raises(Exception, match="Commands: "):
        run(["nonsense"])
    named = set(re.findall(r"^pronghorn (\w+)", (ROOT / "README.md").read_text(), re.M))
    assert named <= {"train", "bench", "eval", "match", "record", "report", "watch", "envs", "doctor"}
