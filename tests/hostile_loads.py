"""A program that spoils one file of a run at a time and loads it in every way: `hostile_loads.py RUN SEED COUNT`.

It prints one JSON object: how many loads ended how, and each that ended otherwise than it must. A load must give what
was saved, or one PronghornError that names the file. A file that was spoilt and given right checksums again (*forged*)
may load as something else. It runs with little memory, and an alarm behind each load.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import pronghorn.training.checkpoint as checkpoints
import pronghorn.training.parts as parts
from members import Arena
from pronghorn.config import replace
from pronghorn.errors import PronghornError, UsageError
from pronghorn.evaluation.policy import Policy, load, load_named
from pronghorn.rules import validate
from pronghorn.settings_file import from_toml
from pronghorn.spec_file import load_spec
from pronghorn.training.beginning import Beginning
from pronghorn.training.checkpoint import params_sha

SPARE_BYTES = 1 << 30
ALARM_S = 60
STATE, CONFIG, ENV = "state.json", "config.toml", "env.json"


class Hung(BaseException):
    """The alarm went off."""


# ------------------------------------------------------------------------------------------ bytes of any file


def flip(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data[: rng.choice((0, 1, 7, 8, 9, len(data) - 1, rng.randrange(len(data))))])


def double(data: bytearray, rng: random.Random) -> bytes:
    start, size = rng.randrange(len(data)), rng.randrange(1, 200)
    return bytes(data[: start + size] + data[start:])


def zero(data: bytearray, rng: random.Random) -> bytes:
    start, size = rng.randrange(len(data)), rng.randrange(1, 200)
    data[start : start + size] = bytes(len(data[start : start + size]))
    return bytes(data)


def noise(data: bytearray, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return bytes(data[:start]) + rng.randbytes(rng.randrange(1, 64)) + bytes(data[start:])


def pickled(data: bytearray, rng: random.Random) -> bytes:
    return pickle.dumps(exit) if rng.random() < 0.5 else pickle.dumps({"weights": [1.0]})


BYTES: list[Callable[[bytearray, random.Random], bytes]] = [flip, cut, double, zero, noise, pickled]


# ------------------------------------------------------------------------------------------ what is no file


def not_a_file(path: Path, rng: random.Random) -> str:
    """Put something in the place of the file; what."""
    kind = rng.choice(("nothing", "directory", "pipe", "socket", "zeros", "loop", "dangling", "elsewhere", "sparse"))
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        where = Path.cwd()
        os.chdir(path.parent)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(where)
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(1 << 36)
    elif kind != "nothing":
        targets = {"zeros": "/dev/zero", "loop": path.name, "dangling": "nowhere", "elsewhere": "/proc/version"}
        path.symlink_to(targets[kind])
    return kind


# ------------------------------------------------------------------------------------------ JSON and TOML

STRANGE: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 10**30, -(10**30), 1.5, 1e308, -0.0, "", "x", "\0", "../../x",
                      "x" * 70_000, [], {}, [[]], {"": {}}, [1, 2, 3], ["a"], {"a": 1}, "9" * 400]  # fmt: skip
RAW = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "9" * 4000, "[" * 50_000 + "]" * 50_000, '{"a":' * 30_000,
       '{"a": 1, "a": 1}', "1.0.0", "'x'", '"\\ud800"', "01", "0x10", "{}{}"]  # fmt: skip


def places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in a JSON tree."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    return [place for key, value in items for place in ((node, key), *places(value))]


def strange_json(data: bytes, rng: random.Random, *, forged: bool) -> bytes:
    record = json.loads(data)
    container, key = rng.choice(places(record))
    raw = ""
    what = rng.randrange(5)
    if what == 0:
        del container[key]
    elif what == 1 and isinstance(container, dict):
        container[rng.choice(("", "zzz", "../x", "x" * 1000))] = container.pop(key)
    elif what == 2:
        raw = rng.choice(RAW)
        container[key] = "@raw@"
    else:
        container[key] = rng.choice(STRANGE)
    return seal(record, raw, forged=forged)


def seal(record: dict[str, Any], raw: str = "", *, forged: bool = True) -> bytes:
    """The record as a file. raw: text in the place of the value "@raw@". forged: with a right checksum of itself."""
    old = record.pop("checksum", None)
    zeros = "0" * 64
    text = json.dumps({"checksum": zeros if forged else old, **record}, indent=1).replace('"@raw@"', raw)
    data = text.encode("utf-8", "surrogatepass")
    return data.replace(zeros.encode(), hashlib.sha256(data).hexdigest().encode(), 1) if forged else data


TOML = ["nan", "inf", "-inf", "-1", "0", "1", "1e400", "9" * 400, "9" * 5000, "0x" + "f" * 5000, '"x"', '""', "true",
        '"' + "x" * 70_000 + '"', '"\\u0000"', "[" * 3000 + "]" * 3000, "[[]]", "[]", '["a", 1]', "1979-05-27",
        "{a = 1}", "{a = {a = {a = 1}}}",
        "'''", "2.5", "[1, 1, 1, 1]", "10000000000", '"../../x"', "{a.a = 1, a.b = 2}"]


def strange_toml(data: bytes, rng: random.Random) -> bytes:
    lines = data.decode().splitlines()
    at = rng.randrange(len(lines))
    name = lines[at].partition(" = ")[0]
    what = rng.randrange(8)
    if what == 0:
        del lines[at]
    elif what == 1:
        lines.insert(at, lines[at])
    elif what == 2:
        lines.insert(at, rng.choice(("x = 1", "a." * 3000 + "a = 1", "x" * 70_000 + " = 1", "[" + "a." * 3000 + "a]")))
    elif what == 3:
        lines[at] = rng.choice(("[model]", "[[model]]", "[", "=", "model = 1", "\ufeff"))
    else:
        lines[at] = f"{name} = {rng.choice(TOML)}"
    return "\n".join(lines).encode()


# ------------------------------------------------------------------------------------------ safetensors


def strange_tensors(data: bytes, rng: random.Random) -> bytes:
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    entry, other = header[name], header[rng.choice(names)]
    what = rng.randrange(14)
    if what == 0:
        return struct.pack("<Q", rng.choice((2**63, 2**64 - 1, 2**31, 10**8, size + 1, size - 1, 0))) + data[8:]
    if what == 1:
        entry["data_offsets"] = other["data_offsets"]
    elif what == 2:
        entry["data_offsets"] = rng.choice(([0, 2**63], [2**64, 2**65], [-4, 0], [8, 4], [0], [], "x", None, [0, 1e3]))
    elif what == 3:
        names = ("I32", "F16", "BF16", "F64", "BOOL", "C64", "F8_E4M3", "F8_E8M0", "F4", "X", 1, None)
        entry["dtype"] = rng.choice(names)
    elif what == 4:
        entry["shape"] = rng.choice(([-1], [2**63], [2**32, 2**32], [0], [1.5], ["a"], "x", None, [2**64], [[1]]))
    elif what == 5:
        entry["shape"] = [*reversed(entry["shape"])] if rng.random() < 0.5 else [*entry["shape"], 1]
    elif what == 6:
        header[rng.choice(("", "0/x", "x/y", "0", "\0", "9999999999999/exp_avg", "a" * 70_000))] = header.pop(name)
    elif what == 7:
        del header[name]
    elif what == 8:
        header["__metadata__"] = rng.choice(({"a": 1}, [], "x", {"a": "b"}, None, {"a": {"b": {}}}))
    elif what == 9:
        entry["dtype"] = "I32"
    elif what == 10:
        body = np.full(len(body) // 4, rng.choice((np.nan, np.inf, 1e38)), np.float32).tobytes()
    elif what == 11:
        header[name], header["extra"] = other, entry
    elif what == 12:
        return struct.pack("<Q", 2) + b"{}"
    text = json.dumps(header)
    if what == 13:
        twice = text.replace("{", f'{{"{name}": {{}}, ', 1)
        text = rng.choice(("[" * 50_000, twice, "null", "[]", text[:-1], " " * 9))
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw + body


# ------------------------------------------------------------------------------------------ loading


class Still(Arena):
    """A pool of the run's environments that stand still."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__(config.env.workers * config.env.envs_per_worker)
        self.spec = SPEC
        self.num_rows = config.env.workers * config.env.envs_per_worker * self.spec.rows_per_env
        self.task_ids = np.zeros(self.num_rows, np.int64)
        self.unit_ids = np.arange(self.num_rows) // self.spec.rows_per_env

    def close(self) -> None: ...


