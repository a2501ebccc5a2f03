"""The sampler: every stored number is the one of its row and step, whatever ends, is lost, is gone or must wait."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from playing import toy
from pronghorn.config import ModelConfig
from pronghorn.envs.workers import ResolvedEnv, WorkerPool
from pronghorn.models.actor_critic import ActorCritic, ModelOutput
from pronghorn.training.acting import Acting, EagerActing, GraphActing, Snapshot
from pronghorn.training.metrics import EpisodeTracker
from pronghorn.training.player import Player, Publisher
from pronghorn.training.sampler import Sampler, part_of
from pronghorn.training.store import Store, stored_leaves
from pronghorn.types import EnvSpec, LeafSpec, Pool, Ready
from recorded_graphs import RecordingQueue
from scripted_pool import ScriptedPool

way_of_acting = "eager"


@pytest.fixture(autouse=True, params=["eager", "graphs"])
def _both_ways(request: pytest.FixtureRequest) -> None:
    """Everything here holds on a CPU and, with graphs as strict as there, on a GPU."""
    global way_of_acting
    way_of_acting = request.param


def make_acting(net: ActorCritic, store: Store, num_rows: int, leaves: dict[str, LeafSpec]) -> Acting:
    if way_of_acting == "eager":
        return EagerActing(net, store, num_rows)
    return GraphActing(net, store, num_rows, leaves, graphs="on", queue=RecordingQueue())


class CountingNet(ActorCritic):
    """V = 10 * step of the observation + 1000 * RNN state; the state counts decisions since the episode began."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec, core="none", mlp_layers=(4,), normalize_obs=False, normalize_returns=False)
        self.bias = nn.Parameter(torch.zeros(()))

    @property
    def state_size(self) -> int:
        return 1

    def forward(self, obs: dict[str, Tensor], state: Tensor, first: Tensor) -> ModelOutput:  # type: ignore[override]
        x = obs["obs"]
        values = []
        for t in range(x.shape[0]):
            state = torch.where(first[t][:, None], 0.0, state) + 1
            values.append(x[t, :, 1] + 1000 * state[:, 0] + self.bias)
        return ModelOutput(torch.zeros(*first.shape, 3), torch.stack(values), state)


def make(pool: Pool, *, length: int = 4, batch: int = 2, max_lag: int = 8, slots: int | None = None) -> Sampler:
    net = CountingNet(pool.spec)
    leaves = stored_leaves(pool.spec, ModelConfig(last_action=True, last_reward=True))
    store = Store(
        leaves,
        pool.spec.action,
        num_slots=slots or pool.num_rows + 2 * batch,
        unroll_length=length,
        state_size=1,
        batch_unrolls=batch,
        max_lag=max_lag,
        device=torch.device("cpu"),
        packed=way_of_acting == "graphs",
    )
    tracker = EpisodeTracker(pool.num_rows, pool.tasks, pool.task_ids)
    acting = make_acting(net, store, pool.num_rows, leaves)
    return Sampler(pool, [Player(pool, store, acting, Publisher(Snapshot.of(net, 0)), tracker)], seed=0)


def run(sampler: Sampler, steps: int) -> None:
    for _ in range(steps):
        sampler.step()


def full_slots(sampler: Sampler) -> np.ndarray:
    status = sampler.players[0].store._status
    order = sampler.players[0].store._order
    full = np.flatnonzero(status == 2)
    return full[np.argsort(order[full])]


@pytest.mark.case("ENV-02")
def test_row_t_holds_obs_its_action_and_what_that_caused() -> None:
    pool = ScriptedPool([100])
    sampler = make(pool)
    run(sampler, 5)
    (slot,) = full_slots(sampler)
    store = sampler.players[0].store
    assert store.obs["obs"][slot, :, 1].tolist() == [0, 10, 20, 30, 40]  # row T is the bootstrap observation
    assert store.steps["reward"][slot].tolist() == [1, 2, 3, 4]  # the reward that the action at obs[t] caused
    assert store.steps["discrete"][slot, :, 0].tolist() == [a[0, 0] for _, a in pool.sent[:4]]
    assert store.steps["first"][slot].tolist() == [True, False, False, False, False]
    assert store.obs["last_reward"][slot].tolist() == [0, 1, 2, 3, 4]
    assert store.obs["last_action"][slot, 0, 0] == -1
    assert store.obs["last_action"][slot, 1:, 0].tolist() == store.steps["discrete"][slot, :, 0].tolist()
    assert np.allclose(store.steps["log_prob"][slot], -np.log(3))


