"""The controller: the same `keep` on every replica, within the budget, in small steps, and saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import overtone
from overtone import Cluster, MethodError, PeerError, WireError
from overtone.coding.bits import Reader
from overtone.exchange.control import BANK, LEAST_KEEP, MOST_KEEP, Budget, Control, Controller, Tell
from overtone.ledger import Round
from overtone.runs.advice import TooFewRoundsWarning, rounds_needed, warn_of_few_rounds
from scenario import backward, batches, build

EVERY, REPLICAS = 2, 4
PATTERNS = {"gathered": 11_000, "sharded": 8_400}  # with a budget for each


def rounds(cluster: Cluster, count: int, skip: int = 0) -> Iterator[list[Round]]:
    """So many rounds of a cluster, on the batches after the first ``skip`` rounds."""
    streams = [batches(rank) for rank in range(REPLICAS)]
    for stream in streams:
        for _ in range(skip * EVERY):
            next(stream)
    for _ in range(count * EVERY):
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        if records := cluster.step():
            yield records


def controlled(budget: str | int, exchange: str, **options: object) -> Cluster:
    method = overtone.decoupled(every=EVERY, budget=str(budget), exchange=exchange, **options)  # type: ignore[arg-type]
    return Cluster(build, method, replicas=REPLICAS, step_seconds=0.5)


@pytest.mark.parametrize(("exchange", "budget"), PATTERNS.items())
def test_all_replicas_keep_the_same_within_the_budget(exchange: str, budget: int) -> None:
    cluster = controlled(budget, exchange)
    keeps, moved = [], 0
    for records in rounds(cluster, 40):
        assert len({record.keep for record in records}) == 1
        assert len({record.control for record in records}) == 1
        states = [replica.state.control for replica in cluster.replicas]
        assert len({(state.keep, state.account) for state in states if state is not None}) == 1
        keep = records[0].keep
        assert keep is not None
        assert keep.bit_count() == 1
        if keeps and keep != keeps[-1]:
            moved += 1
            assert max(keep, keeps[-1]) == 2 * min(keep, keeps[-1])
        keeps.append(keep)
        if records[0].control:
            assert f"keep {keep} to " in records[0].control
    assert moved > 2
    spent = cluster.replicas[0].transport.ledger.counts["rounds"].sent
    # Nearly all of it: the bank holds some rounds at most, and the first rounds owe little.
    assert 0.9 < spent / (40 * budget) < 1.03
    assert len({replica.fingerprint for replica in cluster.replicas}) == 1


@pytest.mark.parametrize("exchange", PATTERNS)
@pytest.mark.parametrize("delay", [0, 1])
def test_a_saved_controller_goes_on_to_the_bit(exchange: str, delay: int) -> None:
    def fresh() -> Cluster:
        return controlled(PATTERNS[exchange], exchange, delay=delay)

    whole, first, second = fresh(), fresh(), fresh()
    expected = [records[0] for records in rounds(whole, 14)]
    before = [records[0] for records in rounds(first, 7)]
    for old, new in zip(first.replicas, second.replicas, strict=True):
        new.model.load_state_dict(old.model.state_dict())
        new.inner.load_state_dict(old.inner.state_dict())
        new.load_state_dict(old.state_dict())
    after = [records[0] for records in rounds(second, 7, skip=7)]
    assert [record.keep for record in [*before, *after]] == [record.keep for record in expected]
    assert [replica.fingerprint for replica in second.replicas] == [replica.fingerprint for replica in whole.replicas]


def test_a_replica_that_keeps_another_number_is_refused_by_all() -> None:
    for exchange, budget in PATTERNS.items():
        cluster = controlled(budget, exchange)
        list(rounds(cluster, 2))
        astray = cluster.replicas[2]
        assert astray.state.control is not None
        astray.exchanger.state.control = replace(astray.state.control, keep=2 * astray.state.control.keep)
        with pytest.raises(PeerError, match=r"keep: .* their controllers disagree"):
            list(rounds(cluster, 1, skip=2))


def test_a_share_of_a_link_follows_the_time_of_a_round() -> None:
    """Two steps of half a second on 1 Mbit/s: 8 % of it are 10 kB a round, and the waiting adds a little."""
    cluster = controlled("8% of 1Mbit/s", "gathered")
    sent = [records[0].bytes_sent for records in rounds(cluster, 30)]
    assert 9_000 < sum(sent[5:]) / 25 < 12_000


def test_a_budget_in_words() -> None:
    assert Budget.parse(5000) == Budget.parse("5kB") == Budget.parse("5 KB") == Budget(bytes=5000)
    assert Budget.parse("1.5MB") == Budget(bytes=1_500_000)
    link = Budget.parse("10% of 50Mbit/s")
    assert link.of_round(2.0) == 1_250_000
    assert str(link) == "10 % of 50 Mbit/s"
    for wrong in (0, -1, True, None, "", "5 apples", "0% of 5Mbit/s", "101% of 5Mbit/s", "5% of 5MB", "1e9", "nan"):
        with pytest.raises(MethodError, match=r"budget=.*such as 200kB"):
            Budget.parse(wrong)
    with pytest.raises(MethodError, match="keep=64: the budget of 5kB sets it"):
        overtone.decoupled(keep=64, budget="5kB")
    with pytest.raises(MethodError, match="has no `keep` to control"):
        replace(overtone.diloco(), budget=Budget(bytes=5))
    with pytest.raises(MethodError, match=r"budget=500: a round takes \d+ bytes even if it sends one coefficient"):
        controlled(500, "gathered")


def test_tells_are_read_as_they_were_written_and_damage_is_refused() -> None:
    tell = Tell(64, 1.5, 2.0, 0.25, 12345, 0.5, -0.25, 3.0)
    assert Tell.unpack(Reader(tell.pack()), 64) == tell
    assert Tell.unpack(Reader(Tell(1, residual=1e300).pack()), 1).residual < 1e39
    with pytest.raises(WireError, match="keep: 64, this replica keeps 32"):
        Tell.unpack(Reader(tell.pack()), 32)
    with pytest.raises(WireError, match="not all of its numbers are finite"):
        Tell.unpack(Reader(Tell(64, cosine=float("nan")).pack()), 64)
    with pytest.raises(WireError, match="was cut"):
        Tell.unpack(Reader(tell.pack()[:-1]), 64)


tells = st.builds(
    Tell,
    keep=st.just(64),
    residual=st.floats(0, 1e30),
    drift=st.floats(0, 1e30),
    sent=st.floats(0, 1e30),
    spent=st.integers(0, 1 << 63),
    agreement=st.floats(-1e30, 1e30),
    cosine=st.floats(-1, 1),
    seconds=st.floats(0, 1e6),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(tells, min_size=1, max_size=5), st.integers(0, 12), st.integers(-(10**9), 10**9))
def test_whatever_peers_tell_keep_moves_by_a_factor_of_two_at_most(said: list[Tell], log: int, account: int) -> None:
    """A peer that lies can neither stop the controller nor lead it out of its bounds."""
    for budget in (Budget(bytes=10_000), Budget.parse("10% of 50Mbit/s")):
        control, why = Controller(budget, lambda keep: 100 * keep).decide(Control(1 << log, account), said)
        assert control.keep in (1 << log, 2 << log, 1 << log >> 1)
        assert LEAST_KEEP <= control.keep <= MOST_KEEP
        assert bool(why) == (control.keep != 1 << log)
        if budget.bytes:
            assert abs(control.account) <= BANK * budget.bytes


def test_a_run_with_too_few_rounds_is_told_so() -> None:
    cluster = Cluster(build, overtone.decoupled(every=10, keep=32), replicas=2)
    needed = rounds_needed(0.0694)
    assert needed == 145
    with pytest.warns(TooFewRoundsWarning, match=r"steps=500: 50 rounds are few for keep=32: a message takes 6\.9%"):
        warn_of_few_rounds(cluster.replicas[0], 500)
    torch.manual_seed(0)
    warn_of_few_rounds(cluster.replicas[0], 1460)  # enough: nothing is said
    warn_of_few_rounds(Cluster(build, overtone.diloco(), replicas=2).replicas[0], 64)


def test_the_first_rounds_may_keep_more() -> None:
    method = overtone.decoupled(every=EVERY, keep=64, exchange="gathered", first_rounds=3, first_keep=1024)
    sent = [records[0].bytes_sent for records in rounds(Cluster(build, method, replicas=REPLICAS), 6)]
    assert min(sent[:3]) > 1.5 * max(sent[3:])
    plain = overtone.decoupled(every=EVERY, keep=64, exchange="gathered")
    assert method.of_round(3).codec == plain.codec
    for wrong, told in (
        ({"first_rounds": 3}, "means nothing without first_keep"),
        ({"first_keep": 3}, "means nothing without first_rounds"),
        ({"first_rounds": -1, "first_keep": 3}, "a whole number from 0"),
        ({"first_rounds": 1, "first_keep": 5000}, "keep=5000: coefficients kept of each 4096"),
        ({"first_rounds": 1, "first_keep": 5, "budget": "5kB"}, "the budget sets `keep`"),
    ):
        with pytest.raises(MethodError, match=told):
            overtone.decoupled(**wrong)  # type: ignore[arg-type]


def test_presets_are_numbers_that_can_be_overruled() -> None:
    thin = overtone.decoupled(preset="thin")
    assert overtone.decoupled(preset="thin", keep=99).codec == replace(thin.codec, keep=99)  # type: ignore[type-var]
    assert overtone.decoupled(preset="balanced") == overtone.decoupled()
    with pytest.raises(MethodError, match="preset='thinner': unknown; there are near, balanced, thin, thinnest"):
        overtone.decoupled(preset="thinner")
