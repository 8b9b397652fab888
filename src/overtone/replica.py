"""One worker's copy of the model with its inner optimiser and exchange state: the object that users hold.

backward → replica.step: inner step; not due? return
         → propose: signal → rule → codec → one message
         → transport → absorb: verify, decode, mean → rule → weights → Round
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overtone import agreement, fingerprint, greeting, saving
from overtone.buffers import Buffers
from overtone.codec import Sparse
from overtone.errors import MethodError, ModelError, OvertoneError, PeerError
from overtone.exchange import Exchange, Gather, Opened, Talk, hold, pattern_for
from overtone.inner import Closure, InnerStep
from overtone.methods import Method, decoupled
from overtone.parameters import Parameters
from overtone.record import Round
from overtone.transport import Count, Transport, connect
from overtone.wire import Expected, Header, Kind


@dataclass(frozen=True)
class _Pending:
    """What `absorb` must know of the `propose` before it."""

    method: Method
    sent: Sparse | None  # None: there was nothing fit to send, and `why` says why
    why: str
    signal_norm: float
    seconds: float
    before: Count


class Replica:
    """Wraps a model and its inner optimiser: call ``step()`` where ``inner.step()`` stood, ``finish()`` at the end.

    ``transport`` defaults to the world the process was started in: one process alone, or a ``torchrun`` world.
    ``buffers`` is "shared" (floating ones averaged each round, others checked) or "private".
    Freeze parameters before building the replica: those with ``requires_grad`` are exchanged, in fp32.
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
        join: bool = True,
    ) -> None:
        if not isinstance(method, Method | None):
            raise MethodError(f"method={method!r}: give a Method, such as overtone.decoupled(every=64)")
        self.model = model
        self.inner = inner
        self.method = method or decoupled()
        self.transport = transport or connect()
        self.steps = 0  # local steps since the beginning
        self.rounds = 0
        self.steps_at_round = 0  # value of `steps` at the last round
        self.state: dict[str, Tensor] = {}  # the rule's: anchor, momentum, residual, as flat coefficients
        self.parameters = Parameters(model, inner)
        self.buffers = Buffers(model, buffers)
        exchanged = self.parameters.exchanged
        self.device = exchanged[0].device
        self.layout = self.method.codec.layout([p.shape for p in exchanged])
        self.signal = self.method.signal(exchanged, self.layout)
        self._pattern = pattern_for(self.method.codec, self.layout, self.transport, self.device)
        self.about = agreement.introduction(self.method, self.parameters.all, self.buffers.named(), self.buffers.policy)
        self._schema = agreement.schema_of(self.about)
        self._inner_step = InnerStep(inner, exchanged)
        self._pending: _Pending | None = None
        self._showing_anchor = False
        self._scratch = self.layout.empty(self.device)
        if join:
            hold(self.joining(), self.transport)

    @property
    def fingerprint(self) -> str:
        """Of the anchor as it is now; equal on every replica if the method has consensus."""
        return self._fingerprint().hex()

    @property
    def proposing(self) -> bool:
        """True between `propose` and `absorb`."""
        return self._pending is not None

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
        shared = self.parameters.tensors if "anchor" in self.state else []
        floats = self.buffers.float_tensors()
        own = [t.clone() for t in (*shared, *floats)]
        if self.method.consensus:
            if shared:
                self.layout.write(self.state["anchor"], shared)
            self.buffers.put(self.buffers.shared)
        self._showing_anchor = True
        try:
            yield self.model
        finally:
            self._showing_anchor = False
            for tensor, mine in zip((*shared, *floats), own, strict=True):
                tensor.copy_(mine)

    # -- a round in two halves -------------------------------------------------------------------------------------

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

    def propose(self, method: Method | None = None) -> Exchange:
        """This replica's half of a round: what to send. Trouble, such as a signal that is not finite, is confessed to
        the others, who would otherwise wait in vain; `absorb` then raises on every rank.

        ``method`` is another row than the replica's own, for the draining messages of `finish`.
        """
        method = method or self.method
        begin = time.perf_counter()
        before = copy.copy(self.transport.ledger.now)
        signal = self.signal.read(self._scratch, scale=self._loss_scale())
        norm = _norm(signal)
        payload: Any = None
        sent = None

        def encode(flat: Tensor) -> Sparse:
            nonlocal payload
            payload, decoded = method.codec.encode(flat, self.layout)
            return decoded

        finite = math.isfinite(norm)
        why = self.parameters.thawed() or self.buffers.trouble() if finite else self._culprit()
        if why:
            abstains = not finite and self._inner_step.may_overflow and not self.signal.inner_first
            kind = Kind.ABSTAIN if abstains else Kind.FAILURE
            exchange = self._pattern.refuse(self._header(kind), why, self.buffers)
        else:
            sent = method.rule.propose(self.state, signal, encode)
            kind = Kind.ROUND if method is self.method else Kind.DRAIN
            exchange = self._pattern.pack(self._header(kind), payload, self.buffers)
        self._pending = _Pending(method, sent, why, norm, time.perf_counter() - begin, before)
        return exchange

    def absorb(self, heard: Any) -> Round:
        """The other half: verify what was heard, then move. No weight is touched before everything is verified."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise OvertoneError("absorb: there was no propose; a round is propose, exchange, absorb")
        begin = time.perf_counter()
        rule = pending.method.rule
        try:
            opened = self._verified(heard, pending)
            if opened is not None:
                mean, buffers = self._pattern.mean(
                    opened, pending.method.codec, self.buffers, over_senders=rule.over_senders
                )
        except OvertoneError:
            self._withdraw(pending)
            raise
        if opened is not None:
            self.signal.write(rule.absorb(self.state, mean), rule.settle, scale=self._loss_scale())
            self.buffers.absorb(buffers)
        else:
            self._withdraw(pending)
            self._inner_step.spoil()
        seconds_decoding = time.perf_counter() - begin
        if not self.signal.inner_first:
            self._inner_step.take()
        now = self.transport.ledger.now
        done = Round(
            index=self.rounds,
            local_steps=self.steps - self.steps_at_round,
            bytes_sent=now.sent - pending.before.sent,
            bytes_received=now.received - pending.before.received,
            seconds_encoding=pending.seconds,
            seconds_waiting=now.waiting - pending.before.waiting,
            seconds_decoding=seconds_decoding,
            drift_norm=pending.signal_norm,
            residual_norm=_norm(self.state["residual"]) if "residual" in self.state else 0.0,
            anchor_fingerprint=self.fingerprint,
        )
        self.rounds += 1
        self.steps_at_round = self.steps
        return done

    # -- talks: a replica's side of every conversation (see exchange.py) -------------------------------------------

    def joining(self) -> Talk[None]:
        yield from greeting.greet(self)

    def rounding(self, method: Method | None = None) -> Talk[Round]:
        exchange = self.propose(method)
        try:
            heard = yield exchange
        except OvertoneError:  # it never got through
            pending, self._pending = self._pending, None
            if pending is not None:
                self._withdraw(pending)
            raise
        return self.absorb(heard)

    def finishing(self) -> Talk[list[Round]]:
        rounds: list[Round] = []
        ledger = self.transport.ledger
        ledger.phase = "finish"
        if self.method.every is not None and self.steps > self.steps_at_round:
            rounds.append((yield from self.rounding()))
        if "residual" in self.state:
            self.method.rule.close(self.state)
            for _ in range(self.method.drain):
                last = yield from self.rounding(self.method.draining())
                rounds.append(last)
            self.state["residual"].zero_()
        if self.method.consensus:
            if "anchor" in self.state:
                self.signal.write(self.state["anchor"], self.method.rule.settle)
            heard = yield Gather(self._fingerprint())
            agreement.compare_anchors(self.rounds, self.transport.peers, [h[:8] for h in heard])
        ledger.phase = "rounds"
        return rounds

    # -- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything of the exchange, at any step inside a round; tensors are references, as in `torch.optim`.

        The model and the inner optimiser have state of their own: save and load them beside this, the model first.
        """
        return saving.save(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; refused, naming the difference, if it is of another model or method."""
        saving.restore(self, saved)

    # -- parts -----------------------------------------------------------------------------------------------------

    def anchor_tensors(self) -> list[Tensor]:
        """What a fingerprint is taken of: the anchor, or the weights where they serve as one."""
        return [self.state["anchor"]] if "anchor" in self.state else self.parameters.tensors

    def _fingerprint(self) -> bytes:
        # Taken anew each time: a message must tell of the anchor as it is, not as it was after the last round.
        return fingerprint.of_tensors(self.anchor_tensors())

    def _header(self, kind: Kind) -> Header:
        anchor = self._fingerprint() if self.method.consensus else bytes(8)
        counters = self.buffers.counters_fingerprint()
        return Header(kind, self.transport.rank, self.rounds, self.steps, self._schema, anchor, counters)

    def _verified(self, heard: Any, pending: _Pending) -> Opened | None:
        """What to absorb; None if somebody abstained. Raises, on every rank alike, if this round must not count."""
        opened = self._pattern.open(heard, Expected(self.rounds, self._schema), self.transport.peers)
        headers = opened.headers
        for position, header in enumerate(headers):
            if header.kind is Kind.FAILURE:
                why = pending.why if header.sender == self.transport.rank else opened.confession(position)
                raise PeerError(f"round {self.rounds}: rank {header.sender} could not take part: {why}")
        ranks = [header.sender for header in headers]
        agreement.compare_progress(self.rounds, headers)
        agreement.compare_anchors(self.rounds, ranks, [header.anchor for header in headers])
        agreement.compare_counters(self.rounds, ranks, [header.counters for header in headers], self.buffers.counters)
        return None if any(header.kind is Kind.ABSTAIN for header in headers) else opened

    def _culprit(self) -> str:
        return self.parameters.culprit(type(self.signal).__name__.lower(), self.signal.tensors(), self.steps)

    def _withdraw(self, pending: _Pending) -> None:
        """Nobody heard this replica's message. What it said is owed again, and said once: a drift that the residual now
        holds must not be measured a second time."""
        if pending.sent is not None and pending.method.rule.withdraw(self.state, pending.sent):
            self.signal.begin()

    def _loss_scale(self) -> float:
        return 1.0 if self.signal.inner_first else self._inner_step.scale


def _norm(flat: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(flat))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(flat, dtype=torch.float64))
