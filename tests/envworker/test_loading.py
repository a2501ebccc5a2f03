from __future__ import annotations

from pathlib import Path

import pytest

from pronghorn.envworker import loading
from pronghorn.envworker.building import make
from pronghorn.envworker.loading import NotFound, PackageMissing, load

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("no_such_module:make", "there is no module 'no_such_module'"),
        (TOYS + ":Countr", "has no 'Countr'; near: Counter"),
        ("/no/such/file.py:make", "there is no file '/no/such/file.py'"),
        ("just_a_name", "names no function"),
    ],
)
def test_what_cannot_be_loaded_is_named(target, match):
    with pytest.raises(NotFound, match=match):
        load(target)


def test_a_file_is_loaded_once_and_never_as_main(tmp_path):
    path = tmp_path / "script_of_mine.py"
    path.write_text("count = 0\nif __name__ == '__main__':\n    raise SystemExit\ndef f():\n    return count\n")
    assert load(f"{path}:f") is load(f"{path}:f")


@pytest.mark.case("ENV-10")
def test_three_different_messages_for_three_different_mistakes(monkeypatch):
    monkeypatch.setattr(loading, "PLUGINS", (("Gone-", "no_such_module", "atari", "gone-py"),))
    with pytest.raises(PackageMissing, match="gym:Gone-v0 needs the package 'gone-py'") as missing:
        make("gym", "Gone-v0")
    assert missing.value.extra == "atari"
    with pytest.raises(NotFound, match="near: CartPole-v1"):
        make("gym", "CartPol-v1")
    with pytest.raises(NotFound, match=r"nothing has registered the namespace 'mine'.*gym:PACKAGE:mine/Maze-v0"):
        make("gym", "mine/Maze-v0")
