"""Time of one round's codec work on the tensors of a small GPT, as multiples of one memory copy of its parameters.

    make bench

Ratios within one run are what counts: absolute times depend on the machine and on who else uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from overtone.codec import TopK, mean

WIDTH, LAYERS, BYTES = 512, 4, 256
SHAPES = [(BYTES, WIDTH), *[(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)] * LAYERS]
REPLICAS = 4


def best_of(job: Callable[[], object], times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main() -> None:
    cpu = torch.device("cpu")
    tensors = [torch.randn(shape) for shape in SHAPES]
    flat = torch.cat([t.view(-1) for t in tensors])
    place = torch.empty_like(flat)
    copy = best_of(lambda: place.copy_(flat), 10)
    print(f"{flat.numel() / 1e6:.1f} M parameters, one thread; one memory copy: {copy * 1e3:.1f} ms = 1\n")
    print("| keep | bits | transform | encode | decode and mean of 4 | inverse | message, bytes | bits per parameter |")
    print("|---|---|---|---|---|---|---|---|")
    for keep, bits in ((32, 1), (32, 2), (128, 1), (512, 1)):
        codec = TopK(keep=keep, bits=bits)
        layout = codec.layout(SHAPES)
        coeffs = layout.empty(cpu)
        forward = best_of(lambda layout=layout, coeffs=coeffs: layout.read(tensors, coeffs))
        encode = best_of(lambda codec=codec, layout=layout, coeffs=coeffs: codec.encode(coeffs, layout))
        payload, _ = codec.encode(coeffs, layout)
        assert isinstance(payload, bytes)

        def decode(codec: TopK = codec, layout: object = layout, payload: bytes = payload) -> None:
            mean([codec.decode(payload, layout) for _ in range(REPLICAS)], layout, cpu, over_senders=False)  # type: ignore[arg-type]

        inverse = best_of(lambda layout=layout, coeffs=coeffs: layout.write(coeffs, tensors))
        print(
            f"| {keep} | {bits} | {forward / copy:.1f} | {encode / copy:.1f} | {best_of(decode) / copy:.1f} | "
            f"{inverse / copy:.1f} | {len(payload)} | {8 * len(payload) / flat.numel():.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
