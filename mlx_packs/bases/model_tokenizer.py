"""The tokenizer of a base model without its weights."""

from functools import partial
from typing import TYPE_CHECKING

from ..errors import library_errors
from .files import check_files, resolve_checkpoint, vocab_size_of
from .tokenizer import load_tokenizer, take_images
from .unsupported import unreadable

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def tokenizer_of(model: str, trust_remote_code: bool) -> tuple["TokenizerWrapper", int]:
    """Return the tokenizer of a base model and the size of its vocabulary; load no weights."""
    from mlx_lm.utils import load_config

    path = resolve_checkpoint(model)
    stored = check_files(path)
    with library_errors(partial(unreadable, path, stored)):
        config = load_config(path)
    tokenizer = load_tokenizer(path, config, trust_remote_code)
    take_images(tokenizer, model, path, stored)
    return tokenizer, vocab_size_of(stored, path)
