"""Who trains on which samples when members come and go: no unit is leased twice, and every epoch is covered."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overtone.errors import WireError
from overtone.swarm.leases import ROUNDS, Leases

Unit = tuple[int, int]


def units_of(leases: Leases, number: int) -> list[Unit]:
    return [(span.epoch, unit) for span in leases.held[number] for unit in range(span.begin, span.end)]


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 60),
    st.integers(1, 9),
    st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.lists(st.integers(0, 30), min_size=6, max_size=6))),
)
def test_no_unit_is_leased_twice_and_every_epoch_is_covered(
    units: int, need: int, rounds: list[tuple[set[int], list[int]]]
) -> None:
    """In each round some are members, and tell that they have used some of their lease, all of it at most."""
    leases, used = Leases(units, need), Counter[Unit]()
    for members, asked in rounds:
        told = {}
        for number in leases.held:
            mine = units_of(leases, number)[: asked[number]]
            told[number] = len(mine)
            used.update(mine)
        leases = leases.after(members, told)
        assert Leases.read(leases.told()) == leases
        assert leases.held.keys() == members
        out = Counter(unit for number in leases.held for unit in units_of(leases, number))
        assert all(len(units_of(leases, number)) >= ROUNDS * need for number in members)
        free = Counter((span.epoch, unit) for span in leases.free for unit in range(span.begin, span.end))
        never = Counter((leases.epoch, unit) for unit in range(leases.next, units))
        begun = Counter((epoch, unit) for epoch in range(leases.epoch + 1) for unit in range(units))
        # Of all epochs that have begun, every unit is used, leased, free or not yet leased out: one of these, once.
        assert used + out + free + never == begun


def test_what_a_member_left_is_leased_out_first() -> None:
    leases = Leases(100, 5).after({0, 1}, {})
    assert leases.told()["held"] == {"0": [[0, 0, 20]], "1": [[0, 20, 40]]}
    alone = leases.after({1}, {0: 14, 1: 20})
    assert alone.told()["held"] == {"1": [[0, 14, 20], [0, 40, 54]]}
    assert not alone.free


@pytest.mark.parametrize(
    "changed",
    [
        {"units": 0},
        {"need": -1},
        {"next": 101},
        {"epoch": True},
        {"free": [[0, 5, 5]]},
        {"free": [[0, 5, 101]]},
        {"free": 3},
        {"held": {"x": []}},
        {"held": {"0": [[0, 1]]}},
        {"held": None},
    ],
)
def test_leases_that_make_no_sense_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(WireError, match="leases"):
        Leases.read({**Leases(100, 5).after({0}, {}).told(), **changed})
    with pytest.raises(WireError, match="leases"):
        Leases.read({})
