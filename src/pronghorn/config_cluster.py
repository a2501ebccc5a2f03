"""Settings of a run whose environments are stepped, and acted in, on other machines. They decide nothing.

The rules that they keep are checked in rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClusterConfig:
    """Remote actors on Ray (extra: cluster): each steps environments of its own and acts in them with a copy of the
    policy; this process learns. --env.workers and --env.envs-per-worker are those of one actor."""

    address: str = ""
    """Where Ray runs: HOST:PORT of its head node; auto, the cluster that this machine belongs to; or local, to start
    one here that ends with the run. Empty: no cluster. Short: --cluster ADDRESS."""
    actors: int = 1
    """Actors, each a process on some machine of the cluster with its own worker processes. Short: --actors N."""
    inference: Literal["actor", "learner"] = "actor"
    """Who acts. actor: each actor, with a copy of the policy that it is sent; unrolls travel. learner: the learner's
    device, for the rows of all; observations and actions travel, at each step, and the learner's speed decides."""
    cpus_per_actor: float = 1.0
    """Cores that Ray sets aside for each actor; a fraction lets several share one. It is also how many workers an actor
    has where --env.workers is left open."""
    in_flight: int = 0
    """Most unrolls of one actor that it fills or has under way. 0: one and a half for each of its rows. More let an
    actor go on while its unrolls travel, and let unrolls get older."""
    weights_every_s: float = 0.0
    """Least seconds between two versions of the weights that are sent; 0: none. With many machines, on which each
    version arrives once, it keeps the learner's network free; unrolls then begin under weights older by as much, but
    not by more iterations than --max-lag leaves."""
    silent_s: float = 30.0
    """Seconds after which an actor that says nothing is given up: its unrolls are lost, and another takes its place."""
    restart_budget: int = 10
    """Actors that may be replaced in ten minutes; beyond it the run saves and ends with the last one's own error."""
    room_s: float = 20.0
    """Seconds to wait for the cluster to have room for all actors before the run is refused."""
    working_dir: str = ""
    """Directory that Ray copies to the actors' machines, from which they import environments; empty: they find them
    where this process does (a shared file system, or installed packages)."""
    object_store_mb: int = 512
    """Memory of the object store of a local cluster (MiB): unrolls and weights on their way."""

    def unrolls_per_actor(self, num_rows: int) -> int:
        """Most unrolls of one actor at a time. num_rows: of one actor."""
        return self.in_flight or num_rows + max(1, num_rows // 2)