@pytest.mark.case("COR-03")
def test_no_step_is_lost_between_unrolls() -> None:
    sampler = make(ScriptedPool([100]), batch=8)
    run(sampler, 13)
    rewards = np.concatenate([sampler.players[0].store.steps["reward"][s] for s in full_slots(sampler)])
    assert rewards.tolist() == list(range(1, 13))
    assert sampler.num_steps == 12


@pytest.mark.case("EPI-04", "EPI-05")
def test_only_truncated_rows_get_the_value_of_their_own_final_observation() -> None:
    pool = ScriptedPool([3, 3], truncated=[1])
    sampler = make(pool, length=4)
    run(sampler, 5)
    store = sampler.players[0].store
    terminated, truncated = full_slots(sampler)
    for slot, cut in ((terminated, False), (truncated, True)):
        assert store.steps["terminated"][slot].tolist() == [False, False, not cut, False]
        assert store.steps["truncated"][slot].tolist() == [False, False, cut, False]
        assert store.obs["obs"][slot, :, 1].tolist() == [0, 10, 20, 0, 10]  # the final observation is never a row
        assert store.steps["first"][slot].tolist() == [True, False, False, True, False]
    # V(final) = 10 * 3 + 1000 * 4: from the state after the three decisions, not of the state before the action
    assert store.steps["truncation_value"][truncated].tolist() == [0, 0, 4030, 0]
    assert store.steps["truncation_value"][terminated].tolist() == [0, 0, 0, 0]


@pytest.mark.case("RNN-04", "RNN-07")
def test_the_state_of_an_unroll_is_the_one_before_its_first_step() -> None:
    sampler = make(ScriptedPool([100, 4]), length=4, batch=8)
    run(sampler, 9)
    store = sampler.players[0].store
    net = sampler.players[0].acting.actor
    for slot in full_slots(sampler):
        obs = {"obs": store.obs["obs"][slot][:, None]}
        first = torch.from_numpy(store.steps["first"][slot][:, None].copy())
        replay = net(obs, store.state[slot][None], first)
        assert replay.values[:-1, 0].tolist() == store.steps["value"][slot].tolist()


@pytest.mark.case("EPI-06")
def test_a_row_that_waits_for_its_reset_leaves_no_trace_in_the_unrolls() -> None:
    """Next-step auto-reset: INACTIVE while the reset is under way, then the end. The stored unrolls are the same."""
    runs = []
    for waits in ((), (0, 1)):
        sampler = make(ScriptedPool([3, 2, 100], truncated=[1], waits=waits), length=6, batch=8)
        run(sampler, 12 if waits else 7)
        slots = full_slots(sampler)[:3]
        first = {int(sampler.players[0].store.obs["obs"][slot, 0, 0]): slot for slot in slots}
        runs.append((sampler, first))
    (plain, a), (waited, b) = runs
    assert set(a) == set(b) == {0, 1, 2}
    for row in a:
        for name, array in plain.players[0].store.steps.items():
            if name not in ("discrete", "log_prob"):  # the actions are drawn in another order
                assert array[a[row]].tolist() == waited.players[0].store.steps[name][b[row]].tolist(), name
        assert torch.equal(plain.players[0].store.obs["obs"][a[row]], waited.players[0].store.obs["obs"][b[row]])
        assert torch.equal(plain.players[0].store.state[a[row]], waited.players[0].store.state[b[row]])
    assert waited.num_steps < 12 * 3  # what was INACTIVE is no step


@pytest.mark.case("EPI-10")
def test_a_life_loss_ends_the_trace_but_neither_the_episode_nor_the_memory() -> None:
    pool = ScriptedPool([4], life_loss=lambda row, step: step == 2)
    sampler = make(pool, length=6)
    run(sampler, 7)
    (slot,) = full_slots(sampler)
    assert sampler.players[0].store.steps["terminated"][slot].tolist() == [False, True, False, True, False, True]
    assert sampler.players[0].store.steps["first"][slot].tolist() == [True, False, False, False, True, False, False]
    assert sampler.players[0].tracker.num_episodes == 1
    assert sampler.players[0].tracker.snapshot()["return_mean"] == 1 + 2 + 3 + 4


@pytest.mark.case("FLT-05")
def test_a_lost_unit_voids_its_unrolls_and_nothing_else() -> None:
    pool = ScriptedPool([100, 100], units=[0, 1])
    sampler = make(pool, length=4, batch=4)
    run(sampler, 6)  # both rows have acted three times
    pool.kill = {1}
    run(sampler, 12)
    store = sampler.players[0].store
    assert store.num_discarded == 1
    rows = {int(store.obs["obs"][s, 0, 0]): store.steps["reward"][s].tolist() for s in full_slots(sampler)[::-1]}
    assert rows[0] == [1, 2, 3, 4]
    assert rows[1] == [1, 2, 3, 4]  # a fresh episode, begun after the loss
    counts = store.counts()
    assert counts["filling"] == 2
    assert sampler.players[0].tracker.num_episodes == 0


