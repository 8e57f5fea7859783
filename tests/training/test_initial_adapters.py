"""--resume-adapter-file: a pack, a folder of mlx-lm, a file; what does not fit the run."""

import pytest

from mlx_packs import LoRAConfig
from mlx_packs.adapters.attach import attach
from mlx_packs.training.attached import load_adapters
from mlx_packs.training.prepare import adapters_file
from tests.helpers.damage import flip_bit
from tests.helpers.errors import raises
from tests.helpers.packs import TARGETS, random_pack


@pytest.fixture
def folder(small_tiny, tmp_path):
    random_pack(small_tiny, rank=4, alpha=6.0).save(tmp_path / "sft")
    return tmp_path / "sft"


def test_a_pack_a_folder_and_a_file_are_the_same_adapters(folder):
    file = folder / "adapters.safetensors"
    assert adapters_file(str(folder)) == adapters_file(str(file)) == file
    (folder / "pack.json").unlink()
    assert adapters_file(str(folder)) == file


@pytest.mark.parametrize("damage", ["absent", "empty", "changed"])
def test_what_is_no_pack(folder, damage):
    start = folder.parent / damage
    if damage == "changed":
        start = folder
        flip_bit(folder / "adapters.safetensors", 99_999)
    elif damage == "empty":
        start.mkdir()
    with raises({"changed": "unreadable"}.get(damage, "not-found"), None, "--resume-adapter-file"):
        adapters_file(str(start))


def load(base, folder, **lora):
    trainable = attach(base, LoRAConfig(**{"target_modules": TARGETS, **lora}))
    try:
        load_adapters(trainable, str(folder))
        return {name: array.tolist() for name, array in trainable.tensors().items()}
    finally:
        trainable.detach()


def test_adapters_of_a_pack_are_loaded_as_they_are(small_tiny, folder):
    expected = random_pack(small_tiny, rank=4, alpha=6.0).tensors
    loaded = load(small_tiny, folder, rank=4, alpha=6.0)
    assert loaded == {name: array.tolist() for name, array in expected.items()}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rank": 8, "alpha": 6.0}, "--rank 4 --alpha 6"),
        ({"rank": 4, "alpha": 8.0}, "--rank 4 --alpha 6"),  # of the same shapes
        ({"rank": 4, "alpha": 6.0, "target_modules": ("q_proj",)}, "--target-modules q_proj,down"),
    ],
)
def test_other_adapters_than_the_run_has_are_rejected(small_tiny, folder, changes, named):
    with raises("mismatch", "resume_adapter_file", str(folder), named):
        load(small_tiny, folder, **changes)
