"""A base model: a frozen checkpoint with its tokenizer, before packs are applied to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.nn as nn
import numpy as np

from ..config.choices import architecture_of
from ..errors import PackError
from ..late import load
from .families import check_architecture
from .files import public_name, quantization_name, text_config, vocab_size_of, weight_files
from .tokenizer import tokens_of
from .weight_map import Source


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
    def vocab_size(self) -> int:
        return vocab_size_of(self.config, self.name)

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

    def encode(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Return the embeddings of texts, float32 [N, D], by an encoder with its active pack.

        Args:
            texts: The texts, N in number.
            batch_size: Number of texts that are computed together.

        Raises:
            PackError: If the base model is a decoder, or an item is not a text.
        """
        self.check_architecture("encode", "encoder")

        if batch_size < 1:
            raise PackError(
                f"encode: batch_size must be positive, but got {batch_size}.", flag="batch_size"
            )

        if isinstance(texts, str):
            raise PackError("encode: texts must be a list of texts, but got one.", flag="texts")

        for at, text in enumerate(texts):
            if not isinstance(text, str):
                raise PackError(
                    f"encode: texts[{at}] must be a text, but is {text!r:.60}.", flag="texts"
                )

        tokens = tokens_of(self.tokenizer, texts, self.model.longest)
        return load("bases.encoder:embedded")(self.model, tokens, batch_size)

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

        size = sum(f.stat().st_size for f in weight_files(self.path))
        shown = f"{size / 1e6:.1f} MB"
        if size >= 1e8:
            shown = f"{size / 1e9:.2f} GB"

        blocks = text.get("num_hidden_layers", text.get("n_layer", "?"))
        model_type = self.config["model_type"]
        return f"{self.name} · {model_type} · {blocks} blocks · {kind} · {shown}"
