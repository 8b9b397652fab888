"""A loop with autocast and a GradScaler, wrapped. Only the scaler's two lines differ from a loop without overtone.

python examples/mixed_precision.py
torchrun --nproc-per-node 2 examples/mixed_precision.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import overtone


def main(steps: int = 200) -> None:
    torch.set_num_threads(1)  # one thread per replica: several of them share this host
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    replica = overtone.Replica(model, inner, overtone.decoupled(every=20))
    rank, size = replica.transport.rank, replica.transport.size
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # too large: the first steps overflow

    data = torch.Generator().manual_seed(rank)  # each replica has its own samples
    skipped = 0
    for _ in range(steps):
        x = torch.rand(64, 16, generator=data) * 2 - 1
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), torch.sin(3 * x[:, :4]))
        scaler.scale(loss).backward()
        replica.step(scaler=scaler, clip=1.0)  # was: scaler.unscale_(inner), clip_grad_norm_(…), scaler.step(inner)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before  # the scaler skipped the step; it counts all the same
        inner.zero_grad()
    replica.finish()

    line = f"rank {rank} of {size}: loss {loss.item():.4f}, {skipped} steps skipped, model {replica.fingerprint}\n"
    print(line, end="", flush=True)  # text and newline in one write: several processes share this terminal


if __name__ == "__main__":
    main()
