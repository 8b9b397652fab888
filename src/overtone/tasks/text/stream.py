"""Text that is read as it is trained on: no window has a number, and resuming is still exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import StreamError, TaskError
from overtone.tasks.sharding import dice_for
from overtone.tasks.sources import first_line, named_splits, needs
from overtone.tasks.text.documents import rows_of
from overtone.tasks.text.exit_guard import close_at_exit
from overtone.tasks.text.tokenizer import Alphabet, Document, encoded, no_tokens
from overtone.tasks.text.windows import Windows, too_short

BLOCK = 1024  # windows of a stream that are shuffled together


class Stream:
    """A dataset that is read as it is trained on.

    ``hub:NAME``, ``hub:NAME:CONFIG``, ``hub:NAME@SPLIT`` or ``hub:NAME:CONFIG@SPLIT``, where NAME is a dataset of the
    Hugging Face hub or a local folder of .jsonl, .txt, .csv or .parquet files. Validation windows are the first of its
    validation or test split; without one, of the first documents of the stream, and training skips these documents
    (and others with the same text: told apart by what they say, not by place, which depends on who reads what).
    """

    def __init__(self, data: str, alphabet: Alphabet, *, context: int, windows: int) -> None:
        self.name = data
        self.alphabet = alphabet
        self.context = context
        self._dataset, held_split = self._open()
        self.held: set[bytes] = set()
        documents = self._withheld() if held_split is None else self.documents(held_split)
        tokens, length = encoded(documents, alphabet, enough=windows * context)
        self._valid = Windows(tokens, context)
        self.bytes_per_token = length / max(tokens.numel(), 1)

    def validation(self, *, context: int, windows: int) -> Tensor:
        if not len(self._valid):
            raise too_short(self.name, "validation", self._valid.tokens, context)
        return self._valid.batch(torch.arange(min(windows, len(self._valid))), None)

    def samples(self, context: int) -> Windows:
        """None that could be asked for by number."""
        return Windows(no_tokens(self.alphabet), context)

    def about(self) -> dict[str, object]:
        return {
            "train_tokens": None,
            "valid_tokens": self._valid.tokens.numel(),
            "bytes_per_token": self.bytes_per_token,
            "fingerprint": fingerprint.of_tensors([self._valid.tokens]).hex(),  # of what can be known beforehand
        }

    def _open(self) -> tuple[Any, Any | None]:
        library = needs("datasets", f"data {self.name}")
        name, config, split = self.name.removeprefix("hub:"), None, None
        if not Path(name).exists():
            name, _, split = name.partition("@")
            name, _, config = name.partition(":")
        if Path(name).is_file():
            raise TaskError(f"data {self.name}: a file; give hub: and its folder, or the file without hub:")
        where = str(Path(name).resolve()) if Path(name).exists() else name
        try:
            splits = library.load_dataset(where, config or None, streaming=True)
        except Exception as error:  # of a dozen libraries below: all mean that the data cannot be had
            raise TaskError(
                f"data {self.name}: {first_line(error)}; check the name and the connection, "
                "or give a local folder (hub:FOLDER)"
            ) from error
        train, valid = named_splits(splits, split or None, self.name)
        return splits[train], None if valid is None else splits[valid]

    def _withheld(self) -> Iterator[Document]:
        """Of the stream itself; whatever is read here is noted, so that it is not trained on."""
        for document in self.documents(self._dataset):
            self.held.add(fingerprint.of_bytes(document.text))
            yield document

    def documents(self, dataset: Any) -> Iterator[Document]:
        rows = rows_of(dataset, self.alphabet, self.name)
        while True:
            try:
                document = next(rows, None)
            except TaskError:
                raise
            except Exception as error:
                raise StreamError(
                    f"data {self.name}: {first_line(error)}; the stream cannot be read further"
                ) from error
            if document is None:
                return
            yield document

    def share(self, rank: int, replicas: int, epoch: int) -> Any:
        """One replica's part of the documents: its own files if they can be dealt evenly, else one row of K."""
        library = needs("datasets.distributed", f"data {self.name}")
        # Each has iterables of its own, also in one process: test_a_stream_resumes_exactly takes from several in turns.
        dataset = library.split_dataset_by_node(self._dataset, rank=rank, world_size=replicas)
        dataset.set_epoch(epoch)
        return dataset


