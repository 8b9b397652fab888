"""Text that is read while it is trained on: windows have no number, and resuming is still exact."""

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
from overtone.tasks.sharding import generator_for
from overtone.tasks.sources import choose_splits, first_line, require
from overtone.tasks.text.documents import row_documents
from overtone.tasks.text.exit_guard import close_at_exit
from overtone.tasks.text.tokenizer import Document, Tokenizer, empty_tokens, encode_documents
from overtone.tasks.text.windows import Windows, too_few_tokens

BLOCK = 1024  # windows that are shuffled together


class Stream:
    """A dataset that is read while it is trained on.

    ``hub:NAME``, ``hub:NAME:CONFIG``, ``hub:NAME@SPLIT`` or ``hub:NAME:CONFIG@SPLIT``, where NAME is a dataset of the
    Hugging Face hub or a local folder of .jsonl, .txt, .csv or .parquet files.

    Validation windows are the first ones of the validation or test split. Without such a split they come from the first
    documents of the stream, and training skips these documents. It recognizes them by their text, not by their place:
    the place depends on which replica reads which rows. So it also skips other documents with the same text.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, *, context: int, windows: int) -> None:
        self.name = data
        self.tokenizer = tokenizer
        self.context = context
        self._dataset, valid_split = self._open()
        self.held_out: set[bytes] = set()  # fingerprints of the documents that training skips
        documents = self._hold_out() if valid_split is None else self.documents(valid_split)
        tokens, text_bytes = encode_documents(documents, tokenizer, enough=windows * context)
        self._valid = Windows(tokens, context)
        self.bytes_per_token = text_bytes / max(tokens.numel(), 1)

    def validation(self, *, context: int, windows: int) -> Tensor:
        """Return the first windows for validation, (windows, context + 1) int64."""
        if not len(self._valid):
            raise too_few_tokens(self.name, "validation", self._valid.tokens, context)
        return self._valid.batch(torch.arange(min(windows, len(self._valid))), None)

    def samples(self, context: int) -> Windows:
        """Return no windows: those of a stream cannot be fetched by number."""
        return Windows(empty_tokens(self.tokenizer), context)

    def about(self) -> dict[str, object]:
        """Return facts for the run log. Only the validation part is known beforehand."""
        return {
            "train_tokens": None,
            "valid_tokens": self._valid.tokens.numel(),
            "bytes_per_token": self.bytes_per_token,
            "fingerprint": fingerprint.of_tensors([self._valid.tokens]).hex(),
        }

    def documents(self, dataset: Any) -> Iterator[Document]:
        """Yield the documents of a split. An error of the libraries below becomes a `StreamError`."""
        rows = row_documents(dataset, self.tokenizer, self.name)
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

    def shard(self, rank: int, replicas: int, epoch: int) -> Any:
        """Return one replica's part of the dataset: whole files if they can be divided evenly, else every K-th row."""
        library = require("datasets.distributed", f"data {self.name}")
        # A new object for each replica, also within one process: test_a_stream_resumes_exactly reads several in turns.
        dataset = library.split_dataset_by_node(self._dataset, rank=rank, world_size=replicas)
        dataset.set_epoch(epoch)
        return dataset

    def _open(self) -> tuple[Any, Any | None]:
        library = require("datasets", f"data {self.name}")
        name, config, split = self.name.removeprefix("hub:"), None, None
        if not Path(name).exists():
            name, _, split = name.partition("@")
            name, _, config = name.partition(":")
        if Path(name).is_file():
            raise TaskError(f"data {self.name}: a file; give hub: and its folder, or the file without hub:")
        where = str(Path(name).resolve()) if Path(name).exists() else name
        try:
            splits = library.load_dataset(where, config or None, streaming=True)
        except Exception as error:  # the libraries below raise many kinds; each means that there is no data
            raise TaskError(
                f"data {self.name}: {first_line(error)}; check the name and the connection, "
                "or give a local folder (hub:FOLDER)"
            ) from error
        train, valid = choose_splits(splits, split or None, self.name)
        return splits[train], None if valid is None else splits[valid]

    def _hold_out(self) -> Iterator[Document]:
        """Yield the first documents of the training split, and note each so that it is not trained on."""
        for document in self.documents(self._dataset):
            self.held_out.add(fingerprint.of_bytes(document.text))
            yield document


