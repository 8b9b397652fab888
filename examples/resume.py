"""A loop that can be stopped at any step and continues where it was, bit for bit.

python examples/resume.py checkpoints --stop-at 130     # as if it were killed there
python examples/resume.py checkpoints                   # continues from step 100, the last checkpoint
torchrun --nproc-per-node 2 examples/resume.py checkpoints

`overtone train` does more: it keeps two checkpoints, so that a kill between the saves of two replicas does no harm.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import overtone


def main(folder: Path, stop_at: int | None, steps: int = 200) -> None:
    torch.set_num_threads(1)  # one thread per replica: several of them share this host
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    replica = overtone.Replica(model, inner, overtone.decoupled(every=15))
    rank, size = replica.transport.rank, replica.transport.size

    parts = {"model": model, "inner": inner, "replica": replica}  # all that a replica must remember, in this order
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"replica-{rank}-of-{size}.pt"
    if file.exists():
        saved = torch.load(file)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        print(f"rank {rank} of {size}: continues from step {replica.steps}", flush=True)

    while replica.steps < steps:
        if replica.steps == stop_at:
            return
        data = torch.Generator().manual_seed(replica.steps * size + rank)  # follows from the step: nothing to save
        x = torch.rand(64, 16, generator=data) * 2 - 1
        F.mse_loss(model(x), torch.sin(3 * x[:, :4])).backward()
        replica.step()
        inner.zero_grad()
        if replica.steps % 50 == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, file.with_suffix(".new"))
            file.with_suffix(".new").rename(file)  # a file that is there is whole
    replica.finish()
    print(f"rank {rank} of {size}: finished, model {replica.fingerprint}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stop-at", type=int)
    given = parser.parse_args()
    main(given.folder, given.stop_at)
