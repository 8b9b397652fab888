"""Which checkpoints there are: their names, and which of them all replicas can go on from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overtone.errors import CheckpointError

Tell = Callable[[Any], Sequence[Any]]  # my word to all, and everybody's in the order of ranks


@dataclass(frozen=True, order=True)
class Mark:
    """Which checkpoint: its step, whether the run was finished there, and of how many replicas. A finished one has a
    name of its own: it must not be written over the one that it was made from."""

    step: int
    final: bool
    replicas: int


def file_of(folder: Path, mark: Mark, rank: int) -> Path:
    place = f"step-{mark.step:08d}{'-final' if mark.final else ''}"
    return folder / place / f"replica-{rank}-of-{mark.replicas}.safetensors"


def present(folder: Path) -> Iterator[tuple[Mark, int, Path]]:
    """Every replica's file that is there."""
    for place in listed(folder):
        step = re.fullmatch(r"step-(\d+)(-final)?", place.name)
        for path in listed(place) if step else []:
            who = re.fullmatch(r"replica-(\d+)-of-(\d+)\.safetensors", path.name)
            if step and who:
                yield Mark(int(step[1]), step[2] is not None, int(who[2])), int(who[1]), path


def listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # none yet, or another rank has just removed it
        return []


def complete(folder: Path) -> list[Mark]:
    """The checkpoints in this folder with a file of each replica, oldest first."""
    found: dict[Mark, set[int]] = {}
    for mark, rank, _ in present(folder):
        found.setdefault(mark, set()).add(rank)
    # Counted, not compared with a range: a name may claim any number of replicas.
    return sorted(m for m, ranks in found.items() if sum(rank < m.replicas for rank in ranks) == m.replicas > 0)


def newest_common(folder: Path, rank: int, replicas: int, *, ever: bool, tell: Tell) -> Mark | None:
    """The newest checkpoint that every rank can go on from: a rank's own file is enough, unless the number of replicas
    changes. None if there never was a complete one; ``ever`` says that the log knows of one."""
    own = {mark for mark, who, _ in present(folder) if who == rank and mark.replicas == replicas}
    heard = tell([[mark.step, mark.final, mark.replicas] for mark in own | set(complete(folder))])
    common = set.intersection(*({Mark(*fields) for fields in marks} for marks in heard))
    if common:
        return max(common)
    if not ever:
        return None
    without = ", ".join(str(who) for who, marks in enumerate(heard) if not marks)
    lacking = f" (ranks without any: {without})" if without else ""
    raise CheckpointError(
        f"{folder}: no complete checkpoint that all {replicas} replicas can go on from{lacking}. Another number of "
        "replicas needs the files of all old ones in one place; or start a new run"
    )
