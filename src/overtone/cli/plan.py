"""`overtone plan` and `overtone train --dry-run`: how a method treats the tensors of a model, before anything runs.

Which tensors are compressed, which travel densely, the bytes of a round, the memory of a replica. The codec decides;
this module asks it and prints the answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from rich.console import Group
from rich.table import Table

from overtone.cli.console import out
from overtone.codec import Payload, TopK
from overtone.coding.chunks import Slab
from overtone.common import limits
from overtone.common.limits import human_bytes
from overtone.errors import ConfigError
from overtone.exchange.choice import Cost, cost_of, costs_of
from overtone.exchange.control import LEAST_KEEP, Controller
from overtone.exchange.message import HEADER_BYTES, Seal
from overtone.ledger import Count
from overtone.methods import METHODS, STORE, Method, method_named, takes
from overtone.runs import advice
from overtone.runs.config import MethodChoice, Run
from overtone.runs.optimizers import INNER_STATES
from overtone.sim.store import mean_cost
from overtone.swarm.records import MOST_MEMBERS
from overtone.tasks import TaskOptions, load_task


@dataclass(frozen=True)
class Plan:
    """Print how each tensor of a model travels, and the bytes of a round."""

    choice: MethodChoice = field(default_factory=MethodChoice)
    task: TaskOptions = field(default_factory=TaskOptions)
    replicas: int = 4
    """Replicas that exchange (papers: K)."""

    def __post_init__(self) -> None:
        limits.check(self, {"replicas": limits.REPLICAS}, ConfigError)


def run_plan(flags: Plan) -> None:
    """Print the plan."""
    shapes = shapes_of(flags.task)
    out.print(describe(within_budget(flags.choice.build(), shapes, flags.replicas), shapes, flags.replicas))


def within_budget(method: Method, shapes: Mapping[str, tuple[int, ...]], replicas: int) -> Method:
    """The method with the `keep` that its budget pays for in the first round."""
    if method.budget is None or replicas == 1:
        return method
    cost = costs_of(method, _slabs(method, shapes), (), replicas)
    controller = Controller(method.budget, cost, cost(LEAST_KEEP))
    return method.with_keep(controller.begin().keep)


def describe(method: Method, shapes: Mapping[str, tuple[int, ...]], replicas: int) -> Group:
    """A table with one line per tensor, and a paragraph on the whole message."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("tensor", "shape", "travels", "bytes"):
        shown.add_column(column, justify="right" if column == "bytes" else "left")
    for name, shape in shapes.items():
        travels, size = how(method, shape)
        shown.add_row(name, "x".join(map(str, shape)) or "scalar", travels, human_bytes(round(size)))
    return Group(shown, "", _in_all(method, shapes, replicas))


