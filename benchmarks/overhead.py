"""Where the time of a whole run goes, and how long a checkpoint holds it up.

    python benchmarks/overhead.py

Two runs of `overtone train` with two replicas on this machine, read from their run logs: a small model for the shares
of time, a larger one for checkpoints. Writes benchmarks/results/overhead.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from overtone.runs import log
from overtone.runs.events import Event

RESULTS = Path(__file__).parent / "results"
SHARES = "--model gpt-neox-1m --context 64 --batch 8 --steps 600 --every 20"
SAVING = "--model gpt-neox-70m --context 64 --batch 2 --steps 60 --every 10 --checkpoint-every 10 --valid-samples 16"


def logged(flags: str, folder: Path) -> list[Event]:
    subprocess.run([sys.executable, "-m", "overtone", "train", "--out", str(folder), *flags.split()], check=True)
    return log.read(folder)


def of(records: list[Event], event: str) -> list[Any]:
    return [record for record in records if record["event"] == event]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        small, large = (logged(flags, Path(scratch) / name) for name, flags in (("shares", SHARES), ("saving", SAVING)))
    (closing,) = of(small, "finish")
    rounds = [r["seconds_encoding"] + r["seconds_waiting"] + r["seconds_decoding"] for r in of(large, "round")]
    stalls = [record["seconds"] for record in of(large, "checkpoint")]
    lines = [
        "# Where the time goes",
        "",
        "`python benchmarks/overhead.py` wrote this page: two replicas on one machine, one thread each.",
        "",
        f"`overtone train {SHARES}`: {closing['seconds']:.0f} s, after {closing['seconds_starting']:.1f} s to start.",
        "",
        "| | share of wall time |",
        "|---|---|",
        *(f"| {name} | {share:.2%} |" for name, share in closing["shares"].items()),
        "",
        f"`overtone train {SAVING}`: {of(large, 'start')[0]['parameters']:,} parameters.",
        "",
        "| | median | longest |",
        "|---|---|---|",
        f"| a round | {median(rounds):.3f} s | {max(rounds):.3f} s |",
        f"| training held up by a checkpoint | {median(stalls):.3f} s | {max(stalls):.3f} s |",
    ]
    (RESULTS / "overhead.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
