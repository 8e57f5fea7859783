"""The tokenizer of a base model that takes images: it encodes them, too."""

from functools import partial
from pathlib import Path
from typing import Any

from ..bases.families import has_vision_tower
from ..bases.files import check_files, resolve_checkpoint, vocab_size_of
from ..bases.tokenizer import load_tokenizer
from ..bases.unsupported import unreadable
from ..errors import library_errors
from ..sandbox.process import IMAGES
from .images import Images


def take_images(tokenizer: Any, path: Path, config: dict, model: Any = None) -> None:
    """Let a tokenizer encode images, if its base has a vision tower.

    Without the language model they are counted and named, but their features are not computed.
    """
    if has_vision_tower(config):
        IMAGES.start()
        tokenizer._images = Images(path, config, model)


def tokenizer_of(model: str, trust_remote_code: bool) -> tuple[Any, int]:
    """Return the tokenizer of a base model and the size of its vocabulary; load no weights."""
    from mlx_lm.utils import load_config

    path = resolve_checkpoint(model)
    stored = check_files(path)
    with library_errors(partial(unreadable, path, stored)):
        config = load_config(path)
    tokenizer = load_tokenizer(path, config, trust_remote_code)
    take_images(tokenizer, path, stored)
    return tokenizer, vocab_size_of(stored, path)
