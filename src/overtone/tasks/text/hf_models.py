"""Causal language models of the transformers library: by name from the table below, or from a config.json.

The number in a name is the total of parameters with the vocabulary in the table, embeddings included; with other
tokens the model has more or fewer. Weights are always random: nothing is downloaded.
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
from overtone.tasks.sources import first_line, needs, refuse_huge_model

# GPT-2 comes with dropout; it draws from torch's own dice, and a resumed run would draw others.
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True)
class Preset:
    """A row of the table."""

    family: str  # transformers' model_type
    parameters: float  # in all, with `vocabulary`
    width: int
    layers: int
    heads: int
    inner: int  # width of the MLP
    vocabulary: int  # when there are no tokens to count, as in a dry run
    positions: int = 2048
    key_heads: int | None = None  # fewer than `heads`: grouped
    inner_name: str = "intermediate_size"  # what the family calls `inner`
    rotary: bool = False  # whole heads are rotated, pair by pair
    more: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise TaskError(f"heads={self.heads}: must divide the width, {self.width}")
        if self.rotary and self.width // self.heads % 2:
            raise TaskError(f"heads={self.heads}: a head of width {self.width} / {self.heads} must be even")

    def resized(self, size: Language) -> Preset:
        """With the numbers that were asked for in place of its own; the MLP stays as many times wider as it was."""
        width = size.width or self.width
        heads = size.heads or self.heads
        return replace(
            self,
            width=width,
            layers=size.layers or self.layers,
            heads=heads,
            inner=max(1, round(self.inner * width / self.width)),
            key_heads=self.key_heads if self.key_heads and heads % self.key_heads == 0 else None,
            positions=max(self.positions, size.context),
        )


def _neox(parameters: float, width: int, layers: int, heads: int, vocabulary: int = 50304) -> Preset:
    return Preset("gpt_neox", parameters, width, layers, heads, 4 * width, vocabulary)


def _llama(
    parameters: float, width: int, layers: int, heads: int, inner: int, vocabulary: int = 32000, keys: int | None = None
) -> Preset:
    return Preset("llama", parameters, width, layers, heads, inner, vocabulary, key_heads=keys, rotary=True)


def _gpt2(
    parameters: float, width: int, layers: int, heads: int, vocabulary: int = 50257, positions: int = 1024
) -> Preset:
    return Preset(
        "gpt2",
        parameters,
        width,
        layers,
        heads,
        4 * width,
        vocabulary,
        positions,
        inner_name="n_inner",
        more=_NO_DROPOUT,
    )


PRESETS: dict[str, Preset] = {
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
    """A model of the transformers library, to be built any number of times."""

    name: str
    vocabulary: int
    config: Any
    parameters: int = 0  # counted once, on no device

    def build(self) -> nn.Module:
        """With random weights from torch's own dice, on torch's default device."""
        library = needs("transformers", f"model {self.name}")
        if torch.get_default_device().type != "meta":  # where nothing takes any room
            refuse_huge_model(self.parameters, self.name)
        # The library picks torch's fused attention where the architecture has it; fp32 whatever the config says.
        model: nn.Module = library.AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float32, trust_remote_code=False
        )
        return model.train()

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens).logits
        return found

    def save(self, model: nn.Module, folder: Path) -> None:
        """In the form that ``AutoModelForCausalLM.from_pretrained(folder)`` loads."""
        saved: Any = model
        saved.config.use_cache = True  # off in training; whoever generates text wants it
        try:
            save_pretrained(saved, folder)
        finally:
            saved.config.use_cache = False


def causal_lm(name: str, size: Language, *, vocabulary: int | None, end: int | None) -> CausalLM:
    """By a preset's name, or from a local config.json or a folder with one. ``vocabulary`` None: the model's own;
    ``end``: the token that ends a document."""
    if name in PRESETS:
        config = _from_preset(name, PRESETS[name].resized(size), vocabulary, end)
    elif Path(name).exists():
        config = _from_file(Path(name), size, vocabulary)
    else:
        raise TaskError(f"model {name!r}: no such file and no such preset; there are {', '.join(nearest_first(name))}")
    made = CausalLM(name, config.get_text_config().vocab_size, config)
    try:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in made.build().parameters())
    except TaskError:
        raise
    except Exception as error:  # whatever an architecture finds wrong with its numbers, before data is read
        raise TaskError(f"model {name}: {first_line(error)}; it must be a causal language model's config") from error
    return replace(made, parameters=parameters)


def nearest_first(name: str) -> list[str]:
    known = ["byte", *PRESETS]
    near = get_close_matches(name, known, n=len(known), cutoff=0.5)
    return near + [other for other in known if other not in near]


def _from_preset(name: str, preset: Preset, vocabulary: int | None, end: int | None) -> Any:
    kind = needs("transformers", f"model {name}").CONFIG_MAPPING[preset.family]
    numbers = {
        "vocab_size": vocabulary or preset.vocabulary,
        "hidden_size": preset.width,  # each family translates these to its own names
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "max_position_embeddings": preset.positions,
        preset.inner_name: preset.inner,
        **preset.more,
    }
    if preset.key_heads is not None:
        numbers["num_key_value_heads"] = preset.key_heads
    return kind(bos_token_id=end, eos_token_id=end, pad_token_id=None, use_cache=False, **numbers)


def _from_file(path: Path, size: Language, vocabulary: int | None) -> Any:
    for flag in ("width", "layers", "heads"):
        if getattr(size, flag) is not None:
            raise TaskError(f"{flag}={getattr(size, flag)}: resizes presets only; edit {path} instead")
    config = read_config(path)
    text = config.get_text_config()
    room = getattr(text, "vocab_size", None)
    if room is None:
        raise TaskError(f"model {path}: a {config.model_type} has no vocab_size; give a causal language model's config")
    if vocabulary is not None and room < vocabulary:
        raise TaskError(f"model {path}: vocab_size={room}, the data has {vocabulary} tokens; raise it")
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and positions < size.context:
        raise TaskError(
            f"model {path}: max_position_embeddings={positions}, less than context={size.context}; "
            "raise it or use a shorter context"
        )
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not _within(getattr(text, token, None), room):
            setattr(text, token, None)
    text.use_cache = False
    return config


def _within(token: Any, vocabulary: int) -> bool:
    tokens = token if isinstance(token, list) else [token]
    return all(number is not None and 0 <= number < vocabulary for number in tokens)
