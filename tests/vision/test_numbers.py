"""The numbers of images in texts: they end with what holds an image."""

import gc

from mlx_packs.vision import images
from tests.helpers.errors import raises


def added(table: images._Table, count: int) -> images.Image:
    return table.add(count, lambda start: images.Image("", None, 0, "", count, start, None))


def test_numbers_name_images_that_exist():
    table = images._Table()
    first = added(table, 3)
    added(table, 5)
    third = added(table, 2)
    gc.collect()
    assert table.all() == [first, third]
    for number, image in ((0, first), (2, first), (8, third), (9, third)):
        assert table.of(images.FIRST_IMAGE - number) is image


def test_after_the_last_number_a_process_has_to_start_again(monkeypatch):
    monkeypatch.setattr(images, "_NUMBERS", 100)
    table = images._Table()
    added(table, 90)
    with raises("conflict", None, "Start it again"):
        added(table, 20)
