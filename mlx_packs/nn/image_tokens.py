"""Tokens below zero, which are features of images (nn/images.py); without MLX."""

from typing import Any

import numpy as np

# Tokens up to here name features of this process, those between it and zero rows of a batch.
FIRST_IMAGE = -1 - (1 << 24)


def names_images(tokens: Any) -> bool:
    """Return whether an array of NumPy has tokens that name features of this process."""
    return isinstance(tokens, np.ndarray) and tokens.size > 0 and int(tokens.min()) <= FIRST_IMAGE
