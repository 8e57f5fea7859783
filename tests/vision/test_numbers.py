"""The numbers of images in texts: they name images that exist."""

import gc

from mlx_packs.vision import images
from tests.helpers.errors import raises


def added(table: images._Table, count: int) -> images.Image:
    image = images.Image("", None, 0, (1, 1), "", count, None, table.reserve(count), None)
    table.add(image)
    return image


def test_numbers_name_images_that_exist():
    table = images._Table()
    first = added(table, 3)
    added(table, 5)
    third = added(table, 2)
    gc.collect()
    assert table.all() == [first, third]
    for number, image in ((0, first), (2, first), (8, third), (9, third)):
        assert table.of(images.FIRST_IMAGE - number) is image


def test_the_numbers_have_an_end(monkeypatch):
    monkeypatch.setattr(images, "_NUMBERS", 100)
    table = images._Table()
    added(table, 90)
    with raises("unsupported", None, "Start it again"):
        table.reserve(20)
    assert table.reserve(10) == 90
