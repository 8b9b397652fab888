"""A model's buffers between replicas: running statistics and counters.

The policy: floating buffers are averaged each round; integer and boolean ones are broadcast at the start and then
checked (their fingerprint rides in every header). A floating buffer that nobody changed since the last round, such as a
mask or a table of frequencies, is left exactly as it is; in a gathered message it travels as one bit. ``private``
leaves every buffer to its replica.
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
    def __init__(self, model: nn.Module, policy: str) -> None:
        if policy not in POLICIES:
            raise ModelError(f"buffers={policy!r}: choose one of {', '.join(POLICIES)}")
        self.model = model
        self.policy = policy
        for name, b in model.named_buffers():
            why = unfit(b)
            if why and (policy == "shared" or nn.parameter.is_lazy(b)):
                raise ModelError(f"buffer {plain_name(name)}: {why}")
        named = self.named() if policy == "shared" else {}
        self.floats = [name for name, b in named.items() if b.is_floating_point()]
        self.counters = [name for name, b in named.items() if not b.is_floating_point()]
        self._shapes = {name: b.shape for name, b in named.items()}
        self.shared: list[Tensor] = []  # the floating buffers as all replicas knew them after the last round
        self.remember()

    def named(self) -> dict[str, Tensor]:
        # By name each time: a module may replace its buffer instead of writing into it.
        return {plain_name(name): b.detach() for name, b in self.model.named_buffers()}

    def _get(self, names: Sequence[str]) -> list[Tensor]:
        named = self.named()
        return [named[name] for name in names]

    def tensors(self) -> list[Tensor]:
        """All buffers under the policy, floating ones first."""
        return [*self.float_tensors(), *self.counter_tensors()]

    def float_tensors(self) -> list[Tensor]:
        return self._get(self.floats)

    def counter_tensors(self) -> list[Tensor]:
        return self._get(self.counters)

    def remember(self) -> None:
        """The floating buffers are now what all replicas share."""
        self.shared = [b.clone() for b in self.float_tensors()]

    def put(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self.float_tensors(), values, strict=True):
            buffer.copy_(value)

    def absorb(self, values: Sequence[Tensor]) -> None:
        """The round's averages become the shared values."""
        self.put(values)
        self.remember()

    def counters_fingerprint(self) -> bytes:
        named = self.named()
        if not self.counters or any(name not in named for name in self.counters):  # whoever lost one says so instead
            return bytes(8)
        return fingerprint.of_tensors([named[name] for name in self.counters])

    def changed(self) -> str:
        """A complaint about buffers that are not there as at the start. A module may replace one by another of the same
        shape, and may make one that is not saved, such as a cache."""
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
        """Why the buffers cannot be exchanged now, if they cannot."""
        for name, now, shared in zip(self.floats, self.float_tensors(), self.shared, strict=True):
            if _has_become_infinite(now, shared):
                return f"buffer {name} has values that are not finite; lower the learning rate, go on from a checkpoint"
        return ""

    def block(self, *, as_numbers: bool) -> Block:
        """The floating buffers as part of a contribution: to be gathered, or numbers to be summed."""
        return Block(numbers=self.changes()) if as_numbers else Block(self.pack())

    # -- as bytes, for messages ------------------------------------------------------------------------------------

    def pack(self) -> bytes:
        """One bit per floating buffer, then the values of those that changed."""
        if not self.floats:
            return b""
        now = self.float_tensors()
        changed = [not (torch.equal(b, s) or bool(_same(b, s).all())) for b, s in zip(now, self.shared, strict=True)]
        values = [tensor_bytes(b.float()) for b, moved in zip(now, changed, strict=True) if moved]
        return tensor_bytes(pack_flags(torch.tensor(changed))) + b"".join(values)

    def unpack(self, reader: Reader) -> list[Tensor | None]:
        """One replica's floating buffers; None for those it did not change."""
        if not self.floats:
            return []
        flags = reader.tensor(field_bytes(len(self.floats), 1), torch.uint8, "flags of changed buffers")
        changed = unpack_flags(flags, len(self.floats)).tolist()
        return [
            _sound(reader.tensor(s.numel(), torch.float32, f"buffer {name}").view(s.shape).to(s.device), s, name)
            if moved
            else None
            for name, s, moved in zip(self.floats, self.shared, changed, strict=True)
        ]

    def average(self, replicas: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
        """Mean of each buffer over the replicas, summed in the order given; untouched if nobody changed it."""
        means = []
        for shared, *values in zip(self.shared, *replicas, strict=True):
            if all(value is None for value in values):
                means.append(shared)
                continue
            total = torch.zeros_like(shared, dtype=torch.float32)
            for value in values:
                total.add_(shared if value is None else value)
            means.append(total.div_(len(values)))
        return means

    # -- as numbers, for sums --------------------------------------------------------------------------------------

    def changes(self) -> Tensor:
        """How far all floating buffers are from the shared values, end to end in fp32; exactly 0 where they rest."""
        pairs = zip(self.float_tensors(), self.shared, strict=True)
        flat = [torch.where(_same(b, s), 0.0, b.float() - s.float()).view(-1).cpu() for b, s in pairs]
        return torch.cat(flat) if flat else torch.empty(0)

    def changed_by(self, vector: Tensor) -> list[Tensor]:
        """The shared values moved by the mean of everybody's `changes`."""
        parts = vector.split([s.numel() for s in self.shared]) if self.shared else ()
        moves = [part.view(s.shape).to(s.device) for part, s in zip(parts, self.shared, strict=True)]
        return [s + move if bool(move.any()) else s for s, move in zip(self.shared, moves, strict=True)]


def _sound(value: Tensor, shared: Tensor, name: str) -> Tensor:
    """Refuse what a sender would not have sent."""
    if _has_become_infinite(value, shared):
        raise WireError(f"buffer {name}: not finite; the message is corrupt")
    return value


def _has_become_infinite(value: Tensor, shared: Tensor) -> bool:
    """Some value is not finite in fp32, as which it travels, and was not so before."""
    return bool((~torch.isfinite(value.float()) & ~_same(value, shared)).any())


def _saved(model: nn.Module) -> Iterator[str]:
    """The buffers that are part of a `state_dict`, by name."""
    for place, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield plain_name(f"{place}.{name}" if place else name)


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors are equal; NaN equals NaN."""
    return (a == b) | (a.isnan() & b.isnan())
