"""The vision tower, projector and image processor of a checkpoint, as mlx-vlm has them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from .. import runtime
from ..bases.families import ImageFacts
from ..errors import PackError, library_errors, pip_install
from ..runtime import mx

_LOADING = "its vision tower cannot be loaded"


@dataclass(frozen=True)
class Features:
    """What a tower makes of one image."""

    text: str  # what stands for the image, in which each token of the image is one feature
    rows: mx.array  # [n, D], features in the order of these tokens
    levels: mx.array | None = None  # [K, n, D], added after the first K blocks
    # float32 [n, 4], as `nn.images.ShownImages`; None where positions are places
    shifts: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        if self.levels is None:
            return self.rows.nbytes
        return self.rows.nbytes + self.levels.nbytes


class Tower:
    """Computes features; its language model is never read. ``token`` stands for a feature."""

    def __init__(self, path: Path, family: ImageFacts, token: int) -> None:
        self._model = _load_tower(path)
        self._processor = _processor_of(path)  # which the module of the model registers

        if runtime.on_cpu():
            self._model.update(tree_map(_in_float32, self._model.parameters()))
        self._model.eval()
        self._family = family
        self._token = token

    def counted(self, image: Any) -> Features:
        """Return the text and the number of the features of a PIL image; ``rows`` are [n, 0]."""
        inputs = self._inputs(image)
        tokens = np.array(inputs["input_ids"][0])
        count = np.count_nonzero(tokens == self._token)
        return Features(self._text(tokens), mx.zeros((count, 0)))

    def features(self, image: Any) -> Features:
        """Return the features of a PIL image, computed."""
        inputs = self._inputs(image)
        tokens = inputs.pop("input_ids")
        mask = inputs.pop("attention_mask", mx.ones_like(tokens))

        entered = self._model.get_input_embeddings(
            tokens, inputs.pop("pixel_values"), mask=mask, **inputs
        )
        places = np.flatnonzero(np.array(tokens[0]) == self._token)
        rows = entered.inputs_embeds[0][mx.array(places)]
        if self._family.divided:
            rows = rows * self._model.config.hidden_size**0.5
        levels = None
        if entered.deepstack_visual_embeds is not None:
            levels = mx.stack(list(entered.deepstack_visual_embeds))

        text = self._text(np.array(tokens[0]))
        mx.eval([rows] if levels is None else [rows, levels])
        return Features(text, rows, levels, _shifts(entered, places))

    def _inputs(self, image: Any) -> dict[str, mx.array]:
        """Return what the processor makes of a text that has only this image; or a ValueError."""

        def rejected(reason: str) -> PackError:
            return PackError(
                f"an image of {image.width:,} x {image.height:,} pixels is rejected by the image "
                f"processor of the base ({reason}). Crop it, or leave it out."
            )

        family = self._family
        written = family.before + family.placeholder + family.after
        try:
            with library_errors(rejected):
                inputs = self._processor(text=[written], images=[image], return_tensors="np")
        except PackError as error:
            raise ValueError(error.message) from None
        return {name: mx.array(values) for name, values in inputs.items()}

    def _text(self, tokens: np.ndarray) -> str:
        tokenizer = self._processor.tokenizer
        plain = tokens.tolist()
        if plain[0] == tokenizer.bos_token_id:
            plain = plain[1:]
        text = tokenizer.decode(plain, skip_special_tokens=False)
        return text.removeprefix(self._family.before).removesuffix(self._family.after)


def _load_tower(path: Path) -> nn.Module:
    """Return mlx-vlm's model of a checkpoint, lazy. Raises: PackError."""
    try:
        from mlx_vlm.utils import load_model
    except ImportError:
        raise PackError(
            f"images need mlx-vlm. Run `{pip_install('vision')}`.", "dependency"
        ) from None

    with library_errors(partial(_faulty, path)), _quiet():
        # a relative path looks like the name of a repository
        return load_model(path.resolve(), lazy=True, strict=False)


def _processor_of(path: Path) -> Any:
    from mlx_vlm.utils import load_processor

    with library_errors(partial(_faulty, path)), _quiet():
        return load_processor(str(path.resolve()), add_detokenizer=False)


def _faulty(path: Path, reason: str) -> PackError:
    return PackError(f"{path}: {_LOADING}: {reason}.", "unreadable")


def _shifts(entered: Any, places: np.ndarray) -> np.ndarray | None:
    """Return the shifts of an image's features, from the positions of the text that has it."""
    positions = entered.position_ids
    if positions is None or positions.ndim != 3:
        return None

    of_text = np.array(positions)[:, 0]
    length = of_text.shape[1]
    shifts = np.zeros((len(places), 4), np.float32)
    shifts[:, :3] = (of_text - np.arange(length))[:, places].T
    shifts[-1, 3] = of_text[0, -1] + 1 - length  # of what follows, all axes are the same
    return shifts


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what transformers and Python say to the authors of a processor."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _in_float32(array: mx.array) -> mx.array:
    """Return a float array in float32, others as they are."""
    if array.dtype in (mx.float16, mx.bfloat16):
        return array.astype(mx.float32)
    return array
