"""`overtone bench codec`: one round's work on the tensors of a GPT, against the published code and against memory.

A round adds the drift of the weights to the residual, transforms, selects, quantizes, packs and updates the residual;
then it checks, unpacks and averages the payloads of all replicas and transforms back into the weights. All measurements
are made in one run, on the same tensors and the same threads: their ratios count.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overtone.bench.options import CodecBench
from overtone.bench.reference import TRANSFORMS, Reference
from overtone.codec import Block, TopK, check_payload, mean
from overtone.coding.bits import Reader
from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels, in_torch, kernels_for
from overtone.common.limits import refuse_beyond_memory
from overtone.errors import ConfigError
from overtone.exchange.dealing import Deal
from overtone.exchange.gathered import bytes_of
from overtone.exchange.round import SlabWork
from overtone.exchange.signals import Sources
from overtone.rules import Mean, Outer

Shapes = Sequence[tuple[int, ...]]
CPU = torch.device("cpu")


def gpt_shapes(bench: CodecBench) -> list[tuple[int, ...]]:
    """The tensors of a GPT as published with GPT-2; its small size, 124 M parameters, is the default."""
    w = bench.width
    norm: Shapes = [(w,), (w,)]
    attend: Shapes = [(3 * w, w), (3 * w,), (w, w), (w,)]
    mlp: Shapes = [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    return [(bench.words, w), (1024, w), *[*norm, *attend, *norm, *mlp] * bench.layers, *norm]


@dataclass(frozen=True)
class Timing:
    """Seconds of the two halves of a round, and the size of one replica's message."""

    encode: float
    decode: float
    message_bytes: int

    @property
    def round(self) -> float:
        return self.encode + self.decode


