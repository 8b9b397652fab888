"""From replica to replica. A transport carries whole buffers and counts them; it knows nothing of what they mean.

With joining.py, which makes the process group, the only module of the science that imports `torch.distributed`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
)

from overtone.coding.bits import bytes_tensor, tensor_bytes
from overtone.errors import OvertoneError, PeerError, RelayedError
from overtone.ledger import Ledger
from overtone.world.board import Board, Store
from overtone.world.watchdog import Watchdog

MARGIN = 5.0  # seconds after its time-out at which torch gives up a collective by itself, so that a process can end
FOREVER = timedelta(days=60)  # torch's own time-out of a group; each collective has one of ours
_boards: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # how many transports a group has had here


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

    def leave(self, words: str) -> None:
        pass


class Torch:
    """A `torch.distributed` process group: gloo over TCP, NCCL on GPUs. ``group=None`` is the default group.

    ``timeout`` is how many seconds to wait for a peer that does not answer; by default it follows from how long rounds
    take (see watchdog.py). A group that you made yourself has a time-out of its own besides: the shorter one counts.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None, ledger: Ledger | None = None
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.peers = range(self.size)
        self.ledger = ledger or Ledger()
        on_gpu = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        name = str(self._collectives.group_name)
        self.watchdog = Watchdog(Board(_store(), f"{name}.{next(_boards[name])}", self.rank, self.size), timeout)

    @property
    def _collectives(self) -> Any:
        # Asked for each time: who holds the default group keeps its threads alive beyond destroy_process_group(), and
        # a thread that frees a tensor while the interpreter ends aborts the process.
        return _of(self.group)

    def branch(self) -> Torch:
        """Another way to the same peers, with an order of its own: what is said there does not wait for the rounds. Its
        bytes go into the same ledger."""
        members = dist.get_process_group_ranks(_of(self.group))

        def made() -> Any:
            return dist.new_group(members, timeout=FOREVER, backend="gloo", use_local_synchronization=True)

        with self._exchanging():
            group = self.watchdog.call(made, self.watchdog.limit(), self.watchdog.board.absent, "joining once more")
        return Torch(group, timeout=self.watchdog.timeout, ledger=self.ledger)

    def leave(self, words: str) -> None:
        """Last words, for peers that would otherwise only see a connection break."""
        self.watchdog.board.leave(words)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Wait on the ledger's time; a broken connection becomes an error that says who was cut off from whom."""
        try:
            with self.ledger.wait():
                yield
        except OvertoneError:
            raise
        except RuntimeError as error:
            raise RelayedError(
                f"rank {self.rank} of {self.size}: the exchange broke off: {self.watchdog.broken(error)}; no "
                "weight was touched. Restart all from a checkpoint"
            ) from error

    def _run(self, options: Any, size: int, start: Callable[[Any], Any]) -> None:
        """One collective of so many bytes, to its end. Every rank must come here for the same one."""
        limit = self.watchdog.limit(size)
        options.timeout = timedelta(seconds=limit + MARGIN)
        work = start(options)
        if self.device.type == "cuda":
            work.wait()  # the host does not wait for a GPU's collective: nothing to watch over here
        else:
            self.watchdog.wait(lambda seconds: _is_done(work, seconds), limit)

    def _gathered(self, buffer: Tensor) -> list[Tensor]:
        """Everybody's buffer; all have the same size."""
        heard = [torch.empty_like(buffer) for _ in range(self.size)]
        through = buffer.numel() * buffer.element_size()
        self._run(
            AllgatherOptions(), through * (self.size - 1), lambda o: self._collectives.allgather([heard], [buffer], o)
        )
        self.ledger.gathered(through, self.size)
        return heard

    def gather(self, message: bytes, *, most: int | None) -> list[bytes]:
        with self._exchanging():
            longest = len(message)
            if most is not None:
                mine = torch.tensor([longest], dtype=torch.int64, device=self.device)
                # gloo and NCCL gather equal sizes only: the longest message sets the length.
                longest = _checked(self._gathered(mine), most)
            buffer = bytes_tensor(message.ljust(longest, b"\0"), torch.uint8).to(self.device)
            return [tensor_bytes(one.cpu()) for one in self._gathered(buffer)]

    def begin_gather(self, message: bytes) -> Begun:
        """A gather of messages of one length that nobody waits for yet."""
        buffer = bytes_tensor(message, torch.uint8)
        heard = [torch.empty_like(buffer) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = FOREVER
        work = self._collectives.allgather([heard], [buffer], options)
        with self.ledger.during("upkeep"):
            self.ledger.gathered(len(message), self.size)
        self.watchdog.board.enter()
        return Begun(self, work, heard)

    def sum(self, buffer: Tensor) -> Tensor:
        with self._exchanging():
            here = buffer.to(self.device)
            through = here.numel() * here.element_size()
            self._run(AllreduceOptions(), 2 * through, lambda o: self._collectives.allreduce([here], o))
            self.ledger.summed(through, self.size)
            return here.to(buffer.device)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        raws = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        if not raws:
            return
        with self._exchanging():
            everything = torch.cat([raw.to(self.device) for raw in raws])
            # Down a tree: each level waits for the one above.
            through = everything.numel() * self.size.bit_length()
            self._run(BroadcastOptions(), through, lambda o: self._collectives.broadcast([everything], o))
        self.ledger.broadcast(everything.numel(), self.rank, self.size)
        if self.rank == 0:
            return
        parts = everything.split([raw.numel() for raw in raws])
        for tensor, part in zip((t for t in tensors if t.numel()), parts, strict=True):
            here = part.to(tensor.device, copy=True).view(tensor.dtype).view(tensor.shape)
            tensor.detach().copy_(here)


class Begun:
    """A gather that is under way."""

    def __init__(self, transport: Torch, work: Any, heard: Sequence[Tensor]) -> None:
        self.transport = transport
        self._work = work
        self._heard = heard

    def messages(self, *, wait: bool = False) -> list[bytes] | None:
        """Everybody's, or None as long as some have not come."""
        with self.transport._exchanging():
            if wait:
                watchdog = self.transport.watchdog
                watchdog.wait(lambda seconds: _is_done(self._work, seconds), watchdog.limit(), begun=True)
            elif not self._work.is_completed() or not _is_done(self._work, 0.0):
                return None
        return [tensor_bytes(one) for one in self._heard]


def _is_done(work: Any, seconds: float) -> bool:
    """Wait so long for a collective. It raises when it failed; it also does when the time is over, and may go on."""
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has ended since: well, or with an error of its own
    return True


def _of(group: dist.ProcessGroup | None) -> Any:
    """The group itself, typed as what it can do in every torch: a collective takes options, with a time-out each."""
    return dist.group.WORLD if group is None else group


def _store() -> Store | None:
    """The store through which the default group met; where torch does not tell, boards stay empty."""
    ask = getattr(dist.distributed_c10d, "_get_default_store", None)
    store: Store | None = None if ask is None else ask()
    return store


def _checked(sizes: Sequence[Tensor], most: int) -> int:
    """The longest of the lengths told; everybody sees the same ones, so everybody refuses alike."""
    told = [int(size) for size in sizes]
    for rank, size in enumerate(told):
        if not 0 <= size <= most:
            raise PeerError(
                f"rank {rank} announces a message of {size} bytes, where {most} are the most; it was refused"
            )
    return max(told)
