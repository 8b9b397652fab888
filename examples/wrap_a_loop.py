"""An ordinary PyTorch loop, wrapped. The same file runs alone, on one host or on many:

python examples/wrap_a_loop.py
torchrun --nproc-per-node 4 examples/wrap_a_loop.py
torchrun --nnodes 3 --node-rank I --master-addr HOST --master-port 29500 examples/wrap_a_loop.py   # on host I = 0, 1, 2
"""

import torch
import torch.nn.functional as F
from torch import nn

import overtone


def teacher(x: torch.Tensor) -> torch.Tensor:
    """What is to be learnt."""
    return torch.sin(3 * x[:, :8]) + x[:, 8:16] * x[:, 16:24]


def main(steps: int = 300) -> None:
    torch.set_num_threads(1)  # one thread per replica: several of them share this host
    model = nn.Sequential(nn.Linear(24, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    replica = overtone.Replica(model, inner, overtone.decoupled(every=20))
    rank, size = replica.transport.rank, replica.transport.size

    data = torch.Generator().manual_seed(rank)  # every replica its own samples
    for _ in range(steps):
        x = torch.rand(64, 24, generator=data) * 2 - 1
        loss = F.mse_loss(model(x), teacher(x))
        loss.backward()
        done = replica.step(clip=1.0)  # was: inner.step()
        inner.zero_grad()
        if done and rank == 0 and done.index % 5 == 4:
            print(f"round {done.index}: loss {loss.item():.4f}, {done.bytes_sent} bytes sent", flush=True)
    replica.finish()

    test = torch.rand(4096, 24, generator=torch.Generator().manual_seed(12345)) * 2 - 1
    with torch.no_grad():
        score = F.mse_loss(model(test), teacher(test)).item()
    sent = replica.transport.ledger.sent
    line = f"rank {rank} of {size}: test loss {score:.4f}, {sent} bytes sent, model {replica.fingerprint}\n"
    print(line, end="", flush=True)  # text and newline in one write: several processes share this terminal


if __name__ == "__main__":
    main()
