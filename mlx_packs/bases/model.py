"""A base model: a frozen checkpoint with its tokenizer, before packs are applied to it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import mlx.nn as nn

from ..config.choices import architecture_of
from ..errors import Float16Overflow
from ..runtime import mx
from .files import (
    K_QUANTS,
    public_name,
    quantization_name,
    text_config,
    vocab_size_of,
    weight_files,
)
from .supported import check_architecture
from .tokenizer import with_template

Source = str | list[str]  # one tensor, or the experts' tensors that are stacked, in their order

_PROBED = 512  # tokens, of the check of a forward pass
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def weight_map(stored: Mapping[str, mx.array], named: Mapping[str, mx.array]) -> dict[str, Source]:
    """The tensor of the files for each ``.weight`` of the model, where that is certain.

    What mlx-lm renames is known by being the same object; what it makes anew, only where its name
    and shape leave one answer. ``stored`` has the names of the files, ``named`` the model's.
    """
    by_object = {id(tensor): name for name, tensor in stored.items()}
    weights = {name: t for name, t in named.items() if name.endswith(".weight")}
    sources = {
        name: by_object[id(tensor)] for name, tensor in weights.items() if id(tensor) in by_object
    }

    used = set(sources.values())
    free = {name: t for name, t in stored.items() if name not in used}
    for name, tensor in weights.items():
        if name in sources:
            continue
        if (source := _experts(name, tensor, free) or _alike(name, tensor, free)) is not None:
            sources[name] = source

    return sources


def _alike(name: str, tensor: mx.array, free: Mapping[str, mx.array]) -> str | None:
    """The one tensor of this name, or of this name but for a prefix, of these sizes."""
    if name in free:
        return name
    similar = [other for other in free if name.endswith(f".{other}") or other.endswith(f".{name}")]
    if len(similar) != 1 or sorted(free[similar[0]].shape) != sorted(tensor.shape):
        return None
    return similar[0]


def _experts(name: str, tensor: mx.array, free: Mapping[str, mx.array]) -> list[str] | None:
    """The tensors of a mixture's experts that are stacked to [E, out, in]."""
    place = re.fullmatch(r"(.+)\.switch_mlp\.(\w+)\.weight", name)
    if place is None or tensor.ndim != 3:
        return None

    for leaf in (place[2], _MIXTRAL.get(place[2])):
        names = [f"{place[1]}.experts.{e}.{leaf}.weight" for e in range(tensor.shape[0])]
        beyond = f"{place[1]}.experts.{len(names)}.{leaf}.weight"
        if beyond not in free and all(
            n in free and tuple(free[n].shape) == tuple(tensor.shape[1:]) for n in names
        ):
            return names
    return None


@dataclass
class BaseModel:
    """A frozen checkpoint with its tokenizer; packs know how to be applied to it (`packs.base`)."""

    name: str  # what the user called it
    path: Path
    model: nn.Module
    tokenizer: object  # None where only weights were asked for
    config: dict  # config.json
    fingerprint: str  # of its tensors (`bases.fingerprint`)
    quantization: dict = field(default_factory=dict)  # as in config.json; empty for a dense base
    # which tensor of the files each weight of the model is
    weight_map: dict[str, Source] = field(default_factory=dict, repr=False, compare=False)
    compute_dtype: str = "float32"  # of hidden states
    is_lazy: bool = False  # whether its weights are read when they are used
    # relative error of the weights, where they were quantized on loading
    rounding_error: float | None = field(default=None, compare=False)

    @property
    def blocks_on_disk(self) -> Any:
        """`offload.blocks.OffloadedBlocks` if blocks are read whenever they are computed."""
        return getattr(self.model, "blocks_on_disk", None)

    @property
    def vocab_size(self) -> int:
        return vocab_size_of(self.config, self.name)

    def with_chat_template(self, text: str | None) -> Self:
        """Return this base model with another chat template; None leaves it as it is."""
        if text is None:
            return self
        return replace(self, tokenizer=with_template(self.tokenizer, text))

    @property
    def template_kwargs(self) -> dict:
        """The variables that the chat template is given; a pack may have some."""
        return {}

    @property
    def architecture(self) -> str:
        """One of `config.choices.ARCHITECTURES`."""
        return architecture_of(self.config["model_type"])

    def check_architecture(self, command: str, wanted: str) -> None:
        check_architecture(command, wanted, self.name, self.config["model_type"])

    @property
    def public_name(self) -> str:
        """The name that a manifest gives it; it has no path."""
        return public_name(self.name)

    def summary(self) -> str:
        """One line: architecture, blocks, quantization, size."""
        text = text_config(self.config)
        kind = quantization_name(self.quantization)
        if self.rounding_error is not None:
            kind += f" (relative error of the weights {100 * self.rounding_error:.1f} %)"

        if errors := self.config.get(K_QUANTS):
            scales = "float32" if self.compute_dtype == "float32" else "rounded"
            kind += f" ({_gguf_line(errors, scales)})"

        size = sum(f.stat().st_size for f in weight_files(self.path))
        shown = f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"

        blocks = text.get("num_hidden_layers", text.get("n_layer", "?"))
        model_type = self.config["model_type"]
        return f"{self.name} · {model_type} · {blocks} blocks · {kind} · {shown}"


def _gguf_line(errors: Mapping[str, Mapping | None], scales: str) -> str:
    """Return which types are exact with scales in ``float32`` or ``rounded``, and other errors."""
    exact = [kind for kind, error in errors.items() if error and not error[scales]]
    parts = [f"{' and '.join(exact)} exact"] if exact else []
    for kind, error in errors.items():
        if error is None:
            parts.append(f"{kind} dense")
        elif error[scales]:
            parts.append(f"{kind} {100 * error[scales]:.2g} %")
    return ", ".join(parts)


def check_forward(base: BaseModel, tokens: list[int]) -> None:
    """Raise Float16Overflow if a base computes in float16 and its logits are not finite."""
    if base.compute_dtype != "float16":
        return
    logits = base.model(mx.array([tokens[:_PROBED]]))
    if not mx.isfinite(logits).all().item():
        raise Float16Overflow("the forward pass overflows")