def shapes_of(options: TaskOptions) -> dict[str, tuple[int, ...]]:
    """The shapes of the exchanged tensors of a task's model, built without memory for its weights and without data."""
    with torch.device("meta"):
        model = load_task(replace(options, data="none"), to_train=False).model()
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def dry_run(config: Run) -> Group:
    """The cost of a run: parameters, bytes per round of each method, memory of each replica."""
    shapes = shapes_of(config.task)
    parameters = sum(map(math.prod, shapes.values()))
    world = config.replicas
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("method", "every", "message", "sent a round", "sent in all", "memory"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    every = {key: value for key, value in config.choice.options().items() if key == "every"}
    for name in METHODS:
        options = every if "every" in takes(name) else {}
        chosen = name == config.choice.method
        method = within_budget(config.choice.build(), shapes, world) if chosen else method_named(name, **options)
        message, count = round_bytes(method, shapes, world)
        rounds = config.training.steps // method.every if method.every else 0
        shown.add_row(
            f"[bold]{name}[/bold]" if chosen else name,
            str(method.every or "never"),
            human_bytes(message),
            human_bytes(count.sent),
            human_bytes(count.sent * rounds),
            human_bytes(memory(method, shapes, config.training.inner)),
        )
    training = config.training
    return Group(
        f"{config.task.task}, {config.task.model or 'the default model'}: {parameters:,} parameters, {world} replicas, "
        f"{training.steps:,} steps of {training.samples:,} samples each",
        shown,
        "[dim]sent: bytes of one replica, about the least possible; in all: without the last messages.\n"
        "memory: of one replica for weights, gradients, inner optimizer and exchange, in fp32. Activations are not\n"
        "counted, nor the copy of all but the gradients in main memory from which checkpoints are written.[/dim]",
    )


def memory(method: Method, shapes: Mapping[str, tuple[int, ...]], inner: str) -> int:
    """The bytes of a replica's state, counted on tensors without content that are made as the replica makes them."""
    weights = sum(map(math.prod, shapes.values()))
    layout = method.codec.layout([torch.Size(shape) for shape in shapes.values()])
    with torch.device("meta"):
        state = method.rule.begin(torch.empty(layout.size), lossless=method.codec.lossless)
        start = layout.size if method.every is not None and method.signal.keeps_start else 0
    if method.every is None:
        state = {}
    exchange = start + sum(tensor.numel() for tensor in state.values())
    return 4 * (exchange + weights * (2 + INNER_STATES[inner]))


def how(method: Method, shape: tuple[int, ...]) -> tuple[str, float]:
    """How a tensor travels, in words, and about how many bytes of a message it takes."""
    if method.every is None:
        return "never", 0.0
    codec = method.codec
    slabs = codec.layout([shape]).slabs
    if all(slab.plain for slab in slabs):
        (width,) = {codec.width(slab) for slab in slabs}
        size = sum(map(codec.bits_of, slabs)) / 8
        part = sum(map(codec.kept, slabs)) / sum(slab.size for slab in slabs)
        which = "densely" if part == 1 else f"the strongest {part:.0%}"
        return f"{which}, {'fp32' if width == 32 else 'bf16'}", size
    chunks: dict[tuple[int, int], int] = {}
    for slab in slabs:
        chunks[slab.h, slab.w] = chunks.get((slab.h, slab.w), 0) + slab.chunks
    kept = {(slab.h, slab.w): codec.kept(slab) for slab in slabs}
    words = [f"{kept[h, w]} of each {h}x{w} ({n})" for (h, w), n in chunks.items()]
    return ", ".join(words), sum(map(codec.bits_of, slabs)) / 8


def round_bytes(method: Method, shapes: Mapping[str, tuple[int, ...]], replicas: int) -> tuple[int, Count]:
    """The approximate bytes of a message, and those that a replica sends and receives in a round."""
    if method.every is None:
        return 0, Count()
    payload = sum(how(method, shape)[1] for shape in shapes.values())
    message = round(payload + HEADER_BYTES + Seal().size)
    if method.codec.payload is Payload.NUMBERS:
        count = Count()
        count.summed(round(payload), replicas)
        return message, count
    if method.exchange == STORE:
        return message, mean_cost(message, replicas)
    cost = _cost(method, shapes, replicas)
    each_way = cost.of(cost.chosen(method.exchange))
    return message, Count(each_way, each_way)


def _cost(method: Method, shapes: Mapping[str, tuple[int, ...]], replicas: int) -> Cost:
    """What the patterns would cost. Buffers are not counted: the model was built without them."""
    return cost_of(method, _slabs(method, shapes), (), replicas)


def _slabs(method: Method, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Slab]:
    return method.codec.layout([torch.Size(shape) for shape in shapes.values()]).slabs


def _in_all(method: Method, shapes: Mapping[str, tuple[int, ...]], replicas: int) -> str:
    parameters = sum(map(math.prod, shapes.values()))
    if method.every is None:
        return f"{method.name}: {parameters / 1e6:.2f} M parameters, nothing is ever sent."
    message, count = round_bytes(method, shapes, replicas)
    received = "" if count.received == count.sent else f" and receives {human_bytes(count.received)}"
    lossy = "" if method.codec.lossless else f"\n{method.codec.describe()}"
    return (
        f"{method.name}: {parameters / 1e6:.2f} M parameters, {human_bytes(message)} per message, every "
        f"{method.every} steps, {_pattern(method, shapes, replicas)}: each of {replicas} replicas sends about "
        f"{human_bytes(count.sent)}{received} a round, {8 * message / parameters:.3g} bits per parameter and message."
        f"{lossy}{_control(method)}{_rounds(method, shapes, replicas)}"
    )


def _control(method: Method) -> str:
    """What a controller does with `keep` during a run."""
    if method.budget is None:
        return ""
    assert isinstance(method.codec, TopK), "checked when the method was built"
    told = f"\nkeep is {method.codec.keep} at first"
    if method.budget.bytes:
        return f"{told}, which is what {method.budget} pay for."
    return f"{told}, then what {method.budget} pays for, which depends on the time of a round."


def _rounds(method: Method, shapes: Mapping[str, tuple[int, ...]], replicas: int) -> str:
    """How many rounds a run should have, by the rule of thumb."""
    if method.codec.payload is Payload.NUMBERS or method.every is None:
        return ""
    pattern = _cost(method, shapes, replicas).chosen(method.exchange)
    share = advice.delta(method, replicas, pattern)
    if share is None:
        return ""
    rounds = advice.rounds_needed(share)
    return (
        f"\nA round takes about {share:.1%} of what a replica owes. By a rule of thumb, a run needs {rounds:,} rounds "
        f"to come near DiLoCo, here {rounds * method.every:,} steps; with fewer, keep more or exchange more often."
    )


def _pattern(method: Method, shapes: Mapping[str, tuple[int, ...]], replicas: int) -> str:
    """How messages meet, and why in this way."""
    if method.codec.payload is Payload.NUMBERS:
        return "summed on the way"
    cost = _cost(method, shapes, replicas)
    chosen = STORE if method.exchange == STORE else cost.chosen(method.exchange)
    words = {
        "gathered": "gathered by all",
        "sharded": "sharded (each replica averages a part of the model for all)",
        STORE: "in a store (each replica writes its message there, and reads all others)",
    }
    if cost.sharded is None or replicas == 1:
        return words[chosen]
    each_way = {"gathered": cost.gathered, "sharded": cost.sharded}
    others = [f"{human_bytes(size)} {name}" for name, size in each_way.items() if name != chosen]
    if chosen != STORE and not method.unfit_for_store and replicas <= MOST_MEMBERS:
        there = mean_cost(round_bytes(method, shapes, replicas)[0], replicas)
        others.append(f"{human_bytes(there.sent)} up and {human_bytes(there.received)} down in a store")
    instead = f"a round would be about {', '.join(others)}"
    if method.exchange != "auto":
        return f"{words[chosen]}, as asked ({instead})"
    if all(size > each_way[chosen] for name, size in each_way.items() if name != chosen):
        return f"{words[chosen]}, because that is cheaper ({instead})"
    return f"{words[chosen]}, because sharding would save less than a tenth and take more hops ({instead})"
