"""The configuration of a run, as dataclasses. A flag, a TOML file or a script may set every field.

A field is a flag and a key of a TOML file. The text below a field is what `--help` shows beside the flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from overtone.common import limits
from overtone.common.limits import COUNT, Limit, check
from overtone.errors import ConfigError
from overtone.methods import METHODS, OPTIONS, Method, method_named, takes
from overtone.sim.network import Link
from overtone.tasks.options import TaskOptions
from overtone.world.watchdog import LONGEST

# -- the method and its options ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    method: str = field(default="decoupled", metadata={"help": f"The method: {', '.join(METHODS)}."})

    def options(self) -> dict[str, Any]:
        """The options that were given. The method itself has a default for each of the others."""
        return {name: value for name, value in vars(self).items() if name != "method" and value is not None}

    def build(self) -> Method:
        """The method with these options. An option that it does not take is refused."""
        return method_named(self.method, **self.options())


if TYPE_CHECKING:

    class MethodChoice(_Choice):
        """A method and its options; at runtime each option of each method is a field."""

        def __init__(self, method: str = "decoupled", **options: int | float | str | None) -> None: ...

else:

    def _option_fields():
        """A field for each option of each method, found in the methods' signatures: a new row needs no list here."""
        kinds = {}
        for row in METHODS.values():
            kinds |= {name: kind for name, kind in get_type_hints(row).items() if name != "return"}
        order = [*OPTIONS, *kinds]
        for name in sorted(kinds, key=order.index):
            found = {row: takes(row)[name] for row in METHODS if name in takes(row)}
            # None: it follows from other options, as its help says.
            defaults = ", ".join(f"{row} {'as said' if value is None else value}" for row, value in found.items())
            help_text = f"{OPTIONS.get(name, '')} By default {defaults}; other methods do not have this option."
            yield name, kinds[name] | None, field(default=None, metadata={"help": help_text})

    MethodChoice = make_dataclass("MethodChoice", _option_fields(), bases=(_Choice,), frozen=True)
    MethodChoice.__module__ = __name__
    MethodChoice.__doc__ = "The method and its options. An option that is not given stays at the method's own default."


# -- the parts of a configuration --------------------------------------------------------------------------------------

TRAINING = {
    "steps": limits.STEPS,
    "batch": limits.BATCH,
    "accumulate": Limit("backward passes of a step", 1, 10**9),
    "inner_lr": Limit("the peak learning rate of the inner optimizer", 0, 1e6, above=True),
    "warmup": Limit("steps of warm-up", 0, COUNT),
    "clip": Limit("the largest gradient norm", 0, 1e12, above=True, endless=True),
    "weight_decay": Limit("the weight decay of the inner optimizer", 0, 1e6),
}


@dataclass(frozen=True)
class Training:
    """How each replica trains between two rounds."""

    steps: int = 1000
    """Local steps of every replica."""
    batch: int = 16
    """Samples of each replica in one backward pass."""
    accumulate: int = 1
    """Backward passes per step; the step uses the mean of their gradients."""
    inner: Literal["adamw", "sgd", "muon"] = "adamw"
    """The inner optimizer. muon trains the matrices with Muon and all other parameters with AdamW."""
    inner_lr: float = 2e-3
    """Peak learning rate of the inner optimizer."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. cosine: falls to a tenth; wsd: constant, then falls to 0 over the last fifth."""
    warmup: int | None = None
    """Steps of linear warm-up. By default a fifth of all steps."""
    clip: float = 1.0
    """Largest norm of the gradient; larger gradients are scaled down to it."""
    weight_decay: float = 0.1
    """Weight decay of the inner optimizer."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the forward pass. bf16 uses autocast; the weights stay fp32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    recompute: bool = False
    """Gradient checkpointing: less memory for more time. Only some models support it."""

    def __post_init__(self) -> None:
        check(self, TRAINING, ConfigError)

    @property
    def samples(self) -> int:
        """Samples of each replica in one step."""
        return self.batch * self.accumulate

    def resolved(self) -> Training:
        """The same with a value for every field whose default depends on other fields."""
        # A long warm-up: at the beginning the drift is large and steady, and the outer momentum multiplies it.
        return self if self.warmup is not None else replace(self, warmup=self.steps // 5)


NETWORK = {
    "bandwidth": Limit("Mbit/s of every replica", 0, 1e12, above=True),
    "up": Limit("Mbit/s that every replica can send", 0, 1e12, above=True),
    "down": Limit("Mbit/s that every replica can receive", 0, 1e12, above=True),
    "latency": Limit("milliseconds from replica to replica", 0, 1e12),
    "step_seconds": Limit("virtual seconds of a local step", 0, 1e12),
}


@dataclass(frozen=True)
class Network:
    """The virtual network and its virtual time."""

    bandwidth: float = 50.0
    """Bandwidth of every virtual replica in Mbit/s, in each direction."""
    up: float | None = None
    """Bandwidth in Mbit/s with which a virtual replica sends. By default that of both directions."""
    down: float | None = None
    """Bandwidth in Mbit/s with which a virtual replica receives. By default that of both directions."""
    latency: float = 20.0
    """Milliseconds that a message takes from one virtual replica to another."""
    step_seconds: float = 0.1
    """Virtual seconds that a local step takes."""

    def __post_init__(self) -> None:
        check(self, NETWORK, ConfigError)

    @property
    def rates(self) -> tuple[float, float]:
        """Mbit/s up and down."""
        up, down = (self.bandwidth if rate is None else rate for rate in (self.up, self.down))
        return up, down

    @property
    def link(self) -> Link:
        """The connection of every virtual replica."""
        up, down = self.rates
        return Link(bandwidth=up * 1e6, latency=self.latency / 1e3, download=down * 1e6)


@dataclass(frozen=True)
class Logging:
    """How often a run validates and writes to its log."""

    eval_every: int | None = None
    """Steps between two validations. By default a tenth of all steps, rounded up to the end of a round."""
    log_every: int = 10
    """Steps between two lines of the run log."""
    spectrum: int = 0
    """Rounds whose signal is looked at, spread over the run; `overtone spectrum` draws it. 0: none."""


SAVING = {
    **limits.WRITING,
    "checkpoint_every": Limit("steps between checkpoints", 1, COUNT),
    "keep_checkpoints": Limit("complete checkpoints to keep", 1, COUNT),
}


@dataclass(frozen=True)
class Saving(Logging):
    """What a run writes, and how often."""

    checkpoint_every: int | None = None
    """Steps between two checkpoints. By default a tenth of all steps, rounded up to the end of a round."""
    keep_checkpoints: int = 2
    """Number of complete checkpoints to keep; older ones are deleted."""
    track: Literal["none", "wandb", "trackio"] = "none"
    """Service that receives the metrics as well. The run log and TensorBoard always have them."""

    def __post_init__(self) -> None:
        check(self, SAVING, ConfigError)

    def resolved(self, tenth: int) -> Saving:
        """The same with a value for every field whose default depends on the number of steps."""
        return replace(self, eval_every=self.eval_every or tenth, checkpoint_every=self.checkpoint_every or tenth)


STORED = {
    "min_replicas": Limit("replicas that must have posted", 1, 1 << 16),
    "snapshot_every": Limit("rounds between two snapshots", 1, 10**9),
}


@dataclass(frozen=True)
class Stored:
    """A run that lives in a store: object storage, where replicas come and go."""

    store: str | None = None
    """The place of the run: a folder, s3://…, gs://… or az://…. This process joins it as one replica."""
    name: str | None = None
    """Who this replica is in the store. By default the host's name and a number. A restart goes on under its name."""
    min_replicas: int | None = None
    """Replicas that must have posted before a round is committed without the others. By default half of the members."""
    snapshot_every: int = 10
    """Rounds between two snapshots in the store, from which newcomers start."""
    wait: bool = False
    """Stand still until a round is committed, instead of training on."""

    def __post_init__(self) -> None:
        check(self, STORED, ConfigError)


