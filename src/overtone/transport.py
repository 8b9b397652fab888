"""From replica to replica. The only module of the science that imports `torch.distributed`.

A transport carries whole buffers and counts them; it knows nothing of what they mean.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from overtone.bits import bytes_tensor, tensor_bytes
from overtone.errors import PeerError

PHASES = ("setup", "rounds", "finish", "upkeep")
SIZE_BYTES = 8  # the length of a message, told beside it


@dataclass
class Count:
    """Bytes through this replica's network interface, and seconds spent waiting for them."""

    sent: int = 0
    received: int = 0
    waiting: float = 0.0
    hops: int = 0  # messages that had to pass one after another: each costs a link's latency


@dataclass
class Ledger:
    """The one place that counts: the buffers really handed over, in the phase they belong to.

    *setup* is the greeting and the first broadcast, *rounds* the training, *finish* the last messages, *upkeep* what a
    run says besides (who was asked to stop, sums of a validation). `sent` and `received` are rounds and finish
    together: what a method costs.
    """

    phase: str = "setup"
    counts: dict[str, Count] = field(default_factory=lambda: {p: Count() for p in PHASES})

    @property
    def now(self) -> Count:
        return self.counts[self.phase]

    @property
    def sent(self) -> int:
        return self.counts["rounds"].sent + self.counts["finish"].sent

    @property
    def received(self) -> int:
        return self.counts["rounds"].received + self.counts["finish"].received

    @property
    def waiting(self) -> float:
        return self.counts["rounds"].waiting + self.counts["finish"].waiting

    @property
    def hops(self) -> int:
        return self.counts["rounds"].hops + self.counts["finish"].hops

    def gathered(self, buffer_bytes: int, size: int) -> None:
        """A gather of equal buffers: each replica's goes to all others."""
        self.now.sent += (size - 1) * buffer_bytes
        self.now.received += (size - 1) * buffer_bytes
        self.now.hops += min(1, size - 1)

    def summed(self, buffer_bytes: int, size: int) -> None:
        """A ring all-reduce: every part of the buffer passes each link twice, but for one hop each way."""
        through = 2 * (size - 1) * buffer_bytes // size
        self.now.sent += through
        self.now.received += through
        self.now.hops += 2 * (size - 1)

    def broadcast(self, buffer_bytes: int, position: int, size: int) -> None:
        """From the first replica down a binomial tree: replica r passes it on to r + 1, 2, 4 …, each above r itself."""
        steps = (1 << i for i in range(size.bit_length()))
        self.now.sent += buffer_bytes * sum(step > position and position + step < size for step in steps)
        self.now.received += buffer_bytes if position else 0
        self.now.hops += (size - 1).bit_length()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What is counted meanwhile belongs to this phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def wait(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.now.waiting += time.perf_counter() - begin

    def state_dict(self) -> dict[str, list[float]]:
        return {phase: [c.sent, c.received, c.waiting, c.hops] for phase, c in self.counts.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        for phase, (sent, received, waiting, hops) in state.items():
            self.counts[phase] = Count(int(sent), int(received), float(waiting), int(hops))


class Transport(Protocol):
    """What a replica needs of the world. Buffers are complete: one call per round, never one per tensor."""

    rank: int
    size: int  # replicas in this world, present or not
    ledger: Ledger

    @property
    def peers(self) -> Sequence[int]:
        """The ranks that take part in this round, in order."""
        ...

    def gather(self, message: bytes, *, most: int | None) -> list[bytes]:
        """Everybody's message, in rank order. Messages may come back with zeros behind them. None may be longer than
        ``most`` bytes; None says that all are as long as this one."""
        ...

    def sum(self, buffer: Tensor) -> Tensor:
        """The sum of everybody's buffer, the same bits on every rank."""
        ...

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's tensors into everybody's."""
        ...


def is_transport(thing: object) -> bool:
    """Has all that a replica needs of the world."""
    return all(hasattr(thing, name) for name in ("rank", "size", "ledger", "peers", "gather", "sum", "broadcast"))


class Solo:
    """A world of one."""

    rank = 0
    size = 1

    peers = (0,)

    def __init__(self) -> None:
        self.ledger = Ledger()

    def gather(self, message: bytes, *, most: int | None) -> list[bytes]:  # noqa: ARG002
        return [message]

    def sum(self, buffer: Tensor) -> Tensor:
        return buffer

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        pass


class Torch:
    """A `torch.distributed` process group: gloo over TCP, NCCL on GPUs. ``group=None`` is the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.peers = range(self.size)
        self.ledger = Ledger()
        on_gpu = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Wait on the ledger's time; a broken connection becomes an error that says who was cut off from whom."""
        try:
            with self.ledger.wait():
                yield
        except PeerError:
            raise
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} of {self.size}: the exchange broke off ({error}). A replica died, the network was "
                "cut or the process group's time-out passed; no weight was touched. Restart all from a checkpoint"
            ) from error

    def gather(self, message: bytes, *, most: int | None) -> list[bytes]:
        with self._exchanging():
            longest = len(message)
            if most is not None:
                mine = torch.tensor([longest], dtype=torch.int64, device=self.device)
                sizes = [torch.empty_like(mine) for _ in range(self.size)]
                dist.all_gather(sizes, mine, group=self.group)
                self.ledger.gathered(SIZE_BYTES, self.size)
                # gloo and NCCL gather equal sizes only: the longest message sets the length.
                longest = _checked(sizes, most)
            buffer = bytes_tensor(message.ljust(longest, b"\0"), torch.uint8).to(self.device)
            heard = [torch.empty_like(buffer) for _ in range(self.size)]
            dist.all_gather(heard, buffer, group=self.group)
            self.ledger.gathered(longest, self.size)
            return [tensor_bytes(one.cpu()) for one in heard]

    def sum(self, buffer: Tensor) -> Tensor:
        with self._exchanging():
            here = buffer.to(self.device)
            dist.all_reduce(here, group=self.group)
            self.ledger.summed(here.numel() * here.element_size(), self.size)
            return here.to(buffer.device)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        raws = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        if not raws:
            return
        with self._exchanging():
            everything = torch.cat([raw.to(self.device) for raw in raws])
            dist.broadcast(everything, src=source, group=self.group)
        self.ledger.broadcast(everything.numel(), self.rank, self.size)
        if self.rank == 0:
            return
        parts = everything.split([raw.numel() for raw in raws])
        for tensor, part in zip((t for t in tensors if t.numel()), parts, strict=True):
            here = part.to(tensor.device, copy=True).view(tensor.dtype).view(tensor.shape)
            tensor.detach().copy_(here)


def _checked(sizes: Sequence[Tensor], most: int) -> int:
    """The longest of the lengths told; everybody sees the same ones, so everybody refuses alike."""
    told = [int(size) for size in sizes]
    for rank, size in enumerate(told):
        if not 0 <= size <= most:
            raise PeerError(
                f"rank {rank} announces a message of {size} bytes, where {most} are the most; it was refused"
            )
    return max(told)


def connect() -> Transport:
    """The world this process was started in: the default process group if there is one, else a world of one.

    Under ``torchrun`` the group is created here, on gloo, if the user's script has not made one: messages are small and
    packed on the CPU, and TCP is what joins distant machines. Initialise NCCL yourself for a fast local network.
    """
    if not dist.is_available():
        return Solo()
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise PeerError(
                    f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but there is no process group and this is not torchrun: "
                    "each process would train by itself. Use torchrun, or call init_process_group() first"
                )
            return Solo()
        dist.init_process_group("gloo")
    return Torch()