class Ours:
    """A round of overtone's codec as `Replica` does it, without the outer step."""

    def __init__(self, shapes: Shapes, codec: TopK, replicas: int, kernels: Kernels) -> None:
        self.replicas = replicas
        layout = codec.layout(shapes)
        deal = Deal.whole(layout.slabs, 0)
        self.sending = SlabWork(layout, kernels, CPU, Outer(lr=1.0, momentum=0.0), codec, deal)
        self.receiving = replace(self.sending, rule=Mean())
        # Filled, so that its memory pages exist before we measure.
        self.state = {"residual": self.sending.layout.empty(CPU).fill_(0.0)}
        self.blocks: list[Block] = []
        self.readers: list[Reader] = []

    def encode(self, start: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """From the weights before and after some local steps to the blocks of a message."""
        self.blocks, _ = self.sending.encode(self.state, Sources(start, weights))

    def decode(self, weights: Sequence[Tensor]) -> None:
        """Check the payloads of the others from end to end, then read all for the mean, as in a real round."""
        codec, layout, kernels = self.receiving.codec, self.receiving.layout, self.receiving.kernels
        payload = b"".join(bytes_of(block) for block in self.blocks)
        for _ in range(self.replicas - 1):
            check_payload(codec, Reader(payload), layout, kernels)
        self.readers = [Reader(payload) for _ in range(self.replicas)]
        self.receiving.absorb({}, self, weights)

    def mean(self, slab: Slab, out: Tensor, *, over_senders: bool) -> Tensor:
        """The mean of all payloads for one slab."""
        codec, kernels = self.receiving.codec, self.receiving.kernels
        decoded = (codec.decode(reader, slab, kernels) for reader in self.readers)
        return mean(decoded, self.replicas, out, over_senders=over_senders)

    def returned(self, slab: Slab) -> tuple[()]:  # noqa: ARG002
        """Nothing: every payload counts."""
        return ()

    @property
    def message_bytes(self) -> int:
        return sum(len(bytes_of(block)) for block in self.blocks)


class Theirs:
    """A round of the published code."""

    def __init__(self, shapes: Shapes, keep: int, replicas: int, transform: str) -> None:
        self.codec, self.replicas = Reference(keep, TRANSFORMS[transform]), replicas
        self.stores = [torch.zeros(shape).fill_(0.0) for shape in shapes]
        self.messages: list[tuple[Tensor, Tensor]] = []

    def encode(self, start: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """From the weights before and after some local steps to one message per tensor."""
        self.messages = [
            self.codec.encode(store, a - b) for store, a, b in zip(self.stores, start, weights, strict=True)
        ]

    def decode(self, weights: Sequence[Tensor]) -> None:
        """Average the messages of all replicas into the weights."""
        for message, weight in zip(self.messages, weights, strict=True):
            weight.copy_(self.codec.decode([message] * self.replicas, weight.shape))

    @property
    def message_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for message in self.messages for t in message)


def tensors_of(shapes: Shapes) -> tuple[list[Tensor], list[Tensor]]:
    """Random weights at the start of a round, and after some local steps."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]
    return start, [a + 1e-3 * torch.randn(a.shape, generator=generator) for a in start]


def measure(path: Ours | Theirs, shapes: Shapes, times: int) -> Timing:
    """The fastest of several rounds, after one round of warm-up."""
    start, weights = tensors_of(shapes)
    answers = [w.clone() for w in weights]
    path.encode(start, weights)
    path.decode(answers)
    encode = best_of(lambda: path.encode(start, weights), times)
    return Timing(encode, best_of(lambda: path.decode(answers), times), path.message_bytes)


def best_of(job: Callable[[], object], times: int) -> float:
    """The seconds of the fastest of several calls."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def memory_copy(values: int) -> float:
    """The seconds of one copy of this many fp32 values in memory."""
    source, place = torch.ones(values), torch.ones(values)
    return best_of(lambda: place.copy_(source), 5)


# -- memory --------------------------------------------------------------------------------------------------------


def extra_memory(make: str, bench: CodecBench) -> float | None:
    """Peak memory of a round beyond weights, residual and result, as a share of the parameters' bytes.

    It is measured in a process of its own: memory that was freed earlier would be used again unseen. None if the system
    does not report it.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_extra_memory, (make, bench))


def _extra_memory(make: str, bench: CodecBench) -> float:
    torch.set_num_threads(1)
    shapes = gpt_shapes(bench)
    loops = kernels_for(size_of(shapes), CPU)

    def path(shapes: Shapes) -> Ours | Theirs:
        if make == "ours":
            return Ours(shapes, TopK(keep=bench.keep, bits=bench.bits), bench.replicas, loops)
        return Theirs(shapes, bench.keep, bench.replicas, make)

    small: Shapes = [(128, 128), (9,)]
    measure(path(small), small, 1)  # loads and compiles the code that a round needs
    start, weights = tensors_of(shapes)
    answers = [w.clone() for w in weights]
    whole = path(shapes)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status_bytes("VmRSS")
    whole.encode(start, weights)
    whole.decode(answers)
    return (_status_bytes("VmHWM") - before) / (4 * size_of(shapes))


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024


# -- the report ----------------------------------------------------------------------------------------------------


def size_of(shapes: Shapes) -> int:
    """The number of values in all tensors."""
    return sum(math.prod(shape) for shape in shapes)


def run(bench: CodecBench, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything; the result is one JSON object. Times are multiples of one memory copy of the parameters."""
    shapes = gpt_shapes(bench)
    size = size_of(shapes)
    refuse_beyond_memory(
        24 * size, f"{size:,} parameters six times", "use a smaller width, layers or words", ConfigError
    )
    loops = kernels_for(size, CPU)
    copy = memory_copy(size)
    report: dict[str, Any] = {
        "parameters": size,
        "threads": torch.get_num_threads(),
        "replicas": bench.replicas,
        "loops": loops.__name__,  # type: ignore[attr-defined]
        "copy_seconds": copy,
        "copy_gb_per_second": 4e-9 * size / copy,
    }

    def ours(keep: int, bits: int, loops: Kernels = loops) -> Ours:
        return Ours(shapes, TopK(keep=keep, bits=bits), bench.replicas, loops)

    paths: dict[str, Callable[[], Ours | Theirs]] = {"overtone": lambda: ours(bench.keep, bench.bits)}
    if loops is not in_torch:
        paths["overtone, torch only"] = lambda: ours(bench.keep, bench.bits, in_torch)
    for name in TRANSFORMS:
        paths[f"reference, {name}"] = lambda name=name: Theirs(shapes, bench.keep, bench.replicas, name)  # type: ignore[misc]
    paths["overtone, keep 512, 1 bit"] = lambda: ours(512, 1)
    report["paths"] = {}
    for name, make in paths.items():
        say(name)
        report["paths"][name] = _row(measure(make(), shapes, bench.times), size, copy)
    say("memory")
    report["extra_memory"] = {make: extra_memory(make, bench) for make in ("ours", "einsum")}
    say("many small tensors")
    report["small_tensors"] = _small_tensors(bench, loops)
    say("selection")
    report["selection"] = _selection(bench.keep, loops)
    return report


def _row(timing: Timing, size: int, copy: float) -> dict[str, float]:
    return {
        "encode_copies": timing.encode / copy,
        "decode_copies": timing.decode / copy,
        "round_copies": timing.round / copy,
        "encode_gb_per_second": 4e-9 * size / timing.encode,
        "decode_gb_per_second": 4e-9 * size / timing.decode,
        "message_bytes": timing.message_bytes,
        "bits_per_parameter": 8 * timing.message_bytes / size,
    }


def _small_tensors(bench: CodecBench, loops: Kernels) -> dict[str, float]:
    """The time of 400 small tensors, divided by the time of one matrix with as many values."""
    codec = TopK(keep=bench.keep, bits=bench.bits)
    found = {}
    for side in (64, 128, 256):
        many = [(side, side)] * 400
        one = [(20 * side, 20 * side)]
        times = [measure(Ours(s, codec, bench.replicas, loops), s, 5 * bench.times).round for s in (many, one)]
        found[f"{side}x{side}"] = times[0] / times[1]
    return found


def _selection(keep: int, loops: Kernels) -> dict[str, float]:
    """The time to find the strongest of each 4096 coefficients, divided by the time of `torch.topk`."""
    coeffs = torch.randn(128, 4096, generator=torch.Generator().manual_seed(0))
    found: dict[str, float] = {}
    for k in dict.fromkeys((min(keep, 4095), 128, 512)):
        ways: dict[str, Callable[[], object]] = {
            "torch.topk": lambda k=k: coeffs.abs().topk(k, dim=1),  # type: ignore[misc]
            "numpy.argpartition": lambda k=k: np.argpartition(coeffs.abs().numpy(), 4096 - k, axis=1),  # type: ignore[misc]
            "overtone": lambda k=k: loops.select(coeffs, k),  # type: ignore[misc]
        }
        seconds = {name: best_of(way, 20) for name, way in ways.items()}
        found |= {f"{name}, {k} of 4096": t / seconds["torch.topk"] for name, t in seconds.items()}
    return found


def markdown(report: dict[str, Any]) -> str:
    """The result as a page of Markdown."""
    copy = f"{report['copy_gb_per_second']:.2f} GB/s, {report['copy_seconds'] * 1e3:.0f} ms"
    threads = "one thread" if report["threads"] == 1 else f"{report['threads']} threads"
    lines = [
        f"{report['parameters'] / 1e6:.1f} M parameters, {report['replicas']} payloads, {threads}, loops: "
        f"{report['loops']}. One memory copy of the parameters: {copy}.",
        "",
        "| path | encode, GB/s | decode, GB/s | round, copies | against reference | message | bits per parameter |",
        "|---|---|---|---|---|---|---|",
    ]
    reference = report["paths"]["reference, einsum"]["round_copies"]
    for name, row in report["paths"].items():
        lines.append(
            f"| {name} | {row['encode_gb_per_second']:.2f} | {row['decode_gb_per_second']:.2f} | "
            f"{row['round_copies']:.1f} | {reference / row['round_copies']:.1f}x | {row['message_bytes']} | "
            f"{row['bits_per_parameter']:.3f} |"
        )
    first = report["paths"]["overtone"]["round_copies"]
    wide = report["paths"]["overtone, keep 512, 1 bit"]["round_copies"]
    lines += ["", f"Keep 512 at 1 bit takes {wide / first:.2f}x the time of the first row."]
    for make, share in report["extra_memory"].items():
        told = "not measured on this system" if share is None else f"{100 * share:.1f} % of the parameters' bytes"
        lines.append(f"Peak extra memory, {'overtone' if make == 'ours' else 'reference'}: {told}.")
    small = ", ".join(f"{shape}: {ratio:.2f}x" for shape, ratio in report["small_tensors"].items())
    lines += [f"400 small tensors against one matrix, time per byte: {small}."]
    lines += ["", "| selection | time over torch.topk |", "|---|---|"]
    lines += [f"| {name} | {ratio:.2f} |" for name, ratio in report["selection"].items()]
    return "\n".join(lines)
