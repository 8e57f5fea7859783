"""--resume-adapter-file: a pack, a folder of mlx-lm, a file; what does not fit the run."""

import pytest

from mlx_packs import LoRAConfig
from mlx_packs.adapters.attach import attach
from mlx_packs.training.attached import load_adapters
from mlx_packs.training.prepare import InitialAdapters
from tests.helpers.damage import flip_bit
from tests.helpers.errors import raises
from tests.helpers.packs import TARGETS, random_pack


@pytest.fixture
def folder(small_tiny, tmp_path):
    random_pack(small_tiny, rank=4, alpha=6.0).save(tmp_path / "sft")
    return tmp_path / "sft"


def test_a_pack_a_folder_and_a_file_are_the_same_adapters(folder):
    file = folder / "adapters.safetensors"
    opened = [InitialAdapters.find(str(path)) for path in (folder, file)]
    assert [(each.file, each.pack.path) for each in opened] == [(file, folder)] * 2
    (folder / "pack.json").unlink()
    assert InitialAdapters.find(str(folder)) == InitialAdapters(file, None)


def test_what_is_no_pack(folder):
    (folder.parent / "empty").mkdir()
    flip_bit(folder / "adapters.safetensors", 99_999)
    for name, code in (("absent", "not-found"), ("empty", "not-found"), ("sft", "unreadable")):
        with raises(code, None, "--resume-adapter-file"):
            InitialAdapters.find(str(folder.parent / name))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rank": 8, "alpha": 6.0}, "--rank 4 --alpha 6"),
        ({"rank": 4, "alpha": 8.0}, "--rank 4 --alpha 6"),  # of the same shapes
        ({"rank": 4, "alpha": 6.0, "target_modules": ("q_proj",)}, "--target-modules q_proj,down"),
    ],
)
def test_other_adapters_than_the_run_has_are_rejected(small_tiny, folder, changes, named):
    trainable = attach(small_tiny, LoRAConfig(**{"target_modules": TARGETS, **changes}))
    try:
        with raises("mismatch", "resume_adapter_file", str(folder), named):
            load_adapters(trainable, InitialAdapters.find(str(folder)))
    finally:
        trainable.detach()
