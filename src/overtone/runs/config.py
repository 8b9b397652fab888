"""The numbers of a run, as dataclasses: what a flag, a file or a script may set."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from overtone.codec import TopK
from overtone.common import limits
from overtone.common.limits import COUNT, Limit, check
from overtone.errors import ConfigError, MethodError
from overtone.methods import Method, method_named
from overtone.tasks.options import Language, TaskOptions
from overtone.world.watchdog import LONGEST


@dataclass(frozen=True)
class MethodChoice:
    """A row of the method table and its numbers; what is left out stays at the method's own default."""

    method: str = "decoupled"
    """Which method: alone, ddp, demo, local_sgd, diloco, sparse_loco, published or decoupled."""
    every: int | None = None
    """Local steps between rounds (papers: H)."""
    keep: int | None = None
    """Coefficients sent of each 64 x 64 chunk."""
    bits: int | None = None
    """Bits per coefficient sent: 1, 2, 4, 8, 16 or 32."""
    outer_lr: float | None = None
    """Learning rate of the outer step."""
    momentum: float | None = None
    """Nesterov momentum of the outer step."""
    decay: float | None = None
    """What the residual (or a private momentum) keeps from round to round."""
    carry: float | None = None
    """How much of the residual stays in the replica's own weights."""
    release: float | None = None
    """How much of what was sent leaves the residual."""
    transform: str | None = None
    """dct, random (a fixed rotation) or none."""
    drain: int | None = None
    """Dense one-bit messages at the end that empty the residuals into the anchor."""

    def build(self) -> Method:
        numbers = {
            ("lr" if name == "outer_lr" else name): value
            for name, value in vars(self).items()
            if name != "method" and value is not None
        }
        try:
            return method_named(self.method, **numbers)
        except MethodError as error:
            told = str(error)  # by the name of the flag
            raise MethodError(f"outer_{told}" if told.startswith("lr=") else told) from None


TRAINING = {
    "steps": limits.STEPS,
    "batch": limits.BATCH,
    "accumulate": Limit("backward passes of a step", 1, 10**9),
    "inner_lr": Limit("the peak learning rate of the inner optimiser", 0, 1e6, above=True),
    "warmup": Limit("steps of warm-up", 0, COUNT),
    "clip": Limit("the largest gradient norm", 0, 1e12, above=True, endless=True),
    "weight_decay": Limit("the weight decay of the inner optimiser", 0, 1e6),
}


