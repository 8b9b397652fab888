"""The index of checkpoints: how their files are named, which exist, and which one all replicas can continue from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overtone.errors import CheckpointError

AllGather = Callable[[Any], Sequence[Any]]  # a collective: this rank's value in, the values of all ranks out


@dataclass(frozen=True, order=True)
class CheckpointId:
    """Which checkpoint: its step, whether the run was finished there, and the number of replicas. The checkpoint of a
    finished run has a name of its own, because it must not overwrite the checkpoint it was made from."""

    step: int
    final: bool
    replicas: int


def file_of(folder: Path, checkpoint: CheckpointId, rank: int) -> Path:
    """The file of one replica."""
    place = f"step-{checkpoint.step:08d}{'-final' if checkpoint.final else ''}"
    return folder / place / f"replica-{rank}-of-{checkpoint.replicas}.safetensors"


def present(folder: Path) -> Iterator[tuple[CheckpointId, int, Path]]:
    """Every file in this folder: the checkpoint it belongs to, the rank of its replica, its path."""
    for place in listed(folder):
        step = re.fullmatch(r"step-(\d+)(-final)?", place.name)
        for path in listed(place) if step else []:
            who = re.fullmatch(r"replica-(\d+)-of-(\d+)\.safetensors", path.name)
            if step and who:
                yield CheckpointId(int(step[1]), step[2] is not None, int(who[2])), int(who[1]), path


def listed(folder: Path) -> list[Path]:
    """The content of a folder; empty if there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # none yet, or another rank has just removed it
        return []


def complete(folder: Path) -> list[CheckpointId]:
    """The checkpoints in this folder that have a file of each replica, oldest first."""
    found: dict[CheckpointId, set[int]] = {}
    for checkpoint, rank, _ in present(folder):
        found.setdefault(checkpoint, set()).add(rank)
    # Counted, not compared with range(replicas): a file name may claim any number of replicas.
    return sorted(c for c, ranks in found.items() if sum(rank < c.replicas for rank in ranks) == c.replicas > 0)


def newest_common(folder: Path, rank: int, replicas: int, *, ever: bool, all_gather: AllGather) -> CheckpointId | None:
    """The newest checkpoint that every rank can continue from. A collective.

    A rank needs only its own file, unless the number of replicas changes. None means that there never was a complete
    checkpoint; ``ever`` is true if the log says that there was one.
    """
    own = {checkpoint for checkpoint, who, _ in present(folder) if who == rank and checkpoint.replicas == replicas}
    gathered = all_gather([[c.step, c.final, c.replicas] for c in own | set(complete(folder))])
    common = set.intersection(*({CheckpointId(*fields) for fields in theirs} for theirs in gathered))
    if common:
        return max(common)
    if not ever:
        return None
    without = ", ".join(str(who) for who, theirs in enumerate(gathered) if not theirs)
    lacking = f" (ranks without any: {without})" if without else ""
    raise CheckpointError(
        f"{folder}: no complete checkpoint that all {replicas} replicas can go on from{lacking}. Another number of "
        "replicas needs the files of all old ones in one place; or start a new run"
    )
