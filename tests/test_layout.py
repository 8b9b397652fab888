import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overtone.coding.chunks import matrix_shape
from overtone.coding.layout import Layout, part_of
from overtone.coding.transforms import DCT, HADAMARD

shapes = st.lists(st.lists(st.sampled_from([1, 2, 3, 5, 8, 13, 67]), min_size=0, max_size=5), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, chunk=st.sampled_from([1, 4, 16, 64]), plain_below=st.sampled_from([0, 30, 1024]))
def test_what_is_read_can_be_written_back(shapes: list[list[int]], chunk: int, plain_below: int) -> None:
    shapes = [s for s in shapes if torch.Size(s).numel() < 50_000]
    tensors = [torch.randn(s) for s in shapes]
    total = sum(t.numel() for t in tensors)
    for transform, tolerance in ((None, 0.0), (DCT, 1e-5), (HADAMARD, 1e-5)):
        layout = Layout(shapes, chunk=chunk, plain_below=plain_below, transform=transform)
        assert layout.size == total  # never padded
        back = [torch.empty(s) for s in shapes]
        layout.write(layout.read(tensors, layout.empty(torch.device("cpu"))), back)
        for a, b in zip(tensors, back, strict=True):
            assert torch.allclose(a, b, rtol=0.0, atol=tolerance)


def test_edges_are_chunks_of_their_own() -> None:
    layout = Layout([(130, 70)], chunk=64, plain_below=0, transform=None)
    assert {(slab.h, slab.w): slab.chunks for slab in layout.slabs} == {(64, 64): 2, (64, 6): 2, (2, 64): 1, (2, 6): 1}


def test_equal_chunks_of_different_tensors_share_a_slab() -> None:
    layout = Layout([(64, 64), (128, 64), (64,)], chunk=64, plain_below=0, transform=None)
    assert [(slab.h, slab.w, slab.chunks, slab.plain) for slab in layout.slabs] == [
        (64, 64, 3, False),
        (1, 64, 1, True),
    ]


def test_chunks_are_the_tensor_s_own_rectangles() -> None:
    matrix = torch.arange(12.0 * 8).view(12, 8)
    layout = Layout([(12, 8)], chunk=4, plain_below=0, transform=None)
    flat = layout.read([matrix], layout.empty(torch.device("cpu")))
    assert torch.equal(part_of(flat, layout.slabs[0])[3].view(4, 4), matrix[4:8, 4:8])


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
    slab=st.sampled_from([16, 48, 100, 1000]),
)
def test_slabs_cut_anywhere_and_lose_nothing(shapes: list[tuple[int, int]], slab: int) -> None:
    """Small slabs, so that they end within rows of chunks, within tensors, within plain ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("overtone.coding.chunks.SLAB", slab)
        layout = Layout([*shapes, (300,)], chunk=4, plain_below=20, transform=None)
    assert all(s.size <= slab for s in layout.slabs)
    starts = [s.offset for s in layout.slabs]
    assert starts == [sum(s.size for s in layout.slabs[:i]) for i in range(len(starts))]
    tensors = [torch.randn(shape) for shape in [*shapes, (300,)]]
    flat = layout.read(tensors, layout.empty(torch.device("cpu")))
    whole = Layout([*shapes, (300,)], chunk=4, plain_below=20, transform=None)
    assert torch.equal(flat, whole.read(tensors, whole.empty(torch.device("cpu"))))  # the order does not depend on it
    back = [torch.empty_like(t) for t in tensors]
    layout.write(flat, back)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
    for s in layout.slabs:
        for chunk in range(s.chunks):
            value = part_of(flat, s)[chunk, 0]
            assert value in tensors[s.tensor_of(chunk, 0)]


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), (1, 1)),
        ((5,), (1, 5)),
        ((8, 3, 3, 3), (8, 27)),
        ((1, 9, 4), (9, 4)),
        ((1, 7, 1), (1, 7)),
        ((6, 1, 3, 3), (6, 9)),
    ],
)
def test_matrix_shape(shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    assert matrix_shape(shape) == matrix


def test_tensors_that_are_no_matrix_in_memory() -> None:
    layout = Layout([(16, 8, 3, 3)], chunk=8, plain_below=0, transform=DCT)
    plain = torch.randn(16, 8, 3, 3)
    last = plain.to(memory_format=torch.channels_last)
    cpu = torch.device("cpu")
    assert torch.equal(layout.read([plain], layout.empty(cpu)), layout.read([last], layout.empty(cpu)))
    target = torch.zeros(16, 8, 3, 3).to(memory_format=torch.channels_last)
    layout.write(layout.read([plain], layout.empty(cpu)), [target])
    assert torch.allclose(target, plain, atol=1e-5)


def test_the_difference_is_taken_in_fp32() -> None:
    start = torch.full((2, 40), 1.0, dtype=torch.bfloat16)
    now = torch.full((2, 40), 1.0 - 2**-8, dtype=torch.bfloat16)
    layout = Layout([(2, 40)], chunk=64, plain_below=0, transform=None)
    (slab,) = layout.slabs
    drift = layout.read_slab(slab, layout.matrices([start]), layout.matrices([now])).coefficients()
    assert torch.equal(drift.view(-1), torch.full((80,), 2**-8))
