"""A data set: batches of any examples, numbered in training, once in evaluation."""

from itertools import islice

import numpy as np

from mlx_packs.data.dataset import Batch, Dataset, FixedOrder, by_length, edges_of, first_examples


class Images(list):
    """Examples that are no tokens: a number each, in place of pixels."""

    def where_of(self, indices) -> list[str]:
        return [f"image {i}" for i in indices]


class PixelCollate:
    def __call__(self, images: Images, order) -> Batch:
        pixels = np.array([images[i] for i in order])
        return Batch({"pixels": pixels}, len(order), len(order), tuple(order), images)

    def shapes(self, images: Images, orders) -> set[tuple[int, int]]:
        return {(len(order), 1) for order in orders}

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        order = batch.examples
        return [self(batch.source, order[i:j]) for i, j in edges_of(len(order), parts)]


DATA = Dataset(Images([7, 8, 9]), PixelCollate(), FixedOrder([[2, 0], [1]]))


def test_training_batches_go_round_and_know_their_number():
    batches = list(islice(DATA.batches(start=1), 3))
    assert [batch.number for batch in batches] == [1, 2, 3]
    assert [batch.examples for batch in batches] == [(1,), (2, 0), (1,)]
    assert DATA.batches_per_epoch() == 2 and DATA.shapes(4) == {(2, 1), (1, 1)}


def test_an_epoch_has_every_example_with_its_row():
    batches = DATA.once()
    assert [batch.inputs["pixels"].tolist() for batch in batches] == [[9, 7], [8]]
    assert [batch.rows for batch in batches] == [["image 2", "image 0"], ["image 1"]]


def test_more_arrays_leave_a_batch_as_it_was():
    (batch, _) = DATA.once()
    more = batch.having(mask=np.ones(2))
    assert set(more.inputs) == {"pixels", "mask"} and set(batch.inputs) == {"pixels"}


def test_pieces_add_up_and_are_no_more_than_rows():
    (batch, _) = DATA.once()
    for parts in (1, 2, 5):
        pieces = DATA.collate.split(batch, parts)
        assert len(pieces) == min(parts, 2)
        assert sum(piece.denominator for piece in pieces) == batch.denominator
        assert sum((piece.examples for piece in pieces), ()) == batch.examples


def test_chosen_examples_come_by_length():
    order = by_length(np.array([5, 1, 3, 2]), 2, np.array([3, 0, 2]))
    assert [own.tolist() for own in order.epoch(0)] == [[3, 2], [0]]
    assert [first_examples(5, 2, batches).tolist() for batches in (-1, 1, 9)] == [
        [0, 1, 2, 3, 4],
        [0, 1],
        [0, 1, 2, 3, 4],
    ]
