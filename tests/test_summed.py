"""The verdict that rides in a sum."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from overtone.exchange.summed import _unanimous, _votes


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=40))
def test_a_sum_tells_whether_all_voted_alike(digests: list[bytes]) -> None:
    total = torch.stack([_votes(digest) for digest in digests]).sum(0)
    assert _unanimous(total, len(digests)) == (len(set(digests)) == 1)


def test_one_half_byte_is_enough_also_among_many() -> None:
    same, other = _votes(bytes(8)), _votes(bytes([0, 0, 0, 1, 0, 0, 0, 0]))
    for voters, dissent in itertools.product((2, 3, 1000), (1, 2)):
        total = same * (voters - dissent) + other * dissent
        assert _unanimous(total, voters) == (dissent == voters)