@dataclass(frozen=True)
class Block:
    """Windows of a stream that are shuffled together."""

    epoch: int
    number: int
    source: Mapping[str, Any] | None  # the dataset's own state before the block; None: the beginning
    windows: Windows
    order: Tensor


class StreamFeed:
    """Endless batches of one replica's share of a stream.

    Blocks of whole documents, about `BLOCK` windows, are read and their windows shuffled; what is left of a block and
    fills no window is dropped. The datasets library's own shuffle buffer is not used because its content is lost on
    resuming. Here a block follows from the dataset's state at its beginning, so that resuming is exact: the block is
    read again. The next block is read while the model computes. At the end the stream begins again, with its files in
    another order. A state of another number of replicas begins anew, with the new shares.
    """

    def __init__(self, stream: Stream, rank: int, replicas: int, *, batch: int, seed: int) -> None:
        self.stream = stream
        self.rank = rank
        self.replicas = replicas
        self.batch = batch
        self.seed = seed
        self._pool = ThreadPoolExecutor(1)
        self._ahead: Future[Block] | None = None
        self._block: Block | None = None
        self._taken = 0
        self._open: list[Iterator[Document]] = []  # the one that is being read
        close_at_exit(self)  # before the interpreter takes the libraries apart: their generators complain otherwise
        self._begin(0, None)

    def next(self) -> Tensor:
        """(batch, context + 1) int64."""
        found: list[Tensor] = []
        left = self.batch
        while left:
            if self._block is None or self._taken == len(self._block.order):
                self._turn(self._block)
                continue
            rows = self._block.order[self._taken : self._taken + left]
            found.append(self._block.windows.batch(rows, None))
            self._taken += len(rows)
            left -= len(rows)
        return torch.cat(found)

    def close(self) -> None:
        self._open.clear()

    def state_dict(self) -> dict[str, Any]:
        at = self._block
        return {
            "epoch": at.epoch if at else 0,
            "block": at.number if at else 0,
            "source": at.source if at else None,
            "taken": self._taken,
            "rank": self.rank,
            "replicas": self.replicas,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._ahead is not None:
            self._ahead.exception()  # waits: two readers would share one place
            self._ahead = None
        self._block, self._taken = None, 0
        if state["replicas"] != self.replicas:
            self._begin(0, None)
            return
        if state["rank"] != self.rank:
            raise TaskError(
                f"stream state of rank {state['rank']}: this is rank {self.rank}; each resumes from its own"
            )
        self._begin(int(state["epoch"]), state["source"])
        self._block = self._read(int(state["epoch"]), int(state["block"]))
        self._taken = int(state["taken"])

    def _turn(self, block: Block | None) -> None:
        """On to the next block, and have the one after it read."""
        if self._ahead is None:
            self._ahead = self._pool.submit(self._after, block)
        self._block, self._taken = self._ahead.result(), 0
        self._ahead = self._pool.submit(self._after, self._block)

    def _after(self, block: Block | None) -> Block:
        found = self._read(block.epoch, block.number + 1) if block else self._read(0, 0)
        if len(found.order):
            return found
        self._begin(found.epoch + 1, None)
        found = self._read(found.epoch + 1, 0)
        if not len(found.order):
            raise TaskError(
                f"data {self.stream.name}: replica {self.rank} of {self.replicas} has no window of "
                f"{self.stream.context + 1} training tokens; use more data, fewer replicas, fewer valid_samples or a "
                "split for validation"
            )
        return found

    def _begin(self, epoch: int, source: Mapping[str, Any] | None) -> None:
        self._share = self.stream.share(self.rank, self.replicas, epoch)
        self._source = source
        if source is not None:
            self._share.load_state_dict(source)
        self._open[:] = [self.stream.documents(self._share)]

    def _read(self, epoch: int, number: int) -> Block:
        before = self._source
        held, context = self.stream.held, self.stream.context
        fresh = (document for document in self._open[0] if fingerprint.of_bytes(document.text) not in held)
        tokens, _ = encoded(fresh, self.stream.alphabet, enough=BLOCK * context)
        self._source = self._share.state_dict()
        windows = Windows(tokens, context)
        dice = dice_for(self.seed, "stream", epoch, number, self.rank, self.replicas)
        return Block(epoch, number, before, windows, torch.randperm(len(windows), generator=dice))
