"""The shared state of a run as a function of its commits: whoever reads the same commits has the same anchor.

A replica, a newcomer, an observer and an auditor all do the same. They open the messages that a commit names, find out
which of them count, and step the anchor. The fingerprint in the commit says whether they have come to the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from overtone.coding import fingerprint
from overtone.coding.bits import Reader
from overtone.errors import MismatchError, WireError
from overtone.exchange.gathered import Gathered, Messages
from overtone.exchange.message import HEADER_BYTES, NOBODY, Expected, Header, Kind, Message, unseal_message
from overtone.exchange.pattern import Contribution, Received
from overtone.exchange.round import Exchanger
from overtone.exchange.slab_work import SlabWork
from overtone.swarm.records import NOTE_BYTES, Commit, Member, Named, Note, Process, way_back

FAR = 10.0  # times the median norm of a round's messages: a message that is larger does not count
FEW = 3  # messages, below which nobody can say which of them is the odd one


@dataclass(frozen=True)
class Heard:
    """The messages of a round, opened, and what follows from them. The same for all who read the same commit."""

    received: Received
    work: SlabWork
    notes: Mapping[int, Note]  # by number, of the messages that count
    norms: Mapping[int, float]  # of all payloads that could be read
    left_out: Mapping[int, str]  # by number: why a message that was named does not count


class Lineage:
    """Steps the shared state of one exchanger, commit by commit."""

    def __init__(self, exchanger: Exchanger) -> None:
        assert isinstance(exchanger.pattern, Gathered), "a store gathers"
        self.exchanger = exchanger
        self.pattern = exchanger.pattern
        self.anchor = exchanger.fingerprint()  # of the anchor now

    @property
    def index(self) -> int:
        """The number of the round that is open."""
        return self.exchanger.state.rounds

    @property
    def longest(self) -> int:
        """Bytes that an object with a message may have at most."""
        context = self.pattern.context
        return context.longest_message() + HEADER_BYTES + NOTE_BYTES + context.seal.size

    def opened(self, process: Process, raw: bytes) -> tuple[Note, Message]:
        """Open the message of a process in the open round. Raises `WireError` if it cannot be read or decoded."""
        state = self.exchanger.state
        expected = Expected(state.rounds, state.run, self.exchanger.schema)
        message = unseal_message(raw, expected, process.number, self.pattern.context.seal)
        note, rest = Note.split(message.body)
        if message.header.kind is not Kind.ROUND:
            raise WireError(f"kind: {message.header.kind.name.lower()} where a round is due")
        if note.session != process.session:
            raise WireError(f"session: says {note.session}, lies where {process.session} would write")
        if message.header.anchor != self.anchor:
            raise WireError("anchor: the sender had another one; it must start again from the store")
        return note, replace(message, body=rest)

    def hear(self, named: Sequence[Named], raw: Mapping[Process, bytes], members: Sequence[Member]) -> Heard:
        """Open the messages that are named, in their order, and decide which of them count. ``members`` are those
        before the commit."""
        begin = time.perf_counter()
        work = self.exchanger.work(self.exchanger.method, self.pattern.name, len(members), self.index)
        speaking = {member.process for member in members}
        mine = Contribution(self._header(), work.codec, work.deal)
        messages: dict[int, Message] = {}
        notes: dict[int, Note] = {}
        norms: dict[int, float] = {}
        left_out: dict[int, str] = {}
        for one in named:
            try:
                if one.process not in speaking:  # the mean is divided by the members
                    raise WireError(f"process {one.process}: is no member")
                note, message = self.opened(one.process, raw[one.process])
                if message.seal.hex() != one.seal:
                    raise WireError("seal: another one than the commit names")
                norms[one.number] = self._norm(message, mine)
            except WireError as error:
                left_out[one.number] = str(error)
            else:
                messages[one.number], notes[one.number] = message, note
        for number, why in far_outside(norms).items():
            left_out[number] = why
            del messages[number], notes[number]
        headers, readers = [m.header for m in messages.values()], [Reader(m.body) for m in messages.values()]
        seconds, context = time.perf_counter() - begin, self.pattern.context
        received = Messages(headers, left_out, seconds, messages, readers, context, mine, len(members))
        return Heard(received, work, notes, norms, left_out)

    def _header(self) -> Header:
        """The header that a message of this round would have here, without another pass over the anchor."""
        state, rank = self.exchanger.state, self.exchanger.transport.rank
        return Header(
            Kind.ROUND, rank, state.rounds, state.steps, state.run, self.exchanger.schema, self.anchor, NOBODY
        )

    def _norm(self, message: Message, mine: Contribution) -> float:
        """The norm of a payload. It is read from end to end here, so that nothing can fail while weights move."""
        context, reader = self.pattern.context, Reader(message.body)
        if self.pattern.deal(1).buffers[0]:
            context.buffers.unpack(reader, self.pattern.deal(1).buffers[0])
        total = 0.0
        for slab in context.layout.slabs:
            values = mine.codec.decode(reader, slab, context.kernels).values
            total += float(torch.sum(values.double() ** 2))
        reader.end()
        if not math.isfinite(total):
            raise WireError("payload: its norm is not finite")
        return math.sqrt(total)

    # -- stepping --------------------------------------------------------------------------------------------------

    def fingerprint_after(self, heard: Heard) -> str:
        """The fingerprint that the anchor will have after this round. Nothing changes here."""
        exchanger = self.exchanger
        shared = {name: exchanger.state.tensors[name].clone() for name in self._shared()}
        if heard.received.headers:
            targets = [torch.empty_like(t, dtype=torch.float32) for t in exchanger.parameters.tensors]
            self._read_past_buffers(heard)
            heard.work.absorb(shared, heard.received, targets)
        return fingerprint.of_tensors([shared["anchor"]], exchanger.kernels).hex()

    def _read_past_buffers(self, heard: Heard) -> list[Tensor | None]:
        return heard.received.buffers() if self.exchanger.buffers.floats else []

    def _shared(self) -> list[str]:
        return [name for name in self.exchanger.method.rule.shared if name in self.exchanger.state.tensors]

    def follow(self, heard: Heard, *, stands: bool = False) -> None:
        """Step the shared state, and move the weights along. Local steps that were not sent yet are kept. If the model
        ``stands`` at the anchor, there are none, and it stands at the next one afterwards, to the bit."""
        exchanger = self.exchanger
        if heard.received.headers:
            sources = exchanger.signal.measure() if stands else exchanger.signal.standing()
            before = [shared.clone() for shared in exchanger.buffers.shared]
            means = self._read_past_buffers(heard)
            heard.work.absorb(exchanger.state.tensors, heard.received, sources.targets)
            exchanger.signal.answer(sources)
            if means:
                exchanger.buffers.absorb(means, before)
        exchanger.state.rounds += 1

    def check(self, commit: Commit, heard: Heard) -> None:
        """Refuse a commit that says other messages count, or another anchor follows, than was found here."""
        self.anchor = self.exchanger.fingerprint()
        if self.anchor.hex() != commit.anchor or tuple(sorted(heard.left_out)) != commit.left_out:
            raise MismatchError(
                f"round {commit.round}: the anchor here is {self.anchor.hex()}, the commit of member {commit.by} says "
                f"{commit.anchor}. One of the two machines computes differently, or its memory is damaged, or a commit "
                "was deleted and written anew: verify the store from another machine with `overtone replay --verify`. "
                f"If it is the commit that is wrong, stop member {commit.by}. {way_back(commit.round)}"
            )


def far_outside(norms: Mapping[int, float]) -> dict[int, str]:
    """By number: why a message is too far outside the others to count."""
    # Who has nothing to say, as at the end of a run, does not say either what is usual.
    some = [norm for norm in norms.values() if norm > 0]
    if len(some) < FEW:
        return {}
    usual = median(some)
    return {
        number: f"its norm is {norm:.3g}, the median of the round is {usual:.3g}; at most {FAR:g} times that counts"
        for number, norm in norms.items()
        if norm > FAR * usual
    }