def test_units_without_a_slot_wait_while_the_others_go_on() -> None:
    """Two units out of phase in one recv, one slot too few: the unit in mid-unroll must not wait for the other."""
    pool = ScriptedPool([100, 100], units=[0, 1], per_recv=1)
    sampler = make(pool, length=4, batch=1, slots=3)
    run(sampler, 1)  # unit 0 acts
    pool.per_recv = 2
    run(sampler, 8)
    held = sum(len(r.rows) for r in sampler._held)
    assert sampler.players[0].store.counts()["full"] + sampler.players[0].store.counts()["filling"] == 3
    assert held >= 1
    taken = sampler.players[0].store.take(0, 0.0)
    assert taken is not None
    sampler.players[0].store.release(taken)
    before = sampler.num_steps
    run(sampler, 4)
    assert sampler.num_steps > before


@pytest.mark.parametrize("max_lag", [0, 1])
def test_taking_turns_collects_exactly_one_batch_a_grant_under_one_version(max_lag: int) -> None:
    pool = ScriptedPool([5, 7, 100, 3], units=[0, 0, 1, 1])
    sampler = make(pool, length=4, batch=4, max_lag=max_lag)
    for round_ in range(3):
        sampler.players[0].publisher.latest = Snapshot(round_, sampler.players[0].publisher.latest.tensors)
        sampler.players[0].store.grant()
        run(sampler, 30)
        assert sampler.num_steps == 16 * (round_ + 1)
        taken = sampler.players[0].store.take(round_, 0.0)
        assert taken is not None
        batch = sampler.players[0].store.gather(taken, round_)
        assert (batch.policy_lag == 0).all()
        sampler.players[0].store.release(taken)


def test_reseed_starts_every_row_anew_and_forgets_what_was_in_progress() -> None:
    pool = ScriptedPool([100, 100])
    sampler = make(pool)
    run(sampler, 3)
    sampler.request_reseed(99)
    sampler.step()
    assert pool.seeds == [99]
    assert sampler.players[0].store.num_discarded == 0  # not lost: asked for
    assert sampler.players[0].store.counts()["filling"] == 2
    run(sampler, 4)
    assert all(sampler.players[0].store.steps["reward"][s].tolist() == [1, 2, 3, 4] for s in full_slots(sampler))