def of_policy(policy: Policy) -> Any:
    return params_sha(policy.model.state_dict()), repr(policy.spec), repr(policy.config)


def by_load(run_dir: Path) -> Any:
    """`pronghorn.load`, of each policy."""
    return [of_policy(load(run_dir, policy=index)) for index in (None, 1)]


def by_name(run_dir: Path) -> Any:
    """What eval, match, record and watch do: RUN and RUN:snapshot."""
    return [of_policy(load_named(f"{run_dir}{part}")) for part in ("", f":{SNAPSHOT}")]  # type: ignore[arg-type]


def by_resume(run_dir: Path) -> Any:
    """What train --resume does before its threads start."""
    config = replace(from_toml(run_dir / CONFIG), {"run_dir": str(run_dir)})
    validate(config)
    latest = checkpoints.previous(run_dir, resume=True)
    assert latest is not None, "it starts afresh"
    built = parts.Parts(Beginning(config, latest, config), time.time())
    members = [member.saved() for member in built.members]
    moments = sorted(
        f"{m.state['learner']['steps']}/{i}/{k}={v.tolist()}"
        for m in members for i, one in m.optimizer["state"].items() for k, v in one.items()
    )  # fmt: skip
    assert built.league is not None
    said = json.dumps([built.league.state(), [m.state for m in members], built.previous_s])
    shas = [params_sha(frozen.weights) for frozen in built.league.snapshots.values()]
    return said, hashlib.sha256("".join(moments).encode()).hexdigest(), shas, repr(config)


WAYS: list[Callable[[Path], Any]] = [by_load, by_name, by_resume]


