"""`overtone bench codec`: whole rounds on two sets of tensors, against the published code and against memory.

A round adds the drift of the weights to the residual, transforms, selects, quantizes, packs and updates the residual;
then it checks, unpacks and averages the payloads of all replicas, makes the outer step and transforms back into the
weights. All measurements are made in one run, on the same tensors and the same threads: their ratios count.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overtone.bench.options import CodecBench
from overtone.bench.reference import TRANSFORMS
from overtone.bench.rounds import (
    CPU,
    Ours,
    Shapes,
    Theirs,
    gpt_shapes,
    matrix_shapes,
    measure,
    seconds_of,
    size_of,
    tensors_of,
)
from overtone.codec import TopK
from overtone.coding.kernels import Kernels, in_torch, kernels_for
from overtone.common.limits import refuse_beyond_memory
from overtone.errors import ConfigError

# -- memory --------------------------------------------------------------------------------------------------------


def extra_memory(make: str, bench: CodecBench) -> float | None:
    """Peak memory of a round beyond weights, state and result, as a share of the parameters' bytes.

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


def run(bench: CodecBench, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything; the result is one JSON object. Times are multiples of one memory copy of the parameters."""
    shapes = gpt_shapes(bench)
    size = size_of(shapes)
    refuse_beyond_memory(
        40 * size, f"{size:,} parameters ten times", "use a smaller width, layers or words", ConfigError
    )
    report: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "replicas": bench.replicas,
        "keep": bench.keep,
        "bits": bench.bits,
        "sets": {
            "a GPT": _measure_set(shapes, bench, lambda what: say(f"a GPT: {what}")),
            "25 matrices": _measure_set(matrix_shapes(), bench, lambda what: say(f"25 matrices: {what}")),
        },
    }
    say("memory")
    report["extra_memory"] = {make: extra_memory(make, bench) for make in ("ours", "einsum")}
    say("many small tensors")
    report["small_tensors"] = _small_tensors(bench)
    say("selection")
    report["selection"] = _selection(bench.keep, kernels_for(size, CPU))
    return report


def _measure_set(shapes: Shapes, bench: CodecBench, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all paths on one set of tensors.

    A set has a process of its own: how fast a memory copy is depends on the pages that were freed before it.
    """
    rows = {}
    with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        for name in _paths(shapes, bench):
            say(name)
            rows[name] = pool.apply(_measure_path, (name, shapes, bench))
    loops = kernels_for(size_of(shapes), CPU)
    return {"parameters": size_of(shapes), "tensors": len(shapes), "loops": loops.__name__, "paths": rows}  # type: ignore[attr-defined]


def _measure_path(name: str, shapes: Shapes, bench: CodecBench) -> dict[str, float]:
    return measure(_paths(shapes, bench)[name](), shapes, bench.times).row()


def _paths(shapes: Shapes, bench: CodecBench) -> dict[str, Callable[[], Ours | Theirs]]:
    loops = kernels_for(size_of(shapes), CPU)

    def ours(loops: Kernels = loops, keep: int = bench.keep, bits: int = bench.bits, transform: str = "dct") -> Ours:
        return Ours(shapes, TopK(keep=keep, bits=bits, transform=transform), bench.replicas, loops)

    paths: dict[str, Callable[[], Ours | Theirs]] = {
        "overtone": ours,
        "overtone, hadamard": lambda: ours(transform="hadamard"),
        "overtone, turning": lambda: ours(transform="turning"),
        "overtone, keep 512, 1 bit": lambda: ours(keep=512, bits=1),
    }
    if loops is not in_torch:
        paths["overtone, torch only"] = lambda: ours(in_torch)
    for name in TRANSFORMS:
        paths[f"reference, {name}"] = lambda name=name: Theirs(shapes, bench.keep, bench.replicas, name)  # type: ignore[misc]
    return paths


def _small_tensors(bench: CodecBench) -> dict[str, float]:
    """The time of 400 small tensors, divided by the time of one matrix with as many values."""
    codec = TopK(keep=bench.keep, bits=bench.bits)
    found = {}
    for side in (64, 128, 256):
        many = [(side, side)] * 400
        one = [(20 * side, 20 * side)]
        loops = kernels_for(size_of(gpt_shapes(bench)), CPU)  # those of the tables
        times = [min(measure(Ours(s, codec, bench.replicas, loops), s, 3 * bench.times).round) for s in (many, one)]
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
        seconds = {name: min(seconds_of(way, 20)) for name, way in ways.items()}
        found |= {f"{name}, {k} of 4096": t / seconds["torch.topk"] for name, t in seconds.items()}
    return found


def markdown(report: dict[str, Any]) -> str:
    """The result as a page of Markdown."""
    threads = "one thread" if report["threads"] == 1 else f"{report['threads']} threads"
    lines = [
        f"{report['replicas']} payloads, {threads}, {report['keep']} of 4096 coefficients at {report['bits']} bits. "
        "Rounds and memory copies of the parameters take turns. Times are in memory copies: the fastest round over the "
        "fastest copy, and the median round over the median copy. GB/s are of medians.",
    ]
    for name, found in report["sets"].items():
        lines += ["", f"## {name}", "", *_table(found)]
    lines += [""]
    for make, share in report["extra_memory"].items():
        told = "not measured on this system" if share is None else f"{100 * share:.1f} % of the parameters' bytes"
        lines.append(f"Peak extra memory, {'overtone' if make == 'ours' else 'reference'}: {told}.")
    small = ", ".join(f"{shape}: {ratio:.2f}x" for shape, ratio in report["small_tensors"].items())
    lines += [f"400 small tensors against one matrix, time per byte: {small}."]
    lines += ["", "| selection | time over torch.topk |", "|---|---|"]
    lines += [f"| {name} | {ratio:.2f} |" for name, ratio in report["selection"].items()]
    return "\n".join(lines)


def _table(found: dict[str, Any]) -> list[str]:
    """The rows of one set of tensors."""
    paths = found["paths"]
    first, reference = paths["overtone"], paths["reference, einsum"]
    lines = [
        f"{found['parameters'] / 1e6:.1f} M parameters in {found['tensors']} tensors, {first['rounds']} rounds of each "
        f"path, loops: {found['loops']}. A memory copy runs at {first['copy_gb_per_second']:.1f} GB/s.",
        "",
        "| path | round, copies: best | median | against reference: best | median | encode, GB/s | decode, GB/s "
        "| message | bits per parameter |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in paths.items():
        best, usual = (reference[key] / row[key] for key in ("round_copies_best", "round_copies_median"))
        lines.append(
            f"| {name} | {row['round_copies_best']:.1f} | {row['round_copies_median']:.1f} | {best:.1f}x | "
            f"{usual:.1f}x | {row['encode_gb_per_second']:.2f} | {row['decode_gb_per_second']:.2f} | "
            f"{row['message_bytes']} | {row['bits_per_parameter']:.3f} |"
        )
    return lines
