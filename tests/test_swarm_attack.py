"""Who attacks a run in a store, breaks it or is careless with it: a stranger without the key, a member with it, a user,
and an unlucky order of things. What cannot be undone by the replicas themselves is named, with the way out."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import obstore
import pytest
import torch
from obstore.store import ObjectStore

from overtone import MismatchError, Replica, Round, StateError, StoreError
from overtone.errors import WireError
from overtone.exchange.message import HEADER_BYTES, Kind, Seal, open_message, seal_message
from overtone.swarm import mailbox, members
from overtone.swarm.bucket import Bucket
from overtone.swarm.course import Course
from overtone.swarm.lineage import far_outside
from overtone.swarm.mailbox import Folder, Mailbox
from overtone.swarm.members import Posts
from overtone.swarm.records import MOST_MEMBERS, About, Commit, Member, Named, Note, Process, commit_path, folder_of
from scenario import EVERY, backward, batches
from test_swarm import (
    PATIENCE,
    come_back,
    course_of,
    gathered,
    joining,
    owed,
    replica_at,
    settle,
    train,
    wait_for,
)


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"memory://{tmp_path}"


def close(*replicas: Replica) -> None:
    for replica in replicas:
        course_of(replica).close()


def kept_of(replica: Replica) -> list[dict[str, object]]:
    return [copy.deepcopy(part.state_dict()) for part in (replica.model, replica.inner, replica)]


def first_message_of(course: Course) -> bytes:
    """What the founder has posted in the open round."""
    folder = f"{folder_of(course.lineage.index)}/0000-0001"
    wait_for(lambda: course.store.bucket.read(folder) is not None)
    raw = course.store.bucket.read(folder)
    assert raw is not None
    return raw


def heard_in(bucket: Bucket, index: int) -> list[int]:
    """The members whose messages counted in a round of a run with a key."""
    raw = bucket.read(commit_path(index))
    assert raw is not None
    commit = json.loads(raw[HEADER_BYTES:-16])
    return [one["number"] for one in commit["messages"] if one["number"] not in commit["left_out"]]


def joined(url: str, first: Replica, rank: int, **options: object) -> Replica:
    """A replica that has joined while another one trained."""
    return joining(first, lambda: replica_at(url, rank, **options))  # type: ignore[arg-type]


def together(replicas: list[Replica], until: Callable[[], bool]) -> list[Round]:
    """All of them train, a step each in turn."""
    records, end, streams = [], time.monotonic() + PATIENCE, [batches(rank) for rank in range(len(replicas))]
    while not until():
        assert time.monotonic() < end, "it hangs"
        for replica, stream in zip(replicas, streams, strict=True):
            backward(replica, next(stream))
            if record := replica.step():
                records.append(record)
    return records


# -- a careless user -----------------------------------------------------------------------------------------------


def test_what_a_process_in_between_has_sent_is_not_owed_again(place: str) -> None:
    """Saved by process 1; process 2 starts from that, speaks and is killed; process 3 starts from the same."""
    first, second = gathered(place, 2, min_replicas=1)
    settle([first, second])
    stream = batches(1)
    backward(second, next(stream))
    second.step()
    kept = kept_of(second)
    assert owed([second]).any()
    course_of(second).mail.close()
    third = come_back(place, first, kept)
    assert owed([third]).any()
    settle([first, third])
    train(third, stream, lambda: course_of(third)._pending is not None)
    settle([first, third])
    course_of(third).mail.close()
    fourth = come_back(place, first, kept)
    assert not owed([fourth]).any()
    close(first, fourth)


def test_a_state_is_loaded_though_the_store_fails_meanwhile(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the commits since say of this member is read from the store: a request that fails is repeated."""
    first, second = gathered(place, 2, min_replicas=1)
    settle([first, second])
    backward(second, next(batches(1)))
    second.step()
    kept, expected = kept_of(second), owed([second])
    course_of(second).mail.close()
    third = joined(place, first, 1, min_replicas=1)
    failed: list[str] = []

    def failing(store: ObjectStore, path: str, *args: object, **options: object) -> object:
        if threading.current_thread() is threading.main_thread() and not failed:
            failed.append(path)
            raise OSError("out of order")
        return get(store, path, *args, **options)

    get = obstore.get
    monkeypatch.setattr(obstore, "get", failing)
    for part, saved in zip((third.model, third.inner, third), kept, strict=True):
        part.load_state_dict(saved)
    assert [path.rpartition("/")[2] for path in failed] == ["commit"]
    assert torch.allclose(owed([third]), expected, atol=1e-6)
    failed.clear()
    course_of(third).store.bucket.patience = 0.0
    with pytest.raises(StoreError, match="out of order"):
        third.load_state_dict(kept[2])
    close(first, third)


