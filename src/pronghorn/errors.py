"""All errors that Pronghorn raises on purpose. A message says what, where, the rule that was broken, and the fix.

    PronghornError
    ├── UsageError              the command or the call is wrong                            (exit code 2)
    │   ├── ConfigError         a field's value breaks a rule: field, value, rule, fix
    │   └── UnknownEnvError     no such environment; carries the nearest names
    ├── MissingExtraError       an optional package is absent; names the one install command
    ├── EnvError                the environment broke its contract, raised, hung or died
    │   ├── SpaceError          a space that is not supported, named by its path
    │   └── WorkerDied          a worker process ended; carries its signal or traceback
    ├── DivergedError           losses or gradients stayed not finite, and nothing good is left to go back to
    ├── StallError              a part of the run stands still; says which, and for whom it waits
    ├── StoreError              a slot was used against its state: names slot, state and owner
    ├── ClusterError            a cluster, or an actor on it, cannot do its part: names the host
    │   ├── ActorDied           actors kept ending, and the restart budget with them; carries the last one's traceback
    │   └── WireError           a block of unrolls from an actor is malformed, damaged, foreign or of another format
    ├── PopulationError         a match, a snapshot or a member was used against its state: names it and the state
    ├── LearnersLost            of several learners one is missing or has failed: names it
    ├── RunDirError             the run directory holds a run already, is finished, or cannot be written
    └── CheckpointError         a checkpoint is missing, malformed, foreign or does not fit the model
        └── NotFiniteError      a checkpoint would hold a number that is not finite; carries the policy's number
"""

from __future__ import annotations


class PronghornError(Exception):
    """Base of every error that Pronghorn raises on purpose; the command line prints it without a traceback."""

    exit_code = 1


class UsageError(PronghornError):
    """The command or the call itself is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """One configuration field breaks a rule."""

    def __init__(self, field: str, value: object, rule: str, fix: str) -> None:
        super().__init__(f"{field} = {_shown(value)}: {rule}. {fix}")
        self.field, self.value, self.rule, self.fix = field, value, rule, fix


def _shown(value: object) -> str:
    """A value of whatever size as a part of a message."""
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits, or lists in lists in lists
        return f"({type(value).__name__} of a size that cannot be shown)"
    return shown if len(shown) <= 1000 else f"{shown[:1000]}…"


class UnknownEnvError(UsageError):
    """No environment of that name."""


class MissingExtraError(PronghornError):
    """An optional package is absent."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}'. Install it: pip install 'pronghorn-rl[{extra}]' "
                         f"(in a clone: pip install -e '.[{extra}]')")
        self.package, self.extra = package, extra


class EnvError(PronghornError):
    """The environment broke its contract, raised, hung or died."""


class SpaceError(EnvError):
    """An observation or action space that is not supported, named by its path."""


class WorkerDied(EnvError):
    """A worker process ended, and its restart budget with it."""


class DivergedError(PronghornError):
    """Losses or gradients were not finite for too many optimiser steps in a row."""


class StallError(PronghornError):
    """A part of the run stands still."""


class StoreError(PronghornError):
    """A slot was used against its state."""


class ClusterError(PronghornError):
    """A cluster, or an actor on it, cannot do its part."""


class ActorDied(ClusterError):
    """Remote actors kept ending, and the restart budget with them."""


class WireError(ClusterError):
    """A block of unrolls from an actor is malformed, damaged, foreign, or of another format."""


class PopulationError(PronghornError):
    """A match, a snapshot or a member of a population was used against its state."""


class LearnersLost(PronghornError):
    """Of several learners one is missing or has failed. exit_code: that of the one that failed."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class RunDirError(UsageError):
    """The run directory holds a run already, holds none, or cannot be written."""


class CheckpointError(PronghornError):
    """A checkpoint is missing, malformed, foreign, or does not fit the model."""


class NotFiniteError(CheckpointError):
    """A checkpoint would hold a number that is not finite. policy: number of the policy whose it is."""

    def __init__(self, where: str, policy: int) -> None:
        super().__init__(
            f"A number in {where} of policy {policy} is not finite: such a checkpoint is not saved, those before are "
            "intact. Lower --learner.lr, or look at the environment's observations and rewards."
        )
        self.policy = policy
