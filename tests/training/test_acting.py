"""Acting by graphs is acting by single operations: on a CPU, with graphs that are as strict as those of a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.config import ModelConfig
from pronghorn.errors import PronghornError
from pronghorn.models.actor_critic import ActorCritic
from pronghorn.training.acting import Acted, EagerActing, GraphActing, Snapshot, buckets, make_acting
from pronghorn.training.store import Store, stored_leaves
from pronghorn.types import LAST_ACTION, LAST_REWARD, ActionSpec, EnvSpec, LeafSpec
from recorded_graphs import AllOn, LoggedFence, RecordingQueue, know_no_autocast

PIXELS = EnvSpec({"obs": LeafSpec((40, 48, 3), "uint8", "image", "hwc", 0.0, 255.0)}, ActionSpec((3, 2)))
CONTINUOUS = EnvSpec({"x": LeafSpec((5,), "float32", "vector")}, ActionSpec((), (-1.0, -np.inf), (2.0, np.inf)))
MIXED = EnvSpec(
    {
        "map": LeafSpec((3, 7, 7), "uint8", "image", "chw", 0.0, 255.0),
        "view": LeafSpec((40, 36, 1), "uint8", "image", "hwc", 0.0, 255.0),
        "code": LeafSpec((2,), "int64", "discrete", n=(3, 5)),
        "action_mask": LeafSpec((5,), "uint8", "mask"),
        "flags": LeafSpec((6,), "int8", "binary"),
        "level": LeafSpec((), "float32", "vector"),
    },
    ActionSpec((2, 3), (-1.0,), (1.0,)),
)
KINDS: dict[str, tuple[EnvSpec, dict[str, Any]]] = {
    "pixels-gru": (PIXELS, {"core": "gru", "core_size": 8, "conv_features": 16}),
    "continuous": (CONTINUOUS, {"core": "none", "separate_critic": True}),
    "masked-mixed-lstm": (
        MIXED, {"core": "lstm", "core_size": 4, "conv_features": 8, "last_action": True, "last_reward": True}
    ),
    "critic-sees-more": (
        MIXED, {"core": "gru", "core_size": 4, "conv_features": 8, "separate_critic": True,
                "critic_only": ("view", "level", "code")}
    ),
}  # fmt: skip
ROWS, SLOTS, LENGTH = 70, 80, 3  # buckets so large that their arrays lie where others' images lie


def network(kind: str) -> ActorCritic:
    spec, settings = KINDS[kind]
    torch.manual_seed(0)
    return ActorCritic(spec, policy_init_gain=1.0, **settings)


def store_of(kind: str, actor: ActorCritic) -> Store:
    spec = KINDS[kind][0]
    return Store(
        leaves_of(kind), spec.action, num_slots=SLOTS, unroll_length=LENGTH, state_size=actor.state_size,
        batch_unrolls=2, max_lag=8, device=torch.device("cpu"),
    )  # fmt: skip


def leaves_of(kind: str) -> dict[str, LeafSpec]:
    spec, settings = KINDS[kind]
    history = {name: settings.get(name, False) for name in (LAST_ACTION, LAST_REWARD)}
    return stored_leaves(spec, ModelConfig(**history))


def eager(kind: str) -> EagerActing:
    actor = network(kind)
    return EagerActing(actor, store_of(kind, actor), ROWS)


def graphed(kind: str, **options: Any) -> GraphActing:
    actor = network(kind)
    options = {"queue": RecordingQueue(), "graphs": "on"} | options
    return GraphActing(actor, store_of(kind, actor), ROWS, leaves_of(kind), **options)


def observations(kind: str, num: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    obs = {}
    for name, leaf in leaves_of(kind).items():
        shape = (num, *leaf.shape)
        if name == "action_mask":
            obs[name] = rng.integers(0, 2, shape).astype(leaf.dtype)
            obs[name][:, [0, 2]] = 1
        elif leaf.n:
            obs[name] = rng.integers(-1 if name == LAST_ACTION else 0, leaf.n, shape)
        elif np.dtype(leaf.dtype).kind == "f":
            obs[name] = rng.standard_normal(shape).astype(leaf.dtype)
        else:
            obs[name] = rng.integers(0, 2 if leaf.kind == "binary" else 256, shape).astype(leaf.dtype)
    return obs


def play(acting: EagerActing | GraphActing, kind: str, batches: int = 8) -> list[Acted]:
    """Batches of some rows each, of all sizes, that begin unrolls and episodes now and then; values between them."""
    rng, answers = np.random.default_rng(3), []
    acting.seed(7)
    for number in range(batches):
        num = [1, ROWS, 9, 40, 5, 64, 17, 3][number % 8]
        rows = rng.permutation(ROWS)[:num]
        slots = rows  # row r always fills slot r
        begins = rng.random(num) < 0.4
        acting.begin(rows[begins], slots[begins])
        at = acting.store.at(slots, rng.integers(0, LENGTH, num))
        answers.append(acting.act(observations(kind, num, rng), rows, rng.random(num) < 0.3, at))
        few = rows[: 1 + num // 3]
        value = acting.values(observations(kind, len(few), rng), few)
        answers.append(Acted(value, value, value, value, value))
        acting.write(observations(kind, len(few), rng), acting.store.at(few, np.full(len(few), LENGTH)))
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_act_as_single_operations_do_whatever_the_bucket(kind: str) -> None:
    """Equal seeds: the same actions, log-probs and values, the same states, the same store."""
    one, other = eager(kind), graphed(kind)
    assert other._queue.num_graphs == len(other.buckets) == 5
    answers = zip(play(one, kind), play(other, kind), strict=True)
    for number, (expected, seen) in enumerate(answers):
        for name in Acted._fields:
            a, b = getattr(expected, name), getattr(seen, name)
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert np.allclose(a, b, rtol=1e-4, atol=1e-5), (number, name)
    assert torch.allclose(one._state, other._state[:-1], rtol=1e-4, atol=1e-5)
    assert torch.allclose(one.store.state, other.store.state, rtol=1e-4, atol=1e-5)
    for name, leaf in one.store.obs.items():
        assert torch.equal(leaf, other.store.obs[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_fill_a_bucket_up_change_nothing(kind: str) -> None:
    acting, rng = graphed(kind), np.random.default_rng(0)
    play(acting, kind)
    before = acting._state.clone(), acting.store.flat_state.clone(), {k: v.clone() for k, v in acting.store.obs.items()}
    rows, at = np.array([4, 11, 2]), acting.store.at(np.array([1, 5, 7]), np.array([0, 2, 1]))
    acting.begin(rows[:1], np.array([1]))
    acting.act(observations(kind, 3, rng), rows, np.zeros(3, np.bool_), at)  # three of the eight of their bucket
    others = np.setdiff1d(np.arange(ROWS), rows)
    assert torch.equal(acting._state[others], before[0][others])
    if acting.actor.state_size:
        assert not torch.equal(acting._state[rows], before[0][rows])
        assert torch.equal(acting.store.flat_state[1], before[0][4])  # the state before the step, of row 4
    assert torch.equal(acting.store.flat_state[2:SLOTS], before[1][2:SLOTS])
    for name, leaf in acting.store.obs.items():
        changed = (leaf != before[2][name]).flatten(2).any(2) if leaf.dim() > 2 else leaf != before[2][name]
        written = torch.zeros(SLOTS, LENGTH + 1, dtype=torch.bool)
        written[[1, 5, 7], [0, 2, 1]] = True
        assert not (changed & ~written).any(), name


def test_asking_for_values_changes_nothing_and_draws_nothing() -> None:
    kind = "masked-mixed-lstm"
    acting, rng = graphed(kind), np.random.default_rng(0)
    play(acting, kind)
    state, slots, generator = acting._state[:-1].clone(), acting.store.state.clone(), acting._generator.get_state()
    obs = {name: leaf.clone() for name, leaf in acting.store.obs.items()}
    acting.values(observations(kind, 5, rng), np.arange(5))
    assert torch.equal(acting._state[:-1], state)
    assert torch.equal(acting.store.state, slots)
    assert all(torch.equal(leaf, obs[name]) for name, leaf in acting.store.obs.items())
    assert torch.equal(acting._generator.get_state(), generator)


def test_what_was_made_up_for_the_capture_is_forgotten() -> None:
    acting = graphed("masked-mixed-lstm")
    assert not acting._state.any()
    assert not acting.store.flat_state.any()
    assert not any(leaf.any() for leaf in acting.store.flat_obs.values())


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_act_in_the_graphs_that_there_are(kind: str) -> None:
    one, other, learned = eager(kind), graphed(kind), network(kind)
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    graphs = other._queue.num_graphs
    for acting in (one, other):
        acting.load(Snapshot.of(learned, 3))
        assert acting.version == 3
    old = play(graphed(kind), kind)
    assert other._queue.num_graphs == graphs
    for number, (expected, seen, before) in enumerate(zip(play(one, kind), play(other, kind), old, strict=True)):
        assert np.allclose(expected.value, seen.value, rtol=1e-4, atol=1e-5), number
        assert not np.allclose(before.value, seen.value, rtol=1e-4, atol=1e-5)


def test_weights_are_read_once_they_are_whole_and_kept_until_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    acting, log = graphed("continuous"), list[str]()
    acting._loaded = LoggedFence("loaded", log)
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *tensors: (log.append("copied"), copy(*tensors)))
    snapshot = Snapshot.of(acting.actor, 1)
    acting.load(Snapshot(1, snapshot.tensors, LoggedFence("snapshot", log)))
    assert log == ["loaded synced", "snapshot waited for", "copied", "loaded marked"]
    held = acting._source
    log.clear()
    acting.load(Snapshot(2, snapshot.tensors, LoggedFence("next", log)))
    assert log[0] == "loaded synced"  # before the one that was held is let go
    assert acting._source is not held


def test_a_batch_comes_behind_the_gather_of_its_slots_and_is_marked_for_the_next_one() -> None:
    kind = "continuous"
    acting, rng, log = graphed(kind), np.random.default_rng(0), list[str]()
    acting.store.read, acting.store.written = LoggedFence("read", log), LoggedFence("written", log)
    acting._done = LoggedFence("done", log)
    rows = np.arange(3)
    acting.act(observations(kind, 3, rng), rows, np.zeros(3, np.bool_), rows)
    assert log == ["read waited for", "written marked", "done marked", "done synced"]
    log.clear()
    acting.write(observations(kind, 3, rng), rows)
    assert log == ["read waited for", "written marked"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_of_a_batch_meets_nothing_that_lies_on_this_side(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that only knows shapes, so that every tensor is either there or here."""
    know_no_autocast(monkeypatch)
    device = torch.device("meta")
    actor = network(kind).to(device)
    spec = KINDS[kind][0]
    store = Store(leaves_of(kind), spec.action, num_slots=SLOTS, unroll_length=LENGTH, state_size=actor.state_size,
                  batch_unrolls=2, max_lag=8, device=device)  # fmt: skip
    acting = GraphActing(actor, store, ROWS, leaves_of(kind), graphs="off", queue=RecordingQueue())
    acting._works[8]()  # what depends on the device alone is made once
    with torch.inference_mode(), AllOn("meta") as seen:
        acting._works[8]()
    assert seen.num_operations > 10