@dataclass(frozen=True)
class Training:
    """How each replica trains by itself."""

    steps: int = 1000
    """Local steps of every replica."""
    batch: int = 16
    """Samples per replica and step, in each part of it if there is accumulation."""
    accumulate: int = 1
    """Backward passes per step."""
    inner: Literal["adamw", "sgd", "muon"] = "adamw"
    """The inner optimiser. muon: for matrices, with AdamW for all else."""
    inner_lr: float = 2e-3
    """Peak learning rate of the inner optimiser."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up. cosine: down to a tenth; wsd: stable, then straight down to 0 over the last fifth of it."""
    warmup: int | None = None
    """Steps of linear warm-up; a fifth of all steps by default, for the outer momentum's sake."""
    clip: float = 1.0
    """Largest gradient norm."""
    weight_decay: float = 0.1
    """Weight decay of the inner optimiser."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast the forward pass; weights stay fp32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    recompute: bool = False
    """Gradient checkpointing: less memory for more time, where the model supports it."""

    def __post_init__(self) -> None:
        check(self, TRAINING, ConfigError)

    @property
    def samples(self) -> int:
        """Of each replica in one step."""
        return self.batch * self.accumulate

    def resolved(self) -> Training:
        """With everything said that was left to a default."""
        return self if self.warmup is not None else replace(self, warmup=self.steps // 5)


NETWORK = {
    "bandwidth": Limit("Mbit/s of every replica", 0, 1e12, above=True),
    "latency": Limit("milliseconds from replica to replica", 0, 1e12),
    "step_seconds": Limit("virtual seconds of a local step", 0, 1e12),
}


@dataclass(frozen=True)
class Network:
    """The virtual network and its virtual time."""

    bandwidth: float = 50.0
    """Mbit/s of every replica, each way."""
    latency: float = 20.0
    """Milliseconds from replica to replica."""
    step_seconds: float = 0.1
    """Virtual seconds that a local step takes."""

    def __post_init__(self) -> None:
        check(self, NETWORK, ConfigError)


@dataclass(frozen=True)
class Simulation:
    """Train a task with K virtual replicas in one process, on a virtual network."""

    choice: MethodChoice = field(default_factory=MethodChoice)
    replicas: int = 4
    """Virtual replicas (papers: K)."""
    seed: int = 0
    """Seed of initial weights and data order."""
    json: Path | None = None
    """Write the result here, as one JSON object."""
    out: Path | None = None
    """Write a run log into this directory, for `overtone report`."""
    eval_every: int | None = None
    """Steps between validations; a tenth of all steps by default, up to the next round."""
    log_every: int = 10
    """Steps between lines of the run log."""
    task: TaskOptions = field(default_factory=TaskOptions)
    training: Training = field(default_factory=Training)
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        check(self, {"replicas": limits.REPLICAS, "seed": limits.SEED, **limits.WRITING}, ConfigError)

    def resolved(self) -> Simulation:
        """With everything said that was left to a default."""
        tenth = _tenth(self.training.steps, self.choice.build().every)
        return replace(self, training=self.training.resolved(), eval_every=self.eval_every or tenth)


COMPARISON = {
    "every": Limit("local steps between rounds", 1, COUNT),
    "replicas": limits.REPLICAS,
    "workers": limits.WORKERS,
}


@dataclass(frozen=True)
class Comparison:
    """Several methods on the same task, data, samples and seeds: a live table, then one page.

    Runs that are finished are kept: the same command goes on where it was cut off.
    """

    methods: tuple[str, ...] = ("alone", "ddp", "diloco:outer_lr=0.9,momentum=0.8", "published", "decoupled")
    """What to compare: NAME, or NAME:key=value,key=value with the names of flags, such as decoupled:keep=512,bits=2."""
    every: int = 10
    """Local steps between rounds (papers: H), for the methods that take it."""
    seeds: tuple[int, ...] = (0,)
    """Each method is run once with each."""
    replicas: int = 4
    """Replicas that exchange (papers: K)."""
    processes: bool = False
    """Real replicas, a process each on this machine, in place of virtual ones."""
    workers: int | None = None
    """Runs at a time; by default one for each core, and one with --processes."""
    out: Path | None = None
    """Where the runs and the page go; by default a new directory below runs/."""
    title: str = "overtone: methods side by side"
    """Of the page."""
    eval_every: int | None = None
    """Steps between validations; a tenth of all steps by default, up to the next round."""
    log_every: int = 10
    """Steps between lines of the run logs."""
    task: TaskOptions = field(default_factory=TaskOptions)
    training: Training = field(default_factory=Training)
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        check(self, {**COMPARISON, **limits.WRITING}, ConfigError)
        for name in ("methods", "seeds"):
            given = getattr(self, name)
            if not given:
                raise ConfigError(f"{name}: at least one")
            if len(set(given)) < len(given):
                raise ConfigError(f"{name} {' '.join(map(str, given))}: one of them is given twice")
        for seed in self.seeds:
            if not limits.SEED.takes(seed):
                raise ConfigError(f"seeds {limits.shown(seed)}: {limits.SEED}")


SAVING = {
    **limits.WRITING,
    "checkpoint_every": Limit("steps between checkpoints", 1, COUNT),
    "keep_checkpoints": Limit("complete checkpoints to keep", 1, COUNT),
}


@dataclass(frozen=True)
class Saving:
    """What a run leaves behind, and when."""

    eval_every: int | None = None
    """Steps between validations; a tenth of all steps by default, up to the next round."""
    log_every: int = 10
    """Steps between lines of the run log."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; likewise."""
    keep_checkpoints: int = 2
    """How many complete ones to keep."""
    track: Literal["none", "wandb", "trackio"] = "none"
    """Send the metrics there too; the run log and TensorBoard have them always."""

    def __post_init__(self) -> None:
        check(self, SAVING, ConfigError)

    def resolved(self, tenth: int) -> Saving:
        return replace(self, eval_every=self.eval_every or tenth, checkpoint_every=self.checkpoint_every or tenth)


