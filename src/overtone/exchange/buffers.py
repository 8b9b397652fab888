"""How replicas exchange a model's buffers: running statistics and counters.

With the policy ``shared``, floating buffers are averaged in each round. Integer and boolean buffers are broadcast at
the start and then compared: every header has their fingerprint. A floating buffer that no replica changed since the
last round, such as a mask or a table of frequencies, keeps its exact values; in a gathered message it takes one bit.
With the policy ``private``, every replica keeps its own buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from overtone.codec import Block
from overtone.coding import fingerprint
from overtone.coding.bits import Reader, field_bytes, pack_flags, tensor_bytes, unpack_flags
from overtone.errors import ModelError, WireError
from overtone.exchange.model_checks import unfit
from overtone.exchange.parameters import plain_name

POLICIES = ("shared", "private")


class Buffers:
    """The buffers of one replica's model, and their last shared values."""

    def __init__(self, model: nn.Module, policy: str) -> None:
        if policy not in POLICIES:
            raise ModelError(f"buffers={policy!r}: choose one of {', '.join(POLICIES)}")
        self.model = model
        self.policy = policy
        for name, b in model.named_buffers():
            why = unfit(b)  # private buffers need no values to be read, but even they need a shape
            if why and (policy == "shared" or nn.parameter.is_lazy(b)):
                raise ModelError(f"buffer {plain_name(name)}: {why}")
        named = self.named() if policy == "shared" else {}
        self.floats = [name for name, b in named.items() if b.is_floating_point()]
        self.counters = [name for name, b in named.items() if not b.is_floating_point()]
        self._shapes = {name: b.shape for name, b in named.items()}
        self.shared: list[Tensor] = []  # the floating buffers after the last round, equal on all replicas
        self.remember()

    def named(self) -> dict[str, Tensor]:
        """All buffers of the model by name, whatever the policy."""
        # Looked up by name each time: a module may replace its buffer instead of writing into it.
        return {plain_name(name): b.detach() for name, b in self.model.named_buffers()}

    def _get(self, names: Sequence[str]) -> list[Tensor]:
        named = self.named()
        return [named[name] for name in names]

    def tensors(self) -> list[Tensor]:
        """All buffers that the policy covers, floating buffers first."""
        return [*self.float_tensors(), *self.counter_tensors()]

    def float_tensors(self) -> list[Tensor]:
        """The floating buffers."""
        return self._get(self.floats)

    def counter_tensors(self) -> list[Tensor]:
        """The integer and boolean buffers."""
        return self._get(self.counters)

    def remember(self) -> None:
        """Keep a copy of the floating buffers as the values that all replicas share."""
        self.shared = [b.clone() for b in self.float_tensors()]

    def put(self, values: Sequence[Tensor]) -> None:
        """Write these values into the floating buffers of the model."""
        for buffer, value in zip(self.float_tensors(), values, strict=True):
            buffer.copy_(value)

    def absorb(self, values: Sequence[Tensor | None], measured: Sequence[Tensor] | None) -> None:
        """Make the averages of the round the new shared values. None stands for a value that stays as it is.

        ``measured`` are the buffers as the round measured them, if local steps may have changed them since: what these
        steps did is then kept.
        """
        for i, (buffer, value) in enumerate(zip(self.float_tensors(), values, strict=True)):
            if value is None:
                # Not averaged, because nothing changed or because its owner was left out.
                continue
            value = value.to(buffer.dtype)
            if measured is None or torch.equal(buffer, measured[i]):
                buffer.copy_(value)
            else:
                buffer.add_(value - measured[i])
            self.shared[i].copy_(value)

    def counters_fingerprint(self) -> bytes:
        """The fingerprint of the integer and boolean buffers, for the header."""
        named = self.named()
        # A replica that lost a buffer must still be able to make a header: its message then reports the loss.
        if not self.counters or any(name not in named for name in self.counters):
            return bytes(8)
        return fingerprint.of_tensors([named[name] for name in self.counters])

    def changed(self) -> str:
        """Which buffer was added, removed or resized since the start, as an error text. Empty if there is none.

        A module may replace a buffer by another of the same shape. It may also add a buffer that is not saved, such as
        a cache.
        """
        named = self.named()
        if self.policy == "shared":
            for name in _saved(self.model):
                if name not in self._shapes:
                    return f"buffer {name} was added after the Replica was built; build a new one for the larger model"
        for name, shape in self._shapes.items():
            if name not in named or named[name].shape != shape:
                return f'buffer {name} was removed or resized; build the Replica with buffers="private"'
        return ""

    def not_finite(self) -> str:
        """Which buffer has become infinite or NaN, as an error text. Empty if there is none."""
        for name, now, shared in zip(self.floats, self.float_tensors(), self.shared, strict=True):
            if _has_become_infinite(now, shared):
                return f"buffer {name} has values that are not finite; lower the learning rate, go on from a checkpoint"
        return ""

    def blocks(self, parts: Sequence[range], *, as_numbers: bool) -> list[Block]:
        """The floating buffers of each part as a contribution: bytes for messages, or numbers for an all-reduce."""
        return [Block(numbers=self.changes()) if as_numbers else Block(self.pack(part)) for part in parts]

    # -- as bytes, for messages ------------------------------------------------------------------------------------

    def pack(self, part: range) -> bytes:
        """One bit per floating buffer of the part, then the values of the buffers that changed."""
        now = self._get([self.floats[i] for i in part])
        # `torch.equal` is fast but never true for NaN. A buffer with NaN in the same places has not changed either.
        pairs = [(b, self.shared[i]) for i, b in zip(part, now, strict=True)]
        return pack_values([None if torch.equal(b, s) or bool(_same(b, s).all()) else b for b, s in pairs])

    def unpack(self, reader: Reader, part: range) -> list[Tensor | None]:
        """Read one replica's floating buffers of the part. None stands for a buffer that it did not change."""
        if not part:
            return []
        flags = reader.tensor(field_bytes(len(part), 1), torch.uint8, "flags of changed buffers")
        changed = unpack_flags(flags, len(part)).tolist()
        return [self._read(reader, i) if moved else None for i, moved in zip(part, changed, strict=True)]

    def _read(self, reader: Reader, i: int) -> Tensor:
        name, shared = self.floats[i], self.shared[i]
        value = reader.tensor(shared.numel(), torch.float32, f"buffer {name}").view(shared.shape).to(shared.device)
        return _sound(value, shared, name)

    def average(self, part: range, replicas: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """The mean of each buffer of the part over the replicas, summed in the order given.

        None stands for a buffer that no replica changed: the mean of equal values could still round to another value.
        """
        means: list[Tensor | None] = []
        for i, *values in zip(part, *replicas, strict=True):
            shared = self.shared[i]
            if all(value is None for value in values):
                means.append(None)
                continue
            total = torch.zeros_like(shared, dtype=torch.float32)
            for value in values:
                total.add_(shared if value is None else value)
            means.append(total.div_(len(values)))
        return means

    # -- as numbers, for sums --------------------------------------------------------------------------------------

    def changes(self) -> Tensor:
        """All floating buffers minus their shared values, as one fp32 vector. It is exactly 0 where nothing changed."""
        pairs = zip(self.float_tensors(), self.shared, strict=True)
        # `where` instead of a plain difference: NaN − NaN and ∞ − ∞ are NaN, and would spread in the sum.
        flat = [torch.where(_same(b, s), 0.0, b.float() - s.float()).view(-1).cpu() for b, s in pairs]
        return torch.cat(flat) if flat else torch.empty(0)

    def changed_by(self, vector: Tensor) -> list[Tensor | None]:
        """The shared values plus the mean of the `changes` of all replicas. None: no replica changed the buffer."""
        parts = vector.split([s.numel() for s in self.shared]) if self.shared else ()
        moves = [part.view(s.shape).to(s.device) for part, s in zip(parts, self.shared, strict=True)]
        return [s + move if bool(move.any()) else None for s, move in zip(self.shared, moves, strict=True)]


def pack_values(values: Sequence[Tensor | None]) -> bytes:
    """One bit per value, 1 if there is one; then the values in fp32."""
    if not values:
        return b""
    flags = pack_flags(torch.tensor([value is not None for value in values]))
    return tensor_bytes(flags) + b"".join(tensor_bytes(value.float()) for value in values if value is not None)


def _sound(value: Tensor, shared: Tensor, name: str) -> Tensor:
    """Return the value, or refuse it if no correct sender would have sent it."""
    if _has_become_infinite(value, shared):
        raise WireError(f"buffer {name}: not finite; the message is corrupt")
    return value


def _has_become_infinite(value: Tensor, shared: Tensor) -> bool:
    """True if some value is not finite in fp32, the type in which it is sent, and has changed since the last round."""
    return bool((~torch.isfinite(value.float()) & ~_same(value, shared)).any())


def _saved(model: nn.Module) -> Iterator[str]:
    """The names of the buffers that are part of a `state_dict`."""
    for place, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield plain_name(f"{place}.{name}" if place else name)


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors are equal; NaN equals NaN."""
    return (a == b) | (a.isnan() & b.isnan())
