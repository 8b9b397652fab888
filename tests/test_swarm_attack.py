"""Who attacks a run in a store, breaks it or is careless with it: a stranger without the key, a member with it, a user,
and an unlucky order of things. What cannot be undone by the replicas themselves is named, with the way out."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

import overtone
from overtone import MismatchError, PeerError, Replica, Round, StateError, StoreError
from overtone.errors import WireError
from overtone.swarm import founding, members
from overtone.swarm.bucket import Bucket
from overtone.swarm.members import Posts
from overtone.swarm.records import MOST_MEMBERS, Member, Note, Process, commit_path, folder_of
from scenario import EVERY, backward, batches
from test_swarm import (
    PATIENCE,
    come_back,
    course_of,
    gathered,
    owed,
    place,  # noqa: F401 (a fixture)
    replica_at,
    settle,
    train,
    wait_for,
)


def close(*replicas: Replica) -> None:
    for replica in replicas:
        course_of(replica).close()


def kept_of(replica: Replica) -> list[dict[str, object]]:
    return [copy.deepcopy(part.state_dict()) for part in (replica.model, replica.inner, replica)]


def joining(url: str, first: Replica, rank: int, **options: object) -> Replica:
    """A replica that joins while another one trains."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(replica_at, url, rank, **options)
        train(first, batches(0), other.done)
    return other.result()


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


def test_a_second_process_takes_the_place_of_one_that_speaks_in_every_round() -> None:
    team = (Member(0, 1, "m0"), Member(1, 1, "m1"))
    posts = Posts({0: Note(1), 1: Note(1)}, {1: Member(1, 2, "m1")})
    after, words = members.after(team, posts)
    assert [member.process for member in after] == [Process(0, 1), Process(1, 2)]
    assert "m1 is back" in words[0]


# -- a stranger ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", ["4095-0001", "0001-99999999999999999", "0000-4294967295", "0000-0002"])
def test_junk_among_the_claims_keeps_nobody_out(place: str, junk: str) -> None:
    first = replica_at(place, 0, min_replicas=1, key="secret")
    Bucket(place).create(f"members/{junk}", b"junk")
    other = joining(place, first, 1, key="secret")
    close(first)
    again = joining(place, other, 0, key="secret")
    assert (other.transport.rank, again.transport.rank) == (1, 0)
    close(other, again)


def test_junk_in_all_places_of_claims_is_named(place: str) -> None:
    close(replica_at(place, 0, min_replicas=1))
    bucket = Bucket(place)
    for number in range(1, MOST_MEMBERS):
        bucket.create(f"members/{Process(number, 1)}", b"junk")
    with pytest.raises(StoreError, match=r"no number is left for m1: .* 4095 objects in members/ .* Delete"):
        replica_at(place, 1)


def test_nobody_takes_the_number_of_a_member_whose_claim_was_deleted(place: str) -> None:
    first, second = gathered(place, 2, min_replicas=1)
    bucket = Bucket(place)
    for name in bucket.names("members"):
        bucket.remove(f"members/{name}")
    stranger = joining(place, first, 2)
    assert stranger.transport.rank == 2
    close(second)
    again = joining(place, first, 1)
    assert course_of(again).store.process == Process(1, 2)
    close(first, stranger, again)


def test_a_claim_that_a_listing_does_not_show_yet_is_not_tried_again(place: str) -> None:
    """As of a storage whose listings lag behind."""
    first = replica_at(place, 0, min_replicas=1)
    other = joining(place, first, 1)
    names = Bucket.names

    def late(bucket: Bucket, folder: str) -> dict[str, int]:
        return {} if folder == "members" else names(bucket, folder)

    with mock.patch.object(Bucket, "names", late):
        third = joining(place, first, 2)
    assert third.transport.rank == 2
    close(first, other, third)


def test_a_message_that_was_replaced_after_it_counted_is_named(place: str) -> None:
    first, second = gathered(place, 2, key="secret")
    settle([first, second])
    index, bucket = first.rounds, Bucket(place)
    train(first, batches(0), lambda: course_of(first)._pending is not None)
    train(second, batches(1), lambda: course_of(second)._pending is not None)
    settle([first, second])
    assert first.rounds > index
    close(first, second)
    path = f"{folder_of(index)}/0001-0001"
    bucket.remove(path)
    bucket.create(path, b"junk")
    with pytest.raises(StoreError, match=r"message of member 1 .*replaced"):
        replica_at(place, 2, key="secret")


def test_the_place_of_a_message_that_a_stranger_took_is_taken_back(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = gathered(place, 2, key="secret", min_replicas=2)
    settle([first, second])
    bucket, index = Bucket(place), first.rounds
    for other in range(index, index + 6):
        for number in (0, 1):
            bucket.create(f"{folder_of(other)}/000{number}-0001", b"junk" * 100)
    streams = batches(0), batches(1)
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(train, replica, stream, lambda: min(first.rounds, second.rounds) >= index + 3)
            for replica, stream in zip((first, second), streams, strict=True)
        ]
        records = [record for one in both for record in one.result()]
    assert all(not record.left_out for record in records)
    assert "000" in caplog.text
    close(first, second)
