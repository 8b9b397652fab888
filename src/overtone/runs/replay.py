"""The model of a run in a store as it was after any of its rounds."""

from __future__ import annotations

from pathlib import Path

import torch

from overtone.common.machine_errors import in_words
from overtone.errors import StoreError
from overtone.runs.export import refuse_existing, write_model
from overtone.runs.observed import OnThisHost, config_in, observer_of, task_in
from overtone.swarm.archive import Archive
from overtone.swarm.observer import Observer


def replay_to(observer: Observer, last: int | None) -> None:
    """Bring an observer to the shared state after round ``last``; by default, after the newest."""
    observer.begin(most=None if last is None else last + 1)
    while last is None or observer.rounds <= last:
        if observer.advance() is None:
            break
    if last is not None and observer.rounds <= last:
        told = f"the newest is round {observer.rounds - 1}" if observer.rounds else "there is none yet"
        raise StoreError(f"store {observer.archive.url}: round {last} is not committed; {told}")
    if last is not None and observer.rounds > last + 1:
        raise StoreError(
            f"store {observer.archive.url}: round {last} cannot be replayed, its messages were deleted; the first that "
            f"can be is round {observer.rounds - 1}"
        )


@in_words()
def export_round(url: str, last: int | None, folder: Path, here: OnThisHost) -> tuple[int, dict[str, float]]:
    """Write the shared model after a round into ``folder``. Returns the round, and the model's validation metrics."""
    refuse_existing(folder)
    archive = Archive.open(url)
    config = config_in(archive)
    task = task_in(archive, config, here, "replay")
    observer = observer_of(archive, config, task, torch.device("cpu"))
    replay_to(observer, last)
    return observer.rounds - 1, write_model(task, observer.show(), folder)
