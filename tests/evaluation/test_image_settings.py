"""The settings of images in an evaluation: as the pack was trained, but for the network."""

from types import SimpleNamespace

import pytest

from mlx_packs.config.data import DataConfig
from mlx_packs.evaluation.rows import columns_of
from tests.helpers.rows import CHATS, write_rows


@pytest.mark.parametrize("pixels", [0, 784, None])
def test_images_are_as_large_as_in_training(pixels):
    recipe = {"allow_urls": True}
    if pixels is not None:
        recipe["max_pixels"] = pixels
    pack = SimpleNamespace(_part=lambda name: recipe)

    columns = columns_of(pack, "somewhere")
    expected = DataConfig.max_pixels if pixels is None else pixels
    assert (columns.max_pixels, columns.allow_urls) == (expected, False)
    columns = columns_of(pack, "somewhere", max_pixels=0, allow_urls=True)
    assert (columns.max_pixels, columns.allow_urls) == (0, True)


def test_packs_data_has_the_settings_of_images(here, run):
    write_rows(here / "d", train=CHATS, valid=CHATS)
    code, _, err = run("data", "d", "--max-pixels", "0", "--allow-urls", "--samples", "0")
    assert code == 0, err
    assert run("data", "d", "--max-pixels", "-1")[0] == 2