# -- whole configurations ----------------------------------------------------------------------------------------------


# The order of the base classes is the order of the flags in `--help`, the last base class first.


@dataclass(frozen=True)
class OneRun:
    """The fields that belong to one run, simulated or real."""

    choice: MethodChoice = field(default_factory=MethodChoice, metadata={"table": "method"})
    seed: int = 0
    """Seed of the first weights and of the order of the data."""


@dataclass(frozen=True)
class Shared:
    """The fields that a simulated run, a real run and a comparison of several runs have in common."""

    replicas: int = 4
    """Replicas that exchange (papers: K)."""
    out: Path | None = None
    """Directory for everything that is written. By default a new directory below runs/."""
    task: TaskOptions = field(default_factory=TaskOptions)
    training: Training = field(default_factory=Training)


@dataclass(frozen=True)
class Simulation(Logging, Shared, OneRun):
    """Train a task with K virtual replicas in one process, on a virtual network."""

    out: Path | None = None
    """Directory for a run log, which `overtone report` reads. By default there is no log."""
    json: Path | None = None
    """File for the result, as one JSON object."""
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        check(self, {"replicas": limits.REPLICAS, "seed": limits.SEED, **limits.WRITING}, ConfigError)

    def resolved(self) -> Simulation:
        """The same with a value for every field whose default depends on other fields."""
        tenth = _tenth(self.training.steps, self.choice.build().every)
        return replace(self, training=self.training.resolved(), eval_every=self.eval_every or tenth)


RUN = {
    "replicas": limits.REPLICAS,
    "seed": limits.SEED,
    "threads": limits.THREADS,
    "timeout": Limit("seconds to wait for a replica that does not answer", 0, LONGEST, above=True),
}


@dataclass(frozen=True)
class Run(Shared, OneRun):
    """The run itself. These values are what config.toml in the run's directory holds."""

    replicas: int = 2
    """Replicas to start on this machine. Under torchrun the size of its world counts instead."""
    out: Path | None = None
    """The run's directory. By default a new directory below runs/."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of each replica. auto: one GPU for each replica if there are enough, else the CPU."""
    threads: int | None = None
    """CPU threads of each replica. By default half of the cores divided by the number of replicas, at least one."""
    timeout: float | None = None
    """Seconds to wait for a replica that does not answer. By default several rounds, and at least ten minutes."""
    saving: Saving = field(default_factory=Saving)
    stored: Stored = field(default_factory=Stored, metadata={"table": "store"})

    def __post_init__(self) -> None:
        check(self, RUN, ConfigError)

    def resolved(self) -> Run:
        """The same with a value for every field whose default depends on other fields."""
        saving = self.saving.resolved(_tenth(self.training.steps, self.choice.build().every))
        return replace(self, training=self.training.resolved(), saving=saving)


def handed_on(config: object, group: type) -> dict[str, Any]:
    """The fields of ``group``, a base class of this configuration, to build another configuration with."""
    return {f.name: getattr(config, f.name) for f in fields(group)}


def _tenth(steps: int, every: int | None) -> int:
    """A tenth of all steps, rounded up to the end of a round: between two rounds the anchor does not move."""
    return -(-max(1, steps // 10) // (every or 1)) * (every or 1)
