"""A basis that turns: as the page of the wire says, the same bits in both kinds of loops, and worth its while."""

from __future__ import annotations

import hashlib

import pytest
import scipy.linalg
import torch
from torch import Tensor

import overtone
from overtone import Cluster, MethodError
from overtone.codec import TopK
from overtone.coding.kernels import in_numba, in_torch
from overtone.coding.turns import Turn
from scenario import backward, batches, build

SHAPES = [(130, 70), (64, 128), (3, 40)]


def layout_and_values(seed: int = 0) -> tuple[object, Tensor]:
    layout = TopK(transform="turning", plain_below=10).layout(SHAPES)
    return layout, torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))


def signs(index: int, count: int) -> list[float]:
    """As docs/wire.md has it, bit by bit."""
    data = hashlib.shake_128(b"overtone turn" + index.to_bytes(8, "little")).digest(count)
    return [-1.0 if data[i // 8] >> (i % 8) & 1 else 1.0 for i in range(count)]


@pytest.mark.parametrize("index", [0, 1, 77, 1 << 40])
def test_a_chunk_turns_as_the_page_says(index: int) -> None:
    layout, flat = layout_and_values()
    slab = layout.slabs[0]  # type: ignore[attr-defined]
    values = flat[: slab.size].view(slab.chunks, slab.area)
    basis = torch.from_numpy(scipy.linalg.hadamard(64) / 8.0).double()
    expected = basis @ (values.double() * torch.tensor(signs(index, 4096))).view(-1, 64, 64) @ basis
    turned = Turn(index, layout, in_torch).forward(values, slab)  # type: ignore[arg-type]
    assert torch.allclose(turned.double().view(-1, 64, 64), expected, atol=2e-6)


def test_turning_back_gives_the_values_and_both_kinds_of_loops_the_same_bits() -> None:
    layout, flat = layout_and_values(1)
    for slab in layout.slabs:  # type: ignore[attr-defined]
        if slab.plain:
            continue
        values = flat[slab.offset : slab.offset + slab.size].view(slab.chunks, slab.area)
        found = []
        for kernels in (in_torch, in_numba):
            turn = Turn(5, layout, kernels)  # type: ignore[arg-type]
            turned = turn.forward(values, slab).clone()
            found += [turned, turn.back(turned, slab).clone()]
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])
        assert torch.allclose(found[1], values, atol=2e-6)


def test_what_is_left_of_a_residual_is_smaller_than_in_a_fixed_basis() -> None:
    """Noise that goes on and on: in a fixed basis the strongest are gone, in a new one there are strong ones again."""
    owed = {}
    for transform in ("hadamard", "turning"):
        codec = TopK(keep=32, transform=transform)
        layout = codec.layout([(64, 64)])
        slab, residual = layout.slabs[0], torch.zeros(1, 4096)
        dice = torch.Generator().manual_seed(0)
        for index in range(200):
            residual += torch.randn(1, 4096, generator=dice)
            turn = Turn(index, layout, in_torch) if codec.turns else None
            coeffs = residual if turn is None else turn.forward(residual, slab)
            _, decoded = codec.encode(coeffs, slab)
            sent = torch.zeros(1, 4096)
            decoded.add_to(sent)
            residual -= sent if turn is None else turn.back(sent, slab)
        owed[transform] = float(residual.square().mean())
    assert owed["turning"] < 0.75 * owed["hadamard"]
    assert 10 < owed["turning"] < 20  # rounds of drift: about one over the energy of 32 strongest of 4096 Gaussians


def test_a_chunk_that_cannot_turn_is_refused() -> None:
    with pytest.raises(MethodError, match="chunk=48: only sides that are powers of two can turn"):
        overtone.decoupled(transform="turning", chunk=48)


def test_a_saved_run_goes_on_in_the_basis_of_its_round() -> None:
    """Also one whose round in flight is taken back, because the number of replicas is another one."""
    method = overtone.decoupled(every=2, keep=64, transform="turning", exchange="gathered", delay=1)

    def run(cluster: Cluster, steps: int, skip: int = 0) -> None:
        streams = [batches(rank) for rank in range(len(cluster.replicas))]
        for step in range(skip + steps):
            for replica in cluster.turns() if step >= skip else []:
                backward(replica, next(streams[replica.transport.rank]))
            if step >= skip:
                cluster.step()
            else:
                for stream in streams:
                    next(stream)

    whole, first, second = (Cluster(build, method, replicas=2) for _ in range(3))
    run(whole, 12)
    run(first, 6)
    saved = [replica.state_dict() for replica in first.replicas]
    assert "flight" in saved[0]
    for old, new in zip(first.replicas, second.replicas, strict=True):
        new.model.load_state_dict(old.model.state_dict())
        new.inner.load_state_dict(old.inner.state_dict())
        new.load_state_dict(old.state_dict())
    run(second, 6, skip=6)
    assert [r.fingerprint for r in second.replicas] == [r.fingerprint for r in whole.replicas]
    alone = Cluster(build, method, replicas=1).replicas[0]
    replica = first.replicas[0]
    pending = replica.exchanger.in_flight
    assert pending is not None
    expected = replica.state.tensors["residual"].clone()
    pending.work.withdraw({"residual": expected}, pending.contribution.blocks)
    alone.load_state_dict(saved[0])
    assert torch.allclose(alone.state.tensors["residual"], expected, atol=1e-6)
