"""Pronghorn trains deep-RL agents from pixels at the speed of the hardware.

The public names are loaded on first use, so that a worker process that only needs `pronghorn.envworker`
never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Config": "pronghorn.config",
    "EnvConfig": "pronghorn.config",
    "Policy": "pronghorn.evaluation.policy",
    "PronghornError": "pronghorn.errors",
    "Result": "pronghorn.training.trainer",
    "check_env": "pronghorn.envs.contract",
    "load": "pronghorn.evaluation.policy",
    "register_env": "pronghorn.envs.registry",
    "train": "pronghorn.training.trainer",
}

__all__ = ["Config", "EnvConfig", "Policy", "PronghornError", "Result", "check_env", "load", "register_env", "train"]

if TYPE_CHECKING:
    from pronghorn.config import Config, EnvConfig
    from pronghorn.envs.contract import check_env
    from pronghorn.envs.registry import register_env
    from pronghorn.errors import PronghornError
    from pronghorn.evaluation.policy import Policy, load
    from pronghorn.training.trainer import Result, train


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'pronghorn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
