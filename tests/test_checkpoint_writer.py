"""What is kept and what is deleted of checkpoints, in places where ranks are not in step with each other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from overtone.errors import CheckpointError, OvertoneError
from overtone.runs import directory
from overtone.runs.checkpoint.format import flatten, fold, write
from overtone.runs.checkpoint.index import CheckpointId, complete, file_of, newest_common
from overtone.runs.checkpoint.writer import CheckpointWriter
from overtone.tasks.sharding import Sampler, ShardedFeed
from overtone.tasks.task import Tensors


def put(folder: Path, checkpoint: CheckpointId, rank: int, tree: Any = None) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    plain = flatten({"model": {"a": torch.full((3,), float(rank))}} if tree is None else tree, tensors)
    write(file_of(folder, checkpoint, rank), plain, tensors)
    return file_of(folder, checkpoint, rank)


def saver(folder: Path, rank: int, keep: int) -> CheckpointWriter:
    return CheckpointWriter(folder, rank, 2, keep=keep, all_gather=lambda value: [value], on_complete=lambda _: None)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_slow_rank_does_not_delete_what_a_fast_one_has_not_replaced(keep: int, tmp_path: Path) -> None:
    """Rank 0 has written step 30 already when rank 1 prunes after step 20."""
    for step in (10, 20):
        for rank in range(2):
            put(tmp_path, CheckpointId(step, False, 2), rank)
    put(tmp_path, CheckpointId(30, False, 2), 0)
    for rank in range(2):
        saver(tmp_path, rank, keep).prune(CheckpointId(20, False, 2))
    assert complete(tmp_path) == [CheckpointId(10, False, 2), CheckpointId(20, False, 2)][-keep:]


def test_a_lost_file_does_not_mean_a_new_beginning(tmp_path: Path) -> None:
    path = put(tmp_path, CheckpointId(10, True, 2), 0)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint that all 2 replicas can go on from"):
        newest_common(tmp_path, 0, 2, ever=True, all_gather=lambda value: [value, []])
    assert path.exists()
    assert newest_common(tmp_path, 0, 2, ever=False, all_gather=lambda value: [value, []]) is None


def test_a_finished_one_is_newer_than_the_one_it_was_made_from(tmp_path: Path) -> None:
    for final in (True, False):
        put(tmp_path, CheckpointId(10, final, 1), 0)
    assert newest_common(tmp_path, 0, 1, ever=True, all_gather=lambda value: [value]) == CheckpointId(10, True, 1)


def test_stale_checkpoints_are_not_built_upon(tmp_path: Path) -> None:
    put(tmp_path / directory.CHECKPOINTS, CheckpointId(1000, False, 1), 0)
    with pytest.raises(OvertoneError, match="holds checkpoints of another run"):
        directory.refuse_used(tmp_path)


def test_only_what_replicas_hold_is_folded(tmp_path: Path) -> None:
    """A stream's position is a replica's own and may have another form on each."""
    trees = [
        {"model": {"a": torch.tensor([1.0, 3.0])}, "feed": {"source": None}, "random": {"torch": torch.zeros(1)}},
        {"model": {"a": torch.tensor([2.0, 3.0])}, "feed": {"source": [1, 2]}, "random": {"torch": torch.ones(1)}},
    ]
    files = [put(tmp_path, CheckpointId(5, False, 2), rank, tree) for rank, tree in enumerate(trees)]
    third = fold(files, consensus=True, rank=2)
    assert third["model"]["a"].tolist() == [1.5, 3.0]
    assert third["feed"] == {"source": None}
    assert fold(files, consensus=False, rank=3)["model"]["a"].tolist() == [2.0, 3.0]
    odd = put(tmp_path, CheckpointId(6, False, 2), 0, {"model": {"b": torch.ones(1)}})
    with pytest.raises(OvertoneError, match="not in every old replica's state"):
        fold([odd, files[1]], consensus=True, rank=0)


@pytest.mark.parametrize("skew", [0.0, 0.3, 0.5, 1.0])
def test_nobody_s_shard_is_too_small_for_the_batch_that_is_promised(skew: float) -> None:
    for size in range(4, 60):
        for replicas in range(1, 9):
            sampler = Sampler(size, None, seed=size, skew=skew, name="x")
            lengths = [len(shard) for shard in sampler.shards(torch.arange(size), replicas)]
            assert sum(lengths) == size
            assert max(lengths) - min(lengths) <= 1
            if batch := size // replicas:
                ShardedFeed(Tensors(torch.arange(size)), sampler, replicas - 1, replicas, batch=batch).next()
