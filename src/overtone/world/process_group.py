"""The transport between processes: a `torch.distributed` process group."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
)

from overtone.coding.bits import bytes_tensor, tensor_bytes
from overtone.errors import OvertoneError, PeerError, RelayedError
from overtone.ledger import SIZE_BYTES, Count, Ledger
from overtone.transport import AlwaysCommits, Background
from overtone.world.board import Board, Store
from overtone.world.watchdog import Watchdog, is_done

FOREVER = timedelta(days=60)  # torch's own time-out of a group; we set a shorter one for each collective
# For each group, a counter of its transports in this process. It gives every board a name of its own.
_boards: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class Torch(AlwaysCommits):
    """A `torch.distributed` process group: gloo over TCP, NCCL on GPUs. ``group=None`` is the default group.

    ``timeout`` is the number of seconds to wait for a peer that does not answer. By default it follows from the
    duration of rounds (see watchdog.py). A group that you made yourself also has its own time-out; the shorter counts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float | None = None,
        ledger: Ledger | None = None,
        words: str = "",  # the board for last words, if it is another transport's
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.peers = range(self.size)
        self.ledger = ledger or Ledger()
        on_gpu = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        name = str(self._collectives.group_name)
        board = Board(_store(), f"{name}.{next(_boards[name])}", self.rank, self.size, words)
        self.watchdog = Watchdog(board, timeout)

    @property
    def _collectives(self) -> Any:
        # Looked up each time. A reference to the default group would keep its threads alive after
        # destroy_process_group(), and a thread that frees a tensor while the interpreter ends aborts the process.
        return _of(self.group)

    def branch(self) -> Torch:
        """A second transport to the same peers, with its own order of collectives.

        Its messages do not wait for the rounds. Its bytes are counted in the same ledger.
        """
        members = dist.get_process_group_ranks(_of(self.group))

        def made() -> Any:
            return dist.new_group(members, timeout=FOREVER, backend="gloo", use_local_synchronization=True)

        count = Count()
        with self._exchanging(count):
            group = self.watchdog.call(made, self.watchdog.limit(), self.watchdog.board.absent, "joining once more")
        self.ledger.add("upkeep", count)
        # Whichever channel is first to see that a peer is gone: it must find what the peer said, on whichever it did.
        words = self.watchdog.board.words
        return Torch(group, timeout=self.watchdog.timeout, ledger=self.ledger, words=words)

    def background(self) -> Background:
        """A second channel for exchanges that go on beside the training."""
        channel = self.branch()
        background = Background(channel, self._idle)
        channel.watchdog.idle = background.give_way
        return background

    def _idle(self) -> None:
        # Looked up each time: stop votes are set up later than this transport.
        if self.watchdog.idle is not None:
            self.watchdog.idle()

    def leave(self, words: str) -> None:
        """Write this replica's last words, for peers that would otherwise see only a broken connection."""
        self.watchdog.board.leave(words)

    @contextmanager
    def _exchanging(self, count: Count) -> Iterator[None]:
        """Count the time as waiting, and turn a broken connection into an error that names the ranks on both sides."""
        begin = time.perf_counter()
        try:
            yield
        except OvertoneError:
            raise
        except RuntimeError as error:
            raise RelayedError(
                f"rank {self.rank} of {self.size}: the exchange broke off: {self.watchdog.broken(error)}; no "
                "weight was touched. Restart all from a checkpoint"
            ) from error
        finally:
            count.waiting += time.perf_counter() - begin

    def _run(self, start: Callable[[Any], Any], options: Any, size: int) -> None:
        """Run one collective of ``size`` bytes to its end. Every rank must call this for the same collective."""
        self.watchdog.run(start, options, size, on_gpu=self.device.type == "cuda")

    def _gathered(self, buffer: Tensor) -> list[Tensor]:
        """All-gather buffers of one size."""
        buffers = [torch.empty_like(buffer) for _ in range(self.size)]
        start = partial(self._collectives.allgather, [buffers], [buffer])
        self._run(start, AllgatherOptions(), buffer.numel() * buffer.element_size() * (self.size - 1))
        return buffers

    def _longest(self, own: int, most: int) -> int:
        """The length of the longest message of all ranks. gloo and NCCL pass on buffers of equal size only."""
        sizes = self._gathered(torch.tensor([own], dtype=torch.int64, device=self.device))
        announced = [int(size) for size in sizes]
        for rank, size in enumerate(announced):  # all ranks see the same sizes, so all of them refuse
            if not 0 <= size <= most:
                raise PeerError(
                    f"rank {rank} announces a message of {size} bytes, where {most} are the most; it was refused"
                )
        return max(announced)

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        with self._exchanging(count):
            longest = len(message) if most is None else self._longest(len(message), most)
            buffer = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8).to(self.device)
            messages = [tensor_bytes(one.cpu()) for one in self._gathered(buffer)]
        # Counted only now: the bytes of an exchange that broke off are not known.
        if most is not None:
            count.gathered(SIZE_BYTES, self.size)
        count.gathered(longest, self.size)
        return messages

    def all_to_all(self, messages: Sequence[bytes], *, most: int, count: Count) -> list[bytes]:
        with self._exchanging(count):
            longest = self._longest(max(map(len, messages)), most)
            padded = bytearray(b"".join(message.ljust(longest, b"\0") for message in messages))
            sent = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
            received = torch.empty_like(sent)
            start = partial(self._collectives.alltoall_base, received, sent, [], [])
            self._run(start, AllToAllOptions(), longest * (self.size - 1))
            found = [tensor_bytes(one.cpu()) for one in received.split(longest)]
        count.gathered(SIZE_BYTES, self.size)
        count.gathered(longest, self.size)  # as in an all-gather, a buffer for each peer, and one of each
        return found

    def begin_gather(self, message: bytes) -> Begun:
        """Start an all-gather of messages of one length, and do not wait for it."""
        buffer = bytes_tensor(message, torch.uint8)
        buffers = [torch.empty_like(buffer) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = FOREVER
        work = self._collectives.allgather([buffers], [buffer], options)
        count = Count()
        count.gathered(len(message), self.size)
        self.watchdog.exchanges += 1  # counted at its start, so that all ranks count in the same order
        return Begun(self, work, buffers, count)

    def sum(self, buffer: Tensor, *, count: Count) -> Tensor:
        with self._exchanging(count):
            here = buffer.to(self.device)
            through = here.numel() * here.element_size()
            self._run(partial(self._collectives.allreduce, [here]), AllreduceOptions(), 2 * through)
            total = here.to(buffer.device)
        count.summed(through, self.size)
        return total

    def broadcast(self, tensors: Sequence[Tensor], *, count: Count) -> None:
        raws = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        if not raws:
            return
        with self._exchanging(count):
            # As bytes in one buffer: tensors of all types in a single collective.
            everything = torch.cat([raw.to(self.device) for raw in raws])
            # A broadcast goes down a tree. Each level waits for the level above, so the time-out allows for all levels.
            through = everything.numel() * self.size.bit_length()
            self._run(partial(self._collectives.broadcast, [everything]), BroadcastOptions(), through)
        count.broadcast(everything.numel(), self.rank, self.size)
        if self.rank == 0:
            return
        parts = everything.split([raw.numel() for raw in raws])
        for tensor, part in zip((t for t in tensors if t.numel()), parts, strict=True):
            here = part.to(tensor.device, copy=True).view(tensor.dtype).view(tensor.shape)
            tensor.detach().copy_(here)


class Begun:
    """An all-gather that has started. ``count`` is its cost."""

    def __init__(self, transport: Torch, work: Any, buffers: Sequence[Tensor], count: Count) -> None:
        self.transport = transport
        self.count = count
        self._work = work
        self._buffers = buffers

    def messages(self, *, wait: bool = False) -> list[bytes] | None:
        """The messages of all ranks, or None if some have not arrived. Its cost is counted when all have arrived."""
        with self.transport._exchanging(self.count):
            if wait:
                self.transport.watchdog.wait(partial(is_done, self._work), self.transport.watchdog.limit(), begun=True)
            elif not self._work.is_completed() or not is_done(self._work, 0.0):
                return None
        self.transport.ledger.add("upkeep", self.count)
        return [tensor_bytes(one) for one in self._buffers]


def _of(group: dist.ProcessGroup | None) -> Any:
    """The group itself, typed as Any: in every version of torch its collectives take options, each with a time-out."""
    return dist.group.WORLD if group is None else group


def _store() -> Store | None:
    """The store of the default group. If this torch does not give access to it, boards have no notes."""
    ask = getattr(dist.distributed_c10d, "_get_default_store", None)
    store: Store | None = None if ask is None else ask()
    return store
