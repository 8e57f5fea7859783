"""A small base, on which a run takes a third of its time on the embedded one."""

from pathlib import Path

import pytest

from mlx_packs import load_base, train_pack
from mlx_packs.packs.base import Base
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory) -> Path:
    """A random dense base of two narrow blocks with the bundled tokenizer; tests only read it."""
    return write_checkpoint(tmp_path_factory.mktemp("small") / "base")


@pytest.fixture(scope="session")
def small(small_folder) -> Base:
    """The small base, loaded once; tests leave it as it was."""
    return load_base(small_folder)


@pytest.fixture(scope="session")
def trained(small, tmp_path_factory) -> Path:
    """A folder with rows ``d``, a pack ``o`` of `small` and its run ``o-run``; tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    write_rows(folder / "d", train=CHATS, valid=CHATS[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train_pack(small, "d", LORA, TRAIN, "o")
    return folder
