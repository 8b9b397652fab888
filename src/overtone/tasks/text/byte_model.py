"""A small decoder transformer over bytes, in plain PyTorch: the language task's model if none is named."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.common.limits import SIZES, check
from overtone.errors import TaskError
from overtone.tasks.sources import refuse_huge_model
from overtone.tasks.task import save_weights

BYTES = 256  # size of the vocabulary


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the transformer. The default has 0.36 M parameters."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    context: int = 64

    def __post_init__(self) -> None:
        check(self, SIZES, TaskError)
        if self.width % self.heads:
            raise TaskError(f"heads={self.heads}: must divide the width, {self.width}")

    @property
    def parameters(self) -> int:
        """The number of parameters of such a model."""
        return self.width * (self.layers * (12 * self.width + 4) + BYTES + self.context + 2)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attend_norm = nn.LayerNorm(size.width)
        self.attend_in = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attend_out = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width, bias=False)
        self.mlp_out = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same shape."""
        batch, time, width = x.shape
        qkv = self.attend_in(self.attend_norm(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attend_out(heads.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class ByteTransformer(nn.Module):
    """Takes bytes, gives the logits of each next byte. The embedding is also the output matrix."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # Matrices that write into the residual stream start smaller, so that it does not grow with depth.
                shrink = (2 * size.layers) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(p, std=0.02 * shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 to (batch, time, 256); time is at most the context."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


@dataclass(frozen=True)
class ByteModel:
    """The preset "byte" as an architecture of the language task. It needs no library but torch."""

    size: ModelSize
    name: str = "byte"
    vocab_size: int = BYTES

    def build(self) -> nn.Module:
        """Return a new model with random weights, on torch's default device."""
        if torch.get_default_device().type != "meta":  # a model on the meta device takes no memory
            refuse_huge_model(self.size.parameters, self.name)
        return ByteTransformer(self.size)

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """(batch, time) to (batch, time, 256)."""
        found: Tensor = model(tokens)
        return found

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write model.safetensors, and model.json with the sizes."""
        save_weights(model, folder)
        (folder / "model.json").write_text(json.dumps(asdict(self.size), indent=2) + "\n")
