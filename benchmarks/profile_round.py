"""Where a round's time goes: cProfile of one replica's rounds on the tensors of a GPT, local work excluded.

OMP_NUM_THREADS=1 python benchmarks/profile_round.py > benchmarks/results/profile_after.txt
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time

import torch
from torch import nn

import overtone

WIDTH, LAYERS, WORDS = 768, 12, 20480
SHAPES = [
    (WORDS, WIDTH),
    *[(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,)] * LAYERS,
]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(shape) * 0.02 for shape in SHAPES])
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    replica = overtone.Replica(
        model, inner, overtone.decoupled(every=1, preset="first", keep=32, bits=2), overtone.Solo()
    )
    flat = torch.cat([p.detach().view(-1) for p in model])
    place = torch.empty_like(flat)
    place.copy_(flat)
    begin = time.perf_counter()
    for _ in range(3):
        place.copy_(flat)
    copy = (time.perf_counter() - begin) / 3
    del flat, place
    profile = cProfile.Profile()
    for index in range(3):
        with torch.no_grad():
            for p in model:
                p.add_(torch.randn_like(p), alpha=1e-3)
        if index:  # the first round warms up
            profile.enable()
        replica.step()
        profile.disable()
    print(f"{sum(p.numel() for p in model) / 1e6:.1f} M parameters, keep 32, 2 bits, one thread, two rounds")
    print(f"one memory copy of the parameters: {copy * 1e3:.0f} ms")
    pstats.Stats(profile, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