def test_a_second_process_takes_the_place_of_one_that_speaks_in_every_round() -> None:
    team = (Member(0, 1, "m0"), Member(1, 1, "m1"))
    posts = Posts({0: Note(1), 1: Note(1)}, {1: Member(1, 2, "m1")})
    after, words = members.after(team, posts)
    assert [member.process for member in after] == [Process(0, 1), Process(1, 2)]
    assert "m1 is back" in words[0]


def test_a_slow_replica_follows_all_rounds_that_were_committed_during_a_step(place: str) -> None:
    """One commit a step would leave it further and further behind, and none of its messages would count."""
    first, second = gathered(place, 2, min_replicas=1)
    settle([first, second])
    mail, index = course_of(second).mail, first.rounds
    train(first, batches(0), lambda: first.rounds >= index + 3)
    wait_for(lambda: mail.folder(index + 2).commit is not None)
    backward(second, next(batches(1)))
    second.step()
    assert second.rounds == index + 3
    close(first, second)


def test_a_replica_tells_the_pace_of_its_steps_since_its_last_message(place: str) -> None:
    """Also if that did not count, so that another one is due at once, and if it has made no step since."""
    first, second = gathered(place, 2, min_replicas=1)
    settle([first, second])
    course, told = course_of(second), []
    send, stream = course.mail.send, batches(1)

    def sending(path: str, data: bytes, tries: int | None = None) -> None:
        if path.startswith("rounds/") and not path.endswith("/commit"):
            told.append(Note.split(data[HEADER_BYTES:])[0].pace)

    course.mail.send = sending  # type: ignore[method-assign]  # its messages are lost
    train(second, stream, lambda: course._pending is not None)
    train(first, batches(0), lambda: first.rounds > second.rounds)
    course._stand_still(lambda: course._pending is None)
    course._posted -= 100.0  # since its last message, one step took so long
    backward(second, next(stream))
    second.step()
    assert course._pending is not None
    assert told[1] >= 100.0 * EVERY
    train(first, batches(0), lambda: first.rounds > second.rounds)
    course._stand_still(lambda: course._pending is None)
    course._posted -= 1e7
    course._post(second._inner_step, leaves=True)
    assert told[2] == 0.0
    course.mail.send = send  # type: ignore[method-assign]
    close(first, second)


def test_who_waits_for_others_is_not_as_slow_as_they_are(place: str) -> None:
    """Its pace would else become theirs, and in the end all would wait for the slowest. Its own requests count."""
    (first,) = gathered(place, 1)
    course, now = course_of(first), 1000.0
    for stands, written, listed, forgiven in (
        (now - 90, now - 70, now - 20, 50.0),  # written while it stood still
        (now - 50, now - 70, now - 20, 30.0),  # and before
        (now - 90, now - 70, now - 80, 0.0),  # the commit was there when it had written at last
        (None, now - 70, now - 20, 0.0),  # it trained on
    ):
        course._stands_since, course._posted = stands, 0.0
        course._forgive(Folder(written=written, listed=listed))
        assert course._posted == forgiven
    course._stands_since = None
    close(first)


def test_a_state_of_another_run_is_refused(place: str) -> None:
    first, second = gathered(place, 2, min_replicas=1)
    settle([first, second])
    kept = kept_of(second)
    close(first, second)
    first, second = gathered(f"{place}2", 2, min_replicas=1)
    settle([first, second])
    with pytest.raises(StateError, match=r"of the run .* that in memory.* is .* without the saved state"):
        second.load_state_dict(kept[2])
    kept = kept_of(second)
    train(second, batches(1), lambda: course_of(second)._pending is not None)
    with pytest.raises(StateError, match="a message of this replica is on its way"):
        second.load_state_dict(kept[2])
    close(first, second)


