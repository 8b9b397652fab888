"""One worker's copy of the model with its inner optimizer and exchange state: the object that users hold.

backward → replica.step → inner step; is no round due? return
                        → exchange/round.py: start → the transport carries the exchange → finish → Round
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from overtone.coding import fingerprint
from overtone.errors import MethodError, ModelError, StateError
from overtone.exchange import state
from overtone.exchange.buffers import Buffers
from overtone.exchange.consensus import compare_anchors, compare_last_weights
from overtone.exchange.description import describe, schema_of
from overtone.exchange.handshake import Handshake
from overtone.exchange.inner_step import Closure, InnerStep
from overtone.exchange.message import MOST_REPLICAS, Kind, Seal
from overtone.exchange.parameters import Parameters
from overtone.exchange.pattern import Contribution, Received
from overtone.exchange.round import Exchanger
from overtone.exchange.state import ExchangeState, Shared
from overtone.ledger import Round
from overtone.methods import Method, decoupled
from overtone.transport import Broadcast, Exchange, Transport, is_transport, run_exchange
from overtone.world.join import connect


class Replica:
    """Wraps a model and its inner optimizer: call ``step()`` where ``inner.step()`` stood, ``finish()`` at the end.

    ``transport`` defaults to the world the process was started in: one process alone, or a ``torchrun`` world.
    ``buffers`` is "shared" (floating ones averaged each round, others checked) or "private".
    Freeze parameters before building the replica: those with ``requires_grad`` are exchanged, in fp32. Parameters that
    are replaced, added or removed afterwards are refused in the next round, on every rank.
    ``key`` (by default the environment's ``OVERTONE_KEY``) seals every message against forgery. ``refused`` says what
    happens to a rank whose message cannot be read: "raise" on every rank, or "leave out" of that round on every rank.
    ``join=False`` leaves the handshake to the caller, who carries `joining` (the simulator does).
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
        self._model, self._inner = model, inner
        self.method = method or decoupled()
        self.transport = transport or connect()
        if self.transport.size > MOST_REPLICAS:
            raise MethodError(f"transport: {self.transport.size} replicas; a message can name {MOST_REPLICAS}")
        self._seal = Seal.with_key(key)
        self._refused = refused
        self.exchanger = Exchanger(
            self.method, self.parameters, self.buffers, self.transport, self._seal, refused=refused
        )
        self.description = describe(self.method, self.parameters.all, self.buffers, refused)
        self.exchanger.schema = schema_of(self.description)
        self._inner_step = InnerStep(inner, self.parameters.exchanged)
        self._showing_anchor = False
        if join:
            run_exchange(self.joining(), self.transport, "setup")

    @property
    def model(self) -> nn.Module:
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self.parameters.replaced |= model is not self._model  # refused in the next round, on every rank
        self._model = model

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self._inner

    @inner.setter
    def inner(self, inner: torch.optim.Optimizer) -> None:
        self.parameters.replaced |= inner is not self._inner
        self._inner = inner

    @property
    def state(self) -> ExchangeState:
        """Everything that this replica remembers of the exchange."""
        return self.exchanger.state

    @property
    def steps(self) -> int:
        """Local steps since the beginning."""
        return self.state.steps

    @property
    def rounds(self) -> int:
        """Rounds since the beginning."""
        return self.state.rounds

    @property
    def device(self) -> torch.device:
        return self.exchanger.device

    @property
    def fingerprint(self) -> str:
        """Of the anchor as it is now; equal on every replica if the method has consensus."""
        return self.exchanger.fingerprint().hex()

    # -- the user's verbs ------------------------------------------------------------------------------------------

    def step(
        self,
        *,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        closure: Closure | None = None,
    ) -> Round | None:
        """One local step with the gradients at hand; if a round is due, the round too, and its record.

        ``clip`` limits the norm of the gradient that the inner optimizer sees: for methods that exchange gradients,
        the averaged one. ``scaler`` steps the inner optimizer through a `GradScaler`; a step it skips still counts, so
        replicas never lose count of each other. ``closure`` is handed to the inner optimizer.
        """
        if not self.local_step(clip=clip, scaler=scaler, closure=closure):
            return None
        pending = self.exchanger.start(self._inner_step)
        run_exchange(pending.exchange, self.transport, "rounds")
        return self.exchanger.finish(pending)

    def finish(self) -> list[Round]:
        """Bring all replicas to the same weights, the ones to save: a round for steps not yet exchanged, then `drain`
        messages, every coefficient at one bit, that move the anchor to the mean of the replicas.

        Methods without consensus (`alone`, `published`) end with each replica's own weights.
        """
        return run_exchange(self.finishing(), self.transport, "finish")

    @contextmanager
    def anchor(self) -> Iterator[nn.Module]:
        """The shared weights and buffers in the model, for evaluation; the replica's own come back afterwards.

        Without consensus nothing is shared, and the replica's own weights stay.
        """
        if self._showing_anchor:
            raise ModelError("anchor: the model shows it already; leave the first `with replica.anchor()` first")
        self._refuse_changes("anchor")
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

        Where gradients are exchanged the inner optimizer has to wait for the round: its second half steps it.
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
        state, every = self.exchanger.state, self.method.every
        state.steps += 1
        return every is not None and state.steps - state.steps_at_round >= every

    # -- exchanges: a replica's side of each, to be carried by a transport (see transport.py) ----------------------

    def joining(self) -> Exchange[None]:
        """The handshake. Afterwards the state is that of round 0, the same on every replica."""
        exchanger, method = self.exchanger, self.method
        handshake = Handshake(self.transport.rank, self.transport.peers, self._seal)
        everything = [*self.parameters.all.values(), *self.buffers.tensors()]
        run = yield from handshake.introduce(self.description, everything)
        self.buffers.remember()
        exchanger.signal.begin()
        weights = exchanger.layout.read(self.parameters.tensors, exchanger.layout.empty(self.device))
        # A rank that can be left out of a round needs a residual to put its payload back into.
        lossless = method.codec.lossless and self._refused == "raise"
        tensors = method.rule.begin(weights, lossless=lossless)
        exchanger.state = ExchangeState(run, tensors, exchanger.pattern.state)
        yield from handshake.confirm(everything, exchanger.anchor_tensors(), consensus=method.consensus)

    def rounding(self, method: Method | None = None) -> Exchange[Round]:
        """A whole round; ``method`` is another row than the replica's own for the draining messages of `finish`."""
        pending = self.exchanger.start(self._inner_step, method)
        yield from pending.exchange
        return self.exchanger.finish(pending)

    def finishing(self) -> Exchange[list[Round]]:
        """All that `finish` exchanges."""
        if self._showing_anchor:
            raise ModelError(
                "finish: inside `with replica.anchor()` the replica's own weights would come back; leave it"
            )
        rounds: list[Round] = []
        if self.method.every is not None and self.steps > self.state.steps_at_round:
            rounds.append((yield from self.rounding()))
        if "residual" in self.state.tensors:
            self.method.rule.close(self.state.tensors)
            for _ in range(self.method.drain):
                rounds.append((yield from self.rounding(self.method.draining())))  # noqa: PERF401 (it yields)
            self.state.tensors["residual"].zero_()
        if self.method.consensus:
            yield from self._closing()
        else:
            self._refuse_changes("finish")  # nobody waits for this replica
        return rounds

    def _closing(self) -> Exchange[None]:
        """The last messages: all replicas hold the same model. Where they do not, the first replica's counts: hosts
        that round D⁻¹ differently (another type of CPU, another library) get other weights from one anchor, and frozen
        parameters and statistics may have changed on their own since they were last equal."""
        on_weights = "anchor" in self.state.tensors
        anchor, weights = self.exchanger.anchor_tensors(), self.parameters.tensors
        if on_weights and not self._changes():
            self.exchanger.show(self.state.tensors["anchor"])
        rest = [*self.parameters.frozen, *self.buffers.float_tensors()]
        received = yield from self._last_message([*anchor, *weights, *rest] if on_weights else [*weights, *rest])
        if _are_equal(received):
            return
        received = yield from self._last_message(anchor)
        compare_anchors(self.rounds, _anchors(received), of_weights=not on_weights)
        received = yield from self._last_message(rest)
        yield Broadcast(weights if _are_equal(received) else [*weights, *rest])
        self.exchanger.signal.begin()
        self.buffers.remember()
        received = yield from self._last_message([*weights, *rest])
        compare_last_weights(_anchors(received))

    def _last_message(self, tensors: Sequence[Tensor]) -> Exchange[Received]:
        """Everybody's last message; instead of the anchor's fingerprint it has that of these tensors."""
        why = self._changes()
        header = self.exchanger.header(Kind.FAILURE if why else Kind.FINISH)
        header = replace(header, anchor=fingerprint.of_tensors(tensors))
        return (yield from self.exchanger.carry(Contribution(header, self.method.codec, why=why)))

    # -- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything of the exchange, at any step inside a round; tensors are references, as in `torch.optim`.

        The model and the inner optimizer have state of their own: save and load them beside this, the model first.
        """
        self._refuse_at_anchor("state_dict", "save")
        self._refuse_changes("state_dict")
        return state.save(self.state, self.description, self.exchanger.signal, self.buffers, self.transport.ledger)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; refused, naming the difference, if it is of another model or method."""
        self._refuse_at_anchor("load_state_dict", "load")
        self._refuse_changes("load_state_dict")
        state.restore(self.state, saved, self.description, self.exchanger.signal, self.buffers, self.transport.ledger)

    def share(self) -> Shared:
        """What a newcomer takes over from this replica."""
        names, anchor = self.method.rule.shared, self.exchanger.anchor_tensors()
        return state.share(self.state, names, anchor, self.buffers, self.inner)

    def adopt(self, shared: Shared) -> None:
        """Go on from a peer's `share`, as a newcomer that owes nothing."""
        names, anchor = self.method.rule.shared, self.exchanger.anchor_tensors()
        state.adopt(self.state, shared, names, anchor, self.buffers, self.inner)
        if "anchor" in self.state.tensors:
            self.exchanger.show(self.state.tensors["anchor"])

    # -- parts -----------------------------------------------------------------------------------------------------

    def _shown_tensors(self) -> list[Tensor]:
        """What `anchor` replaces, and what an evaluation may change."""
        return [*(self.parameters.tensors if "anchor" in self.state.tensors else []), *self.buffers.tensors()]

    def _changes(self) -> str:
        """Why model and optimizer are not those that the replica was built with any more, if they are not."""
        return self.parameters.changed() or self.buffers.changed()

    def _refuse_changes(self, verb: str) -> None:
        """The same where no exchange is under way in which to tell the others; they are told in the next."""
        if why := self._changes():
            raise ModelError(f"{verb}: {why}")

    def _refuse_at_anchor(self, verb: str, do: str) -> None:
        if self._showing_anchor:
            raise StateError(
                f"{verb}: inside `with replica.anchor()` the weights are not the replica's own; {do} after leaving it"
            )


def _are_equal(received: Received) -> bool:
    return len(set(_anchors(received).values())) == 1 and not received.left_out


def _anchors(received: Received) -> dict[int, bytes]:
    return {header.sender: header.anchor for header in received.headers}
