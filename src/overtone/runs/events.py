"""The schema of the run log: every event that a log may hold, and every field of each.

A log is a file of JSON objects, one per line; each is one event. Real runs and simulations write the same events with
the same fields, through `runs/recorder.py`. A field is always there unless it is marked `NotRequired`; then its text
says why. docs/run-log.md is made from this file by tools/document_run_log.py.

The first line of each session ("start" or "resume") carries the number of the format. Whoever adds, removes or renames
an event or a field, or changes a meaning, must raise `FORMAT` and teach `runs/log.py` to upgrade the number before;
tests/test_run_log.py holds the list that must not change without a new number.
"""
# No `from __future__ import annotations` here: with it, Python takes fields that are NotRequired for required ones.

from typing import Any, Literal, NotRequired, TypedDict

FORMAT = 5
READABLE = (0, 1, 2, 3, 4, 5)  # format numbers; 0 are the logs of overtone 0.1.0, which carry no number

Record = dict[str, Any]  # a line as JSON gives it, before its keys are checked


# -- groups of fields that several events share ----------------------------------------------------------------------


class Stamp(TypedDict):
    """In every event."""

    step: int
    """Local steps that replica 0 had taken; in a run in a store, those that its rounds stand for. In "saved": the step
    that was saved."""
    time: float
    """Seconds since 1970, when the line was written."""


class Cost(TypedDict):
    """What the run has cost so far, as replica 0 counts it."""

    bytes_sent: int
    """Bytes that the method has sent through this replica's interface: rounds and last messages, no upkeep."""
    bytes_received: int
    """Bytes that it has received, counted alike."""
    hops: int
    """Messages that had to wait for one another; each costs the latency of a link."""
    units: int
    """Tokens or samples (see `unit`) that all replicas together have trained on; in a store, this replica alone."""
    seconds: float
    """Wall-clock seconds of training, over all sessions; of a simulation, the seconds that the simulation took."""
    simulated_seconds: NotRequired[float]
    """Virtual seconds on the virtual network. In simulations only: a real run has no virtual clock."""


class Evaluation(TypedDict):
    """How good the model is on the validation samples."""

    metrics: dict[str, float]
    """Metrics of the model that all replicas share; without consensus, of replica 0. "loss" is always among them."""
    losses: NotRequired[list[float]]
    """The loss of each replica, by rank. In real runs without consensus only: with consensus there is one shared model,
    and a simulation would spend its time on measuring every replica."""
    drift: NotRequired[float]
    """The largest distance of a replica's weights from the mean of all replicas, relative to the norm of that mean. In
    simulations always. In real runs only at the end and without consensus: the replicas must send all weights."""
    metrics_average: NotRequired[dict[str, float]]
    """Metrics of the mean of all replicas. In simulations at the end, and without consensus in each validation. In real
    runs only at the end and without consensus: the replicas must send all weights."""


class Host(TypedDict):
    """The machine of one replica."""

    host: str
    """Its name in the network."""
    device: str
    """The device that the replica trains on, in torch's words."""
    name: str
    """The name of that device."""
    threads: int
    """CPU threads of the replica."""
    cores: int | None
    """CPU cores of the machine."""


class Environment(TypedDict):
    """Where the run takes place: enough to tell two machines apart, and to build the same environment again."""

    overtone: str
    """The version of overtone."""
    python: str
    """The version of Python."""
    versions: dict[str, str]
    """Versions of the libraries that are installed, by name."""
    commit: str
    """The commit of overtone's sources, with "-dirty" if they were changed; empty where git does not know it."""
    platform: NotRequired[str]
    """The operating system. Left out of logs that are published, together with `hosts`."""
    world: int
    """Processes that train; 1 for a simulation. To an observer, the members of the run when it began to look."""
    hosts: NotRequired[list[Host]]
    """The machine of each process, by rank. Left out of logs that are published: it names machines. An observer does
    not know them."""
    command: list[str]
    """The command line."""


class Exchanged(TypedDict):
    """How many rounds the cost is of."""

    rounds: int
    """Rounds that are over, without the last messages. A round in flight is not over, and not in the cost yet."""


class InFlight(TypedDict):
    """The round that was in flight when training ended. It had fewer local steps to hide behind than `delay`."""

    steps: int
    """Local steps from its start to the end of training."""
    sent: int
    """Bytes."""
    received: int
    """Bytes."""
    hops: int
    """Messages that had to wait for one another."""


class Ending(Exchanged):
    """The rounds of a finished run, and its last messages, which empty the residuals."""

    rounds_finish: int
    """Last messages."""
    in_flight: NotRequired[InFlight]
    """The last of these rounds, if it was in flight when training ended. Never without a delay."""
    metrics_anchor: NotRequired[dict[str, float]]
    """Metrics of the shared model before the last messages. In simulations only: a real run does not validate twice."""


class PhaseCount(TypedDict):
    """One phase of the ledger."""

    sent: int
    """Bytes."""
    received: int
    """Bytes."""
    waiting: float
    """Seconds that the replica stood still for others; virtual seconds in a simulation."""
    hops: int
    """Messages that had to wait for one another."""
    requests: NotRequired[int]
    """Requests to a store, which bills them, with those that only looked for news. Left out where there were none."""


class Observed(TypedDict):
    """Says that the log is one of `overtone follow`, which trains nothing; the beginning of this page says the rest."""

    store: str
    """Where the run lives."""
    run: str
    """The id of the run, in hexadecimal."""
    from_round: int
    """The first round that is replayed: that of the snapshot with which it begins. If rounds were pruned before they
    could be replayed, a "resume" tells it anew."""
    costs_from: int
    """The first round whose bytes are counted. Those before `from_round` are counted as the store lists them, without
    being read, so that wishes to join are among them. It is above 0 if the rounds before it were pruned."""
    host: Host
    """The machine of the observer."""


