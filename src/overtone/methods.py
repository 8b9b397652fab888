"""The table of methods. A method is a row of it: a signal, the steps between rounds, a rule and a codec.

No code compares the names of methods. A new idea is a new rule or codec, and so a new row here. To add a row, write a
function that returns a `Method` and put it into `METHODS`. The tests that all methods share then include it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from overtone.codec import FULL_CHUNK, Codec, Dense, TopK
from overtone.errors import MethodError
from overtone.exchange.control import Budget
from overtone.exchange.signals import Drift, Gradient, Signal, Silence
from overtone.rules import DeMo, Mean, Outer, Published, Rule

MOST_EVERY = 10**12
STORE = "store"  # the exchange of a run that lives in object storage (overtone/swarm)
EXCHANGES = ("auto", "gathered", "sharded", STORE)
UNSAID = (
    ("plain_keep", FULL_CHUNK),
)  # numbers of a codec that earlier versions did not have, with what they then were
AUTO = "auto"  # a number of a rule that follows from the round
MOST_DRAIN = 1024  # each draining message is dense; twelve of them remove most of the residuals


@dataclass(frozen=True)
class Method:
    """A row of the table. ``every`` is the number of local steps between rounds; None means no rounds at all."""

    name: str
    signal: type[Signal]
    every: int | None
    rule: Rule
    codec: Codec
    drain: int = 0  # dense one-bit messages that `finish` sends to empty the residuals
    delay: int = 0  # local steps from the start of a round until its answer is absorbed
    exchange: str = "gathered"  # how messages meet: "gathered", "sharded", "auto" (the cheaper one), or "store"
    keep_down: int | None = None  # if sharded: `keep` of the owners' letters; None: exchange/choice.py chooses it
    first_rounds: int = 0  # so many rounds at the beginning have another `keep`,
    first_keep: int | None = None  # namely this one
    budget: Budget | None = None  # bytes of a round, from which `keep` follows

    def __post_init__(self) -> None:
        # `type(...) is int`, not `isinstance`: True and False are refused.
        if self.every is not None and not (type(self.every) is int and 1 <= self.every <= MOST_EVERY):
            raise MethodError(
                f"every={self.every!r}: local steps between rounds, a whole number from 1 to {MOST_EVERY}"
            )
        if not self.signal.inner_first and self.every != 1:
            raise MethodError(f"every={self.every}: gradient methods exchange at each step; use every=1 or diloco()")
        if not (type(self.drain) is int and 0 <= self.drain <= MOST_DRAIN):
            raise MethodError(f"drain={self.drain!r}: last messages, a whole number from 0 to {MOST_DRAIN}")
        if self.drain and (self.rule.draining() is None or self.codec.whole is None):
            raise MethodError(
                f"drain={self.drain}: this rule and codec leave no residual to drain; only the Outer rule with a TopK "
                "codec does"
            )

        self._check_delay()
        self._check_exchange()
        self._check_first_rounds()
        if self.budget is not None and not self.may_shard:
            raise MethodError(
                f"budget={self.budget}: {self.name} has no `keep` to control; only the Outer rule on the drift, with a "
                "TopK codec, has"
            )

    def _check_delay(self) -> None:
        most = 0 if self.every is None or not self.signal.keeps_start else self.every
        if type(self.delay) is int and 0 <= self.delay <= most:
            return
        if self.delay and not self.signal.keeps_start:
            raise MethodError(
                f"delay={self.delay!r}: {self.name} exchanges no drift, so the inner step must wait for the answer; "
                "only methods that exchange the drift of weights can train on meanwhile"
            )
        raise MethodError(
            f"delay={self.delay!r}: local steps until a round is absorbed, a whole number from 0 to every={self.every}"
        )

    def _check_first_rounds(self) -> None:
        if not (type(self.first_rounds) is int and 0 <= self.first_rounds <= MOST_EVERY):
            raise MethodError(
                f"first_rounds={self.first_rounds!r}: rounds at the beginning, a whole number from 0 to {MOST_EVERY}"
            )
        if bool(self.first_rounds) != (self.first_keep is not None):
            given, other = ("first_rounds", "first_keep") if self.first_rounds else ("first_keep", "first_rounds")
            raise MethodError(f"{given}={getattr(self, given)!r}: means nothing without {other}; give both")
        if self.first_keep is None:
            return
        if not self.may_shard or self.budget is not None:
            why = (
                "the budget sets `keep`" if self.budget is not None else f"{self.name} has no `keep` that could change"
            )
            raise MethodError(f"first_keep={self.first_keep!r}: {why}; leave it out")
        self.with_keep(self.first_keep)  # refuses a number that is none

    def _check_exchange(self) -> None:
        if self.exchange not in EXCHANGES:
            raise MethodError(f"exchange={self.exchange!r}: choose one of {', '.join(EXCHANGES)}")
        if self.exchange == STORE:
            if why := self.unfit_for_store:
                raise MethodError(why)
        elif self.exchange != "gathered" and not self.may_shard:
            raise MethodError(
                f"exchange={self.exchange!r}: {self.name} cannot be sharded; only the Outer rule on the drift, with a "
                "TopK codec, can"
            )
        if self.keep_down is None:
            return
        if not self.may_have_owners:
            raise MethodError(
                f"keep_down={self.keep_down!r}: with exchange={self.exchange!r} there are no owners and no letters; "
                "use exchange='sharded'"
            )
        if not (type(self.keep_down) is int and 1 <= self.keep_down <= FULL_CHUNK):
            raise MethodError(
                f"keep_down={self.keep_down!r}: coefficients of each {FULL_CHUNK} in an owner's letter; use 1 to "
                f"{FULL_CHUNK}"
            )

    @property
    def may_shard(self) -> bool:
        """True if owners can average parts for all: they must know the divisor, and senders must be able to owe."""
        drifts = self.signal.keeps_start and self.every is not None
        return drifts and isinstance(self.codec, TopK) and isinstance(self.rule, Outer)

    @property
    def may_have_owners(self) -> bool:
        """True if the exchange may be sharded."""
        return self.exchange not in ("gathered", STORE)

    @property
    def unfit_for_store(self) -> str:
        """Why this row cannot live in a store; empty if it can. A delay is not looked at: real replicas of a store
        never wait, and in the simulator a delay stands for that."""
        told = f"{self.name}: cannot live in a store"
        if self.every is None:
            return f"{told}: it never exchanges anything; leave the store out"
        if not self.signal.keeps_start:
            return f"{told}: it exchanges gradients at every step; use decoupled(), or torchrun"
        if not self.consensus:
            return f"{told}: its replicas share no anchor that could be replayed; use decoupled()"
        if self.drain:
            return f"drain={self.drain}: replicas of a store do not end together; use drain=0"
        if self.budget is not None:
            return f"budget={self.budget}: not with a store yet; give keep or a preset"
        if self.first_rounds:
            return f"first_rounds={self.first_rounds}: not with a store yet; leave it out"
        return ""

    @property
    def consensus(self) -> bool:
        """True if all replicas share one anchor."""
        return self.every is not None and self.rule.consensus

    def draining(self) -> Method:
        """The row for the last messages: every coefficient at one bit, step 1, no momentum."""
        rule, codec = self.rule.draining(), self.codec.whole
        assert rule is not None, "checked when the method was built"
        assert codec is not None, "checked when the method was built"
        # Letters of the last messages have every coefficient too.
        keep_down = FULL_CHUNK if self.may_have_owners else None
        fixed = replace(self, budget=None, first_rounds=0, first_keep=None)
        return replace(fixed, rule=rule, codec=codec, keep_down=keep_down)

    def of_round(self, index: int) -> Method:
        """The row for the messages of this round: the first ones may have another `keep`."""
        return self if self.first_keep is None or index >= self.first_rounds else self.with_keep(self.first_keep)

    def with_keep(self, keep: int) -> Method:
        """The same row with another `keep`."""
        assert isinstance(self.codec, TopK), "only this codec keeps some coefficients"
        return replace(self, codec=replace(self.codec, keep=keep), first_rounds=0, first_keep=None)

    def numbers(self) -> dict[str, object]:
        """All settings that must be equal on all replicas, as a flat table of printable values."""
        unset = () if self.budget is None else ("keep",)  # the budget sets it
        return {
            "method": self.name,
            "signal": self.signal.__name__.lower(),
            "every": self.every,
            "rule": type(self.rule).__name__,
            **{name: AUTO if value is None else value for name, value in _fields(self.rule).items()},
            "codec": type(self.codec).__name__,
            **{
                name: value
                for name, value in _fields(self.codec).items()
                if (name, value) not in UNSAID and name not in unset
            },
            "drain": self.drain,
            # Only where they say something: earlier versions had none of them.
            **({"delay": self.delay} if self.delay else {}),
            **({"budget": str(self.budget)} if self.budget else {}),
            **({"first_rounds": self.first_rounds, "first_keep": self.first_keep} if self.first_rounds else {}),
            **({"exchange": self.exchange, "keep_down": self.keep_down} if self.exchange != "gathered" else {}),
        }


def _fields(numbers: object) -> dict[str, object]:
    return {f.name: getattr(numbers, f.name) for f in dataclasses.fields(numbers)}  # type: ignore[arg-type]


def alone() -> Method:
    """The control: each replica trains by itself and never communicates."""
    return Method("alone", Silence, None, Mean(), Dense())


def ddp() -> Method:
    """Plain data parallelism: replicas exchange the mean gradient at every step."""
    return Method("ddp", Gradient, 1, Mean(), Dense())


def demo(*, keep: int = 32, bits: int = 32, decay: float = 0.999, release: float = 1.0) -> Method:
    """DeMo (arXiv 2411.19870): replicas send the strongest coefficients of a private gradient momentum at every step.

    The inner optimizer receives only the signs of the mean: use ``torch.optim.SGD`` for the published method.
    """
    return Method("demo", Gradient, 1, DeMo(decay=decay, release=release), TopK(keep=keep, bits=bits))


def local_sgd(*, every: int = 64, delay: int = 0) -> Method:
    """Federated averaging: the weights are replaced by their mean every ``every`` steps."""
    return Method("local_sgd", Drift, every, Outer(lr=1.0, momentum=0.0), Dense(), delay=delay)


def diloco(*, every: int = 64, lr: float = 0.7, momentum: float = 0.9, delay: int = 0) -> Method:
    """DiLoCo (arXiv 2311.08105): an outer Nesterov step on the mean drift."""
    return Method("diloco", Drift, every, Outer(lr=lr, momentum=momentum), Dense(), delay=delay)


def sparse_loco(
    *,
    every: int = 64,
    keep: int = 64,
    bits: int = 2,
    lr: float = 1.0,
    momentum: float = 0.0,
    decay: float = 0.95,
    delay: int = 0,
    exchange: str = "gathered",
    keep_down: int | None = None,
) -> Method:
    """A method like SparseLoCo (arXiv 2508.15706): top-k of the drift with error feedback, two bits, no transform."""
    rule, codec = Outer(lr=lr, momentum=momentum, decay=decay), TopK(keep=keep, bits=bits, transform="none")
    return Method("sparse_loco", Drift, every, rule, codec, delay=delay, exchange=exchange, keep_down=keep_down)


def published(
    *, every: int = 64, keep: int = 32, bits: int = 32, lr: float = 0.7, decay: float = 0.9, delay: int = 0
) -> Method:
    """The paper authors' rule (arXiv 2510.03371). Replicas drift apart: there is no shared anchor to evaluate."""
    return Method("published", Drift, every, Published(lr=lr, decay=decay), TopK(keep=keep, bits=bits), delay=delay)


