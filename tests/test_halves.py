"""The two halves of a round, and what may lie between them: local steps, a refusal, another replica's traffic."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import overtone
from overtone import Cluster, Count, PeerError, Replica, Solo
from overtone.coding.layout import part_of
from overtone.errors import MethodError, StateError
from overtone.exchange import round as rounds
from overtone.exchange.gathered import Gathered
from overtone.exchange.round import Pending
from overtone.methods import METHODS, Method
from overtone.rules import Outer
from overtone.transport import run_exchange

DRIFT_METHODS = [name for name, row in METHODS.items() if row().signal.keeps_start]


def build(rank: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 70), nn.Linear(70, 8)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def gradients(replica: Replica, generator: torch.Generator) -> None:
    for p in replica.model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def weights(replica: Replica) -> list[Tensor]:
    return [p.detach().clone() for p in replica.model.parameters()]


def start_all(cluster: Cluster, *, overlapped: bool) -> dict[int, Pending]:
    """The first half of a round on every replica, after one local step."""
    pending = {}
    for rank, replica in enumerate(cluster.replicas):
        gradients(replica, torch.Generator().manual_seed(rank))
        replica.local_step()
        pending[rank] = replica.exchanger.start(replica._inner_step, overlapped=overlapped)
    return pending


def finish_all(cluster: Cluster, pending: dict[int, Pending]) -> list[overtone.Round]:
    cluster.run_exchanges({rank: one.exchange for rank, one in pending.items()}, "rounds")
    return [cluster.replicas[rank].exchanger.finish(one) for rank, one in pending.items()]


@pytest.mark.parametrize("name", DRIFT_METHODS)
def test_step_is_the_two_halves_together(name: str) -> None:
    whole, halves = (Cluster(build, METHODS[name](every=1), replicas=2) for _ in range(2))
    for rank, replica in enumerate(whole.replicas):
        gradients(replica, torch.Generator().manual_seed(rank))
    records = whole.step()
    assert [record.anchor_fingerprint for record in records] == [
        record.anchor_fingerprint for record in finish_all(halves, start_all(halves, overlapped=False))
    ]
    for one, other in zip(whole.replicas, halves.replicas, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


@pytest.mark.parametrize("name", DRIFT_METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_between_the_halves_are_neither_lost_nor_counted_twice(name: str, dtype: torch.dtype) -> None:
    """The same round with and without a local step inside it. The weights differ by exactly that step, the anchors not
    at all, and the next drift is that step: what is measured next is equal with a step inside and a step after it."""
    atol = 1e-5 if dtype is torch.float32 else 2e-2
    method = METHODS[name](every=1)
    inside, after = (Cluster(lambda rank: build(rank, dtype), method, replicas=2) for _ in range(2))
    pending = start_all(inside, overlapped=True)
    for replica in inside.replicas:
        gradients(replica, torch.Generator().manual_seed(7))
        replica.local_step()
    finish_all(inside, pending)
    finish_all(after, start_all(after, overlapped=False))
    for replica in after.replicas:
        gradients(replica, torch.Generator().manual_seed(7))
        replica.local_step()
    for one, other in zip(inside.replicas, after.replicas, strict=True):
        assert one.fingerprint == other.fingerprint
        assert one.steps == other.steps == 2
        assert one.state.steps_at_round == other.state.steps_at_round == 1
        for a, b in zip(weights(one), weights(other), strict=True):
            assert torch.allclose(a.float(), b.float(), atol=atol)
        mine, theirs = one.exchanger.signal.measure(), other.exchanger.signal.measure()
        for a, b, c, d in zip(mine.plus, mine.minus or (), theirs.plus, theirs.minus or (), strict=True):
            assert torch.allclose(a.float() - b.float(), c.float() - d.float(), atol=atol)


@pytest.mark.parametrize("name", DRIFT_METHODS)
def test_a_round_that_is_refused_between_the_halves_keeps_the_steps(name: str) -> None:
    """A transport says no at the commit, after a local step inside the round: the weights are where the local steps
    left them, and everything that was not exchanged is exchanged in the next round."""
    refusing = Refusing()
    replica = Replica(*build(0), METHODS[name](every=1), refusing)
    gradients(replica, torch.Generator().manual_seed(0))
    replica.local_step()
    pending = replica.exchanger.start(replica._inner_step, overlapped=True)
    gradients(replica, torch.Generator().manual_seed(1))
    replica.local_step()
    before = weights(replica)
    refusing.left = 1
    with pytest.raises(PeerError, match="not this time"):
        run_exchange(pending.exchange, refusing)
    replica.exchanger.refuse(pending)
    assert all(torch.equal(a, b) for a, b in zip(weights(replica), before, strict=True))
    assert not replica.state.under_way
    unsent = owed(replica)
    total = build(0)[0]
    start = [p.detach() for p in total.parameters()]
    moved = torch.cat([(a - b).view(-1) for a, b in zip(start, before, strict=True)])
    assert torch.allclose(unsent.norm(), moved.norm(), rtol=1e-4)


def owed(replica: Replica) -> Tensor:
    """The residual and the drift that was not measured yet, as coefficients."""
    exchanger = replica.exchanger
    sources, layout = exchanger.signal.measure(), exchanger.layout
    assert sources.minus is not None
    store = "momentum" if "drift" in replica.state.tensors else "residual"
    flat = replica.state.tensors.get(store, layout.empty(replica.device)).clone()
    plus, minus = layout.matrices(sources.plus), layout.matrices(sources.minus)
    for slab in layout.slabs:
        layout.read_slab(slab, plus, minus).into(part_of(flat, slab), keep=1.0)
    return flat


class Refusing(Solo):
    """Refuses so many commits."""

    left = 0

    def commit(self, index: int) -> None:
        if self.left:
            self.left -= 1
            raise PeerError(f"round {index}: not this time")


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name]().every])
def test_a_transport_may_refuse_at_the_commit(name: str) -> None:
    """No weight moves; a round that is made up for later ends where one that was never refused does."""
    worlds = [Refusing(), Refusing()]
    replicas = [Replica(*build(0), METHODS[name](), world) for world in worlds]
    for replica in replicas:
        gradients(replica, torch.Generator().manual_seed(0))
        replica.local_step()
    before = weights(replicas[0])
    worlds[0].left = 1
    with pytest.raises(PeerError, match="round 0: not this time"):
        run_exchange(replicas[0].rounding(), worlds[0])
    assert all(torch.equal(a, b) for a, b in zip(weights(replicas[0]), before, strict=True))
    if not replicas[0].exchanger.signal.inner_first:
        return
    for replica, world in zip(replicas, worlds, strict=True):
        run_exchange(replica.rounding(), world)
    assert replicas[0].rounds == replicas[1].rounds == 1
    if METHODS[name]().codec.lossless:
        for a, b in zip(weights(replicas[0]), weights(replicas[1]), strict=True):
            assert torch.allclose(a, b, atol=1e-6)


class Interrupted(Solo):
    """Ctrl-C while the replica waits in its next gather."""

    left = 0

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt
        return super().gather(message, most=most, count=count)


@pytest.mark.parametrize("name", DRIFT_METHODS)
def test_an_interrupt_in_the_middle_of_a_round_takes_it_back(name: str) -> None:
    """The replica can be saved, and the next round sends what this one would have sent."""
    world = Interrupted()
    replica = Replica(*build(0), METHODS[name](every=1), world)
    gradients(replica, torch.Generator().manual_seed(0))
    world.left = 1
    with pytest.raises(KeyboardInterrupt):
        replica.step()
    moved = torch.cat([(a - b).view(-1) for a, b in zip(build(0)[0].parameters(), weights(replica), strict=True)])
    assert torch.allclose(owed(replica).norm(), moved.norm(), rtol=1e-4)
    assert replica.state_dict()["counts"] == {"steps": 1, "rounds": 0, "steps_at_round": 0}
    assert run_exchange(replica.rounding(), world).index == 0


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["codec.TopK.encode", "rules.Outer.sent", "rules.Outer.absorb"])
def test_an_interrupt_that_leaves_the_state_half_moved_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is saved or exchanged from such a state, on any rank, until a saved one is loaded."""
    replica = Replica(*build(0), overtone.decoupled(every=1), Solo())
    saved = copy.deepcopy(replica.state_dict())
    gradients(replica, torch.Generator().manual_seed(0))
    with monkeypatch.context() as patch:
        patch.setattr(f"overtone.{where}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            replica.step()
    with pytest.raises(PeerError, match="rank 0 could not take part: round 0 was interrupted on this replica"):
        run_exchange(replica.rounding(), replica.transport)
    with pytest.raises(StateError, match="round 0 was interrupted"):
        replica.state_dict()
    replica.load_state_dict(saved)
    gradients(replica, torch.Generator().manual_seed(0))
    assert replica.step() is not None


class Failing(torch.optim.SGD):
    fails = False

    def step(self, *args: object) -> None:  # type: ignore[override]
        if self.fails:
            raise RuntimeError("out of memory")
        super().step(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ddp", "demo"])
def test_an_inner_step_that_fails_does_not_lock_the_replica(name: str) -> None:
    model, _ = build(0)
    inner = Failing(model.parameters(), lr=0.1)
    replica = Replica(model, inner, METHODS[name](), Solo())
    inner.fails = True
    gradients(replica, torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="out of memory"):
        replica.step()
    inner.fails = False
    gradients(replica, torch.Generator().manual_seed(0))
    assert replica.step() is not None
    assert replica.state_dict()["counts"]["rounds"] == 1


def test_a_transport_that_lacks_something_is_refused_by_name() -> None:
    class Older:
        rank, size, ledger, peers = 0, 1, overtone.Ledger(), (0,)

        def gather(self, message: bytes, *, most: int | None) -> list[bytes]:  # noqa: ARG002
            return [message]

        def sum(self, buffer: Tensor, *, count: Count) -> Tensor:  # noqa: ARG002
            return buffer

    with pytest.raises(MethodError, match=r"has no all_to_all, broadcast, commit, gather\(count=\); give Solo\(\)"):
        Replica(*build(0), overtone.decoupled(), Older())  # type: ignore[arg-type]


def test_halves_out_of_order_are_refused() -> None:
    replica = Replica(*build(0), overtone.decoupled(every=1), Solo())
    gradients(replica, torch.Generator().manual_seed(0))
    replica.local_step()
    pending = replica.exchanger.start(replica._inner_step)
    with pytest.raises(StateError, match="finish: the round's exchange is not over"):
        replica.exchanger.finish(pending)
    with pytest.raises(StateError, match="start: a round is under way already"):
        replica.exchanger.start(replica._inner_step)
    with pytest.raises(StateError, match="state_dict: in the middle of a round nothing is settled"):
        replica.state_dict()
    run_exchange(pending.exchange, replica.transport)
    assert replica.exchanger.finish(pending).index == 0
    assert replica.state_dict()["counts"]["rounds"] == 1


@pytest.mark.parametrize("name", ["ddp", "demo"])
def test_no_step_can_lie_inside_a_gradient_round(name: str) -> None:
    replica = Replica(*build(0), METHODS[name](), Solo())
    gradients(replica, torch.Generator().manual_seed(0))
    replica.local_step()
    with pytest.raises(MethodError, match="gradients are exchanged before the inner step"):
        replica.exchanger.start(replica._inner_step, overlapped=True)


# -- counts --------------------------------------------------------------------------------------------------------


def test_two_replicas_on_one_transport_count_apart() -> None:
    """Each exchange counts its own bytes; the ledger has the sum of both."""
    cluster = Cluster(build, overtone.decoupled(every=1), replicas=2)
    first = [r.transport for r in cluster.replicas]
    other = Cluster(build, overtone.diloco(every=1), replicas=2)
    for replica, transport in zip(other.replicas, first, strict=True):
        replica.transport.ledger = transport.ledger
    starts = [transport.ledger.sent for transport in first]
    # Both rounds have started before either is carried: neither may see the other's bytes as its own.
    mine, theirs = start_all(cluster, overlapped=False), start_all(other, overlapped=False)
    other_records, records = finish_all(other, theirs), finish_all(cluster, mine)
    dense = sum(p.numel() for p in build(0)[0].parameters()) * 4
    for record, dense_record, start, transport in zip(records, other_records, starts, first, strict=True):
        assert 0 < record.bytes_sent < dense / 2 < dense_record.bytes_sent
        assert transport.ledger.sent - start == record.bytes_sent + dense_record.bytes_sent


def test_a_count_is_the_sum_of_its_collectives() -> None:
    cluster = Cluster(build, overtone.decoupled(every=1), replicas=3)
    transport = cluster.replicas[0].transport
    setup = Count(**vars(transport.ledger.counts["setup"]))
    assert transport.ledger.sent == 0
    assert setup.received > 0 or setup.sent > 0
    pending = start_all(cluster, overlapped=False)
    records = finish_all(cluster, pending)
    assert transport.ledger.counts["rounds"].sent == records[0].bytes_sent == pending[0].count.sent
    assert transport.ledger.counts["setup"] == setup


# -- payloads and patterns -----------------------------------------------------------------------------------------


def play(method: Method, steps: int = 3) -> Cluster:
    cluster = Cluster(build, method, replicas=3)
    for step in range(steps):
        for rank, replica in enumerate(cluster.replicas):
            gradients(replica, torch.Generator().manual_seed(10 * step + rank))
        cluster.step()
    return cluster


@pytest.mark.parametrize("name", ["ddp", "local_sgd", "diloco"])
def test_numbers_that_can_be_summed_can_be_gathered_as_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same to rounding: a gather sums in rank order and then divides."""
    method = METHODS[name]() if name == "ddp" else METHODS[name](every=1)
    summed = play(method)
    monkeypatch.setattr(rounds, "pattern_for", lambda method, context, members: Gathered(context))  # noqa: ARG005
    gathered = play(method)
    for a, b in zip(weights(summed.replicas[0]), weights(gathered.replicas[0]), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert len({replica.fingerprint for replica in gathered.replicas}) == 1


def test_a_pattern_with_state_of_its_own_is_saved_with_the_rest() -> None:
    def make() -> Replica:
        replica = Replica(*build(0), overtone.decoupled(every=1), Solo(), join=False)
        replica.exchanger.pattern.state["owed"] = torch.zeros(5)
        run_exchange(replica.joining(), replica.transport, "setup")
        return replica

    replica, other = make(), make()
    replica.exchanger.pattern.state["owed"] += 3.0
    saved = replica.state_dict()
    other.load_state_dict(saved)
    assert torch.equal(other.exchanger.pattern.state["owed"], torch.full((5,), 3.0))
    del saved["pattern"]
    with pytest.raises(StateError, match="incomplete or damaged"):
        other.load_state_dict(saved)


def test_draining_asks_rule_and_codec() -> None:
    with pytest.raises(MethodError, match="leave no residual to drain"):
        Method("x", overtone.diloco().signal, 1, Outer(lr=1.0, momentum=0.0), overtone.diloco().codec, drain=1)
