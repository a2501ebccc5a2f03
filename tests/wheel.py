"""Builds the wheel, installs it into an environment of its own, and runs tests there: `python tests/wheel.py`.

What is tested is what is published: files that the wheel lacks are not found beside it. `--borrow` takes the packages
that it needs from the interpreter that runs this, and downloads nothing; without it pip installs them, by
constraints.txt.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ("py.typed", "defaults.toml", "evaluation/human_scores.csv")
CHOSEN = ("ops", "test_config.py", "test_defaults.py", "test_settings_file.py", "training/test_checkpoint.py",
          "envs/test_process.py", "evaluation/test_scores.py")  # fmt: skip


def run(*argv: str | Path, cwd: Path) -> None:
    """A command that must succeed."""
    subprocess.run(list(map(str, argv)), cwd=cwd, check=True)


def build(folder: Path, *flags: str) -> Path:
    """The wheel of a copy of the sources, so that none of its by-products lie among them."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *flags, "-w", folder, source, cwd=folder)
    shutil.rmtree(source)
    return next(folder.glob("*.whl"))


def check(wheel: Path) -> None:
    """Every module and every file of data is in it, and nothing else of ours."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ROOT / "src" / "pronghorn"
    wanted = {f"pronghorn/{path.relative_to(package)}" for path in package.rglob("*.py")}
    wanted |= {f"pronghorn/{name}" for name in DATA}
    assert names == wanted, f"missing {sorted(wanted - names)}, too many {sorted(names - wanted)}"


def install(folder: Path, wheel: Path, *, borrow: bool) -> Path:
    """The interpreter of an environment that has the wheel and what its tests need."""
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    if borrow:  # by a path alone, so that what is installed there in editable form is not found
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        own = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        (Path(own) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=folder)
    else:
        constraints = ("-c", ROOT / "constraints.txt")
        run(python, "-m", "pip", "install", "-q", *constraints, "torch", "numpy", cwd=folder)
        run(python, "-m", "pip", "install", "-q", *constraints, f"{wheel}[dev]", cwd=folder)
    return python


def test(folder: Path, python: Path) -> None:
    """Some tests, away from the sources, against the package as it was installed."""
    away = folder / "away"
    shutil.copytree(ROOT / "tests", away / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", away)
    code = "import pronghorn, sys; p = pronghorn.__file__; print(p); sys.exit(sys.prefix not in p)"
    run(python, "-I", "-c", code, cwd=away)
    run(folder / "venv" / "bin" / "pronghorn", "--version", cwd=away)
    run(folder / "venv" / "bin" / "pronghorn", "train", "--preset", "list", cwd=away)
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in CHOSEN), cwd=away)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--borrow", action="store_true", help="download nothing")
    borrow = parser.parse_args().borrow
    with tempfile.TemporaryDirectory(prefix="pronghorn-wheel-") as name:
        folder = Path(name)
        wheel = build(folder, *(["--no-build-isolation"] if borrow else []))
        check(wheel)
        test(folder, install(folder, wheel, borrow=borrow))
    print(f"{wheel.name}: built, installed and tested")


if __name__ == "__main__":
    main()
