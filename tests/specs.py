"""Two kinds of environment that tests share, and settings that are resolved for them."""

from __future__ import annotations

from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec

PIXELS = EnvSpec({"obs": LeafSpec((72, 128, 3), "uint8", "image", "hwc", 0, 255)}, ActionSpec((4,)), frame_skip=4)
VECTOR = EnvSpec({"obs": LeafSpec((4,), "float32", "vector")}, ActionSpec((2,)))


def resolved(spec: EnvSpec = VECTOR, **values: object) -> Config:
    base = replace(Config(env="gym:CartPole-v1"), {"env.workers": 2, "env.envs_per_worker": 8})
    return resolve(replace(base, values), spec)
