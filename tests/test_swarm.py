"""A run in a store: real threads and processes, real folders, S3 (moto); whoever reads the same commits agrees."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import overtone
from overtone import MethodError, MismatchError, PeerError, Replica, Round, StateError, StoreError, WireError
from overtone.exchange.message import Kind, Seal, seal_message
from overtone.swarm import bucket as bucket_module
from overtone.swarm import members
from overtone.swarm.archive import Archive
from overtone.swarm.bucket import Bucket
from overtone.swarm.course import AHEAD, Course
from overtone.swarm.lineage import far_outside
from overtone.swarm.members import Posts
from overtone.swarm.records import About, Commit, Member, Named, Note, Process, commit_path, folder_of
from overtone.swarm.store import Store
from scenario import EVERY, backward, batches, build

PATIENCE = 120.0  # seconds that no test comes near, unless something hangs


# In a process of its own: moto leaves thousands of objects behind, and other tests look at all that there are.
S3 = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of a server that speaks as S3 does, with one bucket."""
    pytest.importorskip("flask_cors")
    command = [sys.executable, "-c", S3]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        address = f"http://127.0.0.1:{int(server.stdout.readline())}"
        with urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")) as answer:
            assert answer.status == 200
        yield address
        server.kill()


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "memory":
        return f"memory://{tmp_path}"
    if request.param == "folder":
        return str(tmp_path / "store")
    names = {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "us-east-1", "ALLOW_HTTP": "true"}
    for name, value in {**names, "ENDPOINT_URL": request.getfixturevalue("s3")}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"memory://{tmp_path}"


# -- the bucket ----------------------------------------------------------------------------------------------------