# ---------------------------------------------------------------- where graphs fail


class Asks(ActorCritic):
    """A network that looks at its numbers, which no graph can."""

    def forward(self, obs: Any, state: Any, first: Any) -> Any:
        return super().forward(obs, state, first if bool(first.any()) else first.clone())


class Frozen(RecordingQueue):
    """Graphs that do nothing, as if a device had lost them."""

    def graph(self, work: Any) -> Any:
        super().graph(work)
        return lambda: None


@pytest.mark.parametrize(
    ("kind", "actor", "queue", "why"),
    [
        ("pixels-gru", Asks, RecordingQueue, "operation not permitted when stream is capturing"),
        ("pixels-gru", ActorCritic, Frozen, "acts differently from single operations"),
        ("continuous", ActorCritic, Frozen, "acts differently from single operations"),  # without a state to differ
    ],
    ids=["not-possible", "different", "different-without-memory"],
)
def test_a_graph_that_fails_is_an_error_or_a_stated_fallback(
    kind: str, actor: Any, queue: Any, why: str
) -> None:
    torch.manual_seed(0)
    net = actor(KINDS[kind][0], policy_init_gain=1.0, **KINDS[kind][1])
    with pytest.raises(PronghornError, match=why):
        GraphActing(net, store_of(kind, net), ROWS, leaves_of(kind), graphs="on", queue=queue())
    acting = GraphActing(net, store_of(kind, net), ROWS, leaves_of(kind), queue=queue())
    assert why in acting.fallback
    assert "Going on with single operations" in acting.fallback
    assert acting.describe().startswith("by single operations")
    for expected, seen in zip(play(eager(kind), kind), play(acting, kind), strict=True):
        assert np.allclose(expected.value, seen.value, rtol=1e-4, atol=1e-5)


