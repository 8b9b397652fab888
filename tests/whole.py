"""A whole vector through a codec at once, as tests like it; the product works slab by slab."""

import torch
from torch import Tensor

from overtone.codec import Codec
from overtone.coding.bits import Reader
from overtone.coding.kernels import Kernels, in_torch
from overtone.coding.layout import Layout, part_of
from overtone.exchange.gathered import bytes_of


def encode_all(codec: Codec, flat: Tensor, layout: Layout, loops: Kernels = in_torch) -> tuple[bytes, Tensor]:
    """The payload, and what its sender says that receivers will decode."""
    blocks, sent = [], torch.zeros_like(flat)
    for slab in layout.slabs:
        block, decoded = codec.encode(part_of(flat, slab), slab, loops)
        decoded.add_to(part_of(sent, slab))
        blocks.append(bytes_of(block))
    return b"".join(blocks), sent


def decode_all(codec: Codec, payload: bytes, layout: Layout, loops: Kernels = in_torch) -> Tensor:
    """What a receiver decodes."""
    reader, ahead, flat = Reader(payload), Reader(payload), layout.empty(torch.device("cpu"))
    for slab in layout.slabs:
        codec.check(ahead, slab, loops)  # refuses whatever decode would, and goes as far
        codec.decode(reader, slab, loops).add_to(part_of(flat, slab))
        assert ahead.at == reader.at
    reader.end()
    return flat
