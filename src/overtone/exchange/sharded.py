"""The pattern of owners: each replica averages a part of the model for all, so that bytes do not grow with replicas.

    1  all-to-all   everybody → owner    the part of its message that concerns this owner
    2  owner        decodes in rank order → mean → the strongest values of the mean → one letter
    3  all-gather   owner → everybody    the letter; all decode the same bytes in the same order

After 1 and after 3 all replicas confirm that they read the same (consensus.py). What a letter does not pass on goes
back to its senders: everybody sees which positions a letter has, so this costs no byte. The owner owes what it rounded
off: K times the difference between the mean and the letter, because the letter counts for all K replicas. So the sum of
all residuals and of K times what was applied is what it was (tests/test_conserved.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from overtone.codec import Block, Codec, Decoded, TopK, mean_of_blocks
from overtone.coding.bits import Reader
from overtone.coding.chunks import Slab
from overtone.coding.layout import inner_part
from overtone.errors import NotFiniteError, WireError
from overtone.exchange.buffers import pack_values
from overtone.exchange.consensus import Inbox, agree
from overtone.exchange.control import Tell
from overtone.exchange.dealing import Deal, deal
from overtone.exchange.letters import LetterCodec, letters_for, marks
from overtone.exchange.message import Expected, Header, Kind, Message, seal_message, unseal_message
from overtone.exchange.pattern import WITH_PAYLOAD, Context, Contribution, Received
from overtone.rules import State
from overtone.transport import AllToAll, Exchange, Gather


class Sharded:
    """The pattern of owners. It keeps no state: what an owner owes is in its residual."""

    name = "sharded"
    adds_numbers = False

    def __init__(self, context: Context, codec: Codec, letters: LetterCodec) -> None:
        self.context = context
        self.state: State = {}
        self.passes_all_on = letters.top_k.lossless
        self._most = context.longest_message()
        self._bits = lambda slab: codec.bits_of(slab) + letters.bits_of(slab)
        self._deals: dict[int, Deal] = {}

    def deal(self, members: int) -> Deal:
        if members not in self._deals:
            sizes = [shared.numel() for shared in self.context.buffers.shared]
            self._deals[members] = deal(self.context.layout.slabs, sizes, members, self._bits)
        return self._deals[members]

    def exchange(self, mine: Contribution, expected: Expected, peers: Sequence[int]) -> Exchange[Received]:
        context, members = self.context, len(peers)
        # By part: its owner in this round.
        owners = [peers[(part + expected.round) % members] for part in range(members)]
        own_part = owners.index(mine.header.sender)
        bodies = {owner: self._body(mine, part) for part, owner in enumerate(owners)}
        messages = [seal_message(mine.header, bodies[peer], context.seal) for peer in peers]
        arrived = yield AllToAll(messages, self._most)
        begin = time.perf_counter()
        inbox = Inbox(peers, personal=True)
        inbox.read(arrived, lambda sender, raw: self._open(raw, expected, sender, mine, own_part))
        seconds = time.perf_counter() - begin
        left_out = yield from agree(inbox, mine.header, expected, context.seal, context.refused)
        counted = {rank: message for rank, message in inbox.messages.items() if rank not in left_out}
        headers = [message.header for message in counted.values()]
        assert isinstance(mine.codec, TopK)
        codec = letters_for(mine.codec, mine.keep_down, members)
        received = _Letters(headers, left_out, seconds, counted, mine, context, owners, codec)
        # The messages that count decide, so that all replicas decide alike.
        kinds = {header.kind for header in headers}
        if len(kinds) > 1 or not kinds.issubset(WITH_PAYLOAD):
            return received  # the last messages, or a round that will be refused: nothing is to be averaged
        yield from self._pass_on(received, expected, peers)
        return received

    def _body(self, mine: Contribution, part: int) -> bytes:
        if mine.header.kind not in WITH_PAYLOAD:
            return mine.reason()
        assert mine.deal is not None
        blocks = [b.packed for b, piece in zip(mine.blocks, mine.deal.pieces, strict=True) if piece.part == part]
        return b"".join([mine.pack_tell(), mine.buffers[part].packed, *blocks])

    def _open(self, raw: bytes, expected: Expected, sender: int, mine: Contribution, part: int) -> Message:
        """Open a message and make sure that it will decode, as the gathered pattern does."""
        message = unseal_message(raw, expected, sender, self.context.seal)
        kind = message.header.kind
        if kind in WITH_PAYLOAD and kind is mine.header.kind and sender != mine.header.sender:
            assert mine.deal is not None
            reader = Reader(message.body)
            mine.unpack_tell(reader)
            self.context.buffers.unpack(reader, mine.deal.buffers[part])
            for piece in mine.deal.of(part):
                mine.codec.check(reader, piece, self.context.kernels)
            reader.end()
        return message

    def _pass_on(self, received: _Letters, expected: Expected, peers: Sequence[int]) -> Exchange[None]:
        """The second half: average the part that this replica owns, exchange letters, and agree on them."""
        context, mine = self.context, received.mine
        begin = time.perf_counter()
        header, body = replace(mine.header, kind=Kind.FAILURE), b""
        if not received.takes_part:
            body = mine.reason() or b"it was left out, and its message was of another kind than all others"
        else:
            try:
                header, body = replace(mine.header, kind=Kind.LETTER), received.average(len(peers))
            except NotFiniteError:
                body = b"the mean of its part is not finite; lower the learning rate, and go on from a checkpoint"
        seconds = time.perf_counter() - begin
        gathered = yield Gather(seal_message(header, body, context.seal), most=self._most)
        begin = time.perf_counter()
        inbox = Inbox(peers).read(gathered, lambda owner, raw: received.open_letter(raw, expected, owner))
        received.seconds += seconds + time.perf_counter() - begin
        absent = yield from agree(inbox, mine.header, expected, context.seal, context.refused, "letter")
        received.take(inbox.messages, absent)


@dataclass
class _Letters(Received):
    """The letters that count. ``owners`` are the owners by part; a part whose letter does not count is not applied."""

    headers: list[Header]
    left_out: dict[int, str]
    seconds: float
    messages: dict[int, Message]  # to this replica, by sender
    mine: Contribution
    context: Context
    owners: list[int]
    codec: LetterCodec
    letters: dict[int, Message] = field(default_factory=dict)  # by owner
    lost: Mapping[int, str] = field(default_factory=dict)
    not_finite: int | None = None
    may_return = True

    def __post_init__(self) -> None:
        self._readers: dict[int, Reader] = {}  # by owner: reads its letter
        self._passed: dict[int, Decoded] = {}  # by piece: what its letter has
        self._owed: dict[int, Decoded] = {}  # by piece: what this replica rounded off as its owner

    @property
    def _deal(self) -> Deal:
        assert self.mine.deal is not None
        return self.mine.deal

    @property
    def takes_part(self) -> bool:
        """False if this replica was left out and its message was of another kind than those that count."""
        return self.headers[0].kind is self.mine.header.kind

    def reason(self, rank: int) -> str:
        return (self.letters if rank in self.letters else self.messages)[rank].text()

    # -- as an owner -------------------------------------------------------------------------------------------------

    def average(self, members: int) -> bytes:
        """The body of this replica's letter: the means of its buffers, then a block for each piece of its part."""
        part = self.owners.index(self.mine.header.sender)
        buffers, own = self.context.buffers, self._deal.buffers[part]
        # In rank order, as everywhere.
        readers = [Reader(message.body) for message in self.messages.values()]
        for reader in readers:
            self.mine.unpack_tell(reader)  # its sender tells all replicas in its letter
        means = buffers.average(own, [buffers.unpack(reader, own) for reader in readers])
        if any(mean is not None and not bool(torch.isfinite(mean).all()) for mean in means):
            raise NotFiniteError(-1)  # the sum of large values; readers would take such a letter for corrupt
        blocks = [Block(self.mine.pack_tell()), Block(pack_values(means))]
        for number, piece in enumerate(self._deal.pieces):
            if piece.part == part:
                blocks.append(self._average_piece(number, piece.slab, readers, members))
        return b"".join(block.packed for block in blocks)

    def _average_piece(self, number: int, piece: Slab, readers: Sequence[Reader], members: int) -> Block:
        codec, kernels = self.mine.codec, self.context.kernels
        # Memory of its own: the training thread may be using the layout's scratch areas at this moment.
        total = torch.empty(piece.chunks, piece.area)
        # Divided by all members, as in the gathered pattern: who is left out still owes its payload.
        average = mean_of_blocks(codec, readers, piece, members, total, over_senders=False, kernels=kernels)
        block, passed = self.codec.encode(average, piece, kernels)
        exact = average if passed.index is None else average.view(-1)[passed.index]
        self._owed[number] = replace(passed, values=(exact - passed.values) * float(members))
        return block

    # -- as a reader -------------------------------------------------------------------------------------------------

    def open_letter(self, raw: bytes, expected: Expected, owner: int) -> Message:
        """Open an owner's letter and make sure that it will decode."""
        letter = unseal_message(raw, expected, owner, self.context.seal)
        if letter.header.kind is Kind.FAILURE:
            return letter
        if letter.header.kind is not Kind.LETTER:
            raise WireError(f"kind: {letter.header.kind.name.lower()} where an owner's letter is due")
        if self.mine.deal is None:
            raise WireError("letter: this replica has ended its rounds and expects none")
        part, reader = self.owners.index(owner), Reader(letter.body)
        self.mine.unpack_tell(reader)
        self.context.buffers.unpack(reader, self._deal.buffers[part])
        for piece in self._deal.of(part):
            self.codec.check(reader, piece, self.context.kernels)
        reader.end()
        return letter

    def take(self, letters: dict[int, Message], lost: dict[int, str]) -> None:
        """Take these letters as those that all replicas have read. ``lost`` are those that do not count."""
        self.letters = {owner: letter for owner, letter in letters.items() if owner not in lost}
        self.lost = lost
        self._readers = {owner: Reader(letter.body) for owner, letter in self.letters.items()}
        # An owner that could not average its part ends the round for all.
        if failed := [letter.header for letter in self.letters.values() if letter.header.kind is Kind.FAILURE]:
            self.headers = failed

    def tells(self) -> list[Tell]:
        # By rank, and not by part: owners change from round to round.
        readers = [self._readers[owner] for owner in sorted(self._readers)]
        return [tell for reader in readers if (tell := self.mine.unpack_tell(reader)) is not None]

    def present(self) -> list[bool]:
        raise AssertionError("only gradients tell which parameters have a signal, and they are not sharded")

    def buffers(self) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for part, owner in zip(self._deal.buffers, self.owners, strict=True):
            lost = owner not in self._readers
            found += [None] * len(part) if lost else self.context.buffers.unpack(self._readers[owner], part)
        return found

    def mean(self, slab: Slab, out: Tensor, *, over_senders: bool) -> Tensor:  # noqa: ARG002
        self._passed.clear()
        out.zero_()
        for number in self._deal.inside[slab.offset]:
            piece = self._deal.pieces[number]
            if reader := self._readers.get(self.owners[piece.part]):
                self._passed[number] = self.codec.decode(reader, piece.slab, self.context.kernels)
                self._passed[number].add_to(inner_part(out, slab, piece.slab))
        return out

    def returned(self, slab: Slab) -> Iterator[tuple[Slab, Decoded]]:
        rank, kernels = self.mine.header.sender, self.context.kernels
        for number in self._deal.inside[slab.offset]:
            piece = self._deal.pieces[number]
            passed = self._passed.get(number)
            if rank not in self.left_out:  # else the whole contribution is taken back
                sent = self.mine.codec.decode_own(self.mine.blocks[number], piece.slab, kernels)
                if (rest := not_passed_on(sent, passed, piece.slab)) is not None:
                    yield piece.slab, rest
            if passed is not None and self.owners[piece.part] == rank:
                yield piece.slab, self._owed[number]


def not_passed_on(sent: Decoded, passed: Decoded | None, piece: Slab) -> Decoded | None:
    """The values that were sent and that no letter passed on. None if there are none."""
    if passed is None:
        return sent
    if passed.index is None:
        return None
    if sent.index is None:
        rest = sent.values.clone()
        rest.view(-1)[passed.index.view(-1)] = 0.0
        return replace(sent, values=rest)
    rows = torch.arange(piece.chunks).unsqueeze(1) * piece.area
    found = marks(passed.index, piece)[sent.index + rows]
    return replace(sent, values=sent.values.masked_fill(found, 0.0))