@dataclass(frozen=True)
class Preset:
    """How thin the messages of `decoupled` are, and the numbers that go with it. benchmarks/frontier chose them."""

    keep: int
    drain: int = 0
    chunk: int = 64
    plain_keep: int = 512
    transform: str = "turning"
    lr: float | None = None  # follows from the round (rules.Outer)
    momentum: float = 0.0
    decay: float = 0.95


PRESETS = {
    "near": Preset(keep=128),
    "balanced": Preset(keep=56),
    "thin": Preset(keep=18),
    "thinnest": Preset(keep=7),
    # As the first version had them: the studies of docs/paper.md and docs/exchange.md were made with these.
    "first": Preset(128, 2, plain_keep=FULL_CHUNK, transform="dct", lr=0.9, momentum=0.8, decay=1.0),
}
DEFAULT_PRESET = "balanced"


def decoupled(
    *,
    every: int = 64,
    preset: str = DEFAULT_PRESET,
    budget: str | None = None,
    keep: int | None = None,
    bits: int = 1,
    lr: float | None = None,
    momentum: float | None = None,
    decay: float | None = None,
    carry: float = 1.0,
    release: float = 1.0,
    transform: str | None = None,
    chunk: int | None = None,
    plain_keep: int | None = None,
    first_rounds: int = 0,
    first_keep: int | None = None,
    drain: int | None = None,
    delay: int = 0,
    exchange: str = "auto",
    keep_down: int | None = None,
) -> Method:
    """The default: replicas send the strongest coefficients of the residual and carry the rest in their own weights.

    The preset gives every number that is None. With a ``budget``, ``keep`` follows from it. In most
    presets ``lr`` is None as well: it then follows from ``keep`` and ``decay`` (`rules.Outer`).
    """
    if not isinstance(preset, str) or preset not in PRESETS:
        raise MethodError(f"preset={preset!r}: unknown; there are {', '.join(PRESETS)}")
    if keep is not None and budget is not None:
        raise MethodError(f"keep={keep!r}: the budget of {budget} sets it for each round; give one of them")
    given: dict[str, Any] = {
        "keep": keep,
        "drain": drain,
        "chunk": chunk,
        "plain_keep": plain_keep,
        "transform": transform,
        "lr": lr,
        "momentum": momentum,
        "decay": decay,
    }
    n = replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})
    rule = Outer(n.lr, n.momentum, n.decay, carry, release)
    codec = TopK(n.keep, bits, n.chunk, n.transform, plain_keep=n.plain_keep)
    limit = None if budget is None else Budget.parse(budget)
    return Method(
        "decoupled",
        Drift,
        every,
        rule,
        codec,
        drain=n.drain,
        delay=delay,
        exchange=exchange,
        keep_down=keep_down,
        first_rounds=first_rounds,
        first_keep=first_keep,
        budget=limit,
    )


