"""A small base with a tokenizer, on disk and loaded."""

from pathlib import Path

import pytest

from mlx_packs import load_base
from mlx_packs.packs.base import Base
from tests.helpers.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory) -> Path:
    """The folder of the base; tests only read it."""
    return write_checkpoint(tmp_path_factory.mktemp("small") / "base")


@pytest.fixture(scope="session")
def small_base(small_folder) -> Base:
    """The base, loaded once; tests leave it as it was."""
    return load_base(small_folder)
