"""Exchanges beside the training: when they are absorbed, what waiting costs, and what happens if they fail or if
somebody saves, loads, evaluates, interrupts or leaves meanwhile."""

from __future__ import annotations

import copy
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import overtone
import worlds
from overtone import Absence, Cluster, Count, Method, PeerError, Replica, Solo
from overtone.codec import Dense
from overtone.errors import MethodError, StateError
from overtone.exchange.message import MAGIC, Kind
from overtone.exchange.signals import Gradient, Silence
from overtone.rules import Mean
from overtone.transport import Background, Flight
from overtone.world.process_group import Torch
from scenario import EVERY, backward, batches, build, run_replica, weights

DELAYED: dict[str, Method] = {
    "gathered": overtone.decoupled(every=EVERY, keep=300, delay=2, exchange="gathered", drain=1),
    "sharded": overtone.decoupled(every=EVERY, keep=300, delay=EVERY, exchange="sharded"),
    "summed": overtone.diloco(every=EVERY, delay=1),
    "published": overtone.published(every=EVERY, keep=300, delay=2),
}
every_pattern = pytest.mark.parametrize("method", DELAYED.values(), ids=DELAYED)
FROZEN = 1


class Gate(Solo):
    """A world of one, whose messages in the background arrive when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.error: Exception | None = None
        self.idle: Callable[[], None] = self.open.set  # what the training thread does while it waits
        self.channel = Channel(self)

    def background(self) -> Background:
        self.channel.carrier = Background(self.channel, lambda: self.idle())
        return self.channel.carrier


class Channel(Solo):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.carrier: Background | None = None

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        while not self.gate.open.wait(0.1):
            assert self.carrier is not None
            self.carrier.give_way()  # at the end of the process
        if self.gate.error is not None:
            raise self.gate.error
        return super().gather(message, most=most, count=count)


def gated(method: Method) -> tuple[Replica, Gate]:
    gate = Gate()
    return Replica(*build(0), method, gate), gate


def step(replica: Replica, seed: int = 0) -> overtone.Round | None:
    backward(replica, next(batches(seed)))
    return replica.step()


def launched(method: Method) -> tuple[Replica, Gate]:
    """A replica whose first round is in flight, and stays there while the gate is closed."""
    replica, gate = gated(method)
    for seed in range(EVERY):
        assert step(replica, seed) is None
    assert replica.exchanger.in_flight is not None
    return replica, gate


def land(replica: Replica) -> None:
    """Wait for the end of the exchange, without the help of the training thread."""
    assert replica._flight is not None
    replica._flight._thread.join()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- when, and at what cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", range(1, EVERY + 1))
@pytest.mark.parametrize("exchange", ["gathered", "sharded"])
def test_a_round_is_absorbed_exactly_so_many_steps_later(delay: int, exchange: str) -> None:
    cluster = Cluster(build, overtone.decoupled(every=EVERY, keep=300, delay=delay, exchange=exchange), replicas=3)
    at = []
    for number in range(1, 3 * EVERY + delay + 1):
        for replica in cluster.turns():
            backward(replica, next(batches(replica.transport.rank)))
        if found := cluster.step():
            assert {record.index for record in found} == {len(at)}
            assert len({record.anchor_fingerprint for record in found}) == 1
            assert {record.local_steps for record in found} == {EVERY}
            at.append(number)
    assert at == [EVERY * round + delay for round in (1, 2, 3)]


@every_pattern
def test_what_is_over_by_then_costs_no_waiting(method: Method) -> None:
    replica, gate = launched(method)
    gate.open.set()
    land(replica)
    took = replica._flight.seconds if replica._flight else math.nan
    records = [step(replica, seed) for seed in range(method.delay)]
    assert records[:-1] == [None] * (method.delay - 1)
    record = records[-1]
    assert record is not None
    assert record.seconds_waiting == 0.0
    assert record.seconds_hidden == took > 0.0
    assert replica.transport.ledger.counts["rounds"].waiting == 0.0


@every_pattern
def test_what_is_not_over_by_then_is_waited_for(method: Method) -> None:
    """The gate opens only when the training thread waits for it."""
    replica, gate = launched(method)
    for seed in range(method.delay - 1):
        assert step(replica, seed) is None
    assert not gate.open.is_set()
    flight = replica._flight
    assert flight is not None
    record = step(replica)
    assert record is not None
    assert gate.open.is_set()
    assert record.seconds_waiting > 0.0
    assert record.seconds_hidden == pytest.approx(max(0.0, flight.seconds - record.seconds_waiting))
    assert replica.transport.ledger.counts["rounds"].waiting == record.seconds_waiting


def test_finish_absorbs_first() -> None:
    before = set(threading.enumerate())  # other tests may have left threads behind
    replica, _ = launched(DELAYED["gathered"])
    step(replica)  # so that there is a step to exchange as well
    rounds = replica.finish()
    assert [record.index for record in rounds] == [0, 1, 2]  # in flight, the rest, a draining message
    assert [record.local_steps for record in rounds[:2]] == [EVERY, 1]
    assert replica.exchanger.in_flight is None
    assert not any(t.name == "overtone exchange" for t in set(threading.enumerate()) - before)


def test_the_record_of_the_last_round_in_flight_goes_to_who_was_there() -> None:
    method = overtone.decoupled(every=2, keep=300, delay=2, drain=1)
    cluster = Cluster(build, method, replicas=3, absences=[Absence(0, 1, 5)])
    for _ in range(5):
        for replica in cluster.turns():
            backward(replica, next(batches(replica.transport.rank)))
        cluster.step()
    assert [[record.index for record in rounds][:2] for rounds in cluster.finish()] == [[2, 3], [1, 2], [1, 2]]


# -- meanwhile -----------------------------------------------------------------------------------------------------


@every_pattern
def test_evaluation_while_a_message_is_in_flight_changes_nothing(method: Method) -> None:
    plain, _ = launched(method)
    watched, gate = launched(method)
    before = weights(watched)
    with watched.anchor() as model:
        model(next(batches(3))[0])  # in training mode: it changes the statistics
        assert not gate.open.is_set()
    assert same(before, weights(watched))
    for replica in (plain, watched):
        for seed in range(method.delay):
            step(replica, seed)
        replica.finish()
    assert same(weights(plain), weights(watched))


def test_statistics_of_steps_made_meanwhile_are_kept() -> None:
    replica, gate = launched(DELAYED["gathered"])
    norm = replica.model.norm
    at_start = norm.running_mean.clone()  # type: ignore[union-attr,operator]
    step(replica)
    backward(replica, next(batches(5)))
    now = norm.running_mean.clone()  # type: ignore[union-attr,operator]
    assert not torch.equal(at_start, now)
    gate.open.set()
    assert replica.step() is not None
    # Alone, the mean of the statistics is the replica's own: what steps did since is neither lost nor counted twice.
    assert torch.allclose(norm.running_mean, now)  # type: ignore[arg-type]
    (mean,) = (s for name, s in zip(replica.buffers.floats, replica.buffers.shared, strict=True) if "mean" in name)
    assert torch.equal(mean, at_start)


# -- failures ------------------------------------------------------------------------------------------------------


@every_pattern
def test_a_failure_in_flight_is_raised_by_the_absorbing_step(method: Method) -> None:
    replica, gate = launched(method)
    anchor = replica.fingerprint
    gate.error = PeerError("rank 7 is gone")
    gate.open.set()
    land(replica)
    for seed in range(method.delay - 1):
        assert step(replica, seed) is None
    backward(replica, next(batches(0)))
    twin = copy.deepcopy((replica.model, replica.inner.state_dict()))
    with pytest.raises(PeerError, match="rank 7 is gone"):
        replica.step()
    assert replica.fingerprint == anchor
    assert replica.exchanger.in_flight is None
    # No weight moved but by the inner step.
    inner = torch.optim.AdamW([p for p in twin[0].parameters() if p.requires_grad], lr=3e-3)
    inner.load_state_dict(twin[1])
    for mine, theirs in zip(twin[0].parameters(), replica.model.parameters(), strict=True):
        mine.grad = theirs.grad
    inner.step()
    assert same(weights(replica), {name: tensor.clone() for name, tensor in twin[0].state_dict().items()})
    # And training can go on: what was in the message is in the next one.
    gate.error = None
    replica.state_dict()
    assert step(replica) is None
    assert replica.exchanger.in_flight is not None
    assert replica.finish()[0].index == 0


def test_an_interrupt_while_waiting_leaves_the_round_in_flight() -> None:
    replica, gate = launched(DELAYED["gathered"])
    step(replica)

    def interrupt() -> None:
        raise KeyboardInterrupt

    gate.idle = interrupt
    backward(replica, next(batches(0)))
    with pytest.raises(KeyboardInterrupt):
        replica.step()
    assert "flight" in replica.state_dict()
    gate.idle = gate.open.set
    record = step(replica)  # the next step absorbs it
    assert record is not None
    assert record.index == 0
    assert replica.finish()[0].index == 1


@pytest.mark.parametrize("where", ["before there is a flight", "before it begins"])
def test_an_interrupt_just_before_the_exchange_begins_loses_no_round(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    replica, _ = gated(DELAYED["gathered"])
    for seed in range(EVERY - 1):
        assert step(replica, seed) is None
    backward(replica, next(batches(EVERY - 1)))
    with monkeypatch.context() as patched:
        patched.setattr(
            *((Background, "flight") if where == "before there is a flight" else (Flight, "begin")), interrupt
        )
        with pytest.raises(KeyboardInterrupt):
            replica.step()
    assert "flight" in replica.state_dict()
    assert step(replica) is None
    record = step(replica)  # after a delay of two steps, as if nothing had been
    assert record is not None
    assert record.index == 0


def test_an_exchange_that_fails_in_flight_still_costs_its_bytes() -> None:
    """Three replicas: the second cannot take part, and says so in a message of its own."""
    cluster = Cluster(build, DELAYED["gathered"], replicas=3)
    for _ in range(EVERY):
        for replica, batch in zip(cluster.turns(), batches(0), strict=False):
            backward(replica, batch)
            if replica.transport.rank == 1:
                replica.state.broken = "a test broke it"
        cluster.step()
    before = [replica.transport.ledger.counts["rounds"].sent for replica in cluster.replicas]
    assert before == [0, 0, 0]
    with pytest.raises(overtone.OvertoneError, match="rank 1 could not take part"):
        cluster.finish()
    assert all(replica.transport.ledger.counts["rounds"].sent > 0 for replica in cluster.replicas)


def test_methods_without_a_drift_refuse_a_delay_by_name() -> None:
    for signal_, every in ((Gradient, 1), (Silence, None)):
        with pytest.raises(MethodError, match="delay=1: any exchanges no drift, so the inner step must wait"):
            Method("any", signal_, every, Mean(), Dense(), delay=1)
    for row in ("ddp", "demo", "alone"):
        with pytest.raises(MethodError, match=f"delay=1: {row} has no such option"):
            overtone.methods.method_named(row, delay=1)


@pytest.mark.parametrize("delay", [-1, EVERY + 1, True, 1.0, "1", None, math.nan])
def test_odd_delays_are_refused(delay: object) -> None:
    with pytest.raises(MethodError, match=r"delay=.*: local steps until a round is absorbed, .* to every=3"):
        overtone.decoupled(every=EVERY, delay=delay)  # type: ignore[arg-type]


# -- saving and loading --------------------------------------------------------------------------------------------


def train(cluster: Cluster, first: int, last: int) -> None:
    for number in range(first, last):
        for replica in cluster.turns():
            backward(replica, next(batches(100 * number + replica.transport.rank)))
        cluster.step()


@every_pattern
def test_a_run_that_stops_with_a_message_in_flight_goes_on_bit_for_bit(method: Method) -> None:
    end = 3 * EVERY + 1
    straight = Cluster(build, method, replicas=3)
    train(straight, 0, end)
    straight.finish()
    for stop in (EVERY, 2 * EVERY):
        stopped, resumed = (Cluster(build, method, replicas=3) for _ in range(2))
        train(stopped, 0, stop)
        for old, new in zip(stopped.replicas, resumed.replicas, strict=True):
            assert old.exchanger.in_flight is not None
            new.model.load_state_dict(old.model.state_dict())
            new.inner.load_state_dict(copy.deepcopy(old.inner.state_dict()))
            new.load_state_dict(copy.deepcopy(old.state_dict()))
        resumed.rounds = stopped.rounds
        train(resumed, stop, end)
        resumed.finish()
        for one, other in zip(straight.replicas, resumed.replicas, strict=True):
            assert same(weights(one), weights(other))
            sent = [(r.transport.ledger.sent, r.transport.ledger.counts["rounds"].received) for r in (one, other)]
            assert sent[0] == sent[1]


def test_a_state_loaded_while_something_is_in_flight_takes_its_place() -> None:
    replica, gate = launched(DELAYED["gathered"])
    model, inner, saved = (copy.deepcopy(x.state_dict()) for x in (replica.model, replica.inner, replica))
    for seed in range(2):
        step(replica, seed)
    end = weights(replica)
    gate.open.clear()
    assert step(replica) is None  # the next round
    assert replica.exchanger.in_flight is not None
    replica.model.load_state_dict(model)
    replica.inner.load_state_dict(inner)
    replica.load_state_dict(saved)  # it waits for the one in flight, and sends the saved one again
    assert gate.open.is_set()
    assert replica.rounds == 0
    assert [step(replica, seed) is None for seed in range(2)] == [True, False]
    assert same(weights(replica), end)


DAMAGES: dict[str, dict[str, Any]] = {
    "no replicas": {"members": 0},
    "too many replicas": {"members": 10**30},
    "another pattern": {"pattern": "sharded", "members": 3},
    "an unknown pattern": {"pattern": "x"},
    "an unknown kind": {"kind": 99},
    "another kind": {"kind": int(Kind.FAILURE)},
    "an anchor that is no number": {"anchor": "zz" * 8},
    "counters cut": {"counters": "00"},
    "no steps": {"steps": "x"},
    "no norms": {"norms": None},
    "no blocks": {"blocks": {}},
    "no buffers": {"buffers": None},
    "no weights": {"measured_at": None},
    "too few weights": {"measured_at": []},
    "no statistics": {"buffers_at": None},
    "too few statistics": {"buffers_at": []},
    "a reason and blocks": {"why": "tired"},
}


@pytest.mark.parametrize("damage", [*DAMAGES, "a block cut", "blocks shifted", "blocks of another type"])
@pytest.mark.parametrize("foreign", [False, True], ids=["same world", "another world"])
def test_a_damaged_message_in_flight_is_refused_before_anything_changes(damage: str, foreign: bool) -> None:
    method = DELAYED["gathered"]
    source, gate = launched(method)
    saved = source.state_dict()
    flight, blocks = saved["flight"], saved["flight"]["blocks"]
    changed = DAMAGES.get(damage) or {
        "blocks": {
            "a block cut": {**blocks, "bytes": blocks["bytes"][:-5]},
            "blocks shifted": {**blocks, "lengths": [length + 1 for length in blocks["lengths"]]},
            "blocks of another type": {**blocks, "bytes": blocks["bytes"].float()},
        }[damage]
    }
    broken = {**saved, "flight": {**flight, **({"members": 2} if foreign else {}), **changed}}
    replica, _ = gated(method)
    before, rounds = copy.deepcopy(replica.state_dict()), replica.rounds
    with pytest.raises(StateError, match="saved state: its round in flight is incomplete or damaged"):
        replica.load_state_dict(broken)
    after = replica.state_dict()
    assert replica.rounds == rounds
    assert after["counts"] == before["counts"]
    assert all(torch.equal(after["state"][name], tensor) for name, tensor in before["state"].items())
    replica.load_state_dict(saved)  # and the true one fits
    gate.open.set()


@pytest.mark.parametrize("other", [overtone.diloco(every=EVERY, delay=2), overtone.diloco(every=EVERY)])
def test_a_state_of_another_method_is_named_as_such_even_with_a_message_in_flight(other: Method) -> None:
    source, gate = launched(DELAYED["gathered"])
    saved = source.state_dict()
    with pytest.raises(StateError, match="of another replica: method: decoupled in the saved state, diloco here"):
        Replica(*build(0), other, Solo()).load_state_dict(saved)
    del saved["state"]
    saved["flight"]["members"] = 3
    with pytest.raises(StateError, match="saved state: incomplete or damaged"):
        gated(DELAYED["gathered"])[0].load_state_dict(saved)
    gate.open.set()


# -- over gloo -----------------------------------------------------------------------------------------------------


class Held(Torch):
    """A channel whose collectives begin when they are let go."""

    go: threading.Event

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        self.go.wait()
        return super().gather(message, most=most, count=count)

    def all_to_all(self, messages: list[bytes], *, most: int, count: Count) -> list[bytes]:  # type: ignore[override]
        self.go.wait()
        return super().all_to_all(messages, most=most, count=count)


def hold(replica: Replica) -> threading.Event:
    assert replica._background is not None
    channel: Any = replica._background.channel
    channel.__class__ = Held
    channel.go = threading.Event()
    return channel.go  # type: ignore[no-any-return]


def two_at_once() -> dict[str, Any]:
    """Two replicas on one process group, both with a message in flight, and traffic on the main transport meanwhile."""
    rank = dist.get_rank()
    replicas = [Replica(*build(rank), DELAYED[name]) for name in ("gathered", "sharded")]
    gates = [hold(replica) for replica in replicas]
    streams = [batches(rank), batches(rank)]
    heard = []
    for number in range(2 * EVERY + 1):
        for replica, gate, stream in zip(replicas, gates, streams, strict=True):
            backward(replica, next(stream))
            if number == EVERY:  # the first round is in flight
                with replica.anchor() as model:
                    model(next(batches(0))[0])
                heard.append(replica.transport.gather(bytes([rank]), most=8, count=Count()))
                assert replica._flight is not None
                assert replica._flight._thread.is_alive()
                gate.set()
            replica.step()
    for replica in replicas:
        replica.finish()
    return {"heard": heard, "weights": [weights(replica) for replica in replicas]}


def alone(name: str) -> dict[str, Tensor]:
    return weights(run_replica(DELAYED[name], 2 * EVERY + 1))


@pytest.mark.slow
def test_two_replicas_of_one_group_do_not_disturb_each_other(tmp_path: Path) -> None:
    both = worlds.run(two_at_once, size=2, folder=tmp_path)
    for place, name in enumerate(("gathered", "sharded")):
        (tmp_path / name).mkdir()
        single = worlds.run(alone, name, size=2, folder=tmp_path / name)
        for one, two in zip(single, both, strict=True):
            assert "value" in two, two
            assert same(one["value"], two["value"]["weights"][place]), name
    assert all(messages == [b"\0", b"\1"] for result in both for messages in result["value"]["heard"])
    assert both[0]["value"]["heard"]


class Deafened(Torch):
    """A channel that hears what rank 1 says in round 1 damaged."""

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        heard = super().gather(message, most=most, count=count)
        said = heard[1]
        if said[:4] == MAGIC and said[5] == Kind.ROUND and int.from_bytes(said[8:12], "little") == 1:
            heard[1] = said[:70] + bytes([said[70] ^ 16]) + said[71:]
        return heard


def failing(what: str, name: str) -> dict[str, Any]:
    """Round 0 succeeds. In round 1 something happens to rank 1."""
    rank = dist.get_rank()
    method = DELAYED[name]
    replica = Replica(*build(rank), method)
    assert replica._background is not None
    channel: Any = replica._background.channel
    stream = batches(rank)
    said: dict[str, Any] = {"records": []}
    for number in range(1, 2 * EVERY + method.delay + 1):
        backward(replica, next(stream))
        if number == 2 * EVERY:  # the next step starts round 1
            replica.settle()
            dist.barrier()
            if what in ("freeze", "kill"):
                channel.watchdog.timeout = 12.0
                if rank == FROZEN:
                    os.kill(os.getpid(), signal.SIGSTOP if what == "freeze" else signal.SIGKILL)
            elif what == "poison" and rank == FROZEN:
                with torch.no_grad():
                    replica.parameters.exchanged[0].fill_(math.nan)
            elif what == "damage" and rank == 2:
                channel.__class__ = Deafened
        anchor = replica.fingerprint
        try:
            record = replica.step()
        except PeerError as error:
            return {**said, "told": str(error), "at": number, "same": replica.fingerprint == anchor}
        said["records"] += [] if record is None else [(number, record.index)]
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "name"),
    [
        *itertools.product(["poison", "freeze", "kill"], ["gathered", "sharded", "summed"]),
        ("damage", "gathered"),  # test_sharded.py and test_refusal.py damage the others
    ],
)
def test_what_happens_in_flight_reaches_all_at_the_absorbing_step(what: str, name: str, tmp_path: Path) -> None:
    found = worlds.run(failing, what, name, size=3, folder=tmp_path)
    gone = what in ("freeze", "kill")
    if gone:
        assert found[FROZEN] == {"died": -signal.SIGKILL}
    survivors = [result for rank, result in enumerate(found) if not (gone and rank == FROZEN)]
    due = 2 * EVERY + DELAYED[name].delay
    for result in survivors:
        assert "value" in result, result
        value = result["value"]
        assert value["records"][:1] == [(EVERY + DELAYED[name].delay, 0)]
        assert value["at"] == due, value
        assert value["same"]
        told = {
            "poison": "round 1: rank 1 could not take part: the drift of parameter",
            "freeze": "rank 1 did not answer for",
            "kill": "rank",
            "damage": "round 1: the message of rank 1 was refused by rank 2: checksum",
        }[what]
        assert told in value["told"], value
    if not gone:
        assert len({result["value"]["told"] for result in survivors}) == 1


LEAVING = """
import os, signal, sys
import torch.distributed as dist
import overtone
from scenario import backward, batches, build
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
replica = overtone.Replica(*build(rank), overtone.decoupled(every=1, keep=300, delay=1))
dist.barrier()
replica._background.channel.watchdog.timeout = 5.0  # torch gives up what it sends soon after that
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
backward(replica, next(batches(rank)))
replica.step()
assert replica._flight._thread.is_alive()
if sys.argv[3] == "fails":
    raise RuntimeError("no more batches")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("ends", 0), ("fails", 1)])
def test_a_process_can_end_while_a_message_is_in_flight(how: str, status: int, tmp_path: Path) -> None:
    """Its thread waits in native code for a peer that is frozen. The process does not abort, and torch lets it go when
    the time-out of the exchange is over."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *filter(None, sys.path)])}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), how],
            env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        _, said = ranks[0].communicate(timeout=300)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.communicate()
    assert ranks[0].returncode == status, said
    assert "terminate called" not in said
    assert ("no more batches" in said) == (how == "fails")
