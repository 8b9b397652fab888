"""A model's buffers between replicas: running statistics and counters.

The policy: floating buffers are averaged each round; integer and boolean ones are broadcast at the start and then
checked (their fingerprint rides in every header). A floating buffer that did not change since the last round, such as a
mask or a table of frequencies, travels as one bit. ``private`` leaves every buffer to its replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from overtone import fingerprint
from overtone.bits import Reader, field_bytes, pack_flags, tensor_bytes, unpack_flags
from overtone.errors import ModelError

POLICIES = ("shared", "private")


class Buffers:
    def __init__(self, model: nn.Module, policy: str) -> None:
        if policy not in POLICIES:
            raise ModelError(f"buffers={policy!r}: choose one of {', '.join(POLICIES)}")
        self.model = model
        named = dict(model.named_buffers()) if policy == "shared" else {}
        self.floats = [name for name, b in named.items() if b.is_floating_point()]
        self.counters = [name for name, b in named.items() if not b.is_floating_point()]
        self.shared: list[Tensor] = []  # the floating buffers as all replicas knew them after the last round
        self.remember()

    def _get(self, names: Sequence[str]) -> list[Tensor]:
        # By name each time: a module may replace its buffer instead of writing into it.
        named = dict(self.model.named_buffers())
        return [named[name].detach() for name in names]

    def tensors(self) -> list[Tensor]:
        """All buffers under the policy, floating ones first."""
        return self._get([*self.floats, *self.counters])

    def remember(self) -> None:
        """The floating buffers are now what all replicas share."""
        self.shared = [b.clone() for b in self._get(self.floats)]

    def put(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._get(self.floats), values, strict=True):
            buffer.copy_(value)

    def absorb(self, values: Sequence[Tensor]) -> None:
        """The round's averages become the shared values."""
        self.put(values)
        self.remember()

    def counters_fingerprint(self) -> bytes:
        return fingerprint.of_tensors(self._get(self.counters)) if self.counters else bytes(8)

    # -- as bytes, for messages ------------------------------------------------------------------------------------

    def pack(self) -> bytes:
        """One bit per floating buffer, then the values of those that changed."""
        if not self.floats:
            return b""
        now = self._get(self.floats)
        changed = [not _same(b, s) for b, s in zip(now, self.shared, strict=True)]
        values = [tensor_bytes(b.float()) for b, moved in zip(now, changed, strict=True) if moved]
        return tensor_bytes(pack_flags(torch.tensor(changed))) + b"".join(values)

    def unpack(self, reader: Reader) -> list[Tensor]:
        """One replica's floating buffers; the unchanged ones from what is shared."""
        if not self.floats:
            return []
        flags = reader.tensor(field_bytes(len(self.floats), 1), torch.uint8, "flags of changed buffers")
        changed = unpack_flags(flags, len(self.floats)).tolist()
        return [
            reader.tensor(s.numel(), torch.float32, f"buffer {name}").view(s.shape).to(s.device) if moved else s.float()
            for name, s, moved in zip(self.floats, self.shared, changed, strict=True)
        ]

    # -- as numbers, for sums --------------------------------------------------------------------------------------

    def vector(self) -> Tensor:
        """All floating buffers end to end in fp32."""
        flat = [b.float().reshape(-1).cpu() for b in self._get(self.floats)]
        return torch.cat(flat) if flat else torch.empty(0)

    def split(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([s.numel() for s in self.shared]) if self.shared else ()
        return [part.view(s.shape).to(s.device) for part, s in zip(parts, self.shared, strict=True)]


def average(replicas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Mean of each buffer over the replicas, summed in the order given."""
    means = []
    for same in zip(*replicas, strict=True):
        total = same[0].clone()
        for other in same[1:]:
            total.add_(other)
        means.append(total.div_(len(same)))
    return means


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
