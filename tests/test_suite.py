"""The test suite itself: what it leaves behind fails it, and its order may be shuffled."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from conftest import shuffled

TESTS = Path(__file__).parent
LEAVING = """
import os, subprocess, tempfile
def test_it():
    subprocess.Popen(["sleep", "120"], stdout=subprocess.DEVNULL)
    subprocess.run(["sh", "-c", "setsid sleep 121 >/dev/null 2>&1 & exit 0"])
    tempfile.mkdtemp(prefix="forgotten-")
    open("forgotten.txt", "w").close()
    open("/dev/shm/pronghorn-test-%d" % os.getpid(), "w").close()
"""
TIDY = "import tempfile\ndef test_it():\n    tempfile.TemporaryDirectory().cleanup()\n"


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """A session of its own over a file with this code, which waits half a second for others to clean up."""
    for name in ("conftest.py", "leftovers.py", "cases.toml"):
        (folder / name).write_text((TESTS / name).read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.5"))
    (folder / "test_one.py").write_text(code)
    (folder / "pytest.ini").write_text("[pytest]\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def test_a_session_that_leaves_nothing_passes(tmp_path: Path) -> None:
    done = run(tmp_path, TIDY)
    assert (done.returncode, "LEFT BEHIND" in done.stdout) == (0, False), done.stdout


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory as files here")
def test_what_a_session_leaves_behind_fails_it(tmp_path: Path) -> None:
    done = run(tmp_path, LEAVING)
    left = [line.removeprefix("LEFT BEHIND: ") for line in done.stdout.splitlines() if line.startswith("LEFT BEHIND")]
    for text in left:
        if text.startswith("process "):
            subprocess.run(["kill", text.split()[1]], check=False)
        elif text.startswith("/dev/shm/pronghorn-test-"):
            Path(text).unlink()
    assert (done.returncode, "1 passed" in done.stdout) == (1, True), done.stdout
    assert sorted(text.split()[-1] for text in left if text.startswith("process")) == ["120", "121"]
    assert any(text.startswith("temporary file forgotten-") for text in left)
    assert str(tmp_path / "forgotten.txt") in left
    assert any(text.startswith("/dev/shm/pronghorn-test-") for text in left)


def test_a_shuffled_order_keeps_files_together_and_repeats() -> None:
    items: list[Any] = [SimpleNamespace(path=Path(f), n=n) for f in "abcdef" for n in range(9)]

    def order(seed: int) -> list[tuple[str, int]]:
        return [(str(item.path), item.n) for item in shuffled(items, seed)]

    plain = [(str(item.path), item.n) for item in items]
    assert order(1) == order(1)
    assert len({tuple(plain), tuple(order(1)), tuple(order(2))}) == 3
    assert sorted(order(1)) == plain
    files = [file for file, _ in order(1)]
    assert sum(one != other for one, other in itertools.pairwise(files)) == 5  # each file is in one piece
