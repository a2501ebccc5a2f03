"""The wheel has every file of the package, and works where nothing else of it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_in_an_environment_of_its_own() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    argv = [sys.executable, str(Path(__file__).with_name("wheel.py")), "--borrow"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "built, installed and tested" in done.stdout
