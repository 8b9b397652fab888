"""A rank that is left out of a round takes back all that it said; what the others said counts as it would have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import overtone
from overtone import Cluster, Method, Replica
from overtone.codec import TopK
from overtone.coding.layout import part_of
from overtone.errors import GaveUpError
from overtone.exchange.message import MAGIC, Kind
from overtone.exchange.signals import Drift
from overtone.ledger import Count
from overtone.rules import Outer
from overtone.sim.transport import SimTransport


@contextmanager
def unread(speaker: int, judge: int) -> Iterator[None]:
    """One rank hears the payloads of another damaged."""
    hear = SimTransport.gather

    def damaged(seat: SimTransport, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        heard = hear(seat, message, most=most, count=count)
        said = heard[speaker]
        if seat.rank == judge and said[:4] == MAGIC and said[5] & 0x7F in (Kind.ROUND, Kind.DRAIN):
            heard[speaker] = said[:60] + bytes([said[60] ^ 1]) + said[61:]
        return heard

    with mock.patch.object(SimTransport, "gather", damaged):
        yield


def leaving_out(method: Method, replicas: int) -> Cluster:
    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(40, 70)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    with mock.patch("overtone.sim.cluster.Replica", partial(Replica, refused="leave out")):
        return Cluster(make, method, replicas=replicas)


def backward(cluster: Cluster, dice: torch.Generator) -> None:
    for replica in cluster.turns():
        for p in replica.model.parameters():
            p.grad = torch.randn(p.shape, generator=dice) ** 3


def total(vectors: list[Tensor]) -> Tensor:
    return torch.stack(vectors).double().sum(0)


def drift(replica: Replica) -> Tensor:
    sources = replica.exchanger.signal.measure()
    layout, flat = replica.exchanger.layout, replica.exchanger.layout.empty(torch.device("cpu"))
    plus, minus = layout.matrices(sources.plus), layout.matrices(sources.minus)
    for slab in layout.slabs:
        layout.read_slab(slab, plus, minus).into(part_of(flat, slab))
    return flat


@settings(max_examples=40, deadline=None)
@given(
    replicas=st.integers(2, 5),
    speaker=st.integers(0, 4),
    judge=st.integers(0, 4),
    keep=st.sampled_from([1, 300, 4096]),
    bits=st.sampled_from([1, 2, 32]),
    release=st.sampled_from([1.0, 0.75]),
    decay=st.sampled_from([1.0, 0.9]),
    carry=st.sampled_from([1.0, 0.0]),
    drains=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_was_proposed_is_applied_or_still_owed(
    replicas: int,
    speaker: int,
    judge: int,
    keep: int,
    bits: int,
    release: float,
    decay: float,
    carry: float,
    drains: bool,
    seed: int,
) -> None:
    """Σ residuals + α·K·u = Σ of all that was proposed, whoever is left out, in rounds and in drains."""
    rule = Outer(lr=1.0, momentum=0.0, decay=decay, carry=carry, release=release)
    method = Method("any", Drift, 1, rule, TopK(keep=keep, bits=bits), drain=1)
    cluster = leaving_out(method, replicas)
    speaker, judge = speaker % replicas, judge % replicas
    dice = torch.Generator().manual_seed(seed)
    backward(cluster, dice)
    cluster.step()  # so that there are residuals
    backward(cluster, dice)
    for replica in cluster.turns():
        replica.local_step()
    row = method.draining() if drains else method
    assert isinstance(row.rule, Outer)
    proposed = total([row.rule.decay * r.state.tensors["residual"] + drift(r) for r in cluster.replicas])
    anchor = cluster.replicas[0].state.tensors["anchor"].clone()
    with unread(speaker, judge):
        records = cluster.run_exchanges(
            {r.transport.rank: r.rounding(row if drains else None) for r in cluster.replicas}, "rounds"
        )
    assert {record.left_out for record in records} == {(speaker,)}
    applied = (anchor - cluster.replicas[0].state.tensors["anchor"]).double() * replicas * row.rule.release
    owed = total([replica.state.tensors["residual"] for replica in cluster.replicas])
    assert len({replica.fingerprint for replica in cluster.replicas}) == 1
    assert float((applied + owed - proposed).abs().max()) <= 1e-5 * float(proposed.abs().max())


@pytest.mark.parametrize("keep", [300, 4096])
def test_a_message_that_is_left_out_counts_nothing_and_weighs_nothing_else(keep: int) -> None:
    """The others' part of the mean is what it would have been: divided by the members, not by those heard."""
    found = []
    for left in (False, True):
        cluster = leaving_out(overtone.decoupled(every=1, keep=keep, lr=1.0, momentum=0.0), 3)
        for replica in cluster.turns():
            for p in replica.model.parameters():
                p.grad = torch.ones_like(p) * (replica.transport.rank != 1)  # rank 1 has nothing to say
        if left:
            with unread(speaker=1, judge=2):
                (record, *_) = cluster.step()
            assert record.left_out == (1,)
        else:
            cluster.step()
        found.append(cluster.replicas[0].state.tensors["anchor"])
    assert torch.equal(*found)


def test_a_failure_that_one_rank_cannot_read_still_ends_a_sharded_round() -> None:
    """Who fails and is left out does not leave the others waiting for its letter: it tells them there."""
    hear = SimTransport.all_to_all

    def damaged(seat: SimTransport, messages: Sequence[bytes], *, most: int, count: Count) -> list[bytes]:
        heard = hear(seat, messages, most=most, count=count)
        if seat.rank == 0:
            heard[1] = heard[1][:60] + bytes([heard[1][60] ^ 1]) + heard[1][61:]
        return heard

    cluster = leaving_out(overtone.decoupled(every=1, keep=300, exchange="sharded"), 4)
    for replica in cluster.turns():
        for p in replica.model.parameters():
            p.grad = torch.full_like(p, math.nan if replica.transport.rank == 1 else 1.0)
    with (
        mock.patch.object(SimTransport, "all_to_all", damaged),
        pytest.raises(GaveUpError, match=r"rank 1 could not take part: .*not finite"),
    ):
        cluster.step()