def test_every_terminal_reward_reaches_an_unroll() -> None:
    """Episode lengths that are no multiple of T: the sum of stored rewards is the sum of returns so far."""
    pool = ScriptedPool([3, 5, 7])
    sampler = make(pool, length=4, batch=30)
    run(sampler, 4 * 20 + 1)
    store = sampler.players[0].store
    slots = full_slots(sampler)
    rewards = store.steps["reward"][slots].sum()
    ends = store.steps["terminated"][slots].sum()
    expected = sum(sum((s % n) + 1 for s in range(80)) for n in (3, 5, 7))
    assert rewards == expected
    assert ends == sum(80 // n for n in (3, 5, 7))


@pytest.mark.case("ASY-03")
def test_without_a_learner_sampling_stops_and_nothing_grows() -> None:
    """Back-pressure: what is under way is bounded by the slots, however long the learner takes."""
    pool = ScriptedPool([100, 100], units=[0, 1])
    sampler = make(pool, length=4, batch=2, slots=5)
    addresses = {name: tensor.data_ptr() for name, tensor in sampler.players[0].store.obs.items()}
    run(sampler, 60)
    sent = len(pool.sent)
    run(sampler, 60)
    assert len(pool.sent) == sent  # both rows wait, unanswered
    assert sampler.num_steps <= 5 * 4 + 2
    assert sampler.players[0].store.counts()["full"] == 5
    assert len(sampler._held) == 2
    taken = sampler.players[0].store.take(0, 0.0)
    assert taken is not None
    sampler.players[0].store.release(taken)
    run(sampler, 4)
    assert len(pool.sent) > sent  # and go on when there is room
    assert addresses == {name: tensor.data_ptr() for name, tensor in sampler.players[0].store.obs.items()}


@pytest.mark.parametrize("counted", [False, True])
def test_a_part_of_what_came_has_the_games_of_its_rows(counted: bool) -> None:
    never, rows = np.zeros(3, np.bool_), np.array([4, 5, 6])
    ready = Ready(
        rows, np.zeros(3, np.uint8), {"obs": rows[:, None]}, np.zeros(3, np.float32), never, never, never,
        np.zeros(0, np.int64), {}, game=rows * 10 if counted else None,
    )  # fmt: skip
    part = part_of(ready, np.array([True, False, True]))
    assert part.rows.tolist() == [4, 6]
    assert (None if part.game is None else part.game.tolist()) == ([40, 60] if counted else None)


# ------------------------------------------------------------------------------------------ agents that are gone

GAMES = str(Path(__file__).parents[1] / "turn_games.py")
TURNS = {"num_agents": 3, "length": 9, "ends": {"2": {"b": "terminated"}}, "comes_back": {"6": "b"},
         "gifts": {str(move): dict.fromkeys("ac", 1) for move in range(1, 10)}}  # fmt: skip


def gone(how: str, padding: float) -> ResolvedEnv:
    """A game in which 'b' ends early, is away, padded with that reward, comes back and ends with the others."""
    if how == "parallel":
        return toy("Away", padding=padding)
    pytest.importorskip("pettingzoo")
    return ResolvedEnv("Circle", "worker", "call", f"{GAMES}:Circle", {**TURNS, "padded": padding}, {})


def collected(env: ResolvedEnv, num_unrolls: int) -> Sampler:
    """The sampler after so many unrolls of four steps, in a worker process."""
    pool = WorkerPool([env], num_workers=1, envs_per_worker=1, num_groups=1, seed=7, ordered=True, pin="off")
    try:
        sampler = make(pool, batch=num_unrolls, max_lag=99)
        while len(full_slots(sampler)) < num_unrolls:
            sampler.step()
    finally:
        pool.close()
    return sampler


@pytest.mark.case("MAS-10")
@pytest.mark.parametrize("how", ["parallel", "turns"])
def test_nothing_of_an_agent_that_is_gone_reaches_a_loss_or_a_statistic(how: str) -> None:
    """What the learner sees, and what the statistics say, is the same whether it is padded with rewards of 7 or not."""
    plain, padded = (collected(gone(how, reward), 12) for reward in (0.0, 7.0))
    assert padded.num_steps == plain.num_steps
    one, other = plain.players[0], padded.players[0]
    for name, array in one.store.steps.items():
        np.testing.assert_array_equal(other.store.steps[name][full_slots(padded)], array[full_slots(plain)], name)
    for name, tensor in one.store.obs.items():
        assert torch.equal(other.store.obs[name][full_slots(padded)], tensor[full_slots(plain)]), name
    assert other.tracker.snapshot() == one.tracker.snapshot()
    assert other.tracker.state()["records"] == one.tracker.state()["records"]
    rewards = other.store.steps["reward"][full_slots(padded)]
    assert 0 < rewards.max() < 7


@pytest.mark.case("MAS-04")
@pytest.mark.parametrize(
    ("how", "seen", "begins"),
    [
        # away at steps 3 to 6 of 9: it sees what is so after 0 and 1 steps, and after 6, 7 and 8
        ("parallel", [0, 1, 6, 7, 8, 0, 1, 6], [True, False, True, False, False, True, False, True]),
        # its turns: move 2, by which it ends, and move 7, as 'a' has just moved when it is back
        ("turns", [1, 6, 1, 6, 1, 6, 1, 6], [True] * 8),
    ],
)
def test_an_agent_that_returns_has_two_trajectories(how: str, seen: list[int], begins: list[bool]) -> None:
    """V is the number of steps seen plus 1000 times the decisions since its memory was emptied."""
    sampler = collected(gone(how, 7.0), 12)
    store = sampler.players[0].store
    mine = [slot for slot in full_slots(sampler) if store.obs["obs"][slot, 0, 2] == 1]
    first, second = mine[:2]
    assert [int(x) for slot in (first, second) for x in store.obs["obs"][slot, :4, 1]] == seen
    assert [bool(x) for slot in (first, second) for x in store.steps["first"][slot, :4]] == begins
    since, counts = 0, []
    for begin in begins:
        since = 1 if begin else since + 1
        counts.append(since)
    values = np.concatenate([store.steps["value"][slot] for slot in (first, second)])
    assert values.tolist() == [x + 1000 * count for x, count in zip(seen, counts, strict=True)]
    ends = np.concatenate([store.steps["terminated"][slot] for slot in (first, second)])
    assert ends.tolist() == [*begins[1:], bool(store.steps["first"][second, 4])]
