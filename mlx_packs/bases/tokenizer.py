"""The tokenizer of a checkpoint."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PackError, library_errors
from ..terminal import guarded_native
from .unsupported import unreadable_tokenizer


def load_tokenizer(path: Path, config: dict, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a decoder, as mlx-lm wraps it."""
    from mlx_lm.utils import load_tokenizer
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    try:
        if not (path / "tokenizer.json").is_file():  # it then logs each thing that it tries
            transformers_logging.set_verbosity(transformers_logging.CRITICAL)
        with guarded_native(), library_errors(partial(unreadable_tokenizer, path)):
            tokenizer = load_tokenizer(
                path,
                {"trust_remote_code": trust_remote_code},
                eos_token_ids=config.get("eos_token_id"),
            )
            tokens = tokenizer.encode("a b", add_special_tokens=False)
            tokenizer.decode(tokens)
    finally:
        transformers_logging.set_verbosity(verbosity)
    if not all(isinstance(token, int) for token in tokenizer.eos_token_ids):
        raise unreadable_tokenizer(path, "eos_token_id is no number")
    # without its files, transformers makes an empty tokenizer of the kind that the config names
    if not tokens:
        raise unreadable_tokenizer(path, "it knows no token")
    return tokenizer


def tokenizer_errors(tokenizer: Any) -> AbstractContextManager[None]:
    """Raise what a tokenizer raises over a text as an error that names the tokenizer's folder."""
    folder = Path(str(getattr(tokenizer, "name_or_path", "")))
    return library_errors(partial(unreadable_tokenizer, folder))


def load_encoder_tokenizer(
    path: Path, config: dict, lower_case: bool, trust_remote_code: bool
) -> Any:
    """Load the WordPiece tokenizer of an encoder, from tokenizer.json or vocab.txt."""
    # as mlx-lm does: that there is no torch is no news
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    if not (path / "tokenizer.json").is_file() and not (path / "vocab.txt").is_file():
        raise PackError(f"{path}: has neither tokenizer.json nor vocab.txt.", "not-found")
    with guarded_native(), library_errors(partial(unreadable_tokenizer, path)):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        works = tokenizer.is_fast and tokenizer.encode("a")
    if not works:
        raise PackError(
            f"{path}: the tokenizer cannot be loaded: it is no fast WordPiece.", "unsupported"
        )
    if len(tokenizer) > config["vocab_size"]:
        raise PackError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens, but the encoder "
            f"{config['vocab_size']} rows for them.",
            "mismatch",
        )
    if lower_case:
        from tokenizers.normalizers import Lowercase, Sequence

        backend = tokenizer.backend_tokenizer
        steps = [Lowercase(), *([backend.normalizer] if backend.normalizer else [])]
        backend.normalizer = Sequence(steps)
    return tokenizer


def tokens_of(tokenizer: Any, texts: Sequence[str], limit: int) -> list[np.ndarray]:
    """Return the tokens of each text with [CLS] and [SEP], cut to ``limit``."""
    if not texts:
        return []
    with tokenizer_errors(tokenizer):
        encoding = tokenizer(
            list(texts),
            truncation=True,
            max_length=limit,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
    return [np.array(ids, dtype=np.int32) for ids in encoding["input_ids"]]
