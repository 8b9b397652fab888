"""Causal language models of the transformers library: by name from the table of presets, or from a config.json.

The number in a preset's name counts all parameters, embeddings included, with the vocabulary in the table. With another
tokenizer the model has more or fewer. Weights are always random: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overtone.errors import TaskError
from overtone.tasks.hf_folders import read_config, save_pretrained
from overtone.tasks.options import Language
from overtone.tasks.sources import first_line, refuse_huge_model, require

# GPT-2's config turns dropout on by default; the other families have none, so neither have these presets.
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True)
class Preset:
    """A row of the table: the sizes of a model."""

    family: str  # transformers' model_type
    parameters: float  # all of them, with `vocab_size`
    width: int
    layers: int
    heads: int
    mlp_width: int
    vocab_size: int  # used if no tokenizer says how many tokens there are, as in a dry run
    positions: int = 2048
    key_heads: int | None = None  # fewer than `heads`: grouped-query attention
    mlp_width_key: str = "intermediate_size"  # the family's own name for `mlp_width`
    rotary: bool = False  # rotary embeddings turn the numbers of a head in pairs
    extra: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise TaskError(f"heads={self.heads}: must divide the width, {self.width}")
        if self.rotary and self.width // self.heads % 2:
            raise TaskError(f"heads={self.heads}: a head of width {self.width} / {self.heads} must be even")

    def resized(self, size: Language) -> Preset:
        """Return the preset with the sizes that the options give in place of its own.

        The MLP keeps its ratio to the width.
        """
        width = size.width or self.width
        heads = size.heads or self.heads
        return replace(
            self,
            width=width,
            layers=size.layers or self.layers,
            heads=heads,
            mlp_width=max(1, round(self.mlp_width * width / self.width)),
            key_heads=self.key_heads if self.key_heads and heads % self.key_heads == 0 else None,
            positions=max(self.positions, size.context),
        )


def _neox(parameters: float, width: int, layers: int, heads: int, vocab: int = 50304) -> Preset:
    return Preset("gpt_neox", parameters, width, layers, heads, 4 * width, vocab)


def _llama(
    parameters: float, width: int, layers: int, heads: int, mlp: int, vocab: int = 32000, keys: int | None = None
) -> Preset:
    return Preset("llama", parameters, width, layers, heads, mlp, vocab, key_heads=keys, rotary=True)


def _gpt2(parameters: float, width: int, layers: int, heads: int, vocab: int = 50257, positions: int = 1024) -> Preset:
    sizes = Preset("gpt2", parameters, width, layers, heads, 4 * width, vocab, positions)
    return replace(sizes, mlp_width_key="n_inner", extra=_NO_DROPOUT)


PRESETS: dict[str, Preset] = {  # parameters, width, layers, heads, then what differs within the family
    "gpt-neox-1m": _neox(0.86e6, 128, 4, 4, 256),
    "gpt-neox-14m": _neox(14e6, 128, 6, 4),  # from here on the sizes of Pythia (arXiv:2304.01373)
    "gpt-neox-30m": _neox(30e6, 256, 6, 8),
    "gpt-neox-70m": _neox(70e6, 512, 6, 8),
    "gpt-neox-160m": _neox(162e6, 768, 12, 12),
    "gpt-neox-410m": _neox(405e6, 1024, 24, 16),
    "gpt-neox-1b": _neox(1012e6, 2048, 16, 8),
    "llama-1m": _llama(0.87e6, 128, 4, 4, 352, 256),
    "llama-30m": _llama(31e6, 320, 8, 5, 896),
    "llama-150m": _llama(148e6, 768, 14, 12, 2048),
    "llama-1b": _llama(1100e6, 2048, 22, 32, 5632, keys=4),  # TinyLlama's (arXiv:2401.02385)
    "gpt2-1m": _gpt2(0.86e6, 128, 4, 4, 256, 256),
    "gpt2-30m": _gpt2(30e6, 384, 6, 6),
    "gpt2": _gpt2(124e6, 768, 12, 12),
    "gpt2-medium": _gpt2(355e6, 1024, 24, 16),
}


@dataclass(frozen=True)
class CausalLM:
    """An architecture of the language task: a causal language model of the transformers library."""

    name: str
    vocab_size: int
    config: Any
    parameters: int = 0

    def build(self) -> nn.Module:
        """Return a new model with random weights from torch's global generator, on torch's default device."""
        library = require("transformers", f"model {self.name}")
        if torch.get_default_device().type != "meta":  # a model on the meta device takes no memory
            refuse_huge_model(self.parameters, self.name)
        # fp32 whatever the config says. The library uses torch's fused attention where the architecture has it.
        model: nn.Module = library.AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float32, trust_remote_code=False
        )
        return model.train()

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """(batch, time) to (batch, time, vocab_size)."""
        found: Tensor = model(input_ids=tokens).logits
        return found

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the files that ``AutoModelForCausalLM.from_pretrained(folder)`` loads."""
        saved: Any = model
        saved.config.use_cache = True  # training needs no cache, but generating text does
        try:
            save_pretrained(saved, folder)
        finally:
            saved.config.use_cache = False


