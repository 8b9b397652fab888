"""The flags of `overtone bench codec` and `overtone bench train`.

They have a file of their own because the measurements import packages that not every installation has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from overtone.codec import TopK
from overtone.common import limits
from overtone.common.limits import COUNT, Limit, check
from overtone.errors import ConfigError
from overtone.tasks.options import Language, TaskOptions

CODEC_BENCH = {
    "width": limits.SIZES["width"],
    "layers": limits.SIZES["layers"],
    "words": Limit("tokens of the vocabulary", 1, 10**9),
    "replicas": Limit("payloads to average", 1, 4096),
    "times": Limit("rounds to measure", 1, 10**6),
    "threads": limits.THREADS,
}


@dataclass(frozen=True)
class Measured:
    """The flags that both benchmarks have."""

    threads: int = 1
    """CPU threads of each process."""
    json: Path | None = None
    """File for everything that was measured, as one JSON object."""


@dataclass(frozen=True)
class CodecBench(Measured):
    """Measure how fast one round is encoded and decoded, against the published code and against memory."""

    width: int = 768
    """Width of the GPT whose tensors are encoded. The defaults are those of GPT-2 small. A second set of 25 matrices
    is always measured."""
    layers: int = 12
    """Layers of the GPT whose tensors are encoded."""
    words: int = 50257
    """Tokens in the vocabulary of the GPT whose tensors are encoded, which are the rows of its embedding."""
    keep: int = 32
    """Coefficients sent of each 64 x 64 chunk."""
    bits: int = 2
    """Bits of each coefficient sent: 1, 2, 4, 8, 16 or 32."""
    replicas: int = 4
    """Number of payloads that are decoded and averaged."""
    times: int = 7
    """Number of rounds to measure. The fastest and the median are reported."""

    def __post_init__(self) -> None:
        check(self, CODEC_BENCH, ConfigError)
        TopK(keep=self.keep, bits=self.bits)  # refuses values that it cannot work with


TRAIN_BENCH = {
    "batch": limits.BATCH,
    "steps": Limit("steps of a segment", 1, COUNT),
    "segments": Limit("segments of each loop", 1, 10**6),
    "replicas": limits.REPLICAS,
    "threads": limits.THREADS,
}


@dataclass(frozen=True)
class TrainBench(Measured):
    """Measure how fast the loop trains, against torch's DistributedDataParallel and against a bare loop."""

    task: TaskOptions = field(default_factory=lambda: TaskOptions(model="gpt-neox-1m", language=Language(context=128)))
    batch: int = 16
    """Samples of each replica in one step."""
    steps: int = 10
    """Steps of a segment; the loops take turns, one segment each."""
    segments: int = 15
    """Segments of each loop."""
    replicas: int = 2
    """Processes that exchange. With 1 there is no comparison with DistributedDataParallel."""

    def __post_init__(self) -> None:
        check(self, TRAIN_BENCH, ConfigError)
