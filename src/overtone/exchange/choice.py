"""Which pattern a method's messages follow, for this model and this number of replicas; and what each would cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from overtone.codec import Payload, TopK
from overtone.coding.chunks import Slab
from overtone.errors import MethodError
from overtone.exchange.dealing import deal
from overtone.exchange.gathered import Gathered
from overtone.exchange.letters import letters_for
from overtone.exchange.message import HEADER_BYTES, Seal
from overtone.exchange.pattern import Context, Pattern
from overtone.exchange.sharded import Sharded
from overtone.exchange.summed import Summed
from overtone.methods import STORE, Method

BUFFER_BITS = 32  # a value of a buffer travels as fp32
WORTH = 0.9  # "auto" shards if that costs less than this share of a gather, since it takes more hops


@dataclass(frozen=True)
class Cost:
    """About what a replica sends in a round, in bytes; it receives as much."""

    gathered: int
    sharded: int | None  # None: the method cannot be sharded

    def chosen(self, exchange: str) -> str:
        """The pattern that a method's `exchange` means. Alone, a replica owns everything and sends nothing.

        What lies in a store are the messages of a gather.
        """
        if exchange == STORE:
            return Gathered.name
        if exchange != "auto" and self.gathered > 0:
            return exchange
        return "sharded" if self.sharded is not None and self.sharded < WORTH * self.gathered else "gathered"

    def of(self, pattern: str) -> int:
        """The bytes of this pattern."""
        found = self.gathered if pattern == "gathered" else self.sharded
        assert found is not None, "a method that cannot be sharded"
        return found


def cost_of(method: Method, slabs: Sequence[Slab], buffers: Sequence[int], members: int) -> Cost:
    """The costs of the patterns for payloads that are bytes. ``buffers`` are the sizes of floating buffers."""
    overhead = HEADER_BYTES + Seal().size
    codec = method.codec
    payload = (sum(map(codec.bits_of, slabs)) + BUFFER_BITS * sum(buffers)) // 8
    gathered = (members - 1) * (payload + overhead)
    if not method.may_shard:
        return Cost(gathered, None)
    assert isinstance(codec, TopK)
    letters = letters_for(codec, method.keep_down, members)
    dealt = deal(slabs, buffers, members, lambda slab: codec.bits_of(slab) + letters.bits_of(slab))
    longest = 0
    for bits_of in (codec.bits_of, letters.bits_of):
        bits = [0] * members
        for piece in dealt.pieces:
            bits[piece.part] += bits_of(piece.slab)
        for part, own in enumerate(dealt.buffers):
            bits[part] += BUFFER_BITS * sum(buffers[number] for number in own)
        longest += max(bits) // 8 + overhead  # shorter messages are padded
    return Cost(gathered, (members - 1) * longest)


def costs_of(method: Method, slabs: Sequence[Slab], buffers: Sequence[int], members: int) -> Callable[[int], int]:
    """About what a replica sends in a round, in bytes, by `keep`. The pattern stays the one of the method."""
    pattern = cost_of(method, slabs, buffers, members).chosen(method.exchange)

    @cache
    def cost(keep: int) -> int:
        return cost_of(method.with_keep(keep), slabs, buffers, members).of(pattern)

    return cost


def pattern_for(method: Method, context: Context, members: int) -> Pattern:
    """The pattern of a method's rounds among so many replicas that send each other messages."""
    if method.exchange == STORE:
        raise MethodError(
            f"exchange={method.exchange!r}: the messages meet in object storage, and there is none; give "
            "Replica(transport=overtone.Store(url)) or overtone train --store, or use gathered, sharded or auto"
        )
    if method.codec.payload is Payload.NUMBERS:
        if context.refused != "raise":
            raise MethodError(
                f"refused={context.refused!r}: payloads that are summed on the way leave nobody out; use 'raise'"
            )
        return Summed(context)
    sizes = [shared.numel() for shared in context.buffers.shared]
    cost = cost_of(method, context.layout.slabs, sizes, members)
    return pattern_named(cost.chosen(method.exchange), method, context, members)


def pattern_named(name: str, method: Method, context: Context, members: int) -> Pattern:
    """The pattern of this name, for the messages of a method among so many replicas."""
    if name == Sharded.name:
        assert isinstance(method.codec, TopK)
        return Sharded(context, method.codec, letters_for(method.codec, method.keep_down, members))
    return {pattern.name: pattern for pattern in (Gathered, Summed)}[name](context)
