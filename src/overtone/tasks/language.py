"""The first task: a small byte-level decoder transformer that learns to predict the next byte of a text."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.errors import OvertoneError

BYTES = 256  # the vocabulary


class TaskError(OvertoneError, ValueError):
    """The task's data or model numbers cannot be used."""


@dataclass(frozen=True)
class ModelSize:
    """The transformer's numbers. The default has 0.36 M parameters."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    context: int = 64

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "context"):
            if getattr(self, name) < 1:
                raise TaskError(f"{name}={getattr(self, name)}: at least 1")
        if self.width % self.heads:
            raise TaskError(f"heads={self.heads}: must divide the width, {self.width}")


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attend_norm = nn.LayerNorm(size.width)
        self.attend_in = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attend_out = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width, bias=False)
        self.mlp_out = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        batch, time, width = x.shape
        qkv = self.attend_in(self.attend_norm(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attend_out(heads.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class ByteTransformer(nn.Module):
    """Bytes in, the loss of predicting each next byte out. The embedding is also the output matrix."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # Matrices that write into the stream start smaller, so that depth does not swell it.
                shrink = (2 * size.layers) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(p, std=0.02 * shrink)

    def forward(self, window: Tensor) -> Tensor:
        """(batch, time + 1) bytes to the mean loss in nats per byte."""
        text, target = window[:, :-1], window[:, 1:]
        x = self.embed(text) + self.place.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Text:
    """Training and validation bytes."""

    train: Tensor  # (n,) uint8
    valid: Tensor
    name: str

    def shard(self, rank: int, replicas: int, *, context: int, batch: int, seed: int) -> Iterator[Tensor]:
        """Endless (batch, context + 1) int64 batches of one replica's own windows.

        The training bytes are cut into windows that do not overlap; window j belongs to replica j mod K. Each epoch
        goes through a replica's windows in a new random order.
        """
        windows = (self.train.numel() - 1) // context
        mine = torch.arange(rank, windows, replicas)
        if mine.numel() < batch:
            raise TaskError(
                f"{self.name}: {self.train.numel()} training bytes give rank {rank} {mine.numel()} windows of "
                f"{context}, fewer than one batch of {batch}; use more text, a shorter context or fewer replicas"
            )
        return self._batches(mine, context, batch, torch.Generator().manual_seed(seed * 1_000_003 + rank))

    def _batches(self, mine: Tensor, context: int, batch: int, dice: torch.Generator) -> Iterator[Tensor]:
        span = torch.arange(context + 1)
        while True:
            order = mine[torch.randperm(mine.numel(), generator=dice)]
            for rows in order.split(batch):
                if rows.numel() == batch:
                    yield self.train[rows.unsqueeze(1) * context + span].long()

    def validation(self, *, context: int, windows: int) -> Tensor:
        """(windows, context + 1) int64, evenly spaced over the validation bytes: the same for everybody."""
        room = self.valid.numel() - context - 1
        if room < 0:
            raise TaskError(f"{self.name}: {self.valid.numel()} validation bytes, the context needs {context + 1}")
        starts = torch.linspace(0, room, min(windows, room + 1)).long().clamp_max(room)  # fp32 may overshoot
        return self.valid[starts.unsqueeze(1) + torch.arange(context + 1)].long()


def load_text(path: str | None) -> Text:
    """A text file (its last tenth is the validation part), or without a path the standard library's own sources (every
    tenth file is for validation)."""
    if path is None:
        return _standard_library()
    file = Path(path)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise TaskError(f"data {path}: {error.strerror or error}; give a readable text file") from error
    cut = len(raw) * 9 // 10
    if cut < 1:
        raise TaskError(f"data {path}: {len(raw)} bytes; give a text of at least a few kilobytes")
    return Text(_as_tensor(raw[:cut]), _as_tensor(raw[cut:]), file.name)


def _standard_library() -> Text:
    """On every machine, about 10 MB without its tests; the bytes depend on the Python version."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    if not files:
        raise TaskError(f"the standard library has no sources below {root}; give a text with --data FILE")
    texts = [p.read_bytes() for p in files]
    train = b"".join(text for i, text in enumerate(texts) if i % 10)
    valid = b"".join(text for i, text in enumerate(texts) if i % 10 == 0)
    return Text(_as_tensor(train), _as_tensor(valid), "standard library")


def _as_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
