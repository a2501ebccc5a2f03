"""Which of several learners this process is, as torchrun says it, and what its share of the run is.

It opens nothing. The command line hands the environment's variables in; a record of numbers is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pronghorn.config import Config, derive_seed, replace, walk
from pronghorn.errors import ConfigError, UsageError

_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """One of `world_size` processes that train one policy together.

    rank: its number, 0 leads (it alone writes files).  local_rank, local_size: the same on its machine.
    restart: how often the processes were started again after one had failed.
    host, port: of the store in which they find each other.  hosted: torchrun runs that store; else rank 0 does.
    interface: the network interface that the user chose for gloo; empty: none.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restart: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False
    interface: str = ""

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's files and speaks for it."""
        return self.rank == 0

    @property
    def on_one_machine(self) -> bool:
        """Whether all learners run here."""
        return self.local_size == self.world_size


def launch_of(variables: Mapping[str, str]) -> Launch:
    """What torchrun's environment variables say; without them, a lone process. Raises UsageError if one is no number.

    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    if not all(name in variables for name in _NEEDED):
        return Launch()
    try:
        size = int(variables["WORLD_SIZE"])
        return Launch(
            int(variables["RANK"]), size, int(variables["LOCAL_RANK"]),
            int(variables.get("LOCAL_WORLD_SIZE", size)), int(variables.get("TORCHELASTIC_RESTART_COUNT", 0)),
            variables["MASTER_ADDR"], int(variables["MASTER_PORT"]),
            variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True", variables.get("GLOO_SOCKET_IFNAME", ""),
        )  # fmt: skip
    except ValueError as error:
        said = ", ".join(f"{name}={variables[name]}" for name in _NEEDED)
        raise UsageError(f"{said}: these must be whole numbers, as torchrun sets them ({error}).") from error


def share_of(config: Config, launch: Launch) -> Config:
    """One learner's settings: its part of the global batch, seeds of its own, and no voice unless it leads.

    Raises ConfigError where the batch cannot be dealt equally.
    """
    if launch.world_size == 1:
        return config
    values: dict[str, Any] = {}
    if config.learner.batch_unrolls is not None:
        values["learner.batch_unrolls"] = unrolls_of_one(config.learner.batch_unrolls, launch.world_size)
    if not launch.leads:
        values["seed"] = derive_seed(config.seed, 9, launch.rank)
        silent = {"log.live": "off", "log.tensorboard": False, "log.wandb": False, "eval.every_s": 0.0,
                  "eval.until_return": None}  # fmt: skip
        values |= silent
    share: Config = replace(config, values)
    return share


def unrolls_of_one(batch_unrolls: int, num_learners: int) -> int:
    """Unrolls that each of several learners adds to a global batch. Raises ConfigError if there is a remainder."""
    if batch_unrolls % num_learners:
        rule = f"must be a multiple of the {num_learners} learners: it is the batch of all of them together"
        near = num_learners * max(1, round(batch_unrolls / num_learners))
        raise ConfigError("learner.batch_unrolls", batch_unrolls, rule, f"Try --learner.batch-unrolls {near}.")
    return batch_unrolls // num_learners


def refuse_several(config: Config, launch: Launch) -> None:
    """What several learners cannot do together. Raises ConfigError."""
    if launch.world_size == 1:
        return
    rule = f"is not possible with several learners ({launch.world_size} were started): one policy is learned by all"
    refused = {
        "population.members": config.population.members > 1,
        "env.policies": config.env.policies == "by_spaces",
        "selfplay": config.selfplay.meets_others,
        "graphs": config.graphs == "on",
    }
    for name, is_asked in refused.items():
        if is_asked:
            value = dict(walk(config)).get(name, "on")
            why = "needs gradients that stay inside a graph, and several learners add theirs up between"
            text = rule if name != "graphs" else f"{why} (--graphs auto uses graphs for acting alone)"
            raise ConfigError(name, value, text, "Start one process (without torchrun), or leave it out.")