def test_a_replica_that_is_no_member_any_more_still_sends_what_it_owes_at_its_end(place: str) -> None:
    first, second = gathered(place, 2, min_replicas=1)
    settle([first, second])
    backward(second, next(batches(1)))
    second.step()
    assert owed([second]).any()
    with mock.patch.object(members, "MOST_MISSED", 0):
        train(first, batches(0), lambda: first.transport.size == 1)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(second.finish)
        train(first, batches(0), done.done)
    last = course_of(second).follower.archive.commit(done.result()[-1].index)
    assert last is not None
    assert last.notes == ("m1 has left",)
    assert 1 in [named.number for named in last.messages]
    assert second.finish() == []
    close(first)


def test_a_replica_that_stands_still_says_why_more_than_once(
    place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replica_at(place, 0)
    course = course_of(first)
    course.store.min_replicas = 2
    monkeypatch.setattr(members, "deadline", lambda _: 0.01)
    course._stand_still(lambda: caplog.text.count("0 have posted, 2 must have; start more replicas") == 3)
    close(first)


def test_a_newcomer_whose_wishes_come_too_late_says_so(place: str, caplog: pytest.LogCaptureFixture) -> None:
    first, send = replica_at(place, 0), Mailbox.send

    def sending(mail: Mailbox, path: str, data: bytes, tries: int | None = None) -> None:
        if not path.endswith("/0001-0001") or "m1 has asked to join in" in caplog.text:
            send(mail, path, data, tries)

    with mock.patch.object(Mailbox, "send", sending):
        with ThreadPoolExecutor(1) as pool:  # the rounds go on without it
            other = pool.submit(replica_at, place, 1)
            train(first, batches(0), other.done)
        close(first, other.result())


@pytest.mark.parametrize("name", ["m0", "m1"])
def test_a_run_whose_first_object_was_deleted_is_not_founded_anew(place: str, name: str) -> None:
    first = replica_at(place, 0)
    train(first, batches(0), lambda: first.rounds >= 2)
    first.finish()
    bucket = Bucket(place)
    raw = bucket.read("run")
    assert raw is not None
    bucket.remove("run")
    with pytest.raises(MismatchError, match=r"the object `run` is not: it was deleted\. Put it back"):
        replica_at(place, 1, name=name)
    assert bucket.read("run") is None
    bucket.create("run", raw)
    second = replica_at(place, 1, name=name)
    assert second.fingerprint == first.fingerprint
    close(second)


def test_a_storage_that_writes_over_objects_is_refused(place: str) -> None:
    """As some do that speak nearly as S3 does."""
    put = obstore.put

    def putting(store: ObjectStore, path: str, data: bytes, **_: object) -> object:
        return put(store, path, data)

    with mock.patch.object(obstore, "put", putting), pytest.raises(StoreError, match="writes over an object"):
        replica_at(place, 0)
    assert Bucket(place).read("run") is None


# -- a member with the key -----------------------------------------------------------------------------------------


def test_who_has_nothing_to_say_does_not_make_the_others_odd() -> None:
    assert far_outside({0: 0.0, 1: 0.0, 2: 1.0}) == {}
    assert far_outside({0: 0.0, 1: 1.0, 2: 1.2, 3: 0.9, 4: 40.0}).keys() == {4}


@pytest.mark.parametrize(
    "wrong", [{"number": 4096}, {"number": -1}, {"session": -1}, {"session": 1 << 32}, {"missed": -1}, {"pace": 1e7}]
)
def test_a_commit_with_members_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    about, seal = About(bytes(8), bytes(8)), Seal(b"secret")
    member = {"number": 0, "session": 1, "name": "m0", "missed": 0, "pace": 1.0}
    body = {"messages": [], "members": [{**member, **wrong}], "anchor": "", "left_out": [], "notes": [], "data": {}}
    raw = seal_message(about.header(Kind.COMMIT, 0, 5), json.dumps(body).encode(), seal)
    with pytest.raises(WireError, match="commit"):
        Commit.unpack(raw, 5, about, seal)


def test_a_message_counts_only_for_the_process_that_sent_it(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """A copy of a virtual machine runs under the same session. What counts is the seal."""
    first, second = gathered(place, 2, key="secret")
    settle([first, second])
    stream, course, others = batches(1), course_of(second), []
    send = course.mail.send

    def sending(path: str, data: bytes, tries: int | None = None) -> None:
        if path.endswith("/0001-0001"):  # the other one was faster, and has made another number of steps
            header, body = open_message(data, course.seal).header, data[HEADER_BYTES:-16]
            other = seal_message(replace(header, steps=header.steps + 1), body, course.seal)
            others.append(course.store.bucket.create(path, other))
        send(path, data, tries)

    course.mail.send = sending  # type: ignore[method-assign]
    train(second, stream, lambda: course._pending is not None)
    pending = course._pending
    assert pending is not None
    state = {name: tensor.clone() for name, tensor in second.state.tensors.items()}
    pending.work.withdraw(state, pending.contribution.blocks)
    index = second.rounds
    train(first, batches(0), lambda: first.rounds > index)
    course._stand_still(lambda: second.rounds > index)
    assert others == [True]
    assert "0001-0001 was there already, and another process has written it" in caplog.text
    assert heard_in(Bucket(place), index) == [0, 1]
    assert second.fingerprint == first.fingerprint
    assert torch.equal(second.state.tensors["residual"], state["residual"])
    close(first, second)


def test_a_message_of_a_process_that_is_no_member_does_not_count(place: str) -> None:
    """Whatever a commit says: the mean is divided by the members, so that its weight would be too large."""
    first, second = gathered(place, 2)
    settle([first, second])
    course = course_of(first)
    train(first, batches(0), lambda: course._pending is not None)
    raw = {Process(0, 1): first_message_of(course)}
    named = [Named(0, 1, raw[Process(0, 1)][-4:].hex())]
    for team, left_out in ((course.members, set()), (course.members[1:], {0}), ((), {0})):
        heard = course.lineage.hear(named, raw, team)
        assert heard.left_out.keys() == left_out
    close(first, second)


def test_a_wrong_commit_is_told_with_the_way_back(place: str) -> None:
    """Of a member with the key. The others stop; when its commit is deleted, the run goes on from there."""
    first, second = gathered(place, 2, key="secret", min_replicas=1)
    settle([first, second])
    course, index, bucket = course_of(first), first.rounds, Bucket(place)
    wrong = Commit(index, 1, (), course.members, "0" * 16)
    bucket.create(commit_path(index), wrong.pack(course.about, course.seal))
    told = (
        rf"the anchor here is .* stop member 1. To undo round {index}: stop all replicas, delete rounds/0000000{index} "
    )
    with pytest.raises(MismatchError, match=told):
        train(first, batches(0), lambda: False)
    close(first, second)
    with pytest.raises(MismatchError, match=told):
        replica_at(place, 0, key="secret")
    for name in bucket.names(folder_of(index)):
        bucket.remove(f"{folder_of(index)}/{name}")
    again = replica_at(place, 0, key="secret", min_replicas=1)
    train(again, batches(0), lambda: again.rounds > index + 2)
    close(again)


# -- a stranger ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", ["4095-0001", "0001-99999999999999999", "0000-4294967295", "0000-0002"])
def test_junk_among_the_claims_keeps_nobody_out(place: str, junk: str) -> None:
    first = replica_at(place, 0, min_replicas=1, key="secret")
    Bucket(place).create(f"members/{junk}", b"junk")
    other = joined(place, first, 1, key="secret")
    close(first)
    again = joined(place, other, 0, key="secret")
    assert (other.transport.rank, again.transport.rank) == (1, 0)
    close(other, again)


def test_junk_in_all_places_of_claims_is_named(place: str) -> None:
    close(replica_at(place, 0, min_replicas=1))
    bucket = Bucket(place)
    for number in range(1, MOST_MEMBERS):
        bucket.create(f"members/{Process(number, 1)}", b"junk")
    with pytest.raises(StoreError, match=r"no number is left for m1: .* 4095 objects in members/ .* Delete"):
        replica_at(place, 1)


def test_nobody_takes_the_number_of_a_member_whose_claim_was_deleted(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "MOST_MISSED", 10**6)  # a member stays one, however slow the machine is
    first, second = gathered(place, 2, min_replicas=1)
    bucket = Bucket(place)
    for name in bucket.names("members"):
        bucket.remove(f"members/{name}")
    stranger = joined(place, first, 2)
    assert stranger.transport.rank == 2
    close(second)
    again = joined(place, first, 1)
    assert course_of(again).store.process == Process(1, 2)
    close(first, stranger, again)


def test_a_claim_that_a_listing_does_not_show_yet_is_not_tried_again(place: str) -> None:
    """As of a storage whose listings lag behind."""
    first = replica_at(place, 0, min_replicas=1)
    other = joined(place, first, 1)
    names = Bucket.names

    def late(bucket: Bucket, folder: str) -> dict[str, int]:
        return {} if folder == "members" else names(bucket, folder)

    with mock.patch.object(Bucket, "names", late):
        third = joined(place, first, 2)
    assert third.transport.rank == 2
    close(first, other, third)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_message_that_was_replaced_or_deleted_after_it_counted_is_named(place: str, replaced: bool) -> None:
    """It would be left out here, and the anchor would be another one than where it was heard."""
    first, second = gathered(place, 2, key="secret")
    bucket = Bucket(place)
    together([first, second], lambda: 1 in heard_in(bucket, min(first.rounds, second.rounds) - 1))
    close(first, second)
    path = f"{folder_of(min(first.rounds, second.rounds) - 1)}/0001-0001"
    bucket.remove(path)
    if replaced:
        bucket.create(path, b"junk")
    what = "replaced" if replaced else "deleted"
    with pytest.raises(StoreError, match=rf"message of member 1 counts, and was {what} .*To undo round"):
        replica_at(place, 2, key="secret")


def test_the_place_of_a_message_that_a_stranger_took_is_taken_back(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger puts junk where the next messages, wishes to join and snapshots belong. Everybody is heard."""
    first, second = gathered(place, 2, key="secret", snapshot_every=2)
    settle([first, second])
    bucket, index, stores = Bucket(place), first.rounds, [course_of(one).store for one in (first, second)]
    for store in stores:
        store.min_replicas = 2  # no round ends without either of them, however slow the machine is
    for other in range(index + 1, index + 5):
        bucket.create(f"snapshots/{other:08d}", b"junk")
        for process in ("0000-0001", "0001-0001", "0002-0001"):
            bucket.create(f"{folder_of(other)}/{process}", b"junk" * 100)
    together([first, second], lambda: min(first.rounds, second.rounds) >= index + 4)
    assert "0001-0001 was there already, and cannot be believed" in caplog.text
    assert {number for ahead in range(1, 4) for number in heard_in(bucket, index + ahead)} == {0, 1}
    names = bucket.names("snapshots")
    assert any(size > 100 for name, size in names.items() if name.isdigit())
    third = joined(place, first, 2, key="secret")
    assert third.transport.rank == 2
    close(first, second, third)


def test_what_nobody_can_read_or_write_stops_nobody(
    place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object of a stranger that cannot be read, and a snapshot that the storage refuses, say since it is too large.
    Nor does a storage that takes nothing keep a replica from reading."""
    first, second = gathered(place, 2, snapshot_every=1)
    settle([first, second])
    read, create, index, bucket = Bucket.read, Bucket.create, first.rounds, Bucket(place)
    for other in range(index, index + 3):
        bucket.create(f"{folder_of(other)}/0999-0001", b"junk")

    def reading(one: Bucket, path: str, most: int | None = None) -> bytes | None:
        if path.endswith("/0999-0001"):
            raise StoreError(f"store: cannot read {path}: in another storage class")
        return read(one, path, most)

    def creating(one: Bucket, path: str, data: bytes) -> bool:
        if path.startswith("snapshots/") or path == "any":
            raise StoreError(f"store: cannot create {path}: too large")
        return create(one, path, data)

    monkeypatch.setattr(mailbox, "LONGEST_BACKOFF", 0.05)
    with mock.patch.object(Bucket, "read", reading), mock.patch.object(Bucket, "create", creating):
        together([first, second], lambda: min(first.rounds, second.rounds) >= index + 3)
        wait_for(lambda: "too large; it is given up" in caplog.text)
        mail, index = course_of(second).mail, second.rounds
        mail.send("any", b"")
        train(first, batches(0), lambda: first.rounds > index)
        wait_for(lambda: mail.folder(index).commit is not None)
        assert "cannot create any" in mail.trouble
    close(first, second)


@pytest.mark.parametrize("name", ["0000-0001", "commit"])
def test_a_folder_in_the_place_of_an_object_is_named(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "deadline", lambda _: 0.1)
    monkeypatch.setattr(mailbox, "LONGEST_BACKOFF", 0.2)
    first = replica_at(str(tmp_path), 0)
    course, stream = course_of(first), batches(0)
    wrong = tmp_path / folder_of(first.rounds) / name
    wrong.mkdir(parents=True)
    train(first, stream, lambda: course._pending is not None)
    told = f"{name}: a folder is in its place, or was; delete it"
    course._stand_still(lambda: f"waits: store {tmp_path}: cannot create" in caplog.text and told in caplog.text)
    wrong.rmdir()
    train(first, stream, lambda: first.rounds >= 2)
    close(first)


# -- who is left ---------------------------------------------------------------------------------------------------


def team_of(place: str, size: int) -> list[Replica]:
    """Members that all train, with the usual minimum of replicas. While they gather, those that are in do not train."""
    replicas = gathered(place, size, min_replicas=1)
    for replica in replicas:
        course_of(replica).store.min_replicas = None
    together(replicas, lambda: {replica.transport.size for replica in replicas} == {size})
    return replicas


@pytest.mark.parametrize(("all_of_them", "dead"), [(2, 1), (4, 2)])
def test_half_of_the_members_go_on_without_the_others(place: str, all_of_them: int, dead: int) -> None:
    replicas = team_of(place, all_of_them)
    close(*replicas[-dead:])  # as if they were killed: they say nothing
    rest = replicas[:-dead]
    together(rest, lambda: rest[0].transport.size == len(rest))
    index = rest[0].rounds
    together(rest, lambda: rest[0].rounds >= index + 2)
    close(*rest)


def test_less_than_half_of_them_stand_still_and_say_what_to_do(place: str, caplog: pytest.LogCaptureFixture) -> None:
    replicas = team_of(place, 4)
    close(*replicas[1:])
    course, why = course_of(replicas[0]), "1 have posted, 2 must have; start more replicas, or this one with fewer"
    with mock.patch.object(members, "deadline", return_value=0.1):
        while why not in caplog.text:  # what the others have posted before may still be committed
            train(replicas[0], batches(0), lambda: course._pending is not None)
            course._stand_still(lambda: course._pending is None or why in caplog.text)
    index = replicas[0].rounds
    close(replicas[0])
    again = replica_at(place, 0, min_replicas=1)
    train(again, batches(0), lambda: again.rounds > index + 2)
    close(again)


# -- an unlucky order ----------------------------------------------------------------------------------------------


def test_a_newcomer_is_not_told_of_a_hole_that_is_none(place: str) -> None:
    """Between its look at the open round and its look at later ones, two rounds are committed."""
    first, folders = replica_at(place, 0, min_replicas=1), Bucket.folders

    def later(bucket: Bucket, folder: str) -> list[str]:
        if not course_of(first)._closed:
            train(first, batches(0), lambda: first.rounds >= 2)
            first.finish()
        return folders(bucket, folder)

    with mock.patch.object(Bucket, "folders", later):
        second = replica_at(place, 1)
    assert second.rounds > first.rounds >= 2
    assert second.fingerprint == first.fingerprint
    close(second)
