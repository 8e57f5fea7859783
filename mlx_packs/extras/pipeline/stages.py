"""The ranks of a pipeline: each computes some blocks of every batch, one rank after the other."""

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...distributed.group import Group, T
from ...runtime import mx


class Stages(Group):
    """Ranks that pass the states of a batch on, and their gradients back.

    A message goes to a neighbour and is over when the neighbour has it. GPipe's order is safe: the
    states of all pieces of a batch go forward before a gradient goes back.
    """

    def __init__(self, ranks: Group) -> None:
        super().__init__(ranks.native)

    @property
    def shares(self) -> int:
        """One: every rank takes part in all of a batch."""
        return 1

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last blocks, and computes the loss."""
        return self.rank == self.size - 1

    def send(self, array: mx.array, rank: int) -> None:
        """Send an array to a neighbour, and wait until it is there."""
        mx.eval(mx.distributed.send(array, rank, group=self.native))

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, rank: int) -> mx.array:
        array = mx.distributed.recv(shape, dtype, rank, group=self.native)
        mx.eval(array)
        return array

    def from_last(self, array: mx.array) -> mx.array:
        """Return the array of the last rank; other ranks pass one of the same shape."""
        return self.sum(array if self.is_last else mx.zeros_like(array))

    def norm(self, norm: mx.array) -> mx.array:
        """Return the L2 norm of what all ranks have, given that of the own part."""
        return mx.sqrt(self.sum(norm.square()))

    def union(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the arrays of all ranks by name; of equal names they must be equal."""
        own = {name: np.array(a.reshape(-1).view(mx.uint8)) for name, a in arrays.items()}
        facts = [[name, a.shape, str(a.dtype).rpartition(".")[2]] for name, a in arrays.items()]
        headers = self.gathered(json.dumps(facts).encode())
        contents = self.gathered(b"".join(part.tobytes() for part in own.values()))

        united: dict[str, mx.array] = {}
        for header, content in zip(headers, contents, strict=True):
            start = 0
            for name, shape, dtype in json.loads(header):
                kind: mx.Dtype = getattr(mx, dtype)
                stop = start + kind.size * int(np.prod(shape))
                values = mx.array(np.frombuffer(content[start:stop], np.uint8))
                united[name] = values.view(kind).reshape(shape)
                start = stop
        return united

    def map(
        self, function: Callable[[T], Sequence[np.ndarray]], items: Sequence[T]
    ) -> list[list[np.ndarray]]:
        return [list(map(np.asarray, function(item))) for item in items]


def stage_blocks(blocks: int, stages: int) -> list[range]:
    """Return the blocks of each stage; the first ones have more where they cannot be equal."""
    least, more = divmod(blocks, stages)
    starts = [stage * least + min(stage, more) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]