METHODS: dict[str, Callable[..., Method]] = {
    row.__name__: row for row in (alone, ddp, demo, local_sgd, diloco, sparse_loco, published, decoupled)
}

# The meaning of each option of the methods, in one sentence. The command line takes its flags and their help from here
# and from the signatures above. tests/test_config.py checks that no option is missing.
OPTIONS: dict[str, str] = {
    "every": "Local steps between two rounds (papers: H).",
    "preset": f"How thin messages are: {', '.join(PRESETS)}. It gives the numbers of decoupled that are not given. "
    "first: as the first version had them.",
    "budget": "Bytes that a replica may send in a round, such as 200kB; or a share of a link, such as "
    "'10% of 50Mbit/s'. `keep` then follows from it.",
    "keep": "Coefficients sent of each 64 x 64 chunk; smaller and larger chunks send in proportion to their area.",
    "bits": "Bits of each coefficient sent: 1, 2, 4, 8, 16 or 32.",
    "lr": "Learning rate of the outer step; the inner optimizer has one of its own. decoupled: by default it "
    "follows from `keep` and `decay`.",
    "momentum": "Nesterov momentum of the outer step.",
    "decay": "Factor by which the residual (of demo: the private momentum) shrinks from one round to the next.",
    "carry": "Share of the residual that stays in the replica's own weights between rounds.",
    "release": "Share of the sent coefficients that leaves the residual.",
    "transform": "Transform of each chunk before the strongest coefficients are chosen: dct, hadamard (sums only: the "
    "same bits on every machine), turning (signs and sums, another basis in each round), random (a fixed rotation) or "
    "none.",
    "chunk": "Side of the square chunks into which tensors are cut for the transform.",
    "first_rounds": "Rounds at the beginning of the run in which `first_keep` takes the place of `keep`.",
    "first_keep": "Coefficients sent of each 64 x 64 chunk in the first rounds: what parts the replicas early, parts "
    "them for long.",
    "plain_keep": "Values sent of each 4096 that are not transformed: norms, biases, small tensors.",
    "drain": "Dense one-bit messages at the end of the run, which empty the residuals into the anchor.",
    "delay": "Local steps from the start of a round until its answer is absorbed; messages travel meanwhile. 0: the "
    "replica waits for the answer. At most `every`.",
    "exchange": "How messages meet: gathered (every replica receives every message), sharded (each replica averages a "
    "part of the model for all; the bytes do not grow with the number of replicas), auto (the cheaper of these), or "
    "store (every replica writes its message into object storage, and reads all others there).",
    "keep_down": "If sharded: coefficients of each 64 x 64 chunk in the letter with which an owner answers. By default "
    "keep times the number of replicas, at most 512, and less with more than 16 replicas.",
}

# The rows that reports compare all other rows with.
REFERENCE = diloco.__name__  # loss and bytes of the other rows are compared with this row
EVERY_GRADIENT = ddp.__name__  # bytes are compared with this row too
NO_EXCHANGE = alone.__name__  # "gain kept" is 0 % at this row's loss and 100 % at the reference's


def method_named(name: str, **options: object) -> Method:
    """The row of that name with these options. The error for an unknown name or option lists the known ones."""
    if name not in METHODS:
        raise MethodError(f"method {name!r}: unknown; there are {', '.join(METHODS)}")
    # Checked here, because Python's own error for an unknown keyword does not list the known ones.
    known = takes(name)
    for option in options:
        if option not in known:
            rule = f"it takes {', '.join(known)}" if known else "it takes no options"
            raise MethodError(f"{option}={options[option]}: {name} has no such option; {rule}")
    return METHODS[name](**options)


def takes(name: str) -> dict[str, object]:
    """The options of the row of that name, with their defaults."""
    return {option: parameter.default for option, parameter in inspect.signature(METHODS[name]).parameters.items()}
