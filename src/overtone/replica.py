"""`Replica`, the object that users hold: one worker's copy of the model, its inner optimizer and its exchange state.

backward → replica.step → inner step; if no round is due, return
                        → exchange/round.py: start → the transport carries the exchange → finish → Round
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overtone.errors import MethodError, ModelError, StateError
from overtone.exchange import flight, state
from overtone.exchange.buffers import Buffers
from overtone.exchange.closing import closing
from overtone.exchange.description import describe, schema_of
from overtone.exchange.handshake import Handshake
from overtone.exchange.inner_step import Closure, InnerStep
from overtone.exchange.message import MOST_REPLICAS, Seal
from overtone.exchange.parameters import Parameters
from overtone.exchange.round import Exchanger, Pending
from overtone.exchange.state import ExchangeState, Shared
from overtone.ledger import Round
from overtone.methods import Method, decoupled
from overtone.swarm.course import Course
from overtone.swarm.store import Store, refuse_unfit
from overtone.transport import Background, Exchange, Flight, Transport, lacking, run_exchange
from overtone.world.join import connect


class Replica:
    """Wraps a model and its inner optimizer. Call ``step()`` instead of ``inner.step()``, and ``finish()`` at the end.

    ``transport`` defaults to the world in which the process was started: one process alone, or a ``torchrun`` world.
    ``buffers`` is "shared" (floating buffers are averaged in each round, all others are compared) or "private".
    Freeze parameters before you build the replica: all parameters with ``requires_grad`` are exchanged, in fp32. If
    parameters are replaced, added or removed later, the next round is refused on every rank.
    ``key`` (by default the environment variable ``OVERTONE_KEY``) seals every message against forgery. ``refused`` is
    the policy for a rank whose message cannot be read: "raise" an error on every rank, or "leave out" that rank from
    the round on every rank.
    ``join=False`` leaves the handshake to the caller, which must carry `joining`. The simulator does so.
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
        overlaps = method is not None and method.delay > 0
        stored = isinstance(transport, Store)
        if transport is not None and (missing := lacking(transport, overlaps=overlaps)):
            raise MethodError(
                f"transport={transport!r}: has no {', '.join(missing)}; give Solo(), Torch(group), one of your own "
                "with all that overtone.transport.Transport asks for, or None for the world at hand"
            )
        self.parameters = Parameters(model, inner)
        self.buffers = Buffers(model, buffers)
        self._model, self._inner = model, inner
        self.method = method or decoupled()
        self.transport = transport or connect()
        if self.transport.size > MOST_REPLICAS:
            raise MethodError(f"transport: {self.transport.size} replicas; a message can name {MOST_REPLICAS}")
        if stored:
            refuse_unfit(self.method)
        self._seal = Seal.with_key(key)
        self._refused = refused
        self.description = describe(self.method, self.parameters.all, self.buffers, refused)
        self.exchanger = Exchanger(
            self.method,
            self.parameters,
            self.buffers,
            self.transport,
            seal=self._seal,
            schema=schema_of(self.description),
            refused=refused,
            # Some transports carry one pattern only.
            pattern=getattr(self.transport, "pattern", None),
        )
        # Each local step replaces it. After a checkpoint was loaded, `finish` may start a round before any local step.
        self._inner_step = InnerStep(inner, self.parameters.exchanged)
        self._showing_anchor = False
        self._flight: Flight | None = None  # the exchange in the background
        self._background: Background | None = None
        self._course: Course | None = None  # through the rounds of a run in a store
        if isinstance(transport, Store):
            self._course = Course(self.exchanger, transport, self.description, self._seal)
        elif join:
            run_exchange(self.joining(), self.transport, "setup")
            if self.method.delay:  # now and not at the first round: a second channel needs all peers
                self._background = self.transport.background()

    @property
    def model(self) -> nn.Module:
        """The model that this replica trains."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        # Not refused here: an error on this rank alone would leave its peers waiting. The next round is refused, on
        # every rank.
        self.parameters.replaced |= model is not self._model
        self._model = model

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The inner optimizer, which takes the local steps."""
        return self._inner

    @inner.setter
    def inner(self, inner: torch.optim.Optimizer) -> None:
        self.parameters.replaced |= inner is not self._inner
        self._inner = inner

    @property
    def state(self) -> ExchangeState:
        """The state that this replica keeps between rounds."""
        return self.exchanger.state

    @property
    def steps(self) -> int:
        """The number of local steps since the beginning of the run."""
        return self.state.steps

    @property
    def progress(self) -> int:
        """How many local steps of the run are done: those of this replica, or over a store, those that its rounds
        stand for. A replica that comes late to a store has made fewer."""
        return self.steps if self._course is None else self._course.progress

    @property
    def is_over(self) -> bool:
        """True if a run in a store has had all of its rounds (`Store(rounds=...)`)."""
        return self._course is not None and self._course.is_over

    @property
    def rounds(self) -> int:
        """The number of rounds since the beginning of the run."""
        return self.state.rounds

    @property
    def device(self) -> torch.device:
        """The device on which the exchange state is kept."""
        return self.exchanger.device

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the present anchor. It is equal on every replica if the method has consensus."""
        return self.exchanger.fingerprint().hex()

    # -- what users call -------------------------------------------------------------------------------------------

    def step(
        self,
        *,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        closure: Closure | None = None,
    ) -> Round | None:
        """Take one local step with the present gradients. If a round is due, run it too and return its record.

        With a `delay`, a round only starts here, and its exchange goes on beside the training. So many steps later it
        is absorbed, and its record is returned then.

        ``clip`` limits the norm of the gradient that the inner optimizer uses. For methods that exchange gradients,
        this is the averaged gradient. ``scaler`` steps the inner optimizer through a `GradScaler`. A step that the
        scaler skips still counts, so all replicas count the same steps. ``closure`` is passed to the inner optimizer.
        """
        due = self.local_step(clip=clip, scaler=scaler, closure=closure)
        if self._course is not None:
            return self._course.after_step(self._inner_step, due=due)
        absorbed = self._absorb() if self.exchanger.must_absorb else None
        if not due:
            return absorbed
        pending = self.exchanger.start(self._inner_step, overlapped=self.method.delay > 0)
        if pending.overlapped:
            self._launch(pending)
            return absorbed
        try:
            run_exchange(pending.exchange, self.transport, "rounds")
        except BaseException:  # an interrupt too
            self.exchanger.refuse(pending)
            raise
        return self.exchanger.finish(pending)

    def finish(self) -> list[Round]:
        """Bring all replicas to the same weights. These are the weights to save.

        First, a round that is in flight is absorbed. Then comes a round for steps that are not yet exchanged. Then come
        `drain` messages, with every coefficient at one bit. They move the anchor to the mean of the replicas. With
        methods without consensus (`alone`, `published`), each replica ends with its own weights.
        """
        self._refuse_to_finish_at_anchor()
        if self._course is not None:
            return self._course.finish(self._inner_step)
        absorbed = [self._absorb()] if self.exchanger.in_flight else []
        return [*absorbed, *run_exchange(self.finishing(), self.transport, "finish")]

    def settle(self) -> None:
        """Wait until no exchange goes on in the background. A process that ends before its peers have received its
        message would take it with it."""
        if self._flight is not None:
            self._flight.settle()

    @contextmanager
    def anchor(self) -> Iterator[nn.Module]:
        """Put the shared weights and buffers into the model, for evaluation. Afterwards the replica's own come back.

        Without consensus no weights are shared, and the replica's own weights stay in the model.
        """
        if self._showing_anchor:
            raise ModelError("anchor: the model shows it already; leave the first `with replica.anchor()` first")
        self._refuse_changes("anchor")
        # Buffers are copied even without consensus: an evaluation in training mode changes them.
        own = [t.clone() for t in self._shown_tensors()]
        if self.method.consensus:
            if "anchor" in self.state.tensors:
                self.exchanger.layout.write(self.state.tensors["anchor"], self.parameters.tensors)
            self.buffers.put(self.buffers.shared)
        self._showing_anchor = True
        try:
            yield self.model
        finally:
            self._showing_anchor = False
            self._refuse_changes("anchor")
            # The tensors are looked up again: `model.to(...)` inside the `with` block may have replaced their memory.
            for tensor, mine in zip(self._shown_tensors(), own, strict=True):
                tensor.copy_(mine)

    def local_step(
        self,
        *,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        closure: Closure | None = None,
    ) -> bool:
        """Do the part of `step` that needs no peer. Returns True if a round is due.

        Where gradients are exchanged, the inner optimizer must wait for the round. The second half of the round then
        steps it.
        """
        if self._showing_anchor:
            raise ModelError(
                "step: inside `with replica.anchor()` the weights are not the replica's own; step after it"
            )
        self._inner_step = InnerStep(self.inner, self.parameters.exchanged, clip, scaler, closure)
        if self.exchanger.signal.inner_first:
            self._inner_step.take()
        else:
            self._inner_step.must_wait(self.method.name)
        return self.exchanger.count_step()

    # -- a round in flight -----------------------------------------------------------------------------------------

    def _launch(self, pending: Pending) -> None:
        """Let the exchange of a round go on in the background, if it does not yet."""
        if self._background is not None:  # in the simulator, the cluster carries it
            self._flight = self._flight or self._background.flight(pending.exchange)
            self._flight.begin()

    def _absorb(self) -> Round:
        """Wait for the exchange in flight, if it is not over yet, and finish its round."""
        pending = self.exchanger.in_flight
        assert pending is not None
        self._launch(pending)  # an interrupt may have come before the first time
        carried = self._flight
        assert carried is not None
        waited = carried.settle()  # an interrupt here changes nothing: the round stays in flight
        self._flight = None
        try:
            carried.land()
        except BaseException:
            self.exchanger.refuse(pending, waited=waited)
            raise
        return self.exchanger.finish(pending, waited=waited, hidden=max(0.0, carried.seconds - waited))

    # -- exchanges: a replica's side of each, to be carried by a transport (see transport.py) ----------------------

    def joining(self) -> Exchange[None]:
        """The handshake. Afterwards every replica has the same state, that of round 0."""
        exchanger, method = self.exchanger, self.method
        handshake = Handshake(self.transport.rank, self.transport.peers, self._seal)
        everything = [*self.parameters.all.values(), *self.buffers.tensors()]
        run = yield from handshake.introduce(self.description, everything)
        # A rank that can be left out of a round needs a residual to put its payload back into.
        # So with "leave out", even a lossless codec counts as lossy here.
        lossless = method.codec.lossless and exchanger.pattern.passes_all_on and self._refused == "raise"
        exchanger.begin(run, lossless=lossless)
        yield from handshake.confirm(everything, exchanger.anchor_tensors(), consensus=method.consensus)

    def rounding(self, method: Method | None = None) -> Exchange[Round]:
        """A whole round. ``method`` replaces the replica's own method in the draining messages of `finish`."""
        pending = self.exchanger.start(self._inner_step, method)
        try:
            yield from pending.exchange
        except BaseException:  # an interrupt too
            self.exchanger.refuse(pending)
            raise
        return self.exchanger.finish(pending)

    def finishing(self) -> Exchange[list[Round]]:
        """All exchanges of `finish`: a last round if steps are left, the draining messages, and a last comparison."""
        self._refuse_to_finish_at_anchor()
        rounds: list[Round] = []
        if self.method.every is not None and self.steps > self.state.steps_at_round:
            rounds.append((yield from self.rounding()))
        if "residual" in self.state.tensors:
            self.method.rule.close(self.state.tensors)
            for _ in range(self.method.drain):
                rounds.append((yield from self.rounding(self.method.draining())))  # noqa: PERF401 (it yields)
            # All replicas now take the anchor as their weights, so the rest of the residual is dropped.
            self.state.tensors["residual"].zero_()
        if self.method.consensus:
            yield from closing(self.exchanger)
        else:
            self._refuse_changes("finish")  # no peer waits for this replica, so it may raise alone
        return rounds

    # -- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole exchange state, at any local step. Tensors are references, as in `torch.optim`.

        The message of a round in flight is part of it. The model and the inner optimizer have their own state. Save and
        load them beside this one, the model first.
        """
        self._refuse_at_anchor("state_dict", "save")
        self._refuse_changes("state_dict")
        exchanger, pending = self.exchanger, self.exchanger.in_flight
        if self.state.under_way and pending is None:
            raise StateError("state_dict: in the middle of a round nothing is settled; save after it")
        saved = state.save(self.state, self.description, exchanger.signal, self.buffers, self.transport.ledger)
        if self._course is not None:
            saved["store"] = self._course.saved()
        if pending is None:
            return saved
        return {**saved, "flight": flight.save(pending, exchanger.pattern.name, len(self.transport.peers))}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. If it is of another model or method, the error names the difference."""
        self._refuse_at_anchor("load_state_dict", "load")
        self._refuse_changes("load_state_dict")
        if self._course is not None:
            self._course.restore(saved, self.description)
            return
        exchanger = self.exchanger
        saved = flight.checked(saved, exchanger, self.description)
        self.settle()  # an exchange that goes on reads what is changed now
        state.restore(self.state, saved, self.description, exchanger.signal, self.buffers, self.transport.ledger)
        # Only now: a state that does not fit must leave everything as it was, a round in flight too.
        exchanger.in_flight = self._flight = None
        if saved.get("flight") is not None:
            self._launch(flight.restore(saved["flight"], exchanger, self._inner_step))

    def share(self) -> Shared:
        """The state that a newcomer takes over from this replica."""
        names, anchor = self.method.rule.shared, self.exchanger.anchor_tensors()
        return state.share(self.state, names, anchor, self.buffers, self.inner)

    def adopt(self, shared: Shared) -> None:
        """Continue from a peer's `share`, as a newcomer or after an absence. What this replica owes, it still owes."""
        self.exchanger.owe_drift()
        names, anchor = self.method.rule.shared, self.exchanger.anchor_tensors()
        state.adopt(self.state, shared, names, anchor, self.buffers, self.inner)
        if "anchor" in self.state.tensors:
            self.exchanger.show(self.method.rule.place(self.state.tensors))

    # -- parts -----------------------------------------------------------------------------------------------------

    def _shown_tensors(self) -> list[Tensor]:
        """The tensors that `anchor` replaces or that an evaluation may change."""
        return [*(self.parameters.tensors if "anchor" in self.state.tensors else []), *self.buffers.tensors()]

    def _refuse_changes(self, verb: str) -> None:
        """Raise an error on this rank if the model or the optimizer has changed.

        This is for calls without an exchange. The peers are told in the next exchange.
        """
        if why := self.exchanger.changes():
            raise ModelError(f"{verb}: {why}")

    def _refuse_to_finish_at_anchor(self) -> None:
        if self._showing_anchor:
            raise ModelError(
                "finish: inside `with replica.anchor()` the replica's own weights would come back; leave it"
            )

    def _refuse_at_anchor(self, verb: str, do: str) -> None:
        if self._showing_anchor:
            raise StateError(
                f"{verb}: inside `with replica.anchor()` the weights are not the replica's own; {do} after leaving it"
            )
