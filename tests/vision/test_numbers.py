"""The numbers of images in texts: they end with what holds an image, and are given anew then."""

import gc

from mlx_packs.vision import images


def added(table: images._Table, count: int) -> images.Image:
    image = images.Image("", None, 0, "", count, None, table.reserve(count), None)
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


def test_after_the_last_number_come_those_that_no_image_has(monkeypatch):
    monkeypatch.setattr(images, "_NUMBERS", 100)
    table = images._Table()
    kept = added(table, 30)
    for _ in range(3):
        added(table, 20)
    assert table.rounds == 0

    again = added(table, 20)
    assert (table.rounds, again.start) == (1, 30)
    last = added(table, 40)
    assert last.start == 50
    assert [table.of(images.FIRST_IMAGE - number) for number in (29, 30, 89)] == [kept, again, last]
