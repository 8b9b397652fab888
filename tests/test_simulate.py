"""The virtual network and its clock; replicas with random states of their own, that come and go."""

import pytest
import torch
from torch import nn

import overtone
from overtone import Absence, Cluster, Link, Method, OvertoneError
from scenario import CONSENSUS, METHODS, backward, batches, build, largest_difference, run_cluster, weights


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_repeatable_to_the_bit(method: Method) -> None:
    first, second = (run_cluster(method, replicas=3, steps=7, seed=5) for _ in range(2))
    for a, b in zip(first.replicas, second.replicas, strict=True):
        assert largest_difference(weights(a), weights(b)) == 0.0
        assert a.transport.ledger.sent == b.transport.ledger.sent
    assert first.clock == second.clock


def still(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(100, 100, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def spin(cluster: Cluster, steps: int) -> None:
    for _ in range(steps):
        for replica in cluster.turns():
            replica.model.weight.grad = torch.ones(100, 100)
        cluster.step()


def test_steps_take_the_slowest_replica_s_time() -> None:
    cluster = Cluster(still, overtone.diloco(every=10), replicas=3, links=Link(1e18), step_seconds=[0.1, 0.2, 0.5])
    spin(cluster, 20)
    assert cluster.clock == pytest.approx(20 * 0.5, rel=1e-6)
    waits = [replica.transport.ledger.waiting for replica in cluster.replicas]
    assert waits == pytest.approx([20 * 0.4, 20 * 0.3, 0.0], abs=1e-6)


def test_a_summed_round_takes_the_ring_s_time() -> None:
    cluster = Cluster(still, overtone.diloco(every=1), replicas=4, links=Link(1e6, latency=0.01))
    before = cluster.clock
    sent = cluster.replicas[0].transport.ledger.sent
    spin(cluster, 1)
    sent = cluster.replicas[0].transport.ledger.sent - sent
    assert sent == pytest.approx(2 * 3 / 4 * 40_000, rel=0.03)  # the ring, plus the headers
    assert cluster.clock - before == pytest.approx(8 * sent / 1e6 + 7 * 0.01)  # a hop for the headers, six for the sum


def test_a_gathered_round_takes_the_narrowest_link_s_time() -> None:
    links = [Link(1e7), Link(1e6, download=1e7), Link(1e7)]
    cluster = Cluster(still, overtone.decoupled(every=1), replicas=3, links=links)
    before = cluster.clock
    spin(cluster, 1)
    sent = cluster.replicas[0].transport.ledger.sent
    assert cluster.clock - before == pytest.approx(8 * sent / 1e6)


def test_gathered_bytes_are_k_minus_one_messages() -> None:
    sent = {}
    for replicas in (2, 5):
        cluster = Cluster(still, overtone.decoupled(every=1), replicas=replicas)
        spin(cluster, 1)
        sent[replicas] = cluster.replicas[0].transport.ledger.sent
    assert sent[5] == 4 * sent[2]


@pytest.mark.parametrize("method", CONSENSUS.values(), ids=CONSENSUS)
def test_churn(method: Method) -> None:
    """Rank 1 misses rounds 1 and 2, rank 0 misses round 3; who comes back takes over a peer's anchor."""
    absences = [Absence(1, leaves=1, returns=3), Absence(0, leaves=3, returns=4)]
    cluster = Cluster(build, method, replicas=3, absences=absences)
    streams = [batches(rank) for rank in range(3)]
    seen = []
    for _ in range(6 * (method.every or 1)):
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        rounds = cluster.step()
        if rounds:
            seen.append(len(rounds))
            here = {replica.fingerprint for replica in cluster.present()}
            assert len(here) == 1
    assert seen == [3, 2, 2, 2, 3, 3][: 5 if method.delay else 6]  # the last one may still be in flight
    cluster.finish()
    first, *others = (weights(replica) for replica in cluster.replicas)
    for other in others:
        floats = {n for n in first if first[n].is_floating_point()}
        assert largest_difference({n: first[n] for n in floats}, {n: other[n] for n in floats}) == 0.0


def test_one_comes_as_the_other_goes() -> None:
    absences = [Absence(0, leaves=1, returns=2), Absence(1, leaves=2, returns=3)]
    cluster = Cluster(build, overtone.decoupled(every=1), replicas=2, absences=absences)
    for _ in range(4):
        for replica in cluster.turns():
            backward(replica, next(batches(replica.transport.rank)))
        cluster.step()
    cluster.finish()
    assert cluster.replicas[0].fingerprint == cluster.replicas[1].fingerprint


def test_who_is_away_at_the_end_comes_home() -> None:
    cluster = Cluster(build, overtone.decoupled(every=2), replicas=2, absences=[Absence(1, leaves=1, returns=99)])
    streams = [batches(rank) for rank in range(2)]
    for _ in range(5):
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        cluster.step()
    cluster.finish()
    assert cluster.replicas[0].fingerprint == cluster.replicas[1].fingerprint
    assert largest_difference(*(weights(replica) for replica in cluster.replicas)) == 0.0


def test_replicas_have_random_states_of_their_own() -> None:
    def rolls(replicas: int) -> list[list[float]]:
        cluster = Cluster(still, overtone.diloco(), replicas=replicas, seed=3)
        seen: list[list[float]] = [[] for _ in range(replicas)]
        for _ in range(3):
            for replica in cluster.turns():
                seen[replica.transport.rank].append(float(torch.rand(())))
            torch.rand(7)  # what happens outside the turns does not matter
        return seen

    two, three = rolls(2), rolls(3)
    assert two[0] == three[0]
    assert two[1] == three[1]
    assert two[0] != two[1]


def test_a_seat_cannot_leave_the_table() -> None:
    cluster = Cluster(still, overtone.decoupled(every=1), replicas=2)
    replica = cluster.replicas[0]
    replica.model.weight.grad = torch.ones(100, 100)
    with pytest.raises(OvertoneError, match=r"call step\(\) and finish\(\) on the Cluster"):
        replica.step()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"replicas": 0}, "replicas=0"),
        ({"replicas": 2, "step_seconds": [0.1]}, "step_seconds: 1 given for 2 replicas"),
        ({"replicas": 2, "absences": [Absence(5, 1, 2)]}, "absence of rank 5"),
    ],
)
def test_impossible_clusters(options: dict[str, object], told: str) -> None:
    with pytest.raises(OvertoneError, match=told):
        Cluster(still, overtone.diloco(), **options)  # type: ignore[arg-type]


def test_impossible_links_and_absences() -> None:
    with pytest.raises(OvertoneError, match="bandwidth=0"):
        Link(0)
    with pytest.raises(OvertoneError, match="latency=-1"):
        Link(1e6, latency=-1)
    with pytest.raises(OvertoneError, match="leaves=3 must come before returns=3"):
        Absence(0, 3, 3)


def test_somebody_must_stay() -> None:
    cluster = Cluster(still, overtone.diloco(every=1), replicas=2, absences=[Absence(0, 0, 2), Absence(1, 0, 2)])
    with pytest.raises(OvertoneError, match="every replica is absent"):
        spin(cluster, 1)
