"""Whole rounds on tensors of given shapes, as overtone and as the published code do them; and their time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from overtone.bench.options import CodecBench
from overtone.bench.reference import TRANSFORMS, Reference, outer_step
from overtone.codec import Block, TopK, check_payload, mean_of_blocks
from overtone.coding.bits import Reader
from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels
from overtone.coding.turns import Turn
from overtone.exchange.dealing import Deal
from overtone.exchange.gathered import bytes_of
from overtone.exchange.signals import Sources
from overtone.exchange.slab_work import SlabWork
from overtone.rules import Outer

Shapes = Sequence[tuple[int, ...]]
CPU = torch.device("cpu")


def gpt_shapes(bench: CodecBench) -> list[tuple[int, ...]]:
    """The tensors of a GPT as published with GPT-2; its small size, 124 M parameters, is the default."""
    w = bench.width
    norm: Shapes = [(w,), (w,)]
    attend: Shapes = [(3 * w, w), (3 * w,), (w, w), (w,)]
    mlp: Shapes = [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    return [(bench.words, w), (1024, w), *[*norm, *attend, *norm, *mlp] * bench.layers, *norm]


def matrix_shapes() -> list[tuple[int, ...]]:
    """25 matrices of 0.26 to 4.2 M values, 23.1 M in all: those of a GPT of width 512 with 6 layers and 8192 words."""
    return [(8192, 512), *[(1536, 512), (512, 512), (2048, 512), (512, 2048)] * 6]


def size_of(shapes: Shapes) -> int:
    """The number of values in all tensors."""
    return sum(math.prod(shape) for shape in shapes)


class Ours:
    """A round of overtone as `Replica` does it. The outer step has momentum, and the whole residual is carried."""

    may_return = False  # every payload counts

    def __init__(self, shapes: Shapes, codec: TopK, replicas: int, kernels: Kernels) -> None:
        self.replicas = replicas
        rule = Outer(lr=0.9, momentum=0.8, carry=1.0)
        layout = codec.layout(shapes)
        turn = Turn(0, layout, kernels) if codec.turns else None
        self.work = SlabWork(layout, kernels, CPU, rule, codec, Deal.whole(layout.slabs, 0), turn)
        self.state = rule.begin(self.work.layout.empty(CPU), lossless=False)
        for vector in self.state.values():
            vector.fill_(0.0)  # so that its memory pages exist before we measure
        self.blocks: list[Block] = []
        self.readers: list[Reader] = []

    def encode(self, start: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """From the weights before and after some local steps to the blocks of a message."""
        self.blocks, _ = self.work.encode(self.state, Sources(start, weights))

    def decode(self, weights: Sequence[Tensor]) -> None:
        """Check the payloads of the others from end to end. Then read all for the mean, step, and write the weights."""
        codec, layout, kernels = self.work.codec, self.work.layout, self.work.kernels
        payload = b"".join(bytes_of(block) for block in self.blocks)
        for _ in range(self.replicas - 1):
            check_payload(codec, Reader(payload), layout, kernels)
        self.readers = [Reader(payload) for _ in range(self.replicas)]
        self.work.absorb(self.state, self, weights)

    def mean(self, slab: Slab, out: Tensor, *, over_senders: bool) -> Tensor:
        """The mean of all payloads for one slab."""
        work, count = self.work, self.replicas
        return mean_of_blocks(
            work.codec, self.readers, slab, count, out, over_senders=over_senders, kernels=work.kernels
        )

    def returned(self, slab: Slab) -> tuple[()]:  # noqa: ARG002
        """Nothing: every payload counts."""
        return ()

    @property
    def message_bytes(self) -> int:
        return sum(len(bytes_of(block)) for block in self.blocks)


class Theirs:
    """A round of the published code: its codec, and its outer step in the domain of the weights."""

    def __init__(self, shapes: Shapes, keep: int, replicas: int, transform: str) -> None:
        self.codec, self.replicas = Reference(keep, TRANSFORMS[transform]), replicas
        self.stores, self.anchors = ([torch.zeros(shape).fill_(0.0) for shape in shapes] for _ in range(2))
        self.messages: list[tuple[Tensor, Tensor]] = []
        self.drifts: list[Tensor] = []

    def encode(self, start: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """From the weights before and after some local steps to one message per tensor."""
        self.drifts = [a - b for a, b in zip(start, weights, strict=True)]
        pairs = zip(self.stores, self.drifts, strict=True)
        self.messages = [self.codec.encode(store, drift) for store, drift in pairs]

    def decode(self, weights: Sequence[Tensor]) -> None:
        """Average the messages of all replicas, step, and write the weights."""
        for i, weight in enumerate(weights):
            mean = self.codec.decode([self.messages[i]] * self.replicas, weight.shape)
            outer_step(self.anchors[i], self.stores[i], self.drifts[i], mean)
            weight.copy_(self.anchors[i])

    @property
    def message_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for message in self.messages for t in message)


def tensors_of(shapes: Shapes) -> tuple[list[Tensor], list[Tensor]]:
    """Random weights at the start of a round, and after some local steps."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]
    return start, [a + 1e-3 * torch.randn(a.shape, generator=generator) for a in start]


@dataclass
class Timing:
    """Seconds of several rounds, each with its two halves, and of memory copies of the parameters between them."""

    size: int
    message_bytes: int = 0
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)

    @property
    def round(self) -> list[float]:
        return [a + b for a, b in zip(self.encode, self.decode, strict=True)]

    def row(self) -> dict[str, float]:
        """Times in memory copies: the fastest round over the fastest copy, and the median over the median."""
        best, usual = min(self.copy), median(self.copy)
        return {
            "round_copies_best": min(self.round) / best,
            "round_copies_median": median(self.round) / usual,
            "encode_copies_median": median(self.encode) / usual,
            "decode_copies_median": median(self.decode) / usual,
            "encode_gb_per_second": 4e-9 * self.size / median(self.encode),
            "decode_gb_per_second": 4e-9 * self.size / median(self.decode),
            "copy_gb_per_second": 4e-9 * self.size / usual,
            "rounds": len(self.encode),
            "message_bytes": self.message_bytes,
            "bits_per_parameter": 8 * self.message_bytes / self.size,
        }


def measure(path: Ours | Theirs, shapes: Shapes, times: int) -> Timing:
    """Several rounds, after one round of warm-up.

    Memory copies are measured in turns with the rounds: a machine that slows down slows both.
    """
    start, weights = tensors_of(shapes)
    answers = [w.clone() for w in weights]
    timing = Timing(size_of(shapes))
    source, place = torch.ones(timing.size), torch.ones(timing.size)
    path.encode(start, weights)
    path.decode(answers)
    for _ in range(times):
        timing.copy += seconds_of(lambda: place.copy_(source), 3)
        timing.encode += seconds_of(lambda: path.encode(start, weights))
        timing.decode += seconds_of(lambda: path.decode(answers))
    timing.message_bytes = path.message_bytes
    return timing


def seconds_of(job: Callable[[], object], times: int = 1) -> list[float]:
    """The seconds of each of several calls.

    With one thread, processor time is measured: other jobs on the machine then disturb only through caches and memory.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = []
    for _ in range(times):
        begin = clock()
        job()
        seconds.append(clock() - begin)
    return seconds
