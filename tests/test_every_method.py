"""One battery that every method must pass: adding a row to the table adds it here."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import overtone
from overtone import Cluster, Method, Replica, Solo
from overtone.errors import MethodError, ModelError, PeerError, StateError
from scenario import CONSENSUS, METHODS, SPEAKING, backward, batches, build, largest_difference, run_cluster, weights

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
speaking_method = pytest.mark.parametrize("method", SPEAKING.values(), ids=SPEAKING)
consensus_method = pytest.mark.parametrize("method", CONSENSUS.values(), ids=CONSENSUS)


@pytest.mark.slow
@every_method
def test_converges_on_a_convex_problem(method: Method) -> None:
    """Least squares whose minimum is the mean of the replicas' own: who communicates gets near it, `alone` finds its
    own, and `published`, where private drift never leaves, ends somewhere between.

    The learning rate falls to nothing, as it must for signs (`demo`) and for drift that opposes itself forever.
    """
    dice = torch.Generator().manual_seed(0)
    goals = torch.randn(70, 70, generator=dice) + 0.5 * torch.randn(3, 70, 70, generator=dice)
    everything = goals.mean(0)

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(70, 70, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    cluster = Cluster(make, method, replicas=3)
    for step in range(300):
        for replica in cluster.turns():
            replica.inner.param_groups[0]["lr"] = 0.05 * (1 - step / 300)
            replica.inner.zero_grad()
            (0.5 * (replica.model.weight - goals[replica.transport.rank]).square().sum()).backward()
        cluster.step()
    cluster.finish()
    goal = everything if method.consensus else goals[0]
    distance = float((cluster.replicas[0].model.weight.detach() - goal).norm() / goal.norm())
    late = 0.02 if method.delay and method.delay == method.every else 0.0  # the last rounds lag by a whole round
    assert distance < (0.1 + late if method.consensus or method.every is None else 0.5)


@consensus_method
def test_all_replicas_end_with_the_same_weights(method: Method) -> None:
    cluster = run_cluster(method, replicas=3, steps=8)
    first, *others = (weights(replica) for replica in cluster.replicas)
    for other in others:
        assert largest_difference(first, other) == 0.0
    assert len({replica.fingerprint for replica in cluster.replicas}) == 1


@consensus_method
def test_anchor_shows_the_same_model_everywhere_and_goes_away(method: Method) -> None:
    cluster = Cluster(build, method, replicas=2)
    streams = [batches(rank) for rank in range(2)]
    for _ in range(5):  # in the middle of a round
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        cluster.step()
    seen = []
    for replica in cluster.replicas:
        before = weights(replica)
        with replica.anchor() as model:
            seen.append({n: t.clone() for n, t in model.state_dict().items() if t.is_floating_point()})
        assert largest_difference(before, weights(replica)) == 0.0
        with pytest.raises(KeyError), replica.anchor():
            raise KeyError
        assert largest_difference(before, weights(replica)) == 0.0
    assert largest_difference(*seen) == 0.0


@every_method
@pytest.mark.parametrize("stop", range(1, 8))
def test_state_round_trip_at_every_step(method: Method, stop: int) -> None:
    """Stop after any step, in or between rounds, go on in new objects: the same bits as never stopped."""
    steps = 8

    def play(replica: Replica, first: int, last: int) -> None:
        for step, batch in enumerate(batches(0)):
            if step == last:
                return
            if step >= first:
                backward(replica, batch)
                replica.step()

    straight = Replica(*build(0), method, Solo())
    play(straight, 0, steps)
    straight.finish()

    halted = Replica(*build(0), method, Solo())
    play(halted, 0, stop)
    saved = pickle.loads(pickle.dumps((halted.model.state_dict(), halted.inner.state_dict(), halted.state_dict())))
    resumed = Replica(*build(1), method, Solo())  # other initial weights: everything must come from the state
    resumed.model.load_state_dict(saved[0])
    resumed.inner.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    play(resumed, stop, steps)
    resumed.finish()
    assert largest_difference(weights(straight), weights(resumed)) == 0.0
    assert straight.fingerprint == resumed.fingerprint
    assert (straight.steps, straight.rounds) == (resumed.steps, resumed.rounds)


def test_state_of_another_method_is_refused() -> None:
    saved = Replica(*build(0), overtone.decoupled(every=5), Solo()).state_dict()
    other = Replica(*build(0), overtone.decoupled(every=6), Solo())
    with pytest.raises(StateError, match="every: 5 in the saved state, 6 here"):
        other.load_state_dict(saved)
    with pytest.raises(StateError, match="damaged"):
        Replica(*build(0), overtone.decoupled(every=5), Solo()).load_state_dict({**saved, "state": {}})


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights(method: Method, dtype: torch.dtype) -> None:
    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(70, 66).to(dtype)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    cluster = Cluster(make, method, replicas=2)
    for _ in range(6):
        for replica in cluster.turns():
            replica.inner.zero_grad()
            (replica.model.weight.float() - 1.0 - replica.transport.rank).square().mean().backward()
        cluster.step()
    cluster.finish()
    a, b = (weights(replica) for replica in cluster.replicas)
    assert a["weight"].dtype == dtype
    if method.consensus:
        assert largest_difference(a, b) == 0.0
    if "anchor" in cluster.replicas[0].state.tensors:
        assert cluster.replicas[0].state.tensors["anchor"].dtype == torch.float32


def test_resting_bf16_weights_have_no_drift() -> None:
    """The fp32 anchor between two bf16 numbers is not pulled to one of them by a replica that does nothing."""
    model = nn.Linear(70, 70).to(torch.bfloat16)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    replica = Replica(model, inner, overtone.diloco(every=1), Solo())
    replica.state.tensors["anchor"] += 1e-5
    replica.exchanger.show(replica.state.tensors["anchor"])
    before = replica.state.tensors["anchor"].clone()
    for _ in range(3):
        model.weight.grad = torch.ones_like(model.weight)
        record = replica.step()
        assert record is not None
        assert record.drift_norm == 0.0
    assert torch.equal(replica.state.tensors["anchor"], before)


@speaking_method
def test_buffers_are_averaged_and_counters_agree(method: Method) -> None:
    cluster = Cluster(build, replace(method, every=1, delay=0), replicas=2)
    streams = [batches(rank) for rank in range(2)]
    own = []
    for replica in cluster.turns():
        backward(replica, next(streams[replica.transport.rank]))
        own.append(replica.model.norm.running_mean.clone())
    assert not torch.equal(*own)
    cluster.step()
    for replica in cluster.replicas:
        assert torch.allclose(replica.model.norm.running_mean, (own[0] + own[1]) / 2, rtol=0, atol=1e-7)
        assert int(replica.model.norm.num_batches_tracked) == 1
        assert replica.model.mask.tolist() == [0.0, float("-inf")]


def test_private_buffers_are_left_alone() -> None:
    cluster = Cluster(build, overtone.decoupled(every=1), replicas=2, buffers="private")
    for replica in cluster.turns():
        backward(replica, next(batches(replica.transport.rank)))
        replica.model.norm.num_batches_tracked += replica.transport.rank
    cluster.step()
    a, b = cluster.replicas
    assert not torch.equal(a.model.norm.running_mean, b.model.norm.running_mean)


def test_buffers_that_rest_travel_as_one_bit() -> None:
    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10))
            self.register_buffer("table", torch.randn(100_000))

    def sent(touch: bool) -> int:
        def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = Tabled()
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        cluster = Cluster(make, overtone.decoupled(every=1), replicas=2)
        for replica in cluster.turns():
            replica.model.weight.grad = torch.ones(10)
            replica.model.table += float(touch)
        return cluster.step()[0].bytes_sent

    assert sent(touch=False) < 200
    assert sent(touch=True) > 400_000


@speaking_method
def test_unused_parameters_stay_unused(method: Method) -> None:
    """A parameter without a gradient on every replica must not be decayed by an optimizer that would skip it."""
    cluster = run_cluster(method, replicas=2, steps=4)
    for replica in cluster.replicas:
        assert torch.equal(replica.model.unused, torch.ones(3, 2))
        if not replica.exchanger.signal.inner_first:
            assert replica.model.unused.grad is None


def test_a_gradient_that_only_one_replica_has_reaches_all() -> None:
    cluster = Cluster(build, overtone.ddp(), replicas=2)
    for replica in cluster.turns():
        backward(replica, next(batches(0)))
        if replica.transport.rank == 0:
            replica.model.unused.grad = torch.ones(3, 2)
    cluster.step()
    for replica in cluster.replicas:
        assert torch.equal(replica.model.unused.grad, torch.full((3, 2), 0.5))


@every_method
def test_accumulated_gradients(method: Method) -> None:
    """Two half batches before `step` are one whole batch (no BatchNorm here, which would see the halves)."""

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(66, 66)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    results = []
    for parts in (1, 2):
        cluster = Cluster(make, method, replicas=2)
        for step in range(6):
            for replica in cluster.turns():
                x = torch.randn(8, 66, generator=torch.Generator().manual_seed(10 * step + replica.transport.rank))
                replica.inner.zero_grad()
                for part in x.chunk(parts):
                    (F.mse_loss(replica.model(part), part.sin()) / parts).backward()
            cluster.step()
        cluster.finish()
        results.append(weights(cluster.replicas[0]))
    # They differ by rounding alone, except where it decides the sign of a near-zero sum (demo): few values, then.
    apart = torch.cat([((a - b).abs() > 1e-4).view(-1) for a, b in zip(*map(dict.values, results), strict=True)])
    assert float(apart.float().mean()) <= 0.005


@every_method
def test_grad_scaler_skips_on_all_replicas_alike(method: Method) -> None:
    """An overflow on one replica: everybody skips that step where gradients are shared, and all go on in step."""
    cluster = Cluster(
        build, replace(method, every=1, delay=min(method.delay, 1)) if method.every else method, replicas=2
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    streams = [batches(rank) for rank in range(2)]
    scales = []
    for step in range(4):
        for replica in cluster.turns():
            x, y = next(streams[replica.transport.rank])
            replica.inner.zero_grad()
            scaler.scale(F.cross_entropy(replica.model(x), y)).backward()
            if step == 1 and replica.transport.rank == 1:
                replica.model.up.weight.grad[0, 0] = float("inf")
        before = [weights(replica)["up.weight"] for replica in cluster.replicas]
        cluster.step(scaler=scaler, clip=1.0)
        scaler.update()
        scales.append(scaler.get_scale())
        moved = [not torch.equal(b, r.model.up.weight) for b, r in zip(before, cluster.replicas, strict=True)]
        if method.signal.inner_first:
            assert moved[0]
        else:
            assert moved == [step != 1] * 2
    assert scales[1] == 512.0  # the scaler saw it
    cluster.finish()
    assert all(bool(torch.isfinite(p).all()) for r in cluster.replicas for p in r.model.parameters())
    if method.consensus:
        assert largest_difference(*(weights(replica) for replica in cluster.replicas)) == 0.0


def test_a_scaler_unscaled_too_early_is_refused() -> None:
    replica = Replica(*build(0), overtone.ddp(), Solo())
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(batches(0))
    scaler.scale(F.cross_entropy(replica.model(x), y)).backward()
    scaler.unscale_(replica.inner)
    with pytest.raises(ModelError, match=r"leave out scaler\.unscale_"):
        replica.step(scaler=scaler)


@every_method
def test_schedulers_see_every_step(method: Method) -> None:
    replica = Replica(*build(0), method, Solo())
    plan = torch.optim.lr_scheduler.StepLR(replica.inner, step_size=1, gamma=0.5)
    for batch, _ in zip(batches(0), range(4), strict=False):
        backward(replica, batch)
        replica.step()
        plan.step()
    assert plan.get_last_lr() == [3e-3 / 16]


@every_method
def test_compiled_models_meet_plain_ones(method: Method) -> None:
    """`torch.compile` renames parameters; compiled and plain replicas still speak of the same ones."""

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(20, 66), nn.Tanh(), nn.Linear(66, 3))
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        return (torch.compile(model, backend="eager") if rank else model), inner

    cluster = Cluster(make, method, replicas=2)
    for _ in range(4):
        for replica in cluster.turns():
            replica.inner.zero_grad()
            replica.model(torch.ones(4, 20)).square().sum().backward()
        cluster.step()
    cluster.finish()
    if method.consensus:
        a, b = (list(replica.model.parameters()) for replica in cluster.replicas)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_lbfgs_with_its_closure() -> None:
    model = nn.Linear(5, 1)
    inner = torch.optim.LBFGS(model.parameters())
    replica = Replica(model, inner, overtone.local_sgd(every=2), Solo())
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))

    def closure() -> float:
        inner.zero_grad()
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        return float(loss.detach())

    first = closure()
    for _ in range(2):
        replica.step(closure=closure)
    assert closure() < 1e-2 * first
    with pytest.raises(ModelError, match="closure: ddp exchanges gradients"):
        Replica(*build(0), overtone.ddp(), Solo()).step(closure=closure)


@speaking_method
def test_a_round_is_recorded(method: Method) -> None:
    cluster = Cluster(build, replace(method, every=2, delay=0) if method.every != 1 else method, replicas=3)
    streams = [batches(rank) for rank in range(3)]
    records = []
    for _ in range(2):
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        records.append(cluster.step())
    last = records[-1]
    assert len(last) == 3
    for rank, record in enumerate(last):
        ledger = cluster.replicas[rank].transport.ledger
        assert record.local_steps == (method.every if method.every == 1 else 2)
        assert record.index == cluster.replicas[rank].rounds - 1
        assert record.bytes_sent > 0
        assert sum(r[rank].bytes_sent for r in records if r) == ledger.sent
        assert sum(r[rank].bytes_received for r in records if r) == ledger.received
        assert record.drift_norm > 0
        assert record.seconds_encoding > 0
        assert record.seconds_decoding > 0
        if "anchor" in cluster.replicas[rank].state.tensors:
            assert record.anchor_fingerprint == cluster.replicas[rank].fingerprint
        else:  # of the weights that all began the round with
            assert record.anchor_fingerprint != cluster.replicas[rank].fingerprint
            assert len({other.anchor_fingerprint for other in last}) == 1


@speaking_method
def test_not_finite_is_refused_by_name(method: Method) -> None:
    cluster = Cluster(build, replace(method, every=1, delay=min(method.delay, 1)), replicas=2)
    for replica in cluster.turns():
        backward(replica, next(batches(replica.transport.rank)))
    cluster.replicas[1].model.up.weight.grad[2, 2] = float("nan")
    with pytest.raises(PeerError, match="rank 1 could not take part"):  # noqa: PT012 (a delayed round is absorbed later)
        cluster.step()
        cluster.finish()


def test_models_that_cannot_be_wrapped() -> None:
    model, inner = build(0)
    with pytest.raises(ModelError, match="holds none of the model's parameters"):
        Replica(model, build(0)[1], overtone.decoupled(), Solo())
    with pytest.raises(ModelError, match="buffers='mean'"):
        Replica(model, inner, overtone.decoupled(), Solo(), buffers="mean")
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter requires a gradient"):
        Replica(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1), transport=Solo())
    complex_model = nn.Module()
    complex_model.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"weight: is torch\.complex64"):
        Replica(complex_model, torch.optim.SGD(complex_model.parameters(), lr=0.1), transport=Solo())
    replica = Replica(model, inner, overtone.decoupled(every=1), Solo())
    model.frozen.weight.requires_grad_(True)
    backward(replica, next(batches(0)))
    with pytest.raises(PeerError, match=r"frozen\.weight became trainable"):
        replica.step()


@pytest.mark.parametrize(
    ("row", "numbers", "told"),
    [
        (overtone.diloco, {"every": 0}, "every=0"),
        (overtone.diloco, {"every": 2.5}, r"every=2\.5"),
        (overtone.diloco, {"lr": 0.0}, r"lr=0\.0"),
        (overtone.diloco, {"momentum": 1.0}, r"momentum=1\.0: must lie in \[0, 1\)"),
        (overtone.decoupled, {"decay": 1.5}, r"decay=1\.5"),
        (overtone.decoupled, {"carry": -0.1}, r"carry=-0\.1"),
        (overtone.decoupled, {"release": 0.0}, r"release=0\.0: must lie in \(0, 1\]"),
        (overtone.decoupled, {"drain": -1}, "drain=-1"),
        (overtone.decoupled, {"lr": float("nan")}, "lr=nan"),
        (overtone.published, {"decay": float("nan")}, "decay=nan"),
        (overtone.demo, {"keep": 0}, "keep=0"),
        (overtone.decoupled, {"momentum": "x"}, r"momentum='x': must be a number in \[0, 1\)"),
        (overtone.diloco, {"momentum": None}, "momentum=None"),
        (overtone.decoupled, {"lr": True}, "lr=True: the outer learning rate"),
        (overtone.decoupled, {"carry": [1]}, r"carry=\[1\]"),
        (overtone.decoupled, {"every": True}, "every=True"),
        (overtone.decoupled, {"every": 10**30}, "every=1000"),
        (overtone.decoupled, {"drain": 10**9}, "drain=1000000000"),
        (overtone.decoupled, {"drain": True}, "drain=True"),
        (overtone.decoupled, {"transform": ["dct"]}, "transform="),
        (overtone.published, {"lr": "x"}, "lr='x'"),
        (overtone.demo, {"decay": None}, "decay=None"),
    ],
)
def test_numbers_are_validated_on_construction(row: object, numbers: dict[str, object], told: str) -> None:
    with pytest.raises(MethodError, match=told):
        row(**numbers)  # type: ignore[operator]


def test_deep_copies_of_state_are_independent() -> None:
    replica = Replica(*build(0), overtone.decoupled(every=1), Solo())
    saved = copy.deepcopy(replica.state_dict())
    backward(replica, next(batches(0)))
    replica.step()
    assert not torch.equal(saved["state"]["anchor"], replica.state.tensors["anchor"])