def test_of_all_who_create_an_object_one_wins(url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        buckets = [Bucket(url) for _ in range(8)]
        won = list(pool.map(lambda i: buckets[i].create("a/b", bytes([i])), range(8)))
    assert sum(won) == 1
    bucket = Bucket(url)
    assert bucket.read("a/b") == bytes([won.index(True)])
    assert bucket.create("a/b", bytes([won.index(True)]))  # its answer may have been lost: it is the same object
    assert bucket.names("a") == {"b": 1}
    assert bucket.folders("rounds") == []
    assert bucket.read("a/c") is None
    bucket.remove("a/b")
    bucket.remove("a/b")
    assert bucket.names("a") == {}
    assert bucket.count().requests == 9
    assert bucket.count("a").sent == 1
    assert bucket.count("a").received == 2


def test_objects_are_listed_deleted_and_read_with_a_limit(url: str) -> None:
    bucket = Bucket(url)
    for path, raw in (("a/b/c", b"123"), ("a/d", b"12"), ("e", b"1")):
        bucket.create(path, raw)
    assert bucket.sizes() == {"a/b/c": 3, "a/d": 2, "e": 1}
    assert bucket.sizes("a") == {"a/b/c": 3, "a/d": 2}
    assert bucket.sizes("nothing") == {}
    assert bucket.read("a/b/c", 3) == b"123"
    assert bucket.read("a/b/c", 2) == b""  # not fetched
    assert bucket.count().received == 3
    bucket.remove_all(["a/b/nothing", "a/b/c", "a/d"])
    bucket.remove_all([])
    assert bucket.sizes() == {"e": 1}


def test_what_bills_requests_is_asked_less_often(tmp_path: Path, place: str) -> None:
    assert Bucket(str(tmp_path)).is_free
    assert Bucket(place).is_free
    assert not Bucket("s3://bucket/run").is_free


def test_a_request_that_fails_is_repeated_while_that_may_help(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.exceptions import PermissionDeniedError

    monkeypatch.setattr(bucket_module, "FIRST_PAUSE", 0.001)
    errors: list[Exception] = []

    def failing(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return put(*args, **options)

    put = obstore.put
    monkeypatch.setattr(obstore, "put", failing)
    bucket = Bucket(place)
    errors += [OSError("out of order"), OSError("out of order")]
    assert bucket.create("a", b"1")
    assert bucket.count().requests == 3
    errors += [PermissionDeniedError("not you")] * 2
    with pytest.raises(StoreError, match=r"cannot create b: .*not you"):
        bucket.create("b", b"1")
    assert len(errors) == 1, "who may not write would not be allowed to the next time either"
    bucket.patience = 0.0
    errors[:] = [OSError("out of order")] * 2
    with pytest.raises(StoreError, match="out of order"):
        bucket.create("b", b"1")
    assert len(errors) == 1


@pytest.mark.parametrize("wrong", ["", "ftp://x/y", "s3://", "/proc/version/x"])
def test_a_place_that_is_none_is_refused_in_words(wrong: str) -> None:
    with pytest.raises(StoreError, match="store"):
        Bucket(wrong).create("a", b"1")


# -- who is a member, and when a round is committed ----------------------------------------------------------------

TEAM = tuple(Member(number, 1, f"m{number}", pace=10.0) for number in range(4))


def said(*numbers: int, **note: float) -> Posts:
    return Posts({number: Note(1, **{"pace": 10.0, **note}) for number in numbers})  # type: ignore[arg-type]


def test_a_round_waits_for_all_who_are_neither_slow_nor_late_until_its_deadline() -> None:
    assert members.may_commit(TEAM, said(0, 1, 2, 3), 0.0)
    assert not members.may_commit(TEAM, said(0, 1, 2), 15.9)
    assert members.may_commit(TEAM, said(0, 1, 2), 16.0)
    slow = (*TEAM[:3], replace(TEAM[3], pace=30.0))
    assert members.may_commit(slow, said(0, 1, 2), 0.0)
    late = (*TEAM[:3], replace(TEAM[3], missed=1))
    assert members.may_commit(late, said(0, 1, 2), 0.0)
    assert not members.may_commit(TEAM, said(0), 1e9)  # less than half of them
    assert members.may_commit(TEAM, said(0), 1e9, asked=1)
    assert not members.may_commit(TEAM, said(0, 1, 2), 1e9, asked=4)
    assert not members.may_commit(TEAM, Posts(), 1e9, asked=1)


def test_members_come_and_go_with_a_commit() -> None:
    joins = {7: Member(7, 1, "new"), 2: Member(2, 2, "m2")}
    posts = Posts({0: Note(1, 12.0), 1: Note(1, 10.0, leaves=True)}, joins)
    after, words = members.after(TEAM, posts)
    assert [member.number for member in after] == [0, 2, 3, 7]
    assert [member.missed for member in after] == [0, 0, 1, 0]
    assert after[0].pace == 12.0
    assert after[1].session == 2
    assert words == ("m1 has left", "m2 is back, as process 2", "new has joined")
    silent = TEAM
    for _ in range(members.MOST_MISSED):
        silent, words = members.after(silent, said(0, 1, 2))
        assert not words
    silent, words = members.after(silent, said(0, 1, 2))
    assert [member.number for member in silent] == [0, 1, 2]
    assert "m3 was not heard of for 5 rounds" in words[0]


def test_a_message_far_outside_the_others_does_not_count() -> None:
    assert far_outside({0: 1.0, 1: 1.2, 2: 13.0, 3: 0.9}).keys() == {2}
    assert far_outside({0: 1.0, 1: 1e9}) == {}  # of two, nobody knows which is the odd one
    assert far_outside({0: 1.0, 1: 9.0, 2: 1.0}) == {}


# -- records -------------------------------------------------------------------------------------------------------

ABOUT, SEAL = About(bytes(range(8)), bytes(range(8, 16))), Seal(b"secret")
COMMIT = Commit(5, 1, (Named(0, 1, "ab"), Named(2, 3, "cd")), TEAM, "0123", (2,), ("m9 has left",), {"epoch": 1})


def test_records_are_read_as_they_were_written_and_nothing_else_is_believed() -> None:
    raw = COMMIT.pack(ABOUT, SEAL)
    assert Commit.unpack(raw, 5, ABOUT, SEAL) == COMMIT
    for index, about, seal in ((6, ABOUT, SEAL), (5, About(), SEAL), (5, ABOUT, Seal(b"other")), (5, ABOUT, Seal())):
        with pytest.raises(WireError):
            Commit.unpack(raw, index, about, seal)
    for place in range(len(raw)):
        with pytest.raises(WireError):
            Commit.unpack(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :], 5, ABOUT, SEAL)
    with pytest.raises(WireError):
        Commit.unpack(raw[:-3], 5, ABOUT, SEAL)
    for body in ("[]", "{}", "x", '{"messages": 3}', "[" * 100_000):
        sealed = seal_message(ABOUT.header(Kind.COMMIT, 0, 5), body.encode(), SEAL)
        with pytest.raises(WireError):
            Commit.unpack(sealed, 5, ABOUT, SEAL)
    twice = replace(COMMIT, members=(TEAM[1], TEAM[0]))
    with pytest.raises(WireError, match="not in the order of numbers"):
        Commit.unpack(twice.pack(ABOUT, SEAL), 5, ABOUT, SEAL)
    note = Note(3, 1.5, leaves=True, samples=77)
    assert Note.split(note.pack() + b"rest") == (note, b"rest")
    assert Process.parse("0003-0001") == Process(3, 1)
    for wrong in ("3-1", "0003", "commit", "0003-0001x", "00003-0001", "٠٠٠٣-٠٠٠١", "-001-0001"):
        assert Process.parse(wrong) is None


# -- replicas ------------------------------------------------------------------------------------------------------


def replica_at(url: str, rank: int, *, key: str | None = None, method: object = None, **options: object) -> Replica:
    method = method or overtone.decoupled(every=EVERY, keep=300)
    store = Store(url, **{"name": f"m{rank}", **options})  # type: ignore[arg-type]
    return Replica(*build(rank), method, transport=store, key=key)  # type: ignore[arg-type]


def train(replica: Replica, stream: Iterator[tuple[Tensor, Tensor]], until: Callable[[], bool]) -> list[Round]:
    records, end = [], time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end, "it hangs"
        backward(replica, next(stream))
        if record := replica.step():
            records.append(record)
    return records


def gathered(url: str, count: int, **options: object) -> list[Replica]:
    """Replicas of one process, all of them members since round 0."""
    together = {**options, "min_replicas": count}
    first = replica_at(url, 0, **together)
    with ThreadPoolExecutor(count) as pool:
        others = [pool.submit(replica_at, url, rank, **together) for rank in range(1, count)]
        train(first, batches(0), lambda: first.rounds > 0)
        replicas = [first, *(other.result() for other in others)]
    for replica in replicas:
        course_of(replica).store.min_replicas = options.get("min_replicas")  # type: ignore[assignment]
    return replicas


def joining(first: Replica, join: Callable[[], Replica]) -> Replica:
    """A replica that joins while another one trains. No round ends without its wish, so that few rounds pass."""
    course = course_of(first)
    least, course.store.min_replicas = course.store.min_replicas, 2
    before = {member.process for member in course.members}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join)
        train(first, batches(0), lambda: bool({one.process for one in course.members} - before) or other.done())
        course.store.min_replicas = least
        return other.result()


def test_replicas_agree_at_every_commit_and_in_the_end(url: str) -> None:
    prints: dict[int, str] = {}

    def go(rank: int) -> Replica:
        torch.set_num_threads(1)
        replica = replica_at(url, rank, snapshot_every=3)
        records = train(replica, batches(rank), lambda: replica.rounds >= 12)
        for record in [*records, *replica.finish()]:
            assert prints.setdefault(record.index, record.anchor_fingerprint) == record.anchor_fingerprint
        return replica

    with ThreadPoolExecutor(3) as pool:
        replicas = list(pool.map(go, range(3)))
    assert len(prints) >= 12
    for replica in replicas:
        # The weights that one saves are those of the anchor after the last round that it saw.
        assert replica.fingerprint == prints[replica.rounds - 1]
        assert replica.transport.ledger.counts["rounds"].sent > 0
    # A newcomer comes to the same by replay alone, from a snapshot, and from the first weights.
    last = max(replicas, key=lambda replica: replica.rounds)
    later = replica_at(url, 9, min_replicas=1)
    assert later.rounds > last.rounds  # it became a member by a commit of its own
    assert later.fingerprint == last.fingerprint  # in which nobody spoke
    later.finish()
    bucket = Bucket(url)
    for name in bucket.names("snapshots"):
        if "-" not in name:
            bucket.remove(f"snapshots/{name}")
    from_start = replica_at(url, 10, min_replicas=1)
    assert from_start.fingerprint == later.fingerprint
    course_of(from_start).close()


def course_of(replica: Replica) -> Course:
    assert replica._course is not None
    return replica._course


def settle(replicas: list[Replica]) -> None:
    """Until no message is on its way, and all have absorbed the same commits."""
    end = time.monotonic() + PATIENCE
    courses = [course_of(replica) for replica in replicas]
    while any(course._pending for course in courses) or len({replica.rounds for replica in replicas}) > 1:
        assert time.monotonic() < end, "it hangs"
        for course in courses:
            course._turn()
            course._commit_if_due()


def coefficients(replica: Replica, tensors: list[Tensor]) -> Tensor:
    layout = replica.exchanger.layout
    return layout.read(tensors, layout.empty(replica.device)).clone()


def owed(replicas: list[Replica]) -> Tensor:
    """Residuals, and drift that was not measured yet."""
    total = torch.zeros_like(replicas[0].state.tensors["anchor"])
    for replica in replicas:
        begin = coefficients(replica, replica.exchanger.signal.state())
        total += replica.state.tensors["residual"] + begin - coefficients(replica, replica.parameters.tensors)
    return total


def test_nothing_that_was_trained_is_lost(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lr 1 and no decay: what all replicas have drifted is what the anchor has moved, times the members of each
    round, and what they still owe. One of them is slow: it speaks in fewer rounds, some of its messages come too late,
    and it may be dropped and come back."""
    method = overtone.decoupled(every=EVERY, keep=300, lr=1.0, momentum=0.0, decay=1.0)
    replicas = gathered(place, 3, method=method, min_replicas=1)
    streams = [batches(rank) for rank in range(3)]
    settle(replicas)
    before = owed(replicas)
    trained, moved, newest, turn = torch.zeros_like(before), torch.zeros_like(before), replicas[0].rounds + 12, 0
    course, absorb = course_of(replicas[0]), Course._absorb

    def absorbing(one: Course, *rest: object) -> Round:
        was, divisor = one.exchanger.state.tensors["anchor"].clone(), len(one.members)
        record = absorb(one, *rest)  # type: ignore[arg-type]
        if one is course:
            moved.add_(was - one.exchanger.state.tensors["anchor"], alpha=divisor)
        return record

    monkeypatch.setattr(Course, "_absorb", absorbing)
    end = time.monotonic() + PATIENCE
    while replicas[0].rounds < newest:
        assert time.monotonic() < end, "it hangs"
        turn += 1
        for rank, replica in enumerate(replicas):
            if rank == 2 and turn % 4:
                continue
            backward(replica, next(streams[rank]))
            weights = coefficients(replica, replica.parameters.tensors)
            replica.inner.step()
            trained += weights - coefficients(replica, replica.parameters.tensors)
            replica.inner.zero_grad()  # so that the inner step of `step` changes nothing
            replica.step()
    settle(replicas)
    assert float(trained.norm()) > 0.1
    assert float((moved + owed(replicas) - before - trained).norm()) < 1e-3 * float(trained.norm())
    for replica in replicas:
        course_of(replica).close()


def come_back(place: str, first: Replica, kept: list[dict[str, object]]) -> Replica:
    """Another process of the member m1, with the states of model, inner optimizer and replica that were saved."""
    replica = joining(first, lambda: replica_at(place, 1, min_replicas=1))
    for part, saved in zip((replica.model, replica.inner, replica), kept, strict=True):
        part.load_state_dict(saved)
    return replica


def test_a_run_goes_on_after_all_were_switched_off(place: str) -> None:
    """Nobody is left who could tell anything: the store alone has the anchor, and the disks what each one owed."""
    replicas = gathered(place, 3, min_replicas=1)
    streams = [batches(rank) for rank in range(3)]
    for _ in range(5):
        for replica, stream in zip(replicas, streams, strict=True):
            backward(replica, next(stream))
            replica.step()
    settle(replicas)
    kept = [copy.deepcopy([part.state_dict() for part in (one.model, one.inner, one)]) for one in replicas]
    before, anchor, index = owed(replicas), replicas[0].fingerprint, replicas[0].rounds
    assert before.any()
    for replica in replicas:
        course_of(replica).mail.close()
    with ThreadPoolExecutor(3) as pool:
        again = list(pool.map(lambda rank: replica_at(place, rank, min_replicas=1), range(3)))
    settle(again)
    assert {replica.fingerprint for replica in again} == {anchor}  # nobody had anything to say yet
    assert min(replica.rounds for replica in again) > index
    for replica, states in zip(again, kept, strict=True):
        for part, saved in zip((replica.model, replica.inner, replica), states, strict=True):
            part.load_state_dict(saved)
    assert torch.allclose(owed(again), before, atol=1e-5)
    for replica in again:
        course_of(replica).close()


@pytest.mark.parametrize("moment", ["between", "lost", "counted"])
def test_a_member_that_restarts_owes_what_it_owed_and_no_more(place: str, moment: str) -> None:
    """Saved between two messages; with a message on its way that gets lost; with one that counts after all."""
    first, second = gathered(place, 2, min_replicas=1)
    course, stream = course_of(second), batches(1)
    settle([first, second])
    if moment == "between":
        backward(second, next(stream))
        second.step()
        expected = owed([second])
    else:
        if moment == "lost":
            course.mail.send = lambda *_: None  # type: ignore[method-assign]
        train(second, stream, lambda: course._pending is not None)
        backward(second, next(stream))
        second.step()
        pending = course._pending
        assert pending is not None
        assert pending.sources.measured_at is not None
        state = {name: tensor.clone() for name, tensor in second.state.tensors.items()}
        if moment == "lost":
            pending.work.withdraw(state, pending.contribution.blocks)
        since = [coefficients(second, list(t)) for t in (pending.sources.measured_at, second.parameters.tensors)]
        expected = state["residual"] + since[0] - since[1]
    kept = [copy.deepcopy(part.state_dict()) for part in (second.model, second.inner, second)]
    if moment == "counted":
        assert course.mail.flush(PATIENCE)
        train(first, batches(0), lambda: first.rounds > second.rounds)
    course.mail.close()  # as if it were killed
    third = come_back(place, first, kept)
    assert torch.allclose(owed([third]), expected, atol=1e-6)
    assert third.steps == second.steps
    for phase, (sent, *_) in kept[2]["ledger"].items():  # type: ignore[attr-defined]
        assert third.transport.ledger.counts[phase].sent >= sent
    stranger = copy.deepcopy(kept[2])
    stranger["store"]["name"] = "m7"
    with pytest.raises(StateError, match="of the member m7, this is m1"):
        third.load_state_dict(stranger)
    del kept[2]["state"]
    with pytest.raises(StateError, match="incomplete or damaged"):
        third.load_state_dict(kept[2])
    for replica in (first, third):
        course_of(replica).close()


def test_members_share_the_samples_of_an_epoch(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is trained on what another one is, though one leaves in the middle and another one comes late."""
    monkeypatch.setattr(members, "MOST_MISSED", 10**6)  # nobody is dropped while it trains
    used: list[tuple[int, int]] = []

    def go(rank: int, until: int) -> None:
        torch.set_num_threads(1)
        replica = replica_at(place, rank, units=200)
        store, stream = replica.transport, batches(rank)
        assert isinstance(store, Store)
        while replica.rounds < until:
            used.append(store.next_unit())
            backward(replica, next(stream))
            replica.step()
        replica.finish()

    with ThreadPoolExecutor(4) as pool:
        early = [pool.submit(go, rank, until) for rank, until in ((0, 30), (1, 30), (2, 8))]
        early[2].result(PATIENCE)
        late = pool.submit(go, 3, 30)
        for one in (*early, late):
            one.result(PATIENCE)
    assert len(used) > 100
    assert len(set(used)) == len(used)
    with pytest.raises(MismatchError, match="units is 200 there and 100 here"):
        replica_at(place, 9, units=100)
    with pytest.raises(MethodError, match="without units"):
        Store(place).next_unit()


def test_a_member_that_leaves_hands_over_what_it_owes(place: str) -> None:
    replicas = gathered(place, 2)
    replicas[1].finish()
    train(replicas[0], batches(0), lambda: replicas[0].transport.size == 1)
    assert [member.name for member in course_of(replicas[0]).members] == ["m0"]
    replicas[0].finish()


def test_a_member_left_alone_ends_without_a_commit(place: str, caplog: pytest.LogCaptureFixture) -> None:
    first, *others = gathered(place, 3, min_replicas=1)
    settle([first, *others])
    for other in others:
        course_of(other).mail.close()  # as if they were killed, all at once
    course_of(first).store.min_replicas = 3
    train(first, batches(0), lambda: course_of(first)._pending is not None)
    with mock.patch.object(members, "deadline", return_value=0.1):
        assert first.finish() == []
    assert "what this replica still owed is lost" in caplog.text


def test_what_does_not_fit_is_refused_with_the_difference(place: str, tmp_path: Path) -> None:
    first = replica_at(place, 0, key="secret")
    with pytest.raises(MismatchError, match=r"keep: 300 there, 200 here.*same model, method and version"):
        replica_at(place, 1, key="secret", method=overtone.decoupled(every=EVERY, keep=200))
    with pytest.raises(StoreError, match=r"cannot be believed: HMAC.*OVERTONE_KEY"):
        replica_at(place, 1, key="other")
    with pytest.raises(StoreError, match=r"cannot be believed: seal.*OVERTONE_KEY"):
        replica_at(place, 1)
    course_of(first).close()
    for method, told in (
        (overtone.ddp(), "gradients at every step"),
        (overtone.alone(), "never exchanges"),
        (overtone.published(), "share no anchor"),
        (overtone.decoupled(delay=1), "never waits for a store"),
        (overtone.decoupled(drain=1), "do not end together"),
        (overtone.decoupled(exchange="sharded"), "everybody reads every message"),
        (overtone.decoupled(budget="1MB"), "not with a store yet"),
    ):
        with pytest.raises(MethodError, match=told):
            replica_at(f"{place}2", 0, method=method)
    for options in ({"name": "a/b"}, {"name": ""}, {"min_replicas": 0}, {"snapshot_every": True}):
        with pytest.raises(MethodError, match="="):
            Store(place, **options)  # type: ignore[arg-type]


def test_dense_drifts_travel_through_a_store_too(place: str) -> None:
    replicas = gathered(place, 2, method=overtone.diloco(every=EVERY))
    train(replicas[0], batches(0), lambda: replicas[0].rounds >= 3)
    course_of(replicas[1])._stand_still(lambda: replicas[1].rounds >= replicas[0].rounds)
    assert replicas[0].fingerprint == replicas[1].fingerprint
    for replica in replicas:
        course_of(replica).close()


def test_a_second_process_of_a_name_takes_the_place_of_the_first(place: str) -> None:
    first, second = gathered(place, 2)
    again = joining(first, lambda: replica_at(place, 1))
    assert course_of(again).store.process == Process(1, 2)
    with pytest.raises(PeerError, match="another process has come under the name m1"):
        train(second, batches(1), lambda: False)
    for replica in (first, second, again):
        course_of(replica).close()


def test_forged_copied_and_damaged_objects_count_nothing(place: str) -> None:
    first, second = gathered(place, 2, key="secret")
    bucket, index = Bucket(place), first.rounds
    course_of(second)._stand_still(lambda: second.rounds >= index)
    # Of somebody without the key; and a member's own message in the place of another, and of another round.
    bucket.create(f"{folder_of(index)}/0009-0001", b"nonsense")
    train(first, batches(0), lambda: course_of(first)._pending is not None)
    assert course_of(first).mail.flush(PATIENCE)
    own = bucket.read(f"{folder_of(first.rounds)}/0000-0001")
    assert own is not None
    bucket.create(f"{folder_of(first.rounds)}/0001-0001", own)
    bucket.create(f"{folder_of(first.rounds + 1)}/0001-0001", own)
    records = train(first, batches(0), lambda: first.rounds >= index + 2)
    assert [record.left_out for record in records] == [()] * len(records)
    commit = bucket.read(commit_path(index))
    assert commit is not None
    named = json.loads(commit[56:-16])["messages"]
    assert [one["number"] for one in named] == [0]
    # A commit that nobody with the key has written stops a run, in words, and does not change it.
    anchor = first.fingerprint
    bucket.remove(commit_path(first.rounds))
    assert bucket.create(commit_path(first.rounds + 3), commit)
    with pytest.raises(PeerError, match=r"its commit .* was refused: commit: of another run, model or round"):
        train(first, batches(0), lambda: False)
    assert first.fingerprint != anchor
    for replica in (first, second):
        course_of(replica).close()


def test_junk_in_the_store_keeps_nobody_out(place: str) -> None:
    first = replica_at(place, 0)
    bucket = Bucket(place)
    for path in (
        "members/0001-0001",
        "members/x",
        "snapshots/²²²²²²²²",
        "snapshots/00000099",
        "rounds/00000099/commit",
    ):
        bucket.create(path, b"junk")
    bucket.create(f"{folder_of(0)}/5000-0001", b"junk")
    other = joining(first, lambda: replica_at(place, 1))
    assert course_of(other).store.process == Process(2, 1)
    for replica in (first, other):
        replica.finish()
    with pytest.raises(StateError, match="this replica has finished"):
        first.step()


def test_what_was_deleted_is_named(place: str) -> None:
    first = replica_at(place, 0)
    train(first, batches(0), lambda: first.rounds >= 6)
    first.finish()
    bucket = Bucket(place)
    message, commit = f"{folder_of(2)}/0000-0001", commit_path(3)
    kept = {path: bucket.read(path) for path in (message, commit)}
    for path, told in (
        (message, "round 2: the message of member 0 counts, and was deleted"),
        (commit, "commit of round 3 is missing"),
    ):
        bucket.remove(path)
        with pytest.raises((StoreError, MismatchError), match=told):
            replica_at(place, 1)
        raw = kept[path]
        assert raw is not None
        assert bucket.create(path, raw)


def test_a_commit_that_is_too_large_is_refused_in_words(place: str) -> None:
    first = replica_at(place, 0)
    train(first, batches(0), lambda: first.rounds >= 1)
    Bucket(place).create(commit_path(first.rounds + 2), bytes((1 << 24) + 1))
    with pytest.raises(PeerError, match=r"its commit .* was refused"):
        train(first, batches(0), lambda: False)
    course_of(first).close()


def test_what_a_later_message_has_sent_is_not_owed_again(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """Saved, trained on, counted, killed: the saved state is older than what the run has heard."""
    first, second = gathered(place, 2, min_replicas=1)
    settle([first, second])
    stream = batches(1)
    backward(second, next(stream))
    second.step()
    kept = [copy.deepcopy(part.state_dict()) for part in (second.model, second.inner, second)]
    train(second, stream, lambda: course_of(second)._pending is not None)
    settle([first, second])
    course_of(second).mail.close()
    third = come_back(place, first, kept)
    assert not owed([third]).any()
    assert "what was owed is dropped" in caplog.text
    for replica in (first, third):
        course_of(replica).close()


def test_training_goes_on_while_the_store_fails(place: str) -> None:
    first, second = gathered(place, 2)
    settle([first, second])  # a message on its way would make the steps that are left too few
    index, failing = first.rounds, threading.Event()
    failing.set()
    ask = Bucket._ask

    def asked(bucket: Bucket, what: str, *rest: object, **more: object) -> object:
        if failing.is_set():
            raise StoreError(f"store: cannot {what}: out of order")
        return ask(bucket, what, *rest, **more)  # type: ignore[arg-type]

    with mock.patch.object(Bucket, "_ask", asked):
        steps = first.steps
        stream = batches(0)
        for _ in range(AHEAD * EVERY):
            backward(first, next(stream))
            first.step()
        assert first.steps == steps + AHEAD * EVERY
        assert first.rounds <= index + 1
        failing.clear()
        both = (first, second)
        done = lambda: min(replica.rounds for replica in both) >= index + 3  # noqa: E731
        end = time.monotonic() + PATIENCE
        streams = [stream, batches(1)]
        while not done():
            assert time.monotonic() < end, "it hangs"
            for replica, one in zip(both, streams, strict=True):
                backward(replica, next(one))
                replica.step()
    for replica in both:
        course_of(replica).close()


# -- processes -----------------------------------------------------------------------------------------------------

JOB = """
import sys, time, torch, overtone
sys.path.insert(0, {tests!r})
from scenario import backward, batches, build
torch.set_num_threads(1)
rank, url, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
method = overtone.decoupled(every=4, keep=300)
replica = overtone.Replica(*build(rank), method, transport=overtone.Store(url, name=f"m{{rank}}", snapshot_every=5))
for batch in batches(rank):
    backward(replica, batch)
    time.sleep(0.01)
    if record := replica.step():
        print(record.index, record.anchor_fingerprint, flush=True)
    if replica.rounds >= rounds:
        break
for record in replica.finish():
    print(record.index, record.anchor_fingerprint, flush=True)
"""


def started(rank: int, url: str, rounds: int, folder: Path) -> subprocess.Popen[bytes]:
    job = folder / "job.py"
    job.write_text(JOB.format(tests=str(Path(__file__).parent)))
    out = (folder / f"out{rank}-{time.monotonic_ns()}").open("wb")
    return subprocess.Popen([sys.executable, str(job), str(rank), url, str(rounds)], stdout=out, stderr=out)


def heard(folder: Path) -> dict[int, set[str]]:
    """By round: the fingerprints that any process printed."""
    found: dict[int, set[str]] = {}
    for file in folder.glob("out*"):
        for line in file.read_text().splitlines():
            number, _, fingerprint = line.partition(" ")
            if number.isdigit():
                found.setdefault(int(number), set()).add(fingerprint)
    return found


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.05)


@pytest.mark.slow
def test_processes_are_killed_frozen_and_come_back(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    team = {rank: started(rank, url, 60, tmp_path) for rank in range(3)}
    try:
        wait_for(lambda: len(heard(tmp_path)) >= 8)
        team[1].kill()  # SIGKILL: it says nothing to anybody
        team[1].wait()
        reached = max(heard(tmp_path))
        wait_for(lambda: max(heard(tmp_path)) >= reached + 5)
        os.kill(team[2].pid, signal.SIGSTOP)
        team[1] = started(1, url, 60, tmp_path)
        reached = max(heard(tmp_path))
        wait_for(lambda: max(heard(tmp_path)) >= reached + 5)
        os.kill(team[2].pid, signal.SIGCONT)
        team[3] = started(3, url, 60, tmp_path)
        for one in team.values():
            assert one.wait(timeout=PATIENCE) == 0, [file.read_text()[-2000:] for file in tmp_path.glob("out*")]
    finally:
        for one in team.values():
            one.kill()
    prints, archive = heard(tmp_path), Archive.open(url)
    for index in range(60):
        commit = archive.commit(index)
        assert commit is not None
        # Who absorbs two commits in one step tells of the later one.
        assert prints.get(index, {commit.anchor}) == {commit.anchor}
    assert len(prints) > 18
