"""Batches of several ranks: each trains on its slice of every batch of a run.

The order of a run (`Sampler`) depends on its seed alone, so that ranks agree on it without a message,
and the place in it is the number of the next batch, on every rank.
"""

from ..errors import PackError
from .packing import Packed
from .sampler import Order


def rank_slice(order: Order, rank: int, world: int) -> Order:
    """Return what a rank has of the examples, or packed sequences, of one batch.

    The slices of all ranks are the batch, each of its examples once. Examples of a batch are ordered
    by length, and a rank takes every ``world``-th of them, so that the slices take equally long. Of a
    batch with fewer examples than ranks, as the last of an epoch may be, some slices are empty.

    Args:
        order: of the whole batch.
        rank: from 0.
        world: the number of ranks.
    """
    if not isinstance(order, Packed):
        return order[rank::world]
    spans = None if order.spans is None else order.spans[rank::world]
    return Packed(order.sequences[rank::world], spans)


def check_ranks(source: str, examples: int, batch_size: int, world: int) -> None:
    """Raise a PackError where a rank would have nothing to train on.

    Args:
        source: of the examples, as messages name it.
        examples: how many there are.
        batch_size: examples of a batch, of all ranks together.
        world: the number of ranks.
    """
    if examples < world:
        raise PackError(
            f"--data {source}: {examples:,} examples are fewer than {world} ranks. Use at most "
            f"{examples:,} ranks, or more examples.",
            "data",
        )
    if batch_size < world:
        raise PackError(
            f"--batch-size {batch_size}: is less than {world} ranks, each of which takes a part of "
            f"every batch. Use at least {world}.",
            "conflict",
        )
