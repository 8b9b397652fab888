"""The compiled loops make the same bytes as the plain ones, and read the same from them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overtone.codec import BITS, TopK
from overtone.coding.bits import Reader
from overtone.coding.kernels import in_numba, in_torch
from test_codec import kinds
from whole import encode_all


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(64, 64), (130, 70), (200, 200), (5, 300)]),
    keep=st.integers(1, 4096),
    bits=st.sampled_from(BITS),
    kind=st.sampled_from(sorted(kinds(0, 1))),
)
def test_payloads_are_equal_byte_for_byte(seed: int, shape: tuple[int, int], keep: int, bits: int, kind: str) -> None:
    codec = TopK(keep=keep, bits=bits, transform="none", plain_below=30)
    layout = codec.layout([shape, (50,)])
    flat = kinds(seed, layout.size)[kind]
    plain, compiled = encode_all(codec, flat, layout, in_torch), encode_all(codec, flat, layout, in_numba)
    assert plain[0] == compiled[0]
    assert torch.equal(plain[1], compiled[1])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), area=st.integers(2, 70_000), chunks=st.integers(1, 4))
def test_positions_round_trip(data: st.DataObject, area: int, chunks: int) -> None:
    k = data.draw(st.integers(1, min(area, 60)))
    rows = [sorted(data.draw(st.sets(st.integers(0, area - 1), min_size=k, max_size=k))) for _ in range(chunks)]
    index = torch.tensor(rows)
    packed = in_torch.pack_positions(index, area)
    assert in_numba.pack_positions(index, area) == packed
    for loops in (in_torch, in_numba):
        reader = Reader(packed)
        assert torch.equal(loops.unpack_positions(reader, (chunks, k), area, "positions"), index)
        reader.end()


@pytest.mark.parametrize("k", [8, 32, 64, 128, 512])
def test_positions_are_near_the_entropy(k: int) -> None:
    """Within 5 % of log2 C(4096, k)."""
    dice = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randperm(4096, generator=dice)[:k].sort().values for _ in range(200)])
    entropy = float(
        torch.lgamma(torch.tensor([4097.0, k + 1.0, 4097.0 - k], dtype=torch.float64))
        .mul(torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64))
        .sum()
        / torch.log(torch.tensor(2.0, dtype=torch.float64))
    )
    assert 8 * len(in_torch.pack_positions(index, 4096)) <= 1.05 * 200 * entropy
