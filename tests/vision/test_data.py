"""Commands on rows with images: what they show, count and compute."""

import json

import pytest

from mlx_packs.bases.tokenizer import readable_text
from mlx_packs.cli import mask
from mlx_packs.config.schema import DataConfig, LoRAConfig, TrainConfig
from mlx_packs.data.encoding import encode
from mlx_packs.data.rows import load_rows
from mlx_packs.memory.row_shapes import row_shapes
from mlx_packs.packs.base import load_base
from tests.helpers.image_rows import write_image_rows
from tests.helpers.vision_bases import write_vision_base

pytestmark = pytest.mark.interop

FAMILIES = ["qwen3_vl", "smolvlm"]
LABELS = {"qwen3_vl": "[image 8x8 patches]", "smolvlm": "[image of "}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with small bases."""
    folder = tmp_path_factory.mktemp("bases")
    for family in FAMILIES:
        write_vision_base(family, folder / family)
    return folder


@pytest.fixture(autouse=True)
def own_cache(here, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(here / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_counts_images_without_the_model(family, folders, here):
    write_image_rows(here / "d", train=3, valid=1)
    splits = load_rows(DataConfig(data=str(here / "d")))
    rows, columns = splits.rows["train"], DataConfig()
    base = load_base(folders / family)
    tokenizer, _ = mask.tokenizer_of(str(folders / family), False)

    computed = encode(rows, base.tokenizer, columns)
    counted = encode(rows, tokenizer, columns)
    assert counted.lengths.tolist() == computed.lengths.tolist()
    assert counted.targets == computed.targets
    assert tokenizer._images.computed == 0
    shown = readable_text(tokenizer, counted[0].tokens)
    assert shown == readable_text(base.tokenizer, computed[0].tokens)
    assert LABELS[family] in shown

    train = TrainConfig(max_seq_length=4096)
    shapes = row_shapes(str(folders / family), DataConfig(data="d"), train, LoRAConfig())
    assert shapes.longest == computed.lengths.max()


@pytest.mark.parametrize("family", FAMILIES)
def test_show_mask_and_data_name_images(family, folders, here, run):
    write_image_rows(here / "d", images=2, train=3, valid=1)
    options = ("--model", folders / family, "--data", "d", "--show-mask", "--json")
    shown = json.loads(run("train", *options)[1])
    assert len(shown) == 3
    assert shown[0]["spans"][0]["text"].count(LABELS[family]) == 2

    _, out, _ = run("data", "d", "--model", folders / family)
    assert out.count(LABELS[family]) == 4  # of two samples
    assert not (here / "cache" / "images").exists()
