"""The compiled loops make the same bytes as the plain ones, and read the same from them."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overtone.codec import BITS, TopK, mean, mean_of_blocks
from overtone.coding.bits import Reader
from overtone.coding.kernels import Kernels, in_numba, in_torch
from overtone.coding.kernels.in_torch import OuterStep
from overtone.coding.transforms import DCT, HADAMARD, RANDOM, Transform
from overtone.errors import WireError
from test_codec import kinds
from whole import encode_all

LOOPS = (in_torch, in_numba)


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


any_slab = {
    "seed": st.integers(0, 10**6),
    "transform": st.sampled_from([DCT, HADAMARD, RANDOM]),
    "sides": st.sampled_from([(64, 64), (7, 64), (64, 3), (1, 1)]),
    "cuts": st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20)), min_size=1, max_size=3),  # (down, across)
}


@settings(max_examples=60, deadline=None)
@given(**any_slab, keep=st.sampled_from([0.0, 0.9, 1.0]))
def test_a_fused_difference_equals_its_parts(
    seed: int, transform: Transform, sides: tuple[int, int], cuts: list[tuple[int, int]], keep: float
) -> None:
    """Bit for bit, from matrices that are larger than the patches, and that start anywhere."""
    h, w = sides
    dice = torch.Generator().manual_seed(seed)
    pairs = [torch.randn(2, down * h + 3, across * w + 5, generator=dice) for down, across in cuts]
    plus, minus = ([pair[i, 1 : 1 - 3, 2 : 2 - 5] for pair in pairs] for i in range(2))
    cut = [(a - b).unflatten(0, (-1, h)).unflatten(2, (-1, w)) for a, b in zip(plus, minus, strict=True)]
    apart = torch.cat([part.transpose(1, 2).reshape(-1, h, w) for part in cut])
    before, between, chunks = (
        torch.randn(apart.shape, generator=dice),
        torch.empty(apart.shape),
        torch.empty_like(apart),
    )
    for loops in LOOPS:
        expected, found = before.clone(), before.clone().view(len(apart), -1)
        loops.forward(transform, apart, between, expected, keep=keep, scale=1.0)
        squares = loops.difference_forward(
            transform, sides, plus, minus, chunks.view(found.shape), between, found, keep=keep, scale=1.0
        )
        assert squares == pytest.approx(float(apart.double().square().sum()), rel=1e-5)
        assert torch.equal(found.view(apart.shape), expected)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 7, 64, 1000]),
    lr=st.floats(1e-3, 10.0),
    mu=st.sampled_from([0.0, 0.5, 0.8, 0.9, 0.999]),
    carry=st.sampled_from([0.0, 0.3, 1.0]),
    lossless=st.booleans(),
)
def test_outer_steps_are_equal_bit_for_bit(
    seed: int, size: int, lr: float, mu: float, carry: float, *, lossless: bool
) -> None:
    dice = torch.Generator().manual_seed(seed)
    anchor, momentum, residual, mean = (torch.randn(4, size, generator=dice) * 10 ** torch.randn(4, 1)).unbind(0)
    results = []
    for loops in (in_torch, in_numba):
        theta, m, u = anchor.clone(), momentum.clone(), mean.clone()
        e = None if lossless else residual.clone()
        answer = loops.outer_answer(OuterStep(theta, m if mu else None, e, u, lr, mu, carry))
        results.append((theta, m, answer, torch.zeros(1) if e is None else e))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_outer_step_is_a_row_of_single_operations() -> None:
    """Each is rounded to fp32 by itself; computed here in fp64 and rounded after every operation."""
    anchor, momentum, residual, mean = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)).unbind(0)
    lr, mu, carry = (torch.tensor(value).double() for value in (0.9, 0.8, 0.7))

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.float().double()

    u, e = mean.double(), residual.double()
    m = rounded(rounded(mu * momentum.double()) + u)
    theta = rounded(anchor.double() - rounded(lr * rounded(u + rounded(mu * m))))
    answer = rounded(theta - rounded(carry * e))
    found = in_numba.outer_answer(OuterStep(anchor, momentum, residual, mean, lr=0.9, mu=0.8, carry=0.7))
    assert torch.equal(found.double(), answer)
    assert torch.equal(anchor.double(), theta)
    assert torch.equal(momentum.double(), m)


@settings(max_examples=40, deadline=None)
@given(**any_slab, carry=st.sampled_from([0.3, 1.0]))
def test_a_fused_outer_step_equals_its_parts(
    seed: int, transform: Transform, sides: tuple[int, int], cuts: list[tuple[int, int]], carry: float
) -> None:
    """Bit for bit, in matrices that are larger than the patches, and that start anywhere."""
    (h, w), numbers = sides, {"lr": 0.9, "mu": 0.8, "carry": carry}
    chunks = sum(down * across for down, across in cuts)
    dice = torch.Generator().manual_seed(seed)
    vectors = torch.randn(4, chunks, h * w, generator=dice).unbind(0)
    between = torch.empty(chunks, h * w)
    for loops in LOOPS:
        found, expected = ([torch.zeros(down * h + 2, across * w + 3) for down, across in cuts] for _ in range(2))
        fused, apart = ([vector.clone() for vector in vectors] for _ in range(2))
        patches = [matrix[1:-1, 2:-1] for matrix in found]
        loops.outer_patches(transform, sides, OuterStep(*fused, **numbers), between, patches)
        answer, first = loops.outer_answer(OuterStep(*apart, **numbers)), 0
        for (down, across), matrix in zip(cuts, expected, strict=True):
            part = answer[first : first + down * across].view(down, across, h, w)
            loops.inverse_patch(transform, part, between, matrix[1:-1, 2:-1])
            first += down * across
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(fused[:3], apart[:3], strict=True))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    bits=st.sampled_from([1, 2, 4, 8]),
    keep=st.integers(1, 4095),
    count=st.integers(1, 9),
    kind=st.sampled_from(sorted(kinds(0, 1))),
)
def test_blocks_are_added_as_if_they_were_unpacked(seed: int, bits: int, keep: int, count: int, kind: str) -> None:
    codec = TopK(keep=keep, bits=bits, transform="none")
    layout = codec.layout([(192, 64)])
    (slab,) = layout.slabs
    payloads = [encode_all(codec, kinds(seed + i, layout.size)[kind], layout)[0] for i in range(2)]
    decoded = (codec.decode(Reader(payload), slab) for payload in payloads)
    expected = mean(decoded, count, torch.empty(slab.chunks, slab.area), over_senders=False)
    for loops in LOOPS:
        readers, out = [Reader(payload) for payload in payloads], torch.full((slab.chunks, slab.area), torch.nan)
        found = mean_of_blocks(codec, readers, slab, count, out, over_senders=False, kernels=loops)
        assert torch.equal(found, expected)
        for reader in readers:
            reader.end()


@pytest.mark.parametrize("loops", LOOPS)
def test_a_block_with_wrong_positions_is_not_added(loops: Kernels) -> None:
    codec = TopK(keep=32, bits=2, transform="none")
    layout = codec.layout([(64, 64)])
    (slab,) = layout.slabs
    payload = bytearray(encode_all(codec, torch.randn(layout.size, generator=torch.manual_seed(0)), layout)[0])
    start = 1 + 32 * payload[0] // 8 + 4  # of the unary parts, which end before the step
    for byte in (0x00, 0xFF):  # fewer ones than are due, and more
        wrong = payload.copy()
        wrong[start] = byte
        with pytest.raises(WireError) as seen:
            codec.check(Reader(bytes(wrong)), slab, loops)
        block = codec.open_sparse_grid(Reader(bytes(wrong)), slab, loops)
        with pytest.raises(WireError, match=re.escape(str(seen.value))):
            loops.add_share(torch.zeros(1, 4096), block, 1)
