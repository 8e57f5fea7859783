"""The memory and the reads of a run whose blocks are on disk, for its plan."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

_TABLE = re.compile(r"(?:^|\.)(embed_tokens\w*|wte|lm_head)\.(?:weight|scales|biases)$")
_BLOCK = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class BlocksOnDisk:
    """The blocks of a base in a plan.

    Attributes:
        blocks: The number of blocks.
        on_disk: How many of them are on disk.
        block_bytes: Bytes of the largest in memory.
        stored_bytes: Bytes of the largest in its files.
        table_bytes: Bytes of embeddings and head in memory, of which steps read parts.
        head_bytes: Bytes of the head in its files, which a step reads once.
        in_flight: How many of those on disk are in memory at the peak: one was measured on CPUs.
        passes: How often a step reads a block for a micro-batch.
        micro_batches: How many micro-batches a step has.
        together: Whether they pass each block together, so that a step reads it as for one.
        together_bytes: Bytes of the inputs of blocks that this adds; None if it cannot be done.
        accumulated_bytes: Bytes of the gradients of earlier micro-batches, which this spares.
    """

    blocks: int
    on_disk: int
    block_bytes: int
    stored_bytes: int
    table_bytes: int = 0
    head_bytes: int = 0
    in_flight: int = 2
    passes: int = 2
    micro_batches: int = 1
    together: bool = False
    together_bytes: int | None = None
    accumulated_bytes: int = 0

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, int, int]]) -> "BlocksOnDisk":
        """Return a base's sizes, given the name of each tensor, its bytes in memory and stored."""
        memory: dict[int, int] = {}
        stored: dict[int, int] = {}
        tables: dict[str, int] = {}
        heads: dict[str, int] = {}

        for name, nbytes, stored_bytes in tensors:
            if table := _TABLE.search(name):
                tables[name] = nbytes
                heads[table[1]] = heads.get(table[1], 0) + stored_bytes
            elif place := _BLOCK.search(name):
                block = int(place[1])
                memory[block] = memory.get(block, 0) + nbytes
                stored[block] = stored.get(block, 0) + stored_bytes

        return cls(
            len(memory),
            len(memory),
            max(memory.values(), default=0),
            max(stored.values(), default=0),
            sum(tables.values()),
            heads.get("lm_head", max(heads.values(), default=0)),
        )

    @property
    def saved_bytes(self) -> int:
        """Bytes that are not in memory."""
        return max(0, self.on_disk - self.in_flight) * self.block_bytes + self.table_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes that are read in a step."""
        block_reads = self.passes * (1 if self.together else self.micro_batches)
        of_blocks = block_reads * self.on_disk * self.stored_bytes
        return of_blocks + self.micro_batches * self.head_bytes

    def in_memory(self, spare: int) -> "BlocksOnDisk":
        """Return these with as many blocks in memory as ``spare`` bytes have room for."""
        count = min(max(0, spare) // max(1, self.block_bytes), self.on_disk)
        return replace(self, on_disk=self.on_disk - count)

    def to_json(self) -> dict[str, int]:
        return {
            "blocks": self.blocks,
            "blocks_on_disk": self.on_disk,
            "block_bytes": self.block_bytes,
            "step_read_bytes": self.step_bytes,
        }
