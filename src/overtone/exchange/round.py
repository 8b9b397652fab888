"""One round, in two halves. `start` measures and encodes the signal. A transport then carries the exchange. `finish`
updates the weights.

    start    signal → rule.accumulate → codec.encode → rule.sent, slab by slab          → Pending
    exchange pattern: the messages of all, read alike by all → verify → commit
    finish   mean of all payloads → rule.absorb → weights, slab by slab                 → Round

Local steps may be taken between the halves. The weights then change by a shift, so that these steps are not
overwritten.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from overtone.coding import fingerprint
from overtone.coding.kernels import kernels_for
from overtone.coding.layout import part_of
from overtone.coding.turns import Turn
from overtone.errors import GaveUpError, NotFiniteError, StateError
from overtone.exchange.buffers import Buffers
from overtone.exchange.choice import costs_of, pattern_for, pattern_named
from overtone.exchange.consensus import compare_anchors, compare_counters, compare_progress
from overtone.exchange.control import LEAST_KEEP, Controller, Tell
from overtone.exchange.inner_step import InnerStep
from overtone.exchange.message import NOBODY, Expected, Header, Kind, Seal
from overtone.exchange.parameters import Parameters
from overtone.exchange.pattern import Context, Contribution, Pattern, Received
from overtone.exchange.probe import Probe
from overtone.exchange.signals import Sources
from overtone.exchange.slab_work import Energies, SlabWork
from overtone.exchange.state import ExchangeState
from overtone.ledger import Count, Round
from overtone.methods import Method
from overtone.transport import Commit, Exchange, Transport, counted

INTERRUPTED = "round {index} was interrupted on this replica, and part of its state has moved; go on from a checkpoint"


@dataclass
class Pending:
    """A round that has started. A transport carries ``exchange``; then the round can be finished."""

    work: SlabWork
    contribution: Contribution
    inner_step: InnerStep
    sources: Sources
    steps: int  # local steps so far, at the start
    norms: Tensor  # the norm of the signal in each slab
    seconds_encoding: float
    buffers_at: Sequence[Tensor] | None = None  # a copy of the floating buffers, if local steps may follow
    count: Count = field(default_factory=Count)  # the cost of the exchange
    exchange: Exchange[None] = field(init=False)
    received: Received | None = None  # set at the end of the exchange

    @property
    def overlapped(self) -> bool:
        """True if local steps may follow before the round is finished."""
        return self.sources.measured_at is not None


class Exchanger:
    """Runs one replica's rounds: sends its contributions, keeps its exchange state and updates its weights."""

    def __init__(
        self,
        method: Method,
        parameters: Parameters,
        buffers: Buffers,
        transport: Transport,
        *,
        seal: Seal,
        schema: bytes,
        refused: str,
        pattern: str | None = None,
    ) -> None:
        self.method = method
        self.parameters = parameters
        self.buffers = buffers
        self.transport = transport
        self.state = ExchangeState()
        self.schema = schema
        self.layout = method.codec.layout([p.shape for p in parameters.exchanged])
        self.signal = method.signal(parameters)
        self._signal_name = method.signal.__name__.lower()
        self._consensus = method.consensus
        self.device = parameters.exchanged[0].device
        self.kernels = kernels_for(self.layout.size, self.device)
        flags = len(parameters.exchanged) if self.signal.tells_presence else 0
        self._context = Context(self.layout, self.kernels, buffers, seal, self.device, refused, flags)
        self.pattern: Pattern = (
            pattern_for(method, self._context, transport.size)
            if pattern is None
            else pattern_named(pattern, method, self._context, transport.size)
        )
        self._deal = self.pattern.deal(transport.size)
        self._turns = method.codec.turns
        self.controller: Controller | None = None
        if method.budget is not None:
            sizes = [shared.numel() for shared in buffers.shared]
            cost, least = (costs_of(method, self.layout.slabs, some, transport.size) for some in (sizes, ()))
            self.controller = Controller(method.budget, cost, least(LEAST_KEEP))
        # In the simulator, time is virtual.
        self._clock: Callable[[], float] = getattr(transport, "now", time.perf_counter)
        self._started: float | None = None  # when the last round started
        self.in_flight: Pending | None = None  # the round whose exchange goes on beside the training
        self.probe: Probe | None = None  # looks at some of the rounds, if it is set

    def begin(self, run: bytes, *, lossless: bool) -> None:
        """Make the state of round 0 of a run, from the weights and buffers that the model has now."""
        self.buffers.remember()
        self.signal.begin()
        weights = self.layout.read(self.parameters.tensors, self.layout.empty(self.device))
        tensors = self.method.rule.begin(weights, lossless=lossless)
        control = None if self.controller is None else self.controller.begin()
        self.state = ExchangeState(run, tensors, self.pattern.state, control=control)

    # -- first half ------------------------------------------------------------------------------------------------

    def start(self, inner_step: InnerStep, method: Method | None = None, *, overlapped: bool = False) -> Pending:
        """Measure the signal and encode it. ``method`` replaces the replica's own method in draining messages.
        ``overlapped``: local steps may follow before the round is finished.

        A replica that cannot take part, for example because its signal is not finite, still starts the round. It tells
        its peers, which would otherwise block. The round is then refused on every rank.
        """
        begin = time.perf_counter()
        row = method or self._row()
        work, scale = self.work(row), self._loss_scale(inner_step)
        if self.state.under_way:
            raise StateError("start: a round is under way already; finish it, or load a saved state")
        if self.probe is not None and method is None:
            work = replace(work, look=self.probe.look(self.state.rounds, len(self.transport.peers)))
        header = self.header(Kind.ROUND if method is None else Kind.DRAIN)
        sources = self.signal.measure(overlapped=overlapped)
        # `why` is the reason if this replica cannot take part. An overflow under a GradScaler is no failure.
        why = self.state.broken or self.parameters.changed()
        peers, steps = len(self.transport.peers), self.state.steps
        # Skipped if there is a reason already: the shapes of changed parameters may not match.
        overflow = "" if why else self.parameters.not_finite(sources, self._signal_name, steps, peers)
        if why := why or self.buffers.changed():
            header = replace(header, kind=Kind.FAILURE)
        elif why := overflow:
            header = replace(header, kind=Kind.ABSTAIN if self._may_skip(inner_step) else Kind.FAILURE)
        elif why := self.buffers.not_finite():
            header = replace(header, kind=Kind.FAILURE)
        mine = Contribution(header, row.codec, work.deal, keep_down=row.keep_down, why=why)
        norms = torch.tensor([math.nan])
        if not why:
            buffers = self.buffers.blocks(work.deal.buffers, as_numbers=self.pattern.adds_numbers)
            try:
                blocks, norms = work.encode(self.state.tensors, sources, scale=scale)
                mine = replace(mine, blocks=blocks, buffers=buffers, present=sources.present)
                if work.energies is not None:
                    mine = replace(mine, tell=self._tell(work.energies.sent, norms))
            except NotFiniteError as error:
                # The signal is finite, but its sum with the residual is not. Some slabs of the state have changed
                # already. They need no repair: with such a residual no further round is possible.
                why = self.state.broken = self.parameters.overflow(error.tensor, steps)
                mine = replace(mine, header=replace(header, kind=Kind.FAILURE), why=why)
            except BaseException:  # Ctrl-C, or no memory: some slabs have taken up the signal, others have not
                if "residual" in self.state.tensors or not row.codec.lossless:
                    self.state.broken = INTERRUPTED.format(index=self.state.rounds)
                raise
        buffers_at = [b.clone() for b in self.buffers.float_tensors()] if overlapped and not why else None
        seconds = time.perf_counter() - begin
        return self.resume(Pending(work, mine, inner_step, sources, steps, norms, seconds, buffers_at))

    def resume(self, pending: Pending) -> Pending:
        """Give a round its exchange. After a checkpoint was loaded, this continues the round that was in flight."""
        pending.exchange = counted(self._exchange(pending), pending.count)
        self.state.under_way = True
        self.in_flight = pending if pending.overlapped else None
        return pending

    def work(self, row: Method, pattern: str | None = None, members: int = 0, index: int | None = None) -> SlabWork:
        """The work of a round of this method. ``pattern``, ``members`` and the ``index`` of the round are those of
        another world, if given."""
        deal, peers = self._deal, len(self.transport.peers)
        if pattern is not None:
            deal = pattern_named(pattern, row, self._context, members).deal(members)
        elif peers != self.transport.size:  # some are away
            deal = self.pattern.deal(peers)
        energies = Energies() if self.controller is not None and row.budget is not None else None
        round_index = self.state.rounds if index is None else index
        turn = Turn(round_index, self.layout, self.kernels) if self._turns else None
        rule = row.rule.among(members or peers, row.codec.energy_share())
        return SlabWork(self.layout, self.kernels, self.device, rule, row.codec, deal, turn, energies)

    def _row(self) -> Method:
        """The method of the next round, with the `keep` of that round."""
        control, method = self.state.control, self.method
        return method.of_round(self.state.rounds) if control is None else method.with_keep(control.keep)

    def _tell(self, sent: float, norms: Tensor) -> Tell:
        """What this replica tells all others in this round."""
        control, now = self.state.control, self._clock()
        assert control is not None
        seconds = 0.0 if self._started is None else now - self._started
        self._started = now
        owed = _norm(self.state.tensors["residual"]) ** 2
        return control.tell(residual=owed, drift=_norm(norms) ** 2, sent=sent, seconds=seconds)

    def header(self, kind: Kind) -> Header:
        """The header of this replica's next message."""
        # Computed for each message: it must describe the present anchor, not the anchor after the last round.
        anchor, state = self.fingerprint() if self._consensus else NOBODY, self.state
        counters = self.buffers.counters_fingerprint() if self.buffers.counters else NOBODY
        return Header(kind, self.transport.rank, state.rounds, state.steps, state.run, self.schema, anchor, counters)

    # -- between the halves ----------------------------------------------------------------------------------------

    def _exchange(self, pending: Pending) -> Exchange[None]:
        """Exchange the contributions, and verify them in the same way on every replica.

        It may run in another thread than the training, so it changes neither weights nor state.
        """
        received = yield from self.carry(pending.contribution)
        anchors = {header.sender: header.anchor for header in received.headers}
        compare_anchors(self.state.rounds, anchors, of_weights="anchor" not in self.state.tensors)
        if received.not_finite is not None and not self._may_skip(pending.inner_step):
            raise self._overflowing_sum(received.not_finite)
        yield Commit(self.state.rounds)
        pending.received = received

    def refuse(self, pending: Pending, *, waited: float = 0.0) -> None:
        """Take a round back whose exchange failed or was interrupted.

        The payload goes back into the residual. The replica can go on, or be saved, as if the round had never begun.
        ``waited`` is as in `finish`.
        """
        self.state.under_way, self.in_flight = False, None
        if pending.overlapped:
            self._count_flight(pending, waited)
        # The residual now contains this drift, so the drift must not be measured a second time.
        if pending.work.withdraw(self.state.tensors, pending.contribution.blocks):
            self.signal.restart(pending.sources)

    def carry(self, mine: Contribution) -> Exchange[Received]:
        """Exchange the contributions of all replicas.

        It is refused on every rank if a replica could not take part or is at another step.
        """
        index = self.state.rounds
        expected = Expected(index, self.state.run, self.schema)
        received = yield from self.pattern.exchange(mine, expected, self.transport.peers)
        for header in received.headers:
            if header.kind is Kind.FAILURE:
                why = received.reason(header.sender)
                raise GaveUpError(f"round {index}: rank {header.sender} could not take part: {why}")
        compare_progress(index, received.headers)
        counters = {header.sender: header.counters for header in received.headers}
        compare_counters(index, counters, self.buffers.counters)
        return received

    def _overflowing_sum(self, place: int) -> GaveUpError:
        """The error for a sum that is not finite, though the payloads of all replicas are."""
        slab = next((slab for slab in self.layout.slabs if place < slab.offset + slab.size), None)  # None: a buffer
        tensor = None if slab is None else slab.tensor_of(0, place - slab.offset)
        told = self.parameters.overflowing_sum(tensor, self._signal_name, self.state.steps)
        return GaveUpError(f"round {self.state.rounds}: {told}")

    def count_step(self) -> bool:
        """Count a local step. Returns True if the next round is to start now."""
        # Counted even if a GradScaler skipped the step: all replicas must reach the round at the same count.
        self.state.steps += 1
        if self.method.every is None:
            return False
        began = self.state.steps_at_round if self.in_flight is None else self.in_flight.steps
        return self.state.steps - began >= self.method.every

    @property
    def must_absorb(self) -> bool:
        """True if the round in flight is to be absorbed now. A step number decides, so all replicas do it together."""
        return self.in_flight is not None and self.state.steps - self.in_flight.steps >= self.method.delay

    # -- second half -----------------------------------------------------------------------------------------------

    def finish(self, pending: Pending, *, waited: float = 0.0, hidden: float = 0.0) -> Round:
        """Update the weights with the mean of all payloads. Returns the record of the round.

        ``waited`` and ``hidden`` are the seconds of an overlapped exchange in which the replica stood still, and in
        which it went on training.
        """
        received = pending.received
        if received is None:
            raise StateError("finish: the round's exchange is not over; carry it by run_exchange() first")
        # The exchange is over, whatever happens from here on.
        self.state.under_way, self.in_flight = False, None
        begin = time.perf_counter()
        abstained = received.not_finite is not None or any(h.kind is Kind.ABSTAIN for h in received.headers)
        # No receiver counted this replica's payload in either case.
        if abstained or self.transport.rank in received.left_out:
            pending.work.withdraw(self.state.tensors, pending.contribution.blocks)
        why = ""
        if not abstained:
            try:
                tells = self._absorb(pending, received)
                why = self._control(pending, tells)
            except BaseException:  # some slabs have moved, others have not
                self.state.broken = INTERRUPTED.format(index=self.state.rounds)
                raise
        seconds = time.perf_counter() - begin
        if pending.overlapped:
            self._count_flight(pending, waited)
        else:
            seconds += received.seconds
        if abstained:
            pending.inner_step.skip()
        elif not self.signal.inner_first:
            pending.inner_step.take()
        record = replace(self._record(pending, received, seconds), seconds_hidden=hidden)
        tell = pending.contribution.tell
        if tell is not None:
            record = replace(record, keep=tell.keep, control=why)
        if pending.work.look is not None:
            pending.work.look.end(record, pending.steps)
        return record

    def _count_flight(self, pending: Pending, waited: float) -> None:
        """Add the cost of an overlapped exchange to the ledger: after its end, so that no checkpoint has half of it."""
        pending.count.waiting = waited
        self.transport.ledger.add("rounds", pending.count)

    def _absorb(self, pending: Pending, received: Received) -> list[Tell]:
        """Mean → rule → weights, slab by slab; then the buffers. The messages are verified already.

        Returns what the messages tell the controller.
        """
        # In the order of the message: tells, flags, buffers, slabs.
        tells = received.tells()
        present = received.present() if self.signal.tells_presence else []
        buffers = received.buffers() if self.buffers.floats else []
        targets = pending.sources.targets
        pending.work.absorb(self.state.tensors, received, targets)
        if pending.work.rule.takes_sign:
            for target in targets:
                target.sign_()
        scale = self._loss_scale(pending.inner_step)
        self.signal.answer(pending.sources, present=present, scale=scale)
        if buffers:
            self.buffers.absorb(buffers, pending.buffers_at)
        return tells

    def _control(self, pending: Pending, tells: Sequence[Tell]) -> str:
        """Choose the `keep` of the next round. Returns why, if it is another one."""
        energies, control = pending.work.energies, self.state.control
        if control is None or energies is None or self.controller is None:
            return ""
        chosen, why = self.controller.decide(control, tells)
        sent = sum(tell.sent for tell in tells)
        agreement = len(tells) * energies.mean / sent if sent > 0 else 0.0
        self.state.control = replace(chosen, spent=pending.count.sent, agreement=agreement, cosine=energies.cosine)
        return why

    def _record(self, pending: Pending, received: Received, seconds_decoding: float) -> Round:
        state, tensors, anchor = self.state, self.state.tensors, pending.contribution.header.anchor
        record = Round(
            index=state.rounds,
            local_steps=pending.steps - state.steps_at_round,
            bytes_sent=pending.count.sent,
            bytes_received=pending.count.received,
            seconds_encoding=pending.seconds_encoding,
            seconds_waiting=pending.count.waiting,
            seconds_decoding=seconds_decoding,
            drift_norm=_norm(pending.norms),
            residual_norm=_norm(tensors["residual"]) if "residual" in tensors else 0.0,
            anchor_fingerprint=(self.fingerprint() if "anchor" in tensors else anchor).hex(),
            left_out=tuple(sorted({*received.left_out, *received.lost})),
        )
        state.rounds += 1
        state.steps_at_round = pending.steps
        return record

    # -- parts -----------------------------------------------------------------------------------------------------

    def anchor_tensors(self) -> list[Tensor]:
        """The anchor, or the weights if they serve as the anchor."""
        anchor = self.state.tensors.get("anchor")
        return self.parameters.tensors if anchor is None else [anchor]

    def fingerprint(self) -> bytes:
        """The fingerprint of the present anchor."""
        return fingerprint.of_tensors(self.anchor_tensors(), self.kernels)

    def show(self, coeffs: Tensor) -> None:
        """Write the weights with these coefficients into the model, as the start of a round."""
        sources = self.signal.measure()
        self.layout.write(coeffs, sources.targets)
        self.signal.answer(sources)

    def owe_drift(self) -> None:
        """Add the drift that was not measured yet to the residual, without a round. Without a residual it is lost."""
        sources, residual = self.signal.measure(), self.state.tensors.get("residual")
        if residual is None or sources.minus is None:
            return
        plus, minus = self.layout.matrices(sources.plus), self.layout.matrices(sources.minus)
        for slab in self.layout.slabs:
            self.layout.read_slab(slab, plus, minus, self.device).into(part_of(residual, slab), keep=1.0)

    def changes(self) -> str:
        """How the model or the optimizer has changed since the replica was built. Empty if neither has."""
        return self.parameters.changed() or self.buffers.changed()

    def _may_skip(self, inner_step: InnerStep) -> bool:
        """True if an overflow is no failure: under a `GradScaler`, all replicas then skip the step."""
        return inner_step.may_overflow and not self.signal.inner_first

    def _loss_scale(self, inner_step: InnerStep) -> float:
        return 1.0 if self.signal.inner_first else inner_step.scale


def _norm(flat: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(flat))
    # Squares of large finite values overflow fp32. fp64 is slower, so it is used only then.
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(flat, dtype=torch.float64))
