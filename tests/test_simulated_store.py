"""A run in a store, simulated: it trains as a gathered run does, costs the bytes of a real one, and takes its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import overtone
from overtone import Absence, Cluster, Link, Method, MethodError, OvertoneError, Replica
from overtone.exchange.choice import cost_of
from overtone.ledger import Count
from overtone.sim.store import mean_cost
from overtone.swarm import members, open_round
from overtone.swarm.records import NOTE_BYTES
from overtone.swarm.store import Store
from overtone.transport import Solo
from scenario import EVERY, SMALL, backward, batches, build, largest_difference, run_cluster, weights

PATIENCE = 120.0  # seconds that no test comes near, unless something hangs
MEMBERS = 3
# With a basis that does not depend on the number of the round: real members need some rounds to come together.
METHOD = overtone.decoupled(every=EVERY, keep=300, transform="dct", exchange="store")


def rounds_of(replica: Replica) -> Count:
    return replace(replica.transport.ledger.counts["rounds"])


def train(cluster: Cluster, steps: int) -> None:
    streams = [batches(rank) for rank in range(len(cluster.replicas))]
    for _ in range(steps):
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        cluster.step()


# -- the training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2 * EVERY, 2 * EVERY + 1])
@pytest.mark.parametrize(
    ("row", "delay"), [(overtone.decoupled, 0), (overtone.decoupled, 2), (overtone.sparse_loco, 0)]
)
def test_training_is_that_of_a_gathered_run_to_the_bit(row: Callable[..., Method], delay: int, steps: int) -> None:
    gathered, stored = (
        run_cluster(row(**SMALL, delay=delay, exchange=exchange), replicas=3, steps=steps)
        for exchange in ("gathered", "store")
    )
    for a, b in zip(gathered.replicas, stored.replicas, strict=True):
        assert largest_difference(weights(a), weights(b)) == 0.0
        assert a.fingerprint == b.fingerprint
        assert a.transport.ledger.sent > b.transport.ledger.sent > 0
        assert b.transport.ledger.received > b.transport.ledger.sent
        if steps % EVERY == 0 and not delay:  # nobody compares the last weights of a store
            assert b.transport.ledger.counts["finish"] == Count()


# -- the bytes -----------------------------------------------------------------------------------------------------


def members_at(url: str) -> list[Replica]:
    """Real members of one run, none of which has trained yet: the founder steps without a gradient until all are in."""

    def member(number: int) -> Replica:
        store = Store(url, name=f"replica-{number}", wait=True, min_replicas=1, snapshot_every=10**6)
        return Replica(*build(number), METHOD, transport=store)

    replicas = [member(0)]
    with ThreadPoolExecutor(1) as pool:
        for number in range(1, MEMBERS):
            joining = pool.submit(member, number)
            while not joining.done():
                for _ in range(EVERY):
                    replicas[0].step()
            replicas.append(joining.result())
    end = time.monotonic() + PATIENCE
    while len({replica.rounds for replica in replicas}) > 1:
        assert time.monotonic() < end, "it hangs"
        for replica in replicas:
            assert replica._course is not None
            replica._course._turn()
    return replicas


def test_a_round_costs_the_bytes_of_a_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a hundredth: messages differ by what rounds otherwise, commits by the digits of the paces. Neither counts
    listings."""
    monkeypatch.setattr(members, "MOST_MISSED", 10**6)  # nobody is dropped while others join
    real = members_at(f"memory://{tmp_path}")
    monkeypatch.setattr(open_round, "TURN", PATIENCE)  # from here on, only the member whose turn it is commits
    before = [rounds_of(replica) for replica in real]

    def go(replica: Replica) -> None:
        torch.set_num_threads(1)
        assert isinstance(replica.transport, Store)
        replica.transport.min_replicas = MEMBERS
        stream = batches(replica.transport.rank)
        for _ in range(MEMBERS * EVERY):  # so many rounds that each member commits once
            backward(replica, next(stream))
            replica.step()

    with ThreadPoolExecutor(MEMBERS) as pool:
        list(pool.map(go, real))
    simulated = Cluster(build, METHOD, replicas=MEMBERS)
    train(simulated, MEMBERS * EVERY)
    for replica, begin, virtual in zip(real, before, simulated.replicas, strict=True):
        count, expected = rounds_of(virtual), rounds_of(replica)
        assert count.sent == pytest.approx(expected.sent - begin.sent, rel=0.01)
        assert count.received == pytest.approx(expected.received - begin.received, rel=0.01)
        assert replica._course is not None
        replica._course.close()
    # Nothing is read that was not written: all but one read each message, and all read each commit.
    counts = [rounds_of(replica) for replica in simulated.replicas]
    written, read = sum(count.sent for count in counts), sum(count.received for count in counts)
    assert (MEMBERS - 1) * written < read < MEMBERS * written


