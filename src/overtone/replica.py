"""One worker's copy of the model with its inner optimiser and exchange state: the object that users hold.

backward → replica.step: inner step; not due? return
         → propose: signal → rule → codec → one message
         → transport → absorb: verify, decode, mean → rule → weights → Round
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overtone import agreement, fingerprint
from overtone.buffers import Buffers
from overtone.codec import Sparse
from overtone.errors import OvertoneError, PeerError, StateError
from overtone.exchange import Broadcast, Exchange, Gather, Talk, hold, pattern_for
from overtone.inner import Closure, InnerStep
from overtone.methods import Method, decoupled
from overtone.parameters import Parameters
from overtone.transport import Count, Transport, connect
from overtone.wire import Expected, Header, Kind


@dataclass(frozen=True)
class Round:
    """What one exchange did. Bytes and seconds are this replica's own, measured where they happen."""

    index: int
    local_steps: int
    bytes_sent: int
    bytes_received: int
    seconds_encoding: float
    seconds_waiting: float
    seconds_decoding: float
    drift_norm: float  # of the gradient, for methods that exchange gradients
    residual_norm: float
    anchor_fingerprint: str


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
    Freeze parameters before building the replica: those with ``requires_grad`` are exchanged.
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
        self._signal = self.method.signal(exchanged, self.layout)
        self._pattern = pattern_for(self.method.codec, self.layout, self.transport, self.device)
        self._about = agreement.introduction(self.method, self.parameters.all, dict(model.named_buffers()))
        self._schema = agreement.schema_of(self._about)
        self._inner_step = InnerStep(inner, exchanged)
        self._pending: _Pending | None = None
        self._scratch = torch.empty(0)
        self._fingerprint = bytes(8)
        if join:
            hold(self.joining(), self.transport)

    @property
    def fingerprint(self) -> str:
        """Of the anchor as it is now; equal on every replica if the method has consensus."""
        return fingerprint.of_tensors(self._shared()).hex()

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
        shared = self.parameters.tensors if "anchor" in self.state else []
        floats = self.buffers.tensors()[: len(self.buffers.floats)]
        own = [t.clone() for t in (*shared, *floats)]
        if self.method.consensus:
            if shared:
                self.layout.write(self.state["anchor"], shared)
            self.buffers.put(self.buffers.shared)
        try:
            yield self.model
        finally:
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
        self._inner_step = InnerStep(self.inner, self.parameters.exchanged, clip, scaler, closure)
        if self._signal.inner_first:
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
        signal = self._signal.read(self._scratch, scale=self._loss_scale())
        norm = _norm(signal)
        payload: Any = None
        sent = None

        def encode(flat: Tensor) -> Sparse:
            nonlocal payload
            payload, decoded = method.codec.encode(flat, self.layout)
            return decoded

        why = self.parameters.thawed() if math.isfinite(norm) else self._culprit()
        if why:
            kind = Kind.ABSTAIN if self._may_abstain() else Kind.FAILURE
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
            bodies = self._verified(heard, pending)
            if bodies:
                mean, buffers = self._pattern.mean(
                    bodies, pending.method.codec, self.buffers, over_senders=rule.over_senders
                )
        except OvertoneError:
            self._withdraw(pending)
            raise
        if bodies:
            self._signal.write(rule.absorb(self.state, mean), rule.settle, scale=self._loss_scale())
            self.buffers.absorb(buffers)
        else:
            self._withdraw(pending)
            self._spoil_gradient()
        if not self._signal.inner_first:
            self._inner_step.take()
        self._fingerprint = fingerprint.of_tensors(self._shared())
        now = self.transport.ledger.now
        done = Round(
            index=self.rounds,
            local_steps=self.steps - self.steps_at_round,
            bytes_sent=now.sent - pending.before.sent,
            bytes_received=now.received - pending.before.received,
            seconds_encoding=pending.seconds,
            seconds_waiting=now.waiting - pending.before.waiting,
            seconds_decoding=time.perf_counter() - begin,
            drift_norm=pending.signal_norm,
            residual_norm=_norm(self.state["residual"]) if "residual" in self.state else 0.0,
            anchor_fingerprint=self._fingerprint.hex(),
        )
        self.rounds += 1
        self.steps_at_round = self.steps
        return done

    # -- talks: a replica's side of every conversation (see exchange.py) -------------------------------------------

    def joining(self) -> Talk[None]:
        """Greet: same method and model everywhere? Then rank 0's weights everywhere, verified."""
        peers = self.transport.peers
        heard = yield Gather(json.dumps(self._about).encode())
        agreement.compare_introductions(dict(zip(peers, heard, strict=True)))
        yield Broadcast([*self.parameters.all.values(), *self.buffers.tensors()])
        self.buffers.remember()
        self._signal.begin()
        self._scratch = self.layout.empty(self.device)
        weights = self.layout.read(self.parameters.tensors, self._scratch).clone()
        self.state = self.method.rule.begin(weights, lossless=self.method.codec.lossless)
        self._fingerprint = fingerprint.of_tensors(self._shared())
        held = fingerprint.of_tensors([*self.parameters.all.values(), *self.buffers.tensors()])
        heard = yield Gather(held + self._fingerprint)
        agreement.compare_initial_weights(peers, [h[:8] for h in heard])
        if self.method.consensus and len({h[8:16] for h in heard}) > 1:
            # Equal weights, unequal coefficients: the hosts round the transform differently. Rank 0's count.
            yield Broadcast(self._shared())
            self._fingerprint = fingerprint.of_tensors(self._shared())
        self.transport.ledger.phase = "rounds"

    def rounding(self, method: Method | None = None) -> Talk[Round]:
        heard = yield self.propose(method)
        return self.absorb(heard)

    def finishing(self) -> Talk[list[Round]]:
        rounds: list[Round] = []
        ledger = self.transport.ledger
        ledger.phase = "finish"
        if self.method.every is not None and self.steps > self.steps_at_round:
            rounds.append((yield from self.rounding()))
        if "residual" in self.state:
            for _ in range(self.method.drain):
                last = yield from self.rounding(self.method.draining())
                rounds.append(last)
            self.state["residual"].zero_()
        if self.method.consensus:
            if "anchor" in self.state:
                self._signal.write(self.state["anchor"], self.method.rule.settle)
            heard = yield Gather(self._fingerprint)
            agreement.compare_anchors(self.rounds, self.transport.peers, [h[:8] for h in heard])
        ledger.phase = "rounds"
        return rounds

    # -- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything of the exchange, at any step inside a round; tensors are references, as in `torch.optim`.

        The model and the inner optimiser have state of their own: save and load them beside this, the model first.
        """
        return {
            "about": dict(self._about),
            "steps": self.steps,
            "rounds": self.rounds,
            "steps_at_round": self.steps_at_round,
            "fingerprint": self._fingerprint.hex(),
            "state": dict(self.state),
            "signal": list(self._signal.state()),
            "buffers": list(self.buffers.shared),
            "ledger": self.transport.ledger.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; refused, naming the difference, if it is of another model or method."""
        agreement.compare_saved(saved.get("about", {}), self._about)
        try:
            for name, tensor in self.state.items():
                tensor.copy_(saved["state"][name])
            for mine, theirs in zip(self._signal.state(), saved["signal"], strict=True):
                mine.copy_(theirs)
            for mine, theirs in zip(self.buffers.shared, saved["buffers"], strict=True):
                mine.copy_(theirs)
            self.steps, self.rounds = int(saved["steps"]), int(saved["rounds"])
            self.steps_at_round = int(saved["steps_at_round"])
            self._fingerprint = bytes.fromhex(saved["fingerprint"])
            self.transport.ledger.load_state_dict(saved["ledger"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"saved state: incomplete or damaged ({error!r}); load one that state_dict() made"
            ) from error

    def shared_state(self) -> dict[str, Any]:
        """What a newcomer takes over from this replica: the anchor, what else the rule shares, buffers, counts.

        Where the weights serve as anchor (gradient methods) they follow from the inner optimiser's state, so that is
        shared as well.
        """
        return {
            "tensors": self._shared_tensors(),
            "inner": None if "anchor" in self.state else self.inner.state_dict(),
            "steps": self.steps,
            "rounds": self.rounds,
            "steps_at_round": self.steps_at_round,
        }

    def adopt(self, shared: Mapping[str, Any]) -> None:
        """Go on from a peer's `shared_state` with nothing left to say of one's own: the residual is empty."""
        for vector in self.state.values():
            vector.zero_()
        for mine, theirs in zip(self._shared_tensors(), shared["tensors"], strict=True):
            mine.copy_(theirs)
        if shared["inner"] is not None:
            self.inner.load_state_dict(copy.deepcopy(shared["inner"]))
        self.buffers.remember()
        if "anchor" in self.state:
            self._signal.write(self.state["anchor"], self.method.rule.settle)
        self.steps, self.rounds = shared["steps"], shared["rounds"]
        self.steps_at_round = shared["steps_at_round"]
        self._fingerprint = fingerprint.of_tensors(self._shared())

    # -- parts -----------------------------------------------------------------------------------------------------

    def _shared(self) -> list[Tensor]:
        """What a fingerprint is taken of: the anchor, or the weights where they are the anchor."""
        return [self.state["anchor"]] if "anchor" in self.state else self.parameters.tensors

    def _shared_tensors(self) -> list[Tensor]:
        also = [self.state[name] for name in self.method.rule.shared if name in self.state and name != "anchor"]
        return [*self._shared(), *also, *self.buffers.tensors()]

    def _header(self, kind: Kind) -> Header:
        anchor = self._fingerprint if self.method.consensus else bytes(8)
        counters = self.buffers.counters_fingerprint()
        return Header(kind, self.transport.rank, self.rounds, self.steps, self._schema, anchor, counters)

    def _verified(self, heard: Any, pending: _Pending) -> list[Any]:
        """Everybody's body; none if somebody abstained. Raises, on every rank alike, if this round must not count."""
        expected = Expected(self.rounds, self._schema)
        headers, bodies = self._pattern.open(heard, expected, self.transport.peers)
        for position, header in enumerate(headers):
            if header.kind is Kind.FAILURE:
                told = bodies[position] if len(bodies) == len(headers) else b""
                why = pending.why if header.sender == self.transport.rank else _text(told)
                raise PeerError(f"round {self.rounds}: rank {header.sender} could not take part: {why}")
        ranks = [header.sender for header in headers]
        agreement.compare_progress(self.rounds, headers)
        agreement.compare_anchors(self.rounds, ranks, [header.anchor for header in headers])
        agreement.compare_counters(self.rounds, ranks, [header.counters for header in headers], self.buffers.counters)
        return [] if any(header.kind is Kind.ABSTAIN for header in headers) else bodies

    def _culprit(self) -> str:
        return self.parameters.culprit(type(self._signal).__name__.lower(), self._signal.tensors(), self.steps)

    def _withdraw(self, pending: _Pending) -> None:
        if pending.sent is not None:
            pending.method.rule.withdraw(self.state, pending.sent)

    def _may_abstain(self) -> bool:
        """Under a `GradScaler` an overflow is business as usual: everybody skips the step."""
        return self._inner_step.scaler is not None and not self._signal.inner_first

    def _loss_scale(self) -> float:
        return 1.0 if self._signal.inner_first else self._inner_step.scale

    def _spoil_gradient(self) -> None:
        """Somebody's gradient overflowed: let this replica's scaler find an infinity too, so that all skip alike."""
        for p in self.parameters.exchanged:
            if p.grad is not None:
                p.grad.fill_(math.inf)
                return


def _norm(flat: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(flat))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(flat, dtype=torch.float64))


def _text(raw: Any) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) and raw else "its own log says why"