RUN = {
    "replicas": limits.REPLICAS,
    "seed": limits.SEED,
    "threads": limits.THREADS,
    "timeout": Limit("seconds to wait for a replica that does not answer", 0, LONGEST, above=True),
}


@dataclass(frozen=True)
class Run:
    """Train a task: spawns the replicas on this machine, or joins the world that torchrun started."""

    choice: MethodChoice = field(default_factory=MethodChoice, metadata={"table": "method"})
    replicas: int = 2
    """Replicas to start here; under torchrun its world counts."""
    seed: int = 0
    """Seed of initial weights and data order."""
    out: Path | None = None
    """The run's directory; by default a new one below runs/."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU for each replica if there are enough."""
    threads: int | None = None
    """CPU threads of each replica; by default half of the cores shared among them, at least one."""
    timeout: float | None = None
    """Seconds to wait for a replica that does not answer; by default several rounds, and ten minutes at least."""
    task: TaskOptions = field(default_factory=TaskOptions)
    training: Training = field(default_factory=Training)
    saving: Saving = field(default_factory=Saving)

    def __post_init__(self) -> None:
        check(self, RUN, ConfigError)

    def resolved(self) -> Run:
        """With everything said that was left to a default."""
        saving = self.saving.resolved(_tenth(self.training.steps, self.choice.build().every))
        return replace(self, training=self.training.resolved(), saving=saving)


def _tenth(steps: int, every: int | None) -> int:
    """Of all steps, up to the next round: between two rounds the anchor does not move."""
    return -(-max(1, steps // 10) // (every or 1)) * (every or 1)


CODEC_BENCH = {
    "width": limits.SIZES["width"],
    "layers": limits.SIZES["layers"],
    "words": Limit("rows of the embedding", 1, 10**9),
    "replicas": Limit("payloads to average", 1, 4096),
    "times": Limit("rounds to take the best of", 1, 10**6),
    "threads": limits.THREADS,
}


@dataclass(frozen=True)
class CodecBench:
    """A round's encoding and decoding, against the published path and against memory."""

    width: int = 768
    """Width of the GPT whose tensors are used; with its layers and words, GPT-2 small by default."""
    layers: int = 12
    words: int = 50257
    keep: int = 32
    """Coefficients sent of each 64 x 64 chunk."""
    bits: int = 2
    """Bits per coefficient sent: 1, 2, 4, 8, 16 or 32."""
    replicas: int = 4
    """Payloads to average."""
    times: int = 3
    """Rounds to take the best of."""
    threads: int = 1
    """Threads that torch may use."""
    json: Path | None = None
    """Write everything measured here, as one JSON object."""

    def __post_init__(self) -> None:
        check(self, CODEC_BENCH, ConfigError)
        TopK(keep=self.keep, bits=self.bits)  # refuses what it cannot work with


TRAIN_BENCH = {
    "batch": limits.BATCH,
    "steps": Limit("steps of a segment", 1, COUNT),
    "segments": Limit("segments of each contestant", 1, 10**6),
    "replicas": limits.REPLICAS,
    "threads": limits.THREADS,
}


@dataclass(frozen=True)
class TrainBench:
    """The loop's speed: ddp against torch's own DistributedDataParallel, one replica against the bare loop."""

    task: TaskOptions = field(default_factory=lambda: TaskOptions(model="gpt-neox-1m", language=Language(context=128)))
    batch: int = 16
    """Samples per replica and step."""
    steps: int = 10
    """Steps of a segment."""
    segments: int = 15
    """Segments of each contestant."""
    replicas: int = 2
    """Processes that exchange; 1 leaves that comparison out."""
    threads: int = 1
    """CPU threads of each process."""
    json: Path | None = None
    """Write everything measured here, as one JSON object."""

    def __post_init__(self) -> None:
        check(self, TRAIN_BENCH, ConfigError)
