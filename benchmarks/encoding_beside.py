"""Where should a message be encoded: in the training thread, or in a thread beside it?

Both are measured in one run, on the tensors of a GPT: some inner steps with the encoding after them, and the same steps
with the encoding in a second thread; once with a core to spare, and once on a single core, as on a host whose cores all
train. The result goes to benchmarks/results/encoding_beside.md.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import median

import torch

from overtone import codec
from overtone.coding.kernels import kernels_for
from overtone.exchange.dealing import Deal
from overtone.exchange.signals import Sources
from overtone.exchange.slab_work import SlabWork
from overtone.rules import Outer
from overtone.tasks import Language, TaskOptions, load_task

RESULTS = Path("benchmarks/results/encoding_beside.md")
TIMES, STEPS = 5, 3


def main() -> None:
    torch.set_num_threads(1)
    task = load_task(TaskOptions(data="none", language=Language(width=512, layers=4, heads=8)), to_train=False)
    model = task.model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    weights = [p.detach() for p in model.parameters()]
    start = [w + 1e-3 * torch.randn_like(w) for w in weights]
    cpu, top_k = torch.device("cpu"), codec.TopK(keep=128)
    layout = top_k.layout([w.shape for w in weights])
    kernels, rule = kernels_for(layout.size, cpu), Outer(lr=0.9, momentum=0.8, carry=1.0)
    work = SlabWork(layout, kernels, cpu, rule, top_k, Deal.whole(layout.slabs, 0))
    state = {"residual": layout.empty(cpu)}
    measured_at = [w.clone() for w in weights]
    tokens = torch.randint(256, (8, 65))

    def train() -> None:
        for _ in range(STEPS):
            task.loss(model, tokens).backward()
            inner.step()
            inner.zero_grad()

    def encode() -> None:
        work.encode(state, Sources(start, measured_at))

    def after() -> None:
        train()
        encode()

    def beside() -> None:
        thread = threading.Thread(target=encode)
        thread.start()
        train()
        thread.join()

    def seconds(job: object) -> float:
        begin = time.perf_counter()
        job()  # type: ignore[operator]
        return time.perf_counter() - begin

    lines = [
        f"{layout.size / 1e6:.1f} M parameters, {STEPS} inner steps of 512 tokens, one thread, median of {TIMES}.",
        "",
        "| cores | steps alone | encoding alone | one after the other | beside each other |",
        "|---|---|---|---|---|",
    ]
    cores = sorted(os.sched_getaffinity(0))
    for used in (cores[:2], cores[:1]):
        os.sched_setaffinity(0, used)
        after()
        found = {job.__name__: [] for job in (train, encode, after, beside)}  # type: ignore[var-annotated]
        for _ in range(TIMES):
            for job in (train, encode, after, beside):
                found[job.__name__].append(seconds(job))
        base = median(found["train"])
        row = " | ".join(f"{median(times) / base:.2f}" for times in found.values())
        lines.append(f"| {len(used)} | {row} |")
    lines += ["", "The unit is the time of the steps alone on as many cores."]
    RESULTS.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
