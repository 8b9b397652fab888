"""The sharded exchange: how parts are dealt, what a letter says, and what a lie in either half leads to."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import overtone
import worlds
from overtone import Cluster, Method, PeerError, Replica, Solo
from overtone.codec import Decoded, TopK
from overtone.coding.bits import Reader
from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels, in_numba, in_torch
from overtone.errors import WireError
from overtone.exchange import message as wire
from overtone.exchange.buffers import Buffers
from overtone.exchange.dealing import deal
from overtone.exchange.letters import LetterCodec, letters_for
from overtone.exchange.message import HEADER_BYTES, MAGIC, Expected, Header, Kind, Seal
from overtone.exchange.pattern import Context, Contribution
from overtone.exchange.sharded import Sharded, _Letters
from overtone.ledger import Count
from overtone.sim.transport import SimTransport
from overtone.transport import run_exchange
from overtone.world.process_group import Torch
from scenario import EVERY, backward, batches, build, run_cluster, run_replica, weights
from test_conserved import damaged
from test_fuzz import DAMAGES

LIAR, JUDGE = 1, 2
KERNELS = [in_torch, in_numba]
SHARDED = overtone.decoupled(every=EVERY, keep=300, exchange="sharded", keep_down=700)
EXACT = {"preset": "first", "every": EVERY, "keep": 4096, "bits": 32}

# -- dealing -------------------------------------------------------------------------------------------------------

SHAPES = st.one_of(
    st.tuples(st.integers(1, 400)),  # a plain tensor
    st.tuples(st.integers(1, 9), st.integers(1, 9)),  # too small to compress
    st.tuples(st.integers(30, 200), st.integers(30, 200)),
)


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=6),
    buffers=st.lists(st.integers(0, 500), max_size=12),
    parts=st.integers(1, 70),
    keep=st.sampled_from([1, 128, 4096]),
    chunk=st.sampled_from([16, 64]),
)
def test_every_unit_is_dealt_once_and_parts_are_about_equal(
    shapes: list[tuple[int, ...]], buffers: list[int], parts: int, keep: int, chunk: int
) -> None:
    codec = TopK(keep=keep, chunk=chunk)
    letters = letters_for(codec, None, parts)
    slabs = codec.layout(shapes).slabs

    def bits(slab: Slab) -> int:
        return codec.bits_of(slab) + letters.bits_of(slab)

    dealt = deal(slabs, buffers, parts, bits)
    at = 0
    for piece in dealt.pieces:  # in the order of the flat vector, without a gap
        assert piece.slab.offset == at
        assert piece.slab.size > 0
        assert 0 <= piece.part < parts
        at += piece.slab.size
    assert at == sum(slab.size for slab in slabs)
    for slab in slabs:
        pieces = [dealt.pieces[number].slab for number in dealt.inside[slab.offset]]
        assert pieces[0].offset == slab.offset
        assert sum(p.units for p in pieces) == slab.units
        assert {(p.plain, p.h if not slab.plain else 1) for p in pieces} == {(slab.plain, slab.h)}
    for plain in (False, True):
        here = [slab for slab in slabs if slab.plain is plain]
        unit = max((bits(slab) / slab.units for slab in here), default=0)
        costs = [0.0] * parts
        for slab in here:
            for number in dealt.inside[slab.offset]:
                piece = dealt.pieces[number]
                costs[piece.part] += bits(slab) * piece.slab.units / slab.units
        assert max(costs) <= sum(costs) / parts + unit + 1
        ran = [dealt.pieces[number].part for slab in here for number in dealt.inside[slab.offset]]
        assert ran == sorted(ran)  # a part is one run
    assert [number for own in dealt.buffers for number in own] == list(range(len(buffers)))
    sizes = [sum(buffers[number] for number in own) for own in dealt.buffers]
    assert max(sizes) <= sum(buffers) / parts + max(buffers, default=0) + 1


def test_more_owners_than_chunks() -> None:
    """Some own nothing and still pass on letters: rounds end with one anchor."""

    def tiny(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(rank)
        model = nn.Linear(3, 2, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    cluster = Cluster(tiny, overtone.decoupled(every=1, exchange="sharded"), replicas=9)
    for _ in range(3):
        for replica in cluster.turns():
            replica.model(torch.randn(4, 3)).square().sum().backward()
        cluster.step()
    assert {type(replica.exchanger.pattern) for replica in cluster.replicas} == {Sharded}
    assert len({replica.fingerprint for replica in cluster.replicas}) == 1
    cluster.finish()


# -- letters -------------------------------------------------------------------------------------------------------

FILLS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "normal": lambda x, _: x,
    "zeros": lambda x, _: torch.zeros_like(x),
    "sparse": lambda x, dice: x * (torch.rand(x.shape, generator=dice) < 0.02),
    "a row of zeros": lambda x, _: x.index_fill(0, torch.tensor([0]), 0.0),
    "ties": lambda x, _: x.sign(),
    "two sizes": lambda x, dice: x.sign() * (1.0 + (torch.rand(x.shape, generator=dice) < 0.3)),
    "denormal": lambda x, _: x * 1e-41,
    "least": lambda x, _: x.sign() * 1e-45,
    "huge": lambda x, _: x.sign() * 3.4e38,
    "outliers": lambda x, _: x**9,
    "all sizes": lambda x, dice: x * 10.0 ** torch.randint(-40, 38, x.shape, generator=dice),
}


def piece_of(shape: tuple[int, int]) -> Slab:
    (slab,) = TopK(chunk=16, plain_below=30).layout([shape]).slabs
    return slab


def in_order(decoded: Decoded) -> tuple[Tensor, ...]:
    """Positions and values, by position: a letter has one layer after the other."""
    if decoded.index is None:
        return (decoded.values,)
    order = decoded.index.view(-1).argsort()
    return decoded.index.view(-1)[order], decoded.values.view(-1)[order]


@pytest.mark.parametrize("fill", FILLS)
@settings(max_examples=20, deadline=None)
@given(
    keep=st.sampled_from([1, 40, 700, 4095, 4096]),
    bits=st.sampled_from([1, 16, 32]),
    shape=st.sampled_from([(48, 32), (16, 16), (1, 29), (3, 5)]),
    seed=st.integers(0, 9),
)
def test_all_replicas_decode_what_the_owner_says_that_they_do(
    fill: str, keep: int, bits: int, shape: tuple[int, int], seed: int
) -> None:
    codec, piece = LetterCodec(TopK(keep=keep, bits=bits, chunk=16, plain_below=30)), piece_of(shape)
    dice = torch.Generator().manual_seed(seed)
    mean = FILLS[fill](torch.randn(piece.chunks, piece.area, generator=dice), dice)
    written = []
    for kernels in KERNELS:
        block, said = codec.encode(mean.clone(), piece, kernels)
        written.append(block.packed)
        for others in KERNELS:
            reader, checked = Reader(block.packed), Reader(block.packed)
            heard = codec.decode(reader, piece, others)
            reader.end()
            codec.check(checked, piece, others)
            checked.end()
            assert (heard.index is None) == (said.index is None)
            assert all(map(torch.equal, in_order(heard), in_order(said)))
        assert bool(torch.isfinite(said.values).all())
        if said.index is not None:
            exact = mean.view(-1)[said.index.view(-1)]
            assert bool((exact != 0).all())  # zeros cost nothing
            assert said.index.numel() <= piece.chunks * codec.top_k.kept(piece)
            if bits == 32:
                assert torch.equal(exact, said.values.view(-1))
    assert written[0] == written[1]


def mean_letter(bits: int) -> tuple[LetterCodec, Slab, bytes]:
    codec, piece = LetterCodec(TopK(keep=300, bits=bits, chunk=16)), piece_of((48, 32))
    mean = torch.randn(piece.chunks, piece.area, generator=torch.Generator().manual_seed(0)) ** 3
    mean[0, 5] = 500.0  # so that there is an exception
    return codec, piece, codec.encode(mean, piece, in_torch)[0].packed


def refusals(codec: LetterCodec, piece: Slab, body: bytes) -> list[str]:
    """Why these bytes are refused, by each way of reading them. Empty where they are not."""
    told = []
    for kernels in KERNELS:
        for read in (codec.decode, codec.check):
            try:
                found = read(Reader(body), piece, kernels)
            except WireError as error:
                told.append(str(error))
                continue
            told.append("")
            if found is not None:
                here = torch.zeros(piece.chunks, piece.area)
                found.add_to(here)
                assert bool(torch.isfinite(here).all())
    return told


@pytest.mark.parametrize("bits", [1, 16, 32])
def test_damaged_letters_are_refused_alike_by_all_ways_of_reading(bits: int) -> None:
    codec, piece, body = mean_letter(bits)
    assert refusals(codec, piece, body) == [""] * 4
    dice, told = random.Random(bits), set()
    for _ in range(1500):
        found = refusals(codec, piece, dice.choice(DAMAGES)(body, dice))
        assert len({bool(why) for why in found}) == 1, found
        told.add(found[0].split(",")[0])
    assert {"values", "positions"} <= told


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=300), keep=st.sampled_from([1, 40, 4096]), bits=st.sampled_from([1, 16, 32]))
def test_any_bytes_are_refused_or_decode(body: bytes, keep: int, bits: int) -> None:
    codec = LetterCodec(TopK(keep=keep, bits=bits, chunk=16, plain_below=30))
    for shape in ((48, 32), (3, 5)):
        found = refusals(codec, piece_of(shape), body)
        assert len({bool(why) for why in found}) == 1, found


def test_an_absurd_number_of_values_is_refused_before_any_memory_is_taken() -> None:
    codec, piece, body = mean_letter(1)
    told = refusals(codec, piece, b"\xff\xff\xff\xff" + body[4:])
    assert all("4294967295, where 114 are the most" in why for why in told), told


def test_a_position_in_both_layers_is_refused() -> None:
    codec, piece, _ = mean_letter(1)
    layer, _ = codec._pack(torch.tensor([3, 9]), torch.ones(2), piece, in_torch)
    assert all("one is in both layers" in why for why in refusals(codec, piece, layer + layer))


# -- lies about letters --------------------------------------------------------------------------------------------

RUN, SCHEMA = b"this run", b"schema.."
EXPECTED = Expected(5, RUN, SCHEMA)
OWNER = Header(Kind.LETTER, 1, 5, 50, RUN, SCHEMA, b"anchor..", bytes(8))


class Reading:
    """Everything between the network and a letter that counts, and a true letter of rank 1 of two."""

    def __init__(self, seal: Seal, kernels: Kernels) -> None:
        codec = TopK(keep=40, bits=1, plain_below=30)
        letters = letters_for(codec, 80, 2)
        model = nn.BatchNorm1d(3)
        layout, buffers = codec.layout([(70, 130), (64, 64), (9,)]), Buffers(model, "shared")
        context = Context(layout, kernels, buffers, seal, torch.device("cpu"))
        dealt = Sharded(context, codec, letters).deal(2)
        header = replace(OWNER, kind=Kind.ROUND, sender=0)
        mine = Contribution(header, codec, dealt, keep_down=80)
        self.letters = _Letters([header], {}, 0.0, {}, mine, context, [0, 1], letters)
        dice = torch.Generator().manual_seed(0)
        model.running_var.add_(1.0)  # type: ignore[union-attr]
        pieces = [torch.randn(slab.chunks, slab.area, generator=dice) ** 5 for slab in dealt.of(1)]
        blocks = [letters.encode(mean, slab, kernels)[0].packed for mean, slab in zip(pieces, dealt.of(1), strict=True)]
        self.body = b"".join([buffers.pack(dealt.buffers[1]), *blocks])
        self.true = wire.seal_message(OWNER, self.body, seal)
        self.others = [
            wire.seal_message(replace(OWNER, **other), self.body, seal)
            for other in ({"round": 4}, {"run": b"that run"}, {"schema": b"schemb.."}, {"kind": Kind.ROUND})
        ]

    def open(self, letter: bytes) -> None:
        self.letters.open_letter(letter, EXPECTED, 1)


@pytest.mark.parametrize("seal", [Seal(), Seal(b"a key")], ids=["checksum", "keyed"])
@pytest.mark.parametrize("kernels", KERNELS, ids=["torch", "numba"])
def test_thousands_of_lies_about_a_letter(seal: Seal, kernels: Kernels) -> None:
    reading, dice = Reading(seal, kernels), random.Random(0)
    reading.open(reading.true)
    reading.open(reading.true + bytes(9))  # padded
    fields = set()
    for _ in range(3000):
        lie = dice.choice(DAMAGES)(dice.choice([reading.true, *reading.others]), dice)
        if lie.rstrip(b"\0") == reading.true.rstrip(b"\0"):
            continue
        with pytest.raises(WireError) as caught:
            reading.open(lie)
        fields.add(str(caught.value).split(":")[0])
    for other in reading.others:
        with pytest.raises(WireError) as caught:
            reading.open(other)
        fields.add(str(caught.value).split(":")[0])
    assert {"magic", "version", "length", "run", "schema", "round", "kind", "message"} <= fields


def test_lies_under_a_valid_seal() -> None:
    reading, dice, told = Reading(Seal(), in_torch), random.Random(1), set()
    other = Reading(Seal(), in_numba)
    for _ in range(2000):
        lie = wire.seal_message(OWNER, dice.choice(DAMAGES)(reading.body, dice), Seal())
        found = []
        for reader in (reading, other):
            try:
                reader.open(lie)
                found.append("")
            except WireError as error:
                found.append(str(error))
        assert bool(found[0]) == bool(found[1]), found
        told.add(found[0].split(":")[0].split(",")[0])
    assert {"values", "positions", "scales", "payload"} <= told


# -- equal to the gathered exchange --------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [2, 3, 4, 5])
@pytest.mark.parametrize("delay", [0, 2])
def test_where_all_is_passed_on_the_exchange_equals_the_gathered_one(replicas: int, delay: int) -> None:
    gathered = run_cluster(overtone.decoupled(**EXACT, exchange="gathered", delay=delay), replicas, 2 * EVERY + 1)
    method = overtone.decoupled(**EXACT, exchange="sharded", keep_down=4096, delay=delay)
    sharded = run_cluster(method, replicas, 2 * EVERY + 1)
    for one, other in zip(gathered.replicas, sharded.replicas, strict=True):
        assert one.fingerprint == other.fingerprint
        assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(one).items())


@pytest.mark.slow
def test_so_it_does_over_gloo(tmp_path: Path) -> None:
    method = overtone.decoupled(**EXACT, exchange="sharded", keep_down=4096)
    gathered = run_cluster(overtone.decoupled(**EXACT, exchange="gathered"), 3, 2 * EVERY + 1)
    for rank, result in enumerate(worlds.run(trained, method, size=3, folder=tmp_path)):
        assert "value" in result, result
        mine = weights(gathered.replicas[rank])
        assert all(torch.equal(tensor, mine[name]) for name, tensor in result["value"].items())


def trained(method: Method) -> dict[str, Tensor]:
    return weights(run_replica(method, 2 * EVERY + 1))


def test_one_replica_alone_equals_the_gathered_exchange() -> None:
    one, other = (
        Replica(*build(0), replace(SHARDED, exchange=exchange, keep_down=None), Solo())
        for exchange in ("gathered", "sharded")
    )
    for replica in (one, other):
        for batch, _ in zip(batches(0), range(2 * EVERY), strict=False):
            backward(replica, batch)
            replica.step()
        replica.finish()
    assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(one).items())


# -- one that fails and is left out --------------------------------------------------------------------------------


def clusters(method: Method, replicas: int = 3) -> Cluster:
    with mock.patch("overtone.sim.cluster.Replica", partial(Replica, refused="leave out")):
        cluster = Cluster(build, method, replicas=replicas)
    for _ in range(method.every or 1):
        advance(cluster)
    return cluster


def advance(cluster: Cluster) -> list[overtone.Round]:
    for replica in cluster.turns():
        backward(replica, next(batches(replica.transport.rank)))
    return cluster.step()


def poison(cluster: Cluster) -> None:
    with torch.no_grad():
        cluster.replicas[LIAR].parameters.exchanged[0].fill_(math.nan)


def test_one_that_fails_and_cannot_be_read_still_tells_the_others() -> None:
    """One rank cannot read its failure, so that it is left out. As an owner it must say once more that it cannot."""
    cluster = clusters(replace(SHARDED, every=1))
    poison(cluster)
    spoilt = damaged(Kind.FAILURE, LIAR, JUDGE)
    before = [replica.fingerprint for replica in cluster.replicas]
    hear = SimTransport.gather
    with spoilt, mock.patch.object(SimTransport, "gather", hear), pytest.raises(PeerError) as caught:
        advance(cluster)
    assert "rank 1 could not take part: the drift of parameter" in str(caught.value)
    assert [replica.fingerprint for replica in cluster.replicas] == before


def test_one_that_fails_and_cannot_be_read_at_all_is_left_out() -> None:
    cluster = clusters(replace(SHARDED, every=1))
    poison(cluster)
    with damaged(Kind.FAILURE, LIAR, JUDGE):
        rounds = advance(cluster)
    assert [record.left_out for record in rounds] == [(LIAR,)] * 3
    assert len({replica.fingerprint for replica in cluster.replicas}) == 1


def test_a_mean_of_buffers_that_overflows_is_told_by_its_owner() -> None:
    """Every replica's value is finite, and their sum is not. Nobody may take the owner's letter for damaged."""
    cluster = clusters(replace(SHARDED, every=1))
    for replica in cluster.replicas:
        replica.buffers.float_tensors()[0].fill_(3e38)
    before = [replica.fingerprint for replica in cluster.replicas]
    with pytest.raises(PeerError, match="could not take part: the mean of its part is not finite"):
        advance(cluster)
    assert [replica.fingerprint for replica in cluster.replicas] == before


def test_one_that_has_ended_its_rounds_and_is_left_out_stops_nobody() -> None:
    """Rank 1 finishes, the others do not; and its last message is damaged, which would have told them."""
    cluster = clusters(replace(SHARDED, every=1, drain=0))
    for replica in cluster.turns():
        backward(replica, next(batches(0)))
        if replica.transport.rank != LIAR:
            replica.local_step()
    exchanges = {
        rank: replica.finishing() if rank == LIAR else replica.rounding()
        for rank, replica in enumerate(cluster.replicas)
    }
    with damaged(Kind.FINISH, LIAR, JUDGE), pytest.raises(PeerError, match="was refused by rank 1: letter: this"):
        cluster.run_exchanges(exchanges, "rounds")


# -- lies, over gloo -----------------------------------------------------------------------------------------------

Spoil = Callable[[bytes], bytes]


class Tampered(Torch):
    """Hears what rank 1 says in messages of one kind in round 1 differently from how it was said."""

    def __init__(self, spoil: Spoil | None, kind: Kind) -> None:
        super().__init__()
        self.spoil, self.kind = spoil, kind

    def heard(self, messages: list[bytes]) -> list[bytes]:
        said = messages[LIAR]
        is_meant = said[:4] == MAGIC and said[5] == self.kind and int.from_bytes(said[8:12], "little") == 1
        if self.spoil is not None and is_meant:
            messages[LIAR] = self.spoil(said)
        return messages

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        return self.heard(super().gather(message, most=most, count=count))

    def all_to_all(self, messages: list[bytes], *, most: int, count: Count) -> list[bytes]:  # type: ignore[override]
        return self.heard(super().all_to_all(messages, most=most, count=count))


def rewritten(said: bytes, body: Callable[[bytes], bytes] = lambda body: body, **fields: object) -> bytes:
    """Another true message, as a liar would send it."""
    header, length = wire._parse(said[:HEADER_BYTES], Seal())
    return wire.seal_message(replace(header, **fields), body(said[HEADER_BYTES : HEADER_BYTES + length]), Seal())  # type: ignore[arg-type]


def flip(said: bytes) -> bytes:
    return said[:70] + bytes([said[70] ^ 16]) + said[71:]


def another(said: bytes) -> bytes:
    return rewritten(said, lambda body: body[:-1] + b"\x01")


# By name: which message, how it is heard, by whom alone (None: by all others), and how it is refused.
LIES: dict[str, tuple[Kind, Spoil, int | None, str]] = {
    "a damaged part": (Kind.ROUND, flip, 2, "message of rank 1 was refused by rank 2: checksum"),
    "a damaged part for itself": (Kind.ROUND, flip, 1, "message of rank 1 was refused by rank 1: checksum"),
    "a part cut short": (
        Kind.ROUND, lambda said: rewritten(said, lambda body: body[:-3]), 0,
        "message of rank 1 was refused by rank 0: values",
    ),
    "two headers": (
        Kind.ROUND, lambda said: rewritten(said, steps=99), 2,
        "message of rank 1 was refused because not every rank received the same",
    ),
    "a letter in place of a part": (
        Kind.ROUND, lambda said: rewritten(said, kind=Kind.LETTER), 2,
        "message of rank 1 was refused because not every rank received the same",
    ),
    "two letters": (Kind.LETTER, another, 2, "letter of rank 1 was refused because not every rank received the same"),
    "a damaged letter": (Kind.LETTER, flip, 2, "letter of rank 1 was refused by rank 2: checksum"),
    "a malformed letter": (
        Kind.LETTER, lambda said: rewritten(said, lambda body: body + b"\x01"), None,
        "letter of rank 1 was refused by rank 0: payload",
    ),
    "a part in place of a letter": (
        Kind.LETTER, lambda said: rewritten(said, kind=Kind.ROUND), None,
        "letter of rank 1 was refused by rank 0: kind: round where an owner's letter is due",
    ),
    "an old letter": (
        Kind.LETTER, lambda said: rewritten(said, round=0), None, "letter of rank 1 was refused by rank 0: round: 0",
    ),
    "a letter of another run": (
        Kind.LETTER, lambda said: rewritten(said, run=b"that run"), 2, "letter of rank 1 was refused by rank 2: run:",
    ),
    "another's letter": (
        Kind.LETTER, lambda said: rewritten(said, sender=0), 2, "letter of rank 1 was refused by rank 2: sender",
    ),
}  # fmt: skip


def steps(replica: Replica, count: int) -> list[overtone.Round]:
    done = []
    for batch, _ in zip(batches(dist.get_rank()), range(count), strict=False):
        backward(replica, batch)
        record = replica.step()
        done += [] if record is None else [record]
    return done


def hold_round(replica: Replica) -> str:
    """A round with nothing before it, so that any change of a weight is the round's."""
    backward(replica, next(batches(dist.get_rank())))
    replica.local_step()
    before, anchor = weights(replica), replica.fingerprint
    try:
        run_exchange(replica.rounding(), replica.transport)
    except PeerError as error:
        same = all(torch.equal(tensor, before[name]) for name, tensor in weights(replica).items())
        return str(error) if same and replica.fingerprint == anchor else "a weight was touched"
    return "no error"