def causal_lm(name: str, size: Language, *, vocab_size: int | None, eos_token_id: int | None) -> CausalLM:
    """Return the model with a preset's name, or the one that a local config.json or a folder with one describes.

    ``vocab_size`` None leaves the size of the vocabulary to the model; ``eos_token_id`` ends a document.
    """
    if name in PRESETS:
        config = _config_of_preset(name, PRESETS[name].resized(size), vocab_size, eos_token_id)
    elif Path(name).exists():
        config = _config_of_file(Path(name), size, vocab_size)
    else:
        raise TaskError(f"model {name!r}: no such file and no such preset; there are {', '.join(nearest_first(name))}")
    made = CausalLM(name, config.get_text_config().vocab_size, config)
    try:
        with torch.device("meta"):  # counts without memory, and finds a wrong config before data is read
            parameters = sum(p.numel() for p in made.build().parameters())
    except TaskError:
        raise
    except Exception as error:  # each architecture checks its config in its own way
        raise TaskError(f"model {name}: {first_line(error)}; it must be a causal language model's config") from error
    return replace(made, parameters=parameters)


def nearest_first(name: str) -> list[str]:
    """Return the names of all presets, those that resemble ``name`` first."""
    known = ["byte", *PRESETS]
    near = get_close_matches(name, known, n=len(known), cutoff=0.5)
    return near + [other for other in known if other not in near]


def _config_of_preset(name: str, preset: Preset, vocab_size: int | None, eos_token_id: int | None) -> Any:
    config_class = require("transformers", f"model {name}").CONFIG_MAPPING[preset.family]
    sizes = {
        "vocab_size": vocab_size or preset.vocab_size,
        "hidden_size": preset.width,  # each family translates these keys to its own
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "max_position_embeddings": preset.positions,
        preset.mlp_width_key: preset.mlp_width,
        **preset.extra,
    }
    if preset.key_heads is not None:
        sizes["num_key_value_heads"] = preset.key_heads
    return config_class(
        bos_token_id=eos_token_id, eos_token_id=eos_token_id, pad_token_id=None, use_cache=False, **sizes
    )


def _config_of_file(path: Path, size: Language, vocab_size: int | None) -> Any:
    for flag in ("width", "layers", "heads"):
        if getattr(size, flag) is not None:
            raise TaskError(f"{flag}={getattr(size, flag)}: resizes presets only; edit {path} instead")
    config = read_config(path)
    text = config.get_text_config()
    available = getattr(text, "vocab_size", None)
    if available is None:
        raise TaskError(f"model {path}: a {config.model_type} has no vocab_size; give a causal language model's config")
    if vocab_size is not None and available < vocab_size:
        raise TaskError(f"model {path}: vocab_size={available}, but the data has {vocab_size} tokens; raise it")
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and positions < size.context:
        raise TaskError(
            f"model {path}: max_position_embeddings={positions}, less than context={size.context}; "
            "raise it or use a shorter context"
        )
    # The config's special tokens are those of another tokenizer; transformers warns of numbers beyond the vocabulary.
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not _within(getattr(text, token, None), available):
            setattr(text, token, None)
    text.use_cache = False
    return config


def _within(token: Any, vocab_size: int) -> bool:
    tokens = token if isinstance(token, list) else [token]
    return all(number is not None and 0 <= number < vocab_size for number in tokens)
