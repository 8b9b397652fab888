"""One worker's copy of the model with its inner optimiser and exchange state: the object that users hold.

backward → replica.step: inner step; not due? return
         → propose: signal → rule → codec → one message, slab by slab
         → pattern: exchange, verify → absorb: mean → rule → weights, slab by slab → Round
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from overtone.codec import Block
from overtone.coding import fingerprint
from overtone.coding.kernels import kernels_for
from overtone.errors import GaveUpError, MethodError, ModelError, NotFiniteError, OvertoneError, printable
from overtone.exchange import agreement, handshake, state
from overtone.exchange.buffers import Buffers
from overtone.exchange.inner_step import Closure, InnerStep
from overtone.exchange.message import MOST_REPLICAS, Expected, Header, Kind, Seal
from overtone.exchange.parameters import Parameters
from overtone.exchange.patterns import WITH_PAYLOAD, Heard, Say, Setting, pattern_for
from overtone.exchange.steps import Broadcast, Talk, hold
from overtone.exchange.work import Work
from overtone.ledger import Count, Round
from overtone.methods import Method, decoupled
from overtone.transport import Transport, is_transport
from overtone.world.join import connect


@dataclass(frozen=True)
class _Proposal:
    """What to remember of a proposal until the round is over."""

    say: Say
    signal_norm: float
    seconds: float
    before: Count


class Replica:
    """Wraps a model and its inner optimiser: call ``step()`` where ``inner.step()`` stood, ``finish()`` at the end.

    ``transport`` defaults to the world the process was started in: one process alone, or a ``torchrun`` world.
    ``buffers`` is "shared" (floating ones averaged each round, others checked) or "private".
    Freeze parameters before building the replica: those with ``requires_grad`` are exchanged, in fp32. Parameters that
    are replaced, added or removed afterwards are refused in the next round, on every rank.
    ``key`` (by default the environment's ``OVERTONE_KEY``) seals every message against forgery. ``refused`` says what
    happens to a rank whose message cannot be read: "raise" on every rank, or "leave out" of that round on every rank.
    ``join=False`` leaves the greeting to whoever drives `joining` (the simulator does).
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        method: Method | None = None,
        transport: Transport | None = None,
        *,
        buffers: str = "shared",
        key: str | bytes | None = None,
        refused: str = "raise",
        join: bool = True,
    ) -> None:
        if not isinstance(method, Method | None):
            raise MethodError(f"method={method!r}: give a Method, such as overtone.decoupled(every=64)")
        if transport is not None and not is_transport(transport):
            raise MethodError(f"transport={transport!r}: give Solo(), Torch(group), or None for the world at hand")
        self.parameters = Parameters(model, inner)
        self.buffers = Buffers(model, buffers)
        self.model = model
        self.inner = inner
        self.method = method or decoupled()
        self.transport = transport or connect()
        if self.transport.size > MOST_REPLICAS:
            raise MethodError(f"transport: {self.transport.size} replicas; a message can name {MOST_REPLICAS}")
        self.steps = 0  # local steps since the beginning
        self.rounds = 0
        self.steps_at_round = 0  # value of `steps` at the last round
        self.state: dict[str, Tensor] = {}  # the rule's: anchor, momentum, residual, as flat coefficients
        exchanged = self.parameters.exchanged
        self.device = exchanged[0].device
        self.layout = self.method.codec.layout([p.shape for p in exchanged])
        self.signal = self.method.signal(exchanged)
        self.kernels = kernels_for(self.layout.size, self.device)
        self.seal = Seal.with_key(key)
        flags = len(self.signal.present())
        setting = Setting(self.layout, self.kernels, self.buffers, self.seal, self.device, refused, flags)
        self._pattern = pattern_for(self.method.codec, setting)
        self.refused = refused
        self.about = agreement.introduction(self.method, self.parameters.all, self.buffers, refused)
        self.schema = agreement.schema_of(self.about)
        self.run = bytes(8)  # agreed upon in the greeting
        self._inner_step = InnerStep(inner, exchanged)
        self.proposing = False  # True while a round is under way
        self.broken = ""  # why no further round is possible
        self._showing_anchor = False
        if join:
            hold(self.joining(), self.transport)

    @property
    def fingerprint(self) -> str:
        """Of the anchor as it is now; equal on every replica if the method has consensus."""
        return self._fingerprint().hex()

    # -- the user's verbs ------------------------------------------------------------------------------------------

    def step(
        self,
        *,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        closure: Closure | None = None,
    ) -> Round | None:
        """One local step with the gradients at hand; if a round is due, the round too, and its record.

        ``clip`` limits the norm of the gradient that the inner optimiser sees: for methods that exchange gradients,
        the averaged one. ``scaler`` steps the inner optimiser through a `GradScaler`; a step it skips still counts, so
        replicas never lose count of each other. ``closure`` is handed to the inner optimiser.
        """
        if not self.local_step(clip=clip, scaler=scaler, closure=closure):
            return None
        return hold(self.rounding(), self.transport)

    def finish(self) -> list[Round]:
        """Bring all replicas to the same weights, the ones to save: a round for steps not yet exchanged, then `drain`
        messages, every coefficient at one bit, that move the anchor to the mean of the replicas.

        Methods without consensus (`alone`, `published`) end with each replica's own weights.
        """
        return hold(self.finishing(), self.transport)

    @contextmanager
    def anchor(self) -> Iterator[nn.Module]:
        """The shared weights and buffers in the model, for evaluation; the replica's own come back afterwards.

        Without consensus nothing is shared, and the replica's own weights stay.
        """
        if self._showing_anchor:
            raise ModelError("anchor: the model shows it already; leave the first `with replica.anchor()` first")
        self.refuse_changes("anchor")
        own = [t.clone() for t in self._shown_tensors()]
        if self.method.consensus:
            if "anchor" in self.state:
                self.layout.write(self.state["anchor"], self.parameters.tensors)
            self.buffers.put(self.buffers.shared)
        self._showing_anchor = True
        try:
            yield self.model
        finally:
            self._showing_anchor = False
            self.refuse_changes("anchor")
            # Asked for anew: `model.to(...)` in there has given the weights other memory.
            for tensor, mine in zip(self._shown_tensors(), own, strict=True):
                tensor.copy_(mine)

    def local_step(
        self,
        *,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        closure: Closure | None = None,
    ) -> bool:
        """The part of `step` that needs nobody else. True if a round is due.

        Where gradients are exchanged the inner optimiser has to wait for the round: `absorb` steps it.
        """
        if self._showing_anchor:
            raise ModelError(
                "step: inside `with replica.anchor()` the weights are not the replica's own; step after it"
            )
        self._inner_step = InnerStep(self.inner, self.parameters.exchanged, clip, scaler, closure)
        if self.signal.inner_first:
            self._inner_step.take()
        else:
            self._inner_step.must_wait(self.method.name)
        self.steps += 1
        every = self.method.every
        return every is not None and self.steps - self.steps_at_round >= every

    # -- a round ---------------------------------------------------------------------------------------------------

    def _propose(self, kind: Kind, work: Work) -> _Proposal:
        """What to say in a round of this kind. Trouble, such as a signal that is not finite, is confessed to others who
        would otherwise wait in vain; the round is then refused on every rank."""
        begin = time.perf_counter()
        before = copy.copy(self.transport.ledger.now)
        blocks: list[Block] = []
        norm = math.nan
        if why := self.broken or self._changes():
            kind = Kind.FAILURE
        elif why := self.parameters.not_finite(self.signal, self.steps, len(self.transport.peers)):
            kind = Kind.ABSTAIN if self._may_skip else Kind.FAILURE
        elif why := self.buffers.not_finite():
            kind = Kind.FAILURE
        else:
            try:
                signal, scale = self.signal.sources(), self._loss_scale()
                norms = work.encode(self.state, signal, blocks, scale=scale, measures=True)
                norm = _norm(torch.stack(norms))
            except NotFiniteError as error:
                # A finite signal, but the sum with what was there already is not: part of the state has moved, and all
                # of it is lost anyway.
                blocks.clear()
                self.broken = self.parameters.overflow(error.tensor, self.steps)
                kind, why = Kind.FAILURE, self.broken
        present = self.signal.present() if kind in WITH_PAYLOAD else []
        say = Say(self._header(kind), work.codec, blocks, why, present)
        return _Proposal(say, norm, time.perf_counter() - begin, before)

    def _absorb(self, heard: Heard, work: Work) -> None:
        """What was heard into state, weights and buffers. Everything was verified before."""
        present = heard.present()
        buffers = heard.buffers()
        targets = self.signal.targets()
        over_senders = work.rule.over_senders
        work.absorb(self.state, lambda slab, out: heard.mean(slab, out, over_senders=over_senders), targets)
        self.signal.wrote(targets, work.rule.settle, present=present, scale=self._loss_scale())
        self.buffers.absorb(buffers)

    def _verify(self, heard: Heard, say: Say) -> None:
        """Refuse, on every rank alike, a round that must not count."""
        for header in heard.headers:
            if header.kind is Kind.FAILURE:
                own = header.sender == self.transport.rank
                why = printable(say.why) if own else heard.reason(header.sender)
                raise GaveUpError(f"round {self.rounds}: rank {header.sender} could not take part: {why}")
        agreement.compare_progress(self.rounds, heard.headers)
        counters = {header.sender: header.counters for header in heard.headers}
        agreement.compare_counters(self.rounds, counters, self.buffers.counters)

    def _verify_payload(self, heard: Heard) -> None:
        """Likewise, a payload that must not be absorbed: replicas apart, or a sum that overflowed on the way."""
        agreement.compare_anchors(self.rounds, _anchors(heard), of_weights="anchor" not in self.state)
        if heard.not_finite is not None and not self._may_skip:
            told = self.parameters.overflowing_sum(self._tensor_at(heard.not_finite), self.signal, self.steps)
            raise GaveUpError(f"round {self.rounds}: {told}")

    def _tensor_at(self, place: int) -> int | None:
        """Which parameter a place in a sum belongs to; None beyond them, where the buffers are."""
        for slab in self.layout.slabs:
            if place < slab.offset + slab.size:
                return slab.tensor_of(0, place - slab.offset)
        return None

    # -- talks: a replica's side of every conversation (see exchange.py) -------------------------------------------

    def joining(self) -> Talk[None]:
        yield from handshake.greet(self)

    def rounding(self, method: Method | None = None) -> Talk[Round]:
        """A whole round; ``method`` is another row than the replica's own for the draining messages of `finish`."""
        method = method or self.method
        work = Work(self.layout, method.rule, method.codec, self.kernels, self.device)
        proposal = self._propose(Kind.ROUND if method is self.method else Kind.DRAIN, work)
        self.proposing = True
        try:
            heard = yield from self._converse(proposal.say)
            self._verify_payload(heard)
        except OvertoneError:
            # A drift that the residual now holds must not be measured a second time.
            if work.withdraw(self.state, proposal.say.blocks):
                self.signal.begin()
            raise
        finally:
            self.proposing = False
        begin = time.perf_counter()
        abstained = heard.not_finite is not None or any(header.kind is Kind.ABSTAIN for header in heard.headers)
        if abstained or self.transport.rank in heard.left_out:
            work.withdraw(self.state, proposal.say.blocks)
        if not abstained:
            self._absorb(heard, work)
        seconds = time.perf_counter() - begin + heard.seconds
        if abstained:
            self._inner_step.skip()
        elif not self.signal.inner_first:
            self._inner_step.take()
        return self._recorded(proposal, heard, seconds)

    def _converse(self, say: Say) -> Talk[Heard]:
        expected = Expected(self.rounds, self.run, self.schema)
        heard = yield from self._pattern.converse(say, expected, self.transport.peers)
        self._verify(heard, say)
        return heard

    def _recorded(self, proposal: _Proposal, heard: Heard, seconds_decoding: float) -> Round:
        now = self.transport.ledger.now
        done = Round(
            index=self.rounds,
            local_steps=self.steps - self.steps_at_round,
            bytes_sent=now.sent - proposal.before.sent,
            bytes_received=now.received - proposal.before.received,
            seconds_encoding=proposal.seconds,
            seconds_waiting=now.waiting - proposal.before.waiting,
            seconds_decoding=seconds_decoding,
            drift_norm=proposal.signal_norm,
            residual_norm=_norm(self.state["residual"]) if "residual" in self.state else 0.0,
            anchor_fingerprint=self.fingerprint if "anchor" in self.state else proposal.say.header.anchor.hex(),
            left_out=tuple(heard.left_out),
        )
        self.rounds += 1
        self.steps_at_round = self.steps
        return done

    def finishing(self) -> Talk[list[Round]]:
        if self._showing_anchor:
            raise ModelError(
                "finish: inside `with replica.anchor()` the replica's own weights would come back; leave it"
            )
        rounds: list[Round] = []
        with self.transport.ledger.during("finish"):
            if self.method.every is not None and self.steps > self.steps_at_round:
                rounds.append((yield from self.rounding()))
            if "residual" in self.state:
                self.method.rule.close(self.state)
                for _ in range(self.method.drain):
                    last = yield from self.rounding(self.method.draining())
                    rounds.append(last)
                self.state["residual"].zero_()
            if self.method.consensus:
                yield from self._closing()
            else:
                self.refuse_changes("finish")  # nobody waits for this replica
        return rounds

    def _closing(self) -> Talk[None]:
        """The last words: all replicas hold the same model. Where they do not, the first replica's counts: hosts that
        round D⁻¹ differently (another type of CPU, another library) get other weights from one anchor, and frozen
        parameters and statistics may have changed on their own since they were last equal."""
        anchor, weights = self.anchor_tensors(), self.parameters.tensors
        if "anchor" in self.state and not self._changes():
            self.show(self.state["anchor"])
        rest = [*self.parameters.frozen, *self.buffers.float_tensors()]
        heard = yield from self._finish([*anchor, *weights, *rest] if "anchor" in self.state else [*weights, *rest])
        if _are_equal(heard):
            return
        heard = yield from self._finish(anchor)
        agreement.compare_anchors(self.rounds, _anchors(heard), of_weights="anchor" not in self.state)
        heard = yield from self._finish(rest)
        yield Broadcast(weights if _are_equal(heard) else [*weights, *rest])
        self.signal.begin()
        self.buffers.remember()
        heard = yield from self._finish([*weights, *rest])
        agreement.compare_last_weights(_anchors(heard))

    def _finish(self, tensors: Sequence[Tensor]) -> Talk[Heard]:
        """Everybody's last message; instead of the anchor's fingerprint it has that of these tensors."""
        why = self._changes()
        header = self._header(Kind.FAILURE if why else Kind.FINISH)
        say = Say(replace(header, anchor=fingerprint.of_tensors(tensors)), self.method.codec, why=why)
        return (yield from self._converse(say))

    def show(self, coeffs: Tensor) -> None:
        """Weights with these coefficients into the model, as the start of a round."""
        targets = self.signal.targets()
        self.layout.write(coeffs, targets)
        self.signal.wrote(targets, self.method.rule.settle)

    # -- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything of the exchange, at any step inside a round; tensors are references, as in `torch.optim`.

        The model and the inner optimiser have state of their own: save and load them beside this, the model first.
        """
        return state.save(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; refused, naming the difference, if it is of another model or method."""
        state.restore(self, saved)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _shown_tensors(self) -> list[Tensor]:
        """What `anchor` replaces, and what an evaluation may change."""
        return [*(self.parameters.tensors if "anchor" in self.state else []), *self.buffers.tensors()]

    def _changes(self) -> str:
        """Why model and optimiser are not those that the replica was built with any more, if they are not."""
        return self.parameters.changed(self.model, self.inner) or self.buffers.changed()

    def refuse_changes(self, verb: str) -> None:
        """The same where no exchange is under way in which to tell the others; they hear of it in the next."""
        if why := self._changes():
            raise ModelError(f"{verb}: {why}")

    @property
    def showing_anchor(self) -> bool:
        """True inside `with replica.anchor()`: the weights in the model are not the replica's own."""
        return self._showing_anchor

    @property
    def _may_skip(self) -> bool:
        """An overflow is no failure: under a `GradScaler` everybody skips the step."""
        return self._inner_step.may_overflow and not self.signal.inner_first

    def anchor_tensors(self) -> list[Tensor]:
        """What a fingerprint is taken of: the anchor, or the weights where they serve as one."""
        return [self.state["anchor"]] if "anchor" in self.state else self.parameters.tensors

    def _fingerprint(self) -> bytes:
        # Taken anew each time: a message must tell of the anchor as it is, not as it was after the last round.
        return fingerprint.of_tensors(self.anchor_tensors())

    def _header(self, kind: Kind) -> Header:
        anchor = self._fingerprint() if self.method.consensus else bytes(8)
        counters = self.buffers.counters_fingerprint()
        return Header(kind, self.transport.rank, self.rounds, self.steps, self.run, self.schema, anchor, counters)

    def _loss_scale(self) -> float:
        return 1.0 if self.signal.inner_first else self._inner_step.scale


def _are_equal(heard: Heard) -> bool:
    return len(set(_anchors(heard).values())) == 1 and not heard.left_out


def _anchors(heard: Heard) -> dict[int, bytes]:
    return {header.sender: header.anchor for header in heard.headers}


def _norm(flat: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(flat))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(flat, dtype=torch.float64))