@dataclass(frozen=True)
class Block:
    """Windows of a stream that are shuffled together."""

    epoch: int
    number: int
    source: Mapping[str, Any] | None  # the dataset's own state before this block; None at the beginning
    windows: Windows
    order: Tensor


class StreamFeed:
    """Endless batches from one replica's part of a stream.

    A block is made of whole documents, about `BLOCK` windows, and its windows are shuffled. Tokens at the end of the
    block that fill no window are dropped. The shuffle buffer of the datasets library is not used, because its content
    is lost on resuming. A block follows from the dataset's state before it, so resuming is exact: the block is read
    again. The next block is read while the model computes. When the stream ends it begins again, with its files in
    another order. A state of another number of replicas is not used: the stream begins again with the new parts.
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
        self._open: list[Iterator[Document]] = []  # the one iterator that is being read
        close_at_exit(self)  # generators of the libraries complain if they are closed later than that
        self._begin(0, None)

    def next(self) -> Tensor:
        """Return the next windows, (batch, context + 1) int64."""
        found: list[Tensor] = []
        left = self.batch
        while left:
            if self._block is None or self._taken == len(self._block.order):
                self._next_block()
                continue
            rows = self._block.order[self._taken : self._taken + left]
            found.append(self._block.windows.batch(rows, None))
            self._taken += len(rows)
            left -= len(rows)
        return torch.cat(found)

    def close(self) -> None:
        """Release the files that are being read."""
        self._open.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state before the current block, and how many of its windows were taken."""
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
        """Continue from a saved state of the same rank: read its block again."""
        if self._ahead is not None:
            self._ahead.exception()  # wait for the thread: it reads from the same iterator
            self._ahead = None
        self._block, self._taken = None, 0
        if state["replicas"] != self.replicas:
            self._begin(0, None)
            return
        if state["rank"] != self.rank:
            raise TaskError(
                f"stream state of rank {state['rank']}: this is rank {self.rank}; each rank resumes from its own state"
            )
        self._begin(int(state["epoch"]), state["source"])
        self._block = self._read(int(state["epoch"]), int(state["block"]))
        self._taken = int(state["taken"])

    def _next_block(self) -> None:
        """Take the next block, and start to read the one after it."""
        if self._ahead is None:
            self._ahead = self._pool.submit(self._read_after, self._block)
        self._block, self._taken = self._ahead.result(), 0
        self._ahead = self._pool.submit(self._read_after, self._block)

    def _read_after(self, block: Block | None) -> Block:
        """Read the block after this one; the first block of the next epoch if the stream has ended."""
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
        """Open this replica's part of the dataset, at a state of its own or at the beginning."""
        self._shard = self.stream.shard(self.rank, self.replicas, epoch)
        self._source = source
        if source is not None:
            self._shard.load_state_dict(source)
        self._open[:] = [self.stream.documents(self._shard)]

    def _read(self, epoch: int, number: int) -> Block:
        """Read documents from where the dataset is, and shuffle their windows."""
        before = self._source
        held_out, context = self.stream.held_out, self.stream.context
        documents = (document for document in self._open[0] if fingerprint.of_bytes(document.text) not in held_out)
        tokens, _ = encode_documents(documents, self.stream.tokenizer, enough=BLOCK * context)
        self._source = self._shard.state_dict()
        windows = Windows(tokens, context)
        generator = generator_for(self.seed, "stream", epoch, number, self.rank, self.replicas)
        return Block(epoch, number, before, windows, torch.randperm(len(windows), generator=generator))