class Beginning(TypedDict):
    """Everything that is known before the first step of a session."""

    format: int
    """The number of this format."""
    folder: str
    """The run's directory."""
    simulated: bool
    """Whether virtual replicas in one process trained, or real processes."""
    method: str
    """The name of the method."""
    numbers: dict[str, Any]
    """The options of the method, by name, with all defaults; "every" is always among them."""
    consensus: bool
    """Whether all replicas share one model after each round."""
    parameters: int
    """Parameters of the model."""
    steps: int
    """Local steps that each replica is to take in all."""
    unit: str
    """The unit that the task counts in: tokens, samples."""
    units_per_step: int
    """Units that one replica trains on in one step."""
    data: dict[str, Any]
    """The task's description of its data; "name" is always among the keys."""
    config: dict[str, Any]
    """The whole configuration, by the names of flags, with all defaults."""
    environment: Environment
    """Where the run takes place."""
    observed: NotRequired[Observed]
    """What the observer of a run in a store saw, if it has written the log. In the logs of trainers it is left out."""


# -- the events ------------------------------------------------------------------------------------------------------


class Start(Stamp, Beginning):
    """A run begins."""

    event: Literal["start"]


class Resume(Stamp, Beginning):
    """A run goes on from a checkpoint. Readers drop earlier lines of later steps: these steps were lost."""

    event: Literal["resume"]
    from_replicas: int
    """Replicas that wrote the checkpoint."""
    folded: bool
    """Whether that is another number than now."""


class Train(Stamp, Cost, Exchanged):
    """Every `log_every` steps: how training goes."""

    event: Literal["train"]
    loss: float
    """Training loss of replica 0 in this step."""
    lr: float
    """Learning rate of replica 0 in this step."""
    units_per_second: float
    """Units per second of all replicas together, in this session."""
    seconds_left: float
    """Seconds to the last step, at the speed of this session."""
    waiting_share: float
    """Share of the time in which replica 0 stood still for others; in a simulation, of the virtual time."""


class RoundDone(Stamp):
    """A round of replica 0 is over. A method that exchanges at each step has one event every `log_every` steps."""

    event: Literal["round"]
    index: int
    """Which round, from 0."""
    local_steps: int
    """Local steps since the round before."""
    bytes_sent: int
    """Bytes of this round alone."""
    bytes_received: int
    """Bytes of this round alone."""
    seconds_encoding: float
    """Seconds to make the message."""
    seconds_waiting: float
    """Seconds of the exchange in which training stood still; virtual in a simulation."""
    seconds_hidden: float
    """Seconds of the exchange in which training went on; virtual in a simulation. 0 without a delay."""
    seconds_decoding: float
    """Seconds to read the messages and to apply them."""
    drift_norm: float
    """Norm of this replica's drift; of its gradient, for methods that exchange gradients."""
    residual_norm: float
    """Norm of the residual after the round."""
    anchor_fingerprint: str
    """Fingerprint of the anchor after the round; for methods that exchange gradients, of the weights before it."""
    left_out: list[int]
    """Ranks whose message was refused, if the policy is to go on without them."""
    keep: int | None
    """Coefficients that the controller kept of each 64 x 64 chunk in this round; null if none sets `keep`."""
    control: str
    """Why the controller keeps another number in the next round; empty if it does not."""


class Eval(Stamp, Evaluation, Cost, Exchanged):
    """A validation before the end of training."""

    event: Literal["eval"]


class Checkpoint(Stamp):
    """A checkpoint was begun. Real runs only: a simulation saves nothing."""

    event: Literal["checkpoint"]
    seconds: float
    """Seconds that training stood still for it."""


class Saved(Stamp):
    """A checkpoint is complete on all ranks. Real runs only."""

    event: Literal["saved"]


class Stop(Stamp):
    """A signal asked the run to stop, and everything is saved. Real runs only."""

    event: Literal["stop"]
    why: str
    """The name of the signal."""
    folder: str
    """The run's directory, to resume from."""


class Fail(Stamp):
    """The run gave up, for instance because a loss was not finite. It would fail again."""

    event: Literal["fail"]
    why: str
    """The error, as the user read it."""


class Finish(Stamp, Evaluation, Cost, Ending):
    """The run has come to its end."""

    event: Literal["finish"]
    waiting_share: float
    """Share of the time in which replica 0 stood still for others; in a simulation, of the virtual time."""
    anchor_fingerprint: str
    """Fingerprint of the final weights."""
    bytes: dict[str, PhaseCount]
    """The ledger of replica 0, by phase: setup, rounds, finish, upkeep."""
    shares: dict[str, float]
    """Shares of this session's time, by kind of work; they add up to 1. A simulation works for all replicas, and its
    waiting, which is virtual, takes no time."""
    seconds_starting: float
    """Seconds from the start of the session to its first step."""
    sample: str
    """A text that the trained model writes; empty if the task has none, and in simulations, which do not make one."""


Opening = Start | Resume  # the first event of a session
Event = Start | Resume | Train | RoundDone | Eval | Checkpoint | Saved | Stop | Fail | Finish
EVENTS: dict[str, type] = {
    "start": Start, "resume": Resume, "train": Train, "round": RoundDone, "eval": Eval, "checkpoint": Checkpoint,
    "saved": Saved, "stop": Stop, "fail": Fail, "finish": Finish,
}  # fmt: skip
# Tables whose keys are those of a task, a method or the flags: the schema leaves them open, but readers need these.
NEEDED = {"config": ("seed", "replicas", "task"), "numbers": ("every",), "data": ("name",), "metrics": ("loss",)}