def still(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(100, 100, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def spin(cluster: Cluster) -> None:
    for replica in cluster.turns():
        replica.model.weight.grad = torch.ones(100, 100)
    cluster.step()


EACH_STEP = overtone.decoupled(every=1, exchange="store")


@pytest.mark.parametrize("replicas", [1, 4])
def test_one_of_them_writes_the_commit_and_all_read_it(replicas: int) -> None:
    cluster = Cluster(still, EACH_STEP, replicas=replicas)
    before = [rounds_of(replica) for replica in cluster.replicas]
    for index in range(replicas + 1):
        spin(cluster)
        now = [rounds_of(replica) for replica in cluster.replicas]
        sent = [count.sent - old.sent for count, old in zip(now, before, strict=True)]
        received = [count.received - old.received for count, old in zip(now, before, strict=True)]
        before = now
        writer = index % replicas
        message = sent[writer - 1] if replicas > 1 else 0
        commit = received[writer] - (replicas - 1) * message
        assert received == [(replicas - 1) * message + commit] * replicas
        if replicas > 1:
            assert sent == [message + commit * (rank == writer) for rank in range(replicas)]
        assert 130 * replicas < commit < 250 + 160 * replicas


def test_what_a_plan_tells_is_about_what_a_run_costs() -> None:
    gathered, stored = (
        Cluster(still, replace(EACH_STEP, exchange=exchange), replicas=4, step_seconds=1 / 3)
        for exchange in ("gathered", "store")
    )
    begin = [rounds_of(replica) for replica in stored.replicas]
    spin(gathered)
    spin(stored)
    passed = rounds_of(gathered.replicas[0]).sent // 3 - 16  # without its length and the verdict
    about = mean_cost(passed, 4)
    counts = [rounds_of(replica) for replica in stored.replicas]
    assert sum(count.sent for count in counts) / 4 == pytest.approx(about.sent, rel=0.01)
    assert counts[0].received - begin[0].received == pytest.approx(about.received, rel=0.01)
    assert min(count.sent for count in counts) == passed + NOTE_BYTES


# -- the time ------------------------------------------------------------------------------------------------------


def test_objects_go_up_before_they_come_down() -> None:
    link = Link(1e6, latency=0.01, download=4e6)
    cluster = Cluster(still, EACH_STEP, replicas=3, links=link, step_seconds=0.5)
    begin = cluster.clock
    spin(cluster)
    count = rounds_of(cluster.replicas[0])  # that has written the commit
    # There and back: write a message, list, read two of them; and write, list and read the commit.
    assert count.hops == 2 * (1 + 1 + 2 + 3)
    seconds = 14 * 0.01 + 8 * count.sent / 1e6 + 8 * count.received / 4e6
    assert cluster.clock - begin - 0.5 == pytest.approx(seconds)
    assert link.seconds_in_store(count.sent, count.received, count.hops) == pytest.approx(seconds)


def test_nobody_waits_until_another_one_has_read() -> None:
    fast, slow = Link(1e7), Link(1e7, download=1e4)
    waits = []
    for last in (fast, slow):
        cluster = Cluster(still, EACH_STEP, replicas=3, links=[fast, fast, last])
        spin(cluster)
        waits.append([rounds_of(replica).waiting for replica in cluster.replicas])
    assert waits[1][:2] == pytest.approx(waits[0][:2], rel=0.05)  # the pace in the commit has more or fewer digits
    assert waits[1][2] > 100 * waits[0][2]


def test_a_round_hides_behind_local_steps() -> None:
    def waited(delay: int) -> float:
        method = overtone.decoupled(every=4, keep=300, exchange="store", delay=delay)
        cluster = Cluster(build, method, replicas=2, links=Link(1e6, latency=0.02), step_seconds=1.0)
        train(cluster, 8)
        return rounds_of(cluster.replicas[0]).waiting

    assert waited(0) > 0.5
    assert waited(2) == 0.0


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_a_store_is_never_chosen_for_you(replicas: int) -> None:
    method = overtone.decoupled(every=2)
    slabs = method.codec.layout([torch.Size((512, 512))]).slabs
    assert cost_of(method, slabs, (), replicas).chosen(method.exchange) in ("gathered", "sharded")
    assert Cluster(still, method, replicas=2).mailbox.store is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"drain": 1}, "do not end together"),
        ({"preset": "first"}, "do not end together"),
        ({"budget": "1MB"}, "not with a store yet"),
        ({"first_rounds": 2, "first_keep": 8}, "not with a store yet"),
        ({"keep_down": 8}, "there are no owners and no letters"),
    ],
)
def test_what_no_run_in_a_store_can_do_is_refused_at_once(options: dict[str, object], told: str) -> None:
    with pytest.raises(MethodError, match=told):
        overtone.decoupled(exchange="store", **options)  # type: ignore[arg-type]


def test_without_a_store_there_is_no_exchange_in_one() -> None:
    with pytest.raises(MethodError, match=r"exchange='store'.*transport=overtone\.Store\(url\).*train --store"):
        Replica(*build(0), METHOD, Solo())
    with pytest.raises(MethodError, match="cannot live in a store: it exchanges gradients"):
        replace(overtone.ddp(), exchange="store")
    with pytest.raises(OvertoneError, match="every member posts in every round"):
        Cluster(still, METHOD, replicas=2, absences=[Absence(1, 1, 2)])