def test_a_graph_that_writes_elsewhere_is_noticed() -> None:
    class Elsewhere(RecordingQueue):
        def graph(self, work: Any) -> Any:
            replay = super().graph(work)

            def other() -> None:
                replay()
                acting_store.flat_obs["x"][0] += 1.0

            return other

    actor = network("continuous")
    acting_store = store_of("continuous", actor)
    with pytest.raises(PronghornError, match="writes other observations or states"):
        GraphActing(actor, acting_store, ROWS, leaves_of("continuous"), graphs="on", queue=Elsewhere())


def test_off_makes_no_graph_and_acts_alike() -> None:
    kind = "pixels-gru"
    acting = graphed(kind, graphs="off")
    assert acting._queue.num_graphs == 0
    assert acting.describe() == "by single operations of 8, 16, 32, 64, 70 rows"
    assert graphed(kind).describe() == "by CUDA graphs of 8, 16, 32, 64, 70 rows"
    for expected, seen in zip(play(eager(kind), kind), play(acting, kind), strict=True):
        assert np.allclose(expected.log_prob, seen.log_prob, rtol=1e-4, atol=1e-5)


def test_on_a_cpu_single_operations_act_and_graphs_cannot_be_asked_for() -> None:
    actor = network("continuous")
    store = store_of("continuous", actor)
    assert isinstance(make_acting(actor, store, ROWS, leaves_of("continuous")), EagerActing)
    with pytest.raises(PronghornError, match="--graphs on"):
        make_acting(actor, store, ROWS, leaves_of("continuous"), "on")


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, [8]), (8, [8]), (9, [8, 9]), (100, [8, 16, 32, 64, 100]), (64, [8, 16, 32, 64])]
)
def test_buckets_double_up_to_all_rows(rows: int, sizes: list[int]) -> None:
    assert list(buckets(rows)) == sizes


def test_only_as_much_of_the_largest_image_goes_up_as_there_are_rows() -> None:
    acting, sent = graphed("masked-mixed-lstm", graphs="off"), []
    packet = acting._ups[8]
    upload = packet.upload
    packet.upload = lambda num_bytes=None: (sent.append(num_bytes), upload(num_bytes))  # type: ignore[method-assign]
    acting.values(observations("masked-mixed-lstm", 3, np.random.default_rng(0)), np.arange(3))
    assert list(acting._leaves)[-1] == "view"
    assert sent == [packet.num_bytes - 5 * 40 * 36]  # 8 * 40 * 36 needs no filling up to 256 bytes


def test_a_snapshot_shares_no_memory_with_the_model_that_goes_on_learning() -> None:
    model = network("pixels-gru")
    snapshot = Snapshot.of(model, 1)
    kept = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in snapshot.tensors.items())
