"""Nothing is lost and nothing counts twice: what replicas owe, plus K times what was applied, is what they proposed.

This holds for any pattern, codec and delay, whoever is away, whoever's message or letter cannot be read, and whenever a
round is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from overtone import Absence, Cluster, Count, Method, PeerError, Replica
from overtone.codec import Dense, TopK
from overtone.coding.layout import part_of
from overtone.exchange.message import MAGIC, Kind
from overtone.exchange.signals import Drift
from overtone.rules import Outer
from overtone.sim.transport import SimTransport

LR = 0.5
CODECS = [
    Dense(),
    TopK(keep=1),
    TopK(keep=300),
    TopK(keep=300, bits=2),
    TopK(keep=64, bits=32),
    TopK(keep=4096, bits=32),
    TopK(keep=64, transform="turning"),
]


def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 3))
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def cluster_of(method: Method, replicas: int, absences: list[Absence]) -> Cluster:
    refused = "raise" if isinstance(method.codec, Dense) else "leave out"
    with mock.patch("overtone.sim.cluster.Replica", partial(Replica, refused=refused)):
        return Cluster(make, method, replicas=replicas, absences=absences)


@contextmanager
def damaged(kind: Kind, speaker: int, judge: int) -> Iterator[None]:
    """One rank receives the messages of this kind from another one damaged."""

    def spoil(seat: SimTransport, heard: list[bytes]) -> list[bytes]:
        place = list(seat.peers).index(speaker) if speaker in seat.peers else None
        if seat.rank == judge and place is not None:
            said = heard[place]
            if said[:4] == MAGIC and said[5] & 0x7F == kind:
                heard[place] = said[:56] + bytes([said[56] ^ 1]) + said[57:]
        return heard

    gather, all_to_all = SimTransport.gather, SimTransport.all_to_all

    def gathered(seat: SimTransport, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        return spoil(seat, gather(seat, message, most=most, count=count))

    def dealt(seat: SimTransport, messages: list[bytes], *, most: int, count: Count) -> list[bytes]:
        return spoil(seat, all_to_all(seat, messages, most=most, count=count))

    with mock.patch.object(SimTransport, "gather", gathered), mock.patch.object(SimTransport, "all_to_all", dealt):
        yield


@contextmanager
def refused_at_the_commit() -> Iterator[None]:
    def refuse(seat: SimTransport, index: int) -> None:
        raise PeerError(f"round {index}: not this time")

    with mock.patch.object(SimTransport, "commit", refuse):
        yield


def coefficients(replica: Replica, tensors: list[Tensor]) -> Tensor:
    layout = replica.exchanger.layout
    return layout.read(tensors, layout.empty(torch.device("cpu"))).double()


def owed(replica: Replica) -> Tensor:
    """The residual, what is in flight, and the drift that was not measured yet."""
    exchanger = replica.exchanger
    layout, pending = exchanger.layout, exchanger.in_flight
    flat = replica.state.tensors.get("residual", layout.empty(replica.device)).clone()
    sources = exchanger.signal.measure()
    start = sources.plus if pending is None else pending.sources.measured_at
    assert start is not None
    assert sources.minus is not None
    total = flat.double() + coefficients(replica, [a - b for a, b in zip(start, sources.minus, strict=True)])
    if pending is not None:
        for piece, block in zip(pending.work.deal.pieces, pending.contribution.blocks, strict=True):
            sent = torch.zeros(piece.slab.chunks, piece.slab.area)
            decoded = pending.work.codec.decode_own(block, piece.slab)
            pending.work.in_state_basis(decoded, piece.slab).add_to(sent)
            part_of(total, piece.slab).add_(sent)
    return total


EVENTS = st.sampled_from(["nothing", "message", "letter", "commit"])


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.integers(1, 5),
    codec=st.sampled_from(CODECS),
    exchange=st.sampled_from(["gathered", "sharded"]),
    keep_down=st.sampled_from([None, 1, 500, 4096]),
    delay=st.integers(0, 2),
    carry=st.sampled_from([1.0, 0.5, 0.0]),
    events=st.lists(st.tuples(EVENTS, st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=3),
    away=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(1, 2)),
    seed=st.integers(0, 99),
)
def test_what_was_proposed_is_applied_or_still_owed(
    replicas: int,
    codec: Dense | TopK,
    exchange: str,
    keep_down: int | None,
    delay: int,
    carry: float,
    events: list[tuple[str, int, int]],
    away: tuple[int, int, int] | None,
    seed: int,
) -> None:
    dense = isinstance(codec, Dense)
    if dense:
        exchange = "gathered"
    absences = []
    if away is not None and replicas > 1 and not dense:  # without a residual, who is away loses what it did
        absences.append(Absence(away[0] % replicas, away[1], away[1] + away[2]))
    rule = Outer(lr=1.0, momentum=0.0, carry=carry)
    down = keep_down if exchange == "sharded" else None
    method = Method("any", Drift, 2, rule, codec, delay=delay, exchange=exchange, keep_down=down)
    cluster = cluster_of(method, replicas, absences)
    dice = torch.Generator().manual_seed(seed)
    proposed = torch.zeros(cluster.replicas[0].exchanger.layout.size, dtype=torch.float64)
    applied = proposed.clone()
    happened = set()
    for step in range(8):
        for replica in cluster.turns():
            gradients = [torch.randn(p.shape, generator=dice) ** 3 for p in replica.model.parameters()]
            for p, gradient in zip(replica.model.parameters(), gradients, strict=True):
                p.grad = gradient
            proposed += LR * coefficients(replica, gradients)
        kind, speaker, judge = events[min(step // 2, 2)]
        anchor = cluster.present()[0].state.tensors["anchor"].double().clone()
        with spoilt(kind, speaker % replicas, judge % replicas):
            try:
                rounds = cluster.step()
            except PeerError:  # most messages were refused, or the commit was
                rounds = []
        # Of a replica that was there: one that returns in this step has adopted a later anchor.
        if rounds:
            happened |= {rank for record in rounds for rank in record.left_out}
            now = next(r for r in cluster.present() if r.rounds == cluster.rounds).state.tensors["anchor"].double()
            applied += len(rounds) * (anchor - now)
    total = sum((owed(replica) for replica in cluster.replicas), start=torch.zeros_like(proposed))
    error = float((total + applied - proposed).abs().max())
    assert error <= 2e-5 * float(proposed.abs().max()), happened


def spoilt(kind: str, speaker: int, judge: int) -> AbstractContextManager[None]:
    if kind == "message":
        return damaged(Kind.ROUND, speaker, judge)
    if kind == "letter":
        return damaged(Kind.LETTER, speaker, judge)
    return refused_at_the_commit() if kind == "commit" else nullcontext()