def lies() -> dict[str, str]:
    rank, told = dist.get_rank(), {}
    method = overtone.decoupled(every=1, keep=300, bits=32, exchange="sharded", keep_down=700)
    for name, (kind, spoil, judge, _) in LIES.items():
        hears = rank == judge if judge is not None else rank != LIAR
        transport = Tampered(spoil if hears else None, kind)
        replica = Replica(*build(rank), method, transport)
        steps(replica, 1)
        told[name] = hold_round(replica)
        transport.spoil = None
        run_exchange(replica.rounding(), replica.transport)  # and the next try succeeds
        told[f"{name}, afterwards"] = replica.fingerprint
    return told


@pytest.mark.slow
def test_every_lie_is_refused_alike_by_all_and_no_weight_moves(tmp_path: Path) -> None:
    found = worlds.run(lies, size=3, folder=tmp_path)
    for result in found:
        assert "value" in result, result
    told = [result["value"] for result in found]
    for name, (*_, refused) in LIES.items():
        assert told[0][name].startswith(f"round 1: the {refused}"), (name, told[0][name])
    assert told[0] == told[1] == told[2]


def leaving_out() -> dict[str, object]:
    rank = dist.get_rank()
    found: dict[str, object] = {}
    for name in ("a damaged part", "a damaged letter", "two letters", "a malformed letter"):
        for delay in (0, 2):
            kind, spoil, judge, _ = LIES[name]
            hears = rank == judge if judge is not None else rank != LIAR
            method = replace(SHARDED, delay=delay, codec=replace(SHARDED.codec, bits=32))
            replica = Replica(*build(rank), method, Tampered(spoil if hears else None, kind), refused="leave out")
            if replica._background is not None:  # its channel hears as badly
                channel: Torch = replica._background.channel  # type: ignore[assignment]
                channel.__class__ = Tampered
                channel.__dict__.update(spoil=spoil if hears else None, kind=kind)
            rounds = steps(replica, 3 * EVERY)
            rounds += replica.finish()
            said = [(record.left_out, record.anchor_fingerprint) for record in rounds]
            found[f"{name}, {delay}"] = (said, weights(replica))
    return found


