"""Bytes on the wire are what we say: the ledger against the kernel's own count.

Four gloo ranks, each in a network namespace of its own, joined by a bridge in a fifth. What the ledger claims,

    gather of p bytes        (K-1) p           sent and received by every rank
    ring all-reduce of n     2 (K-1)/K n       likewise

is compared with the counters of the interface, where TCP/IP headers, acknowledgements and gloo's own framing come on
top. Neither count knows of the other.

A virtual interface takes segments of up to 64 kB whole, as one that cuts them in hardware does, and counts one header
for each. Cut into frames of 1500 bytes, every 1448 bytes carry 66 of headers: 4.6 % on any TCP connection, before
acknowledgements. That is the wire's price, not the method's, and no part of what is compared here.

Making namespaces takes root; without it the test is skipped. Run with ``-s`` to see the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overtone
from namespaces import WIRE, address, network
from overtone import Method, Replica

SIZE = 4
ROUNDS = 5
SIDE = 1024  # of the square matrix that is the model
LEAST = 1 << 20  # bytes in a message; below some 70 kB headers and framing are more than 5 %
EXTRA = 0.05
QUIET = 0.25  # seconds; the kernel delays an acknowledgement by 0.2 at most
PATIENCE = 300  # seconds for all ranks together; only there to end a hang

METHODS = {
    "gathered": overtone.decoupled(every=1, keep=1024, bits=32, exchange="gathered"),
    "summed": overtone.diloco(every=1),
}


# -- in a rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Bytes so far."""

    sent: int
    received: int

    def since(self, before: Reading) -> Reading:
        return Reading(self.sent - before.sent, self.received - before.received)


def interface() -> Reading:
    folder = Path("/sys/class/net", WIRE, "statistics")
    return Reading(*(int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx")))


def settled() -> Reading:
    """The interface's count while nobody has anything to say.

    Behind the first barrier every rank has all it waits for, so what still moves are acknowledgements: two readings
    that agree, further apart than the longest of their delays, are the last word. The second barrier keeps ranks from
    talking before all have read. Barriers are counted too: 2 kB or so, on top like the headers.
    """
    dist.barrier()
    last, now = None, interface()
    while now != last:
        time.sleep(QUIET)
        last, now = now, interface()
    dist.barrier()
    return now


def measure(method: Method) -> dict[str, dict[str, int]]:
    """Some rounds with random gradients, and only those: what the ledger counted, and what the kernel did."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(SIDE, SIDE)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), method)
    count = replica.transport.ledger.counts["rounds"]
    before, wire = Reading(count.sent, count.received), settled()
    for _ in range(ROUNDS):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        assert replica.step() is not None
    after = settled()
    return {
        "ledger": vars(Reading(count.sent, count.received).since(before)),
        "interface": vars(after.since(wire)),
    }


def main(result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    found = {name: measure(method) for name, method in METHODS.items()}
    Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


# -- around the ranks ----------------------------------------------------------------------------------------------


def run_ranks(namespaces: list[str], folder: Path) -> list[dict[str, dict[str, dict[str, int]]]]:
    """This file as a program, once in each namespace; what every rank found."""
    results = [folder / f"result{rank}.json" for rank in range(SIZE)]
    logs = [folder / f"rank{rank}.log" for rank in range(SIZE)]
    ranks: list[subprocess.Popen[bytes]] = []
    world = {
        "GLOO_SOCKET_IFNAME": WIRE,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": "29500",  # a namespace has all ports to itself
        "WORLD_SIZE": str(SIZE),
        "OMP_NUM_THREADS": "1",
        "OVERTONE_KERNELS": "torch",  # the same bytes, and nothing to compile
    }
    try:
        for rank, name in enumerate(namespaces):
            command = ["ip", "netns", "exec", name, sys.executable, __file__, str(results[rank])]
            env = {**os.environ, **world, "RANK": str(rank)}
            with logs[rank].open("wb") as log:
                ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + PATIENCE
        while (codes := [process.poll() for process in ranks]) != [0] * SIZE:
            if any(codes) or time.monotonic() > deadline:
                said = "\n".join(f"--- rank {rank}\n{log.read_text()}" for rank, log in enumerate(logs))
                pytest.fail(f"exit codes {codes} (None: still running) after at most {PATIENCE} s\n{said}")
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads(result.read_text()) for result in results]


@pytest.mark.slow
def test_the_interface_counts_what_the_ledger_counts(tmp_path: Path) -> None:
    """For messages over 1 MB, within 5 %, on every rank, both ways, gathered and summed."""
    with network(SIZE) as namespaces:
        found = run_ranks(namespaces, tmp_path)
    extras = {}
    for name, method in METHODS.items():
        for rank, counts in enumerate(result[name] for result in found):
            ledger, wire = counts["ledger"], counts["interface"]
            told = []
            for way in ("sent", "received"):
                # A message goes to K-1 others; summed, it weighs at most that much (2/K ≤ 1).
                assert ledger[way] >= ROUNDS * (SIZE - 1) * LEAST, (name, rank, way, ledger)
                extra = extras[name, rank, way] = wire[way] / ledger[way] - 1
                told.append(f"{way} {ledger[way]:,} by the ledger, {wire[way]:,} by the interface ({extra:+.2%})")
            print(f"{name} ({method.name}), rank {rank}: {'; '.join(told)}")
    # Never less either: the ledger claims no byte that did not pass.
    wrong = {which: f"{extra:+.2%}" for which, extra in extras.items() if not 0 <= extra < EXTRA}
    assert not wrong


if __name__ == "__main__":
    main(sys.argv[1])
