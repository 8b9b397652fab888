import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overtone.codec import BITS, Dense, TopK, mean
from overtone.coding.bits import Reader
from overtone.coding.kernels import Kernels, in_numba, in_torch, kernels_for
from overtone.coding.kernels.in_torch import select
from overtone.coding.transforms import TRANSFORMS
from overtone.coding.values import encode_values, open_values
from overtone.errors import MethodError, NotFiniteError, WireError
from overtone.exchange import message as wire
from overtone.exchange.gathered import bytes_of
from test_wire import sealed
from whole import decode_all, encode_all

CPU = torch.device("cpu")
SHAPES = [(64, 64), (130, 70), (67, 67), (5, 300), (3, 3, 7), (40,), ()]
LOOPS = {"torch": in_torch, "numba": in_numba}


def kinds(seed: int, size: int) -> dict[str, Tensor]:
    """Vectors that quantisers and selectors have trouble with."""
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return {
        "noise": noise,
        "zeros": torch.zeros(size),
        "mostly zeros": torch.where(noise > 1.5, noise, 0.0),
        "constant": torch.full((size,), -3.0),
        "ties": noise.sign() * 2.0,
        "tiny": noise * 1e-42,
        "huge": noise * 1e37,
        "largest": noise.sign() * torch.finfo(torch.float32).max,
        "mixed": noise * torch.logspace(-30, 30, size),
    }


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shapes=st.lists(
        st.sampled_from([(64, 64), (130, 70), (67, 67), (5, 300), (3, 3, 7), (40,), ()]), min_size=1, max_size=3
    ),
    keep=st.sampled_from([1, 8, 32, 500, 4096]),
    bits=st.sampled_from(BITS),
    transform=st.sampled_from(sorted(TRANSFORMS)),
    kind=st.sampled_from(sorted(kinds(0, 1))),
    loops=st.sampled_from(sorted(LOOPS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_sent_is_what_receivers_decode(
    seed: int,
    shapes: list[tuple[int, ...]],
    keep: int,
    bits: int,
    transform: str,
    kind: str,
    loops: str,
    dtype: torch.dtype,
) -> None:
    """Whatever the tensors: what the sender takes out of its residual is, to the bit, what every receiver decodes,
    whichever loops each of them uses; and it is finite."""
    codec = TopK(keep=keep, bits=bits, transform=transform, plain_below=30)
    layout = codec.layout(shapes)
    tensors = [kinds(seed, math.prod(shape))[kind].view(shape).to(dtype) for shape in shapes]
    tensors = [t if bool(torch.isfinite(t).all()) else t.nan_to_num() for t in tensors]  # huge is infinite in fp16
    if kind in ("huge", "largest", "mixed") and transform != "none":
        tensors = [t / 8192 for t in tensors]  # a sum over a chunk must fit fp32; hadamard scales it afterwards
    flat = layout.read(tensors, layout.empty(CPU))
    payload, sent = encode_all(codec, flat, layout, LOOPS[loops])
    for other in LOOPS.values():
        assert torch.equal(decode_all(codec, payload, layout, other), sent)
    assert bool(torch.isfinite(sent).all())


@pytest.mark.parametrize("codec", [Dense(), TopK(keep=4096, bits=32), TopK(keep=4096, bits=32, transform="none")])
def test_lossless_codecs_lose_nothing(codec: Dense | TopK) -> None:
    layout = codec.layout([(130, 70), (9,)])
    flat = torch.randn(layout.size)
    _, sent = encode_all(codec, flat, layout)
    assert codec.lossless
    assert torch.equal(sent, flat)


@pytest.mark.parametrize("loops", LOOPS.values(), ids=LOOPS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 59), levels=st.sampled_from([1, 3, 20, 10**6]))
def test_selection_is_exact_and_ties_go_to_the_front(loops: Kernels, seed: int, k: int, levels: int) -> None:
    coeffs = torch.randint(-levels, levels + 1, (7, 60), generator=torch.Generator().manual_seed(seed)).float()
    for row, chosen in zip(coeffs.abs().tolist(), loops.select(coeffs, k).tolist(), strict=True):
        best = sorted(range(60), key=lambda i: (-row[i], i))[:k]
        assert chosen == sorted(best)


def test_one_bit_is_sign_times_mean_magnitude() -> None:
    values = torch.tensor([[1.0, -3.0, 2.0, -2.0]])
    _, decoded, _ = encode_values(values, 1)
    assert torch.equal(decoded, torch.tensor([[2.0, -2.0, 2.0, -2.0]]))


@pytest.mark.parametrize(("bits", "worst"), [(1, 0.45), (2, 0.25), (4, 0.08), (8, 0.006), (16, 0.003), (32, 0.0)])
def test_more_bits_err_less(bits: int, worst: float) -> None:
    coeffs = torch.randn(50, 4096, generator=torch.Generator().manual_seed(0))
    values = coeffs.gather(1, select(coeffs, 128))
    _, decoded, _ = encode_values(values, bits)
    assert float((decoded - values).norm() / values.norm()) <= worst


# -- size ----------------------------------------------------------------------------------------------------------

WIDTH, LAYERS, WORDS = 384, 5, 3001  # a GPT of 10 million parameters, with norms, biases and an edge that 64 cuts badly
GPT = [
    (WORDS, WIDTH),
    *[(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,)]
    * LAYERS,
]


@pytest.fixture(scope="module")
def noise() -> Tensor:
    size = sum(math.prod(shape) for shape in GPT)
    assert 9.9e6 < size < 10.5e6
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("keep", [8, 32, 64, 128, 512])
@pytest.mark.parametrize("bits", BITS)
def test_a_message_is_within_six_percent_of_the_bound(keep: int, bits: int, noise: Tensor) -> None:
    """log2 C(a, k) for the positions, k · bits for the values and 16 for the scale of each chunk, against the whole
    message of a model of 10 M parameters: header, lengths, seal and what travels densely included."""
    codec = TopK(keep=keep, bits=bits, transform="none")
    layout = codec.layout(GPT)
    payload, _ = encode_all(codec, noise, layout, in_numba)
    message = sealed(payload)
    assert len(message) == len(payload) + wire.HEADER_BYTES + 4
    bound = sum(map(codec.bits_of, layout.slabs)) / 8
    assert bound <= len(message) <= 1.06 * bound


def test_keep_is_in_proportion_to_area() -> None:
    codec = TopK(keep=128)
    layout = codec.layout([(96, 96)])
    assert {(slab.h, slab.w): codec.kept(slab) for slab in layout.slabs} == {
        (64, 64): 128,
        (64, 32): 64,
        (32, 64): 64,
        (32, 32): 32,
    }


def test_mean_over_all_and_over_senders() -> None:
    codec = TopK(keep=1, bits=32, chunk=2, transform="none", plain_below=0)
    layout = codec.layout([(2, 2)])
    (slab,) = layout.slabs
    heard = []
    for values in ([9.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0, 1.0], [0.0, 6.0, 0.0, 0.0]):
        block, _ = codec.encode(torch.tensor([values]), slab)
        heard.append(codec.decode(Reader(bytes_of(block)), slab))
    assert mean(heard, 3, torch.empty(1, 4), over_senders=False).tolist() == [[4.0, 2.0, 0.0, 0.0]]
    assert mean(heard, 3, torch.empty(1, 4), over_senders=True).tolist() == [[6.0, 6.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"keep": 0}, "keep=0"),
        ({"keep": 4097}, "keep=4097"),
        ({"bits": 3}, "bits=3"),
        ({"chunk": 0}, "chunk=0"),
        ({"chunk": 1025}, "chunk=1025"),
        ({"transform": "fft"}, "transform='fft'"),
        ({"plain_below": -1}, "plain_below=-1"),
    ],
)
def test_bad_numbers_are_refused_by_name(numbers: dict[str, object], told: str) -> None:
    with pytest.raises(MethodError, match=told):
        TopK(**numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_values_far_beyond_the_grid_are_sent_as_exceptions(bits: int) -> None:
    """One coefficient a thousand times its neighbours: sent nearly exactly, and the others keep their own scale."""
    values = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    plain, *_ = encode_values(values, bits)
    values[1, 77] = -1000.0
    data, decoded, _ = encode_values(values, bits)
    assert float(decoded[1, 77]) == -1000.0
    others = torch.ones(3, 500, dtype=torch.bool)
    others[1, 77] = False
    assert float((decoded - values)[others].norm() / values[others].norm()) < 0.7
    assert len(data) <= len(plain) + 16


def test_a_coefficient_that_always_drifts_fastest_is_not_left_behind() -> None:
    """Error feedback at one bit: without exceptions its residual grows every round, with them it stays bounded."""
    codec = TopK(keep=2048, bits=1, transform="none", plain_below=0)
    layout = codec.layout([(64, 64)])
    dice = torch.Generator().manual_seed(0)
    residual, worst = layout.empty(CPU), 0.0
    for _ in range(50):
        residual += torch.randn(layout.size, generator=dice)
        residual[123] += 100.0
        residual -= encode_all(codec, residual, layout)[1]
        worst = max(worst, abs(float(residual[123])))
    assert worst < 10.0


# -- refusal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("position", "tensor"), [(0, 0), (4099, 1), (8192, 2), (8196, 3)])
def test_what_is_not_finite_is_refused_at_the_sender(bad: float, position: int, tensor: int) -> None:
    codec = TopK(transform="none")
    layout = codec.layout([(64, 64), (64, 64), (3,), (9,)])
    flat = torch.randn(layout.size)
    flat[position] = bad
    with pytest.raises(NotFiniteError) as caught:
        encode_all(codec, flat, layout)
    assert caught.value.tensor == tensor


def block_of(**changes: bytes) -> bytes:
    """The block of one chunk, 80 of 4096 at one bit, taken apart, changed and put together again."""
    (slab,) = ONE_CHUNK.slabs
    encoded, _ = EIGHTY.encode(torch.randn(1, 4096, generator=torch.Generator().manual_seed(1)), slab)
    block = bytes_of(encoded)
    width, low = block[:1], block[1 : 1 + 10 * block[0]]
    at = 1 + len(low)
    high = block[at + 4 : at + 4 + int.from_bytes(block[at : at + 4], "little")]
    scale, codes, count = block[-16:-14], block[-14:-4], block[-4:]
    parts = {"width": width, "low": low, "length": len(high).to_bytes(4, "little"), "high": high}
    whole = {**parts, "scale": scale, "codes": codes, "count": count}
    assert b"".join(whole.values()) == block
    return b"".join({**whole, **changes}.values())


EIGHTY = TopK(keep=80, bits=1, transform="none")
ONE_CHUNK = EIGHTY.layout([(64, 64)])
SCALES = "scales, chunks of 64x64: not all from 0 to 3.4"
CORRUPT = {
    "another width": ({"width": b"\xc8"}, "positions, chunks of 64x64: Rice width 200, not in 3 to 7"),
    "absurd length": ({"length": b"\xff\xff\xff\xff"}, "4294967295 bytes of unary numbers, at most"),
    "long unary": ({"length": b"\x14\0\0\0"}, "positions|scales"),
    "no positions": ({"length": bytes(4), "high": b""}, "more or fewer than the 80 positions"),
    "too many": ({"high": b"\xff" * 16, "length": b"\x10\0\0\0"}, "more or fewer than the 80 positions"),
    "zeros behind": ({"length": b"\x10\0\0\0", "high": b"\xff" * 10 + bytes(6)}, "end with a zero byte"),
    "beyond": (
        {"low": b"\xff" * 50, "length": b"\x13\0\0\0", "high": bytes(9) + b"\xff" * 10},
        "a position beyond the 4096",
    ),
    "NaN scale": ({"scale": b"\xc0\x7f"}, SCALES),
    "infinite scale": ({"scale": b"\x80\x7f"}, SCALES),
    "negative scale": ({"scale": b"\x80\xbf"}, SCALES),
    "absurd exceptions": ({"count": b"\xff\xff\xff\x7f"}, "exceptions, chunks of 64x64: 2147483647 of 80"),
    "exceptions cut": ({"count": b"\x02\0\0\0"}, "exceptions, chunks of 64x64: needs .* the message was cut"),
    "NaN exception": ({"count": b"\x01\0\0\0\x06\x05\x01\0\0\0\x01\xc0\x7f"}, "exceptions.*not finite"),
    "exception beyond": ({"count": b"\x01\0\0\0\x06\x3f\x01\0\0\0\x02\x80\x3f"}, "exceptions.*beyond the 80"),
    "extended": ({"count": bytes(5)}, "payload: 1 bytes too many"),
    "cut": ({"count": bytes(3)}, "exceptions.*needs 4 bytes, 3 are left"),
}


@pytest.mark.parametrize("loops", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(("changes", "told"), CORRUPT.values(), ids=CORRUPT)
def test_corrupt_numbers_are_refused_by_name(loops: Kernels, changes: dict[str, bytes], told: str) -> None:
    with pytest.raises(WireError, match=told):
        decode_all(EIGHTY, block_of(**changes), ONE_CHUNK, loops)


def test_wide_grids_of_huge_scale_are_refused() -> None:
    for loops in LOOPS.values():
        with pytest.raises(WireError, match=r"scales, here: not all from 0 to 2\.6"):
            open_values(Reader(b"\x7f\x7f" + bytes(8) + bytes(4)), (1, 8), 8, "here", loops)


@pytest.mark.parametrize(
    ("wish", "size", "loops"),
    [
        ("", 1, in_torch),
        ("", 1 << 22, in_numba),
        ("torch", 1 << 22, in_torch),
        ("numba", 1, in_numba),
    ],
)
def test_which_loops_are_used(monkeypatch: pytest.MonkeyPatch, wish: str, size: int, loops: Kernels) -> None:
    monkeypatch.setenv("OVERTONE_KERNELS", wish)
    assert kernels_for(size, CPU) is loops
    assert kernels_for(size, torch.device("cuda")) is in_torch
    monkeypatch.setenv("OVERTONE_KERNELS", "fortran")
    with pytest.raises(MethodError, match="OVERTONE_KERNELS=fortran"):
        kernels_for(size, CPU)