@pytest.mark.slow
def test_a_lie_is_left_out_everywhere_alike(tmp_path: Path) -> None:
    found = worlds.run(leaving_out, size=3, folder=tmp_path)
    for result in found:
        assert "value" in result, result
        for name, (said, mine) in result["value"].items():
            first, theirs = found[0]["value"][name]
            assert said == first, name
            assert [left_out for left_out, _ in said][:3] == [(), (LIAR,), ()], name
            assert all(torch.equal(tensor, theirs[key]) for key, tensor in mine.items()), name


# -- silence between the halves ------------------------------------------------------------------------------------


class Freezing(Torch):
    """Stops when its letter is due."""

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        if message[:4] == MAGIC and message[5] == Kind.LETTER:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().gather(message, most=most, count=count)


def frozen_owner() -> str:
    rank, transport = dist.get_rank(), Torch()
    replica = Replica(*build(rank), replace(SHARDED, every=1), transport)
    steps(replica, 1)
    dist.barrier()
    transport.watchdog.timeout = 12.0
    if rank == LIAR:
        transport.__class__ = Freezing
    return hold_round(replica)


@pytest.mark.slow
def test_an_owner_that_is_silent_is_named(tmp_path: Path) -> None:
    first, frozen, last = worlds.run(frozen_owner, size=3, folder=tmp_path)
    assert frozen == {"died": -signal.SIGKILL}
    for survivor in (first, last):
        assert "rank 1 did not answer for" in survivor["value"], survivor
        assert "no weight was touched" in survivor["value"]


def test_pairs_of_owners_rotate() -> None:
    """Nobody has the largest part in each round."""
    cluster = clusters(replace(SHARDED, every=1))
    seen = []
    hear = _Letters.__post_init__

    def note(letters: _Letters) -> None:
        hear(letters)
        if letters.mine.header.sender == 0:
            seen.append(tuple(letters.owners))

    with mock.patch.object(_Letters, "__post_init__", note):
        for _ in range(3):
            advance(cluster)
    assert all(later == (*earlier[1:], earlier[0]) for earlier, later in pairwise(seen))
    assert len(set(seen)) == 3