class Run:
    """A copy of a run whose files are spoilt one at a time, and made good again."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.checkpoint = checkpoints.list_checkpoints(run_dir / "checkpoints")[-1]
        self.others = [p for p in checkpoints.list_checkpoints(run_dir / "checkpoints") if p != self.checkpoint]
        self.strangers = {p.name: p.read_bytes() for o in self.others for p in o.rglob("*") if p.is_file()}
        for other in self.others:
            shutil.rmtree(other)  # so that nothing takes the damaged one's place
        found = [p for p in self.checkpoint.rglob("*") if p.is_file()]
        self.files = {path: path.read_bytes() for path in (*found, run_dir / CONFIG, run_dir / ENV)}
        self.saved = {way.__name__: way(run_dir) for way in WAYS}

    def restore(self) -> None:
        for path, data in self.files.items():
            regular = path.is_file() and not path.is_symlink()
            if regular and path.stat().st_size == len(data) and path.read_bytes() == data:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif os.path.lexists(path):
                path.unlink()
            path.write_bytes(data)

    def write(self, path: Path, data: bytes) -> None:
        path.unlink()  # snapshots may be links of each other
        path.write_bytes(data)

    def forge(self, path: Path, data: bytes) -> None:
        """Spoilt tensors, with right checksums."""
        self.write(path, data)
        record = json.loads(self.files[self.checkpoint / STATE])
        record["sha256"][str(path.relative_to(self.checkpoint))] = hashlib.sha256(data).hexdigest()
        self.write(self.checkpoint / STATE, seal(record))

    def spoil(self, path: Path, rng: random.Random) -> tuple[str, bool]:
        """What was done to the file, and whether it was forged."""
        data, kind = self.files[path], rng.randrange(10)
        if kind == 0:
            return not_a_file(path, rng), False
        if kind == 1:
            swapped = self.strangers.get(path.name) or self.files[rng.choice(list(self.files))]
            self.write(path, swapped)
            return "swapped", False
        if kind <= 4:
            change = rng.choice(BYTES)
            self.write(path, change(bytearray(data), rng))
            return change.__name__, False
        if path.suffix == ".safetensors":
            self.forge(path, strange_tensors(data, rng) if kind > 5 else rng.choice(BYTES)(bytearray(data), rng))
            return "forged tensors", True
        if path.suffix == ".toml":
            self.write(path, strange_toml(data, rng))
            return "strange TOML", True
        forged = kind > 6
        self.write(path, strange_json(data, rng, forged=forged))
        return ("forged" if forged else "strange") + " JSON", forged

    def fault(self, way: Callable[[Path], Any], path: Path, free: bool, seen: Counter[str]) -> str:
        """What is wrong with how a load of the spoilt run ends; empty if nothing is. free: it may load as another."""
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                loaded = way(self.run_dir)
        except PronghornError as error:
            seen["refused"] += 1
            named = path.name in str(error) or (free and str(self.run_dir) in str(error))
            of_a_rule = path.name == CONFIG and isinstance(error, UsageError)  # names the setting
            return "" if named or of_a_rule else f"names no file: {error}"
        except BaseException:
            return traceback.format_exc()
        same = loaded == self.saved[way.__name__]
        seen["same" if same else "another"] += 1
        return "" if same or free or path.name == CONFIG else "loads as another"


def on_alarm(*_: Any) -> None:
    raise Hung


NEVER = {"pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"}


def watch(run_dir: Path, done: list[str]) -> None:
    """Note in `done` whatever executes or reaches beyond the run's directory from here on."""

    def hook(event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(given[0], str) and (given[2] & (os.O_WRONLY | os.O_RDWR))
        if event in NEVER or (writes and not os.path.realpath(given[0]).startswith(f"{run_dir}/")):
            done.append(f"{event}{given}")

    sys.addaudithook(hook)


def main() -> None:
    global SPEC, SNAPSHOT
    source, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    run_dir = Path(tempfile.mkdtemp(dir=source.parent)) / "run"
    shutil.copytree(source, run_dir)
    torch.set_num_threads(1)
    SPEC = load_spec(run_dir)
    newest = checkpoints.load_latest(run_dir / "checkpoints")
    SNAPSHOT = checkpoints.snapshot_names(newest.state)[0]
    parts.make_pool = Still  # type: ignore[assignment]
    run = Run(run_dir)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, size + SPARE_BYTES))
    signal.signal(signal.SIGALRM, on_alarm)
    faults: list[str] = []
    seen = Counter[str]()
    watch(run_dir.parent.resolve(), faults)
    files = list(run.files)
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        path = files[number % len(files)]
        what, free = run.spoil(path, rng)
        for way in WAYS if number % 3 == 0 or path.name == STATE else WAYS[number % 2 :: 2]:
            signal.alarm(ALARM_S)
            fault = run.fault(way, path, free, seen)
            signal.alarm(0)
            if fault:
                faults.append(f"{seed}/{number} {path.name}, {what}, {way.__name__}: {fault[-1500:]}")
        run.restore()
    print(json.dumps({"faults": faults, "seen": seen}))


if __name__ == "__main__":
    main()
