"""A small model whose frozen activations are cached."""

import dataclasses
import itertools

import numpy as np

from mlx_packs import TrainConfig
from mlx_packs.data.batches import training_set
from mlx_packs.data.dataset import Batch
from mlx_packs.data.encoding import Examples
from mlx_packs.data.sampler import Sampler
from mlx_packs.display import NORMAL, QUIET, Display
from mlx_packs.objectives.frozen_activations import open_frozen_activations
from mlx_packs.packs.base import Base
from tests.helpers.models import SMALL_FAMILIES, base_of
from tests.helpers.steps import adapted, examples_of

LENGTHS = (9, 17, 5, 30, 2, 21, 12)
TRAIN = TrainConfig(
    iters=40,
    batch_size=2,
    max_seq_length=48,
    cache_frozen="on",
    matmul_path="quantized",
    recompute="none",
    seed=3,
)
BLOCKS = 4


def changed(train: TrainConfig, **changes) -> TrainConfig:
    """The same settings but for some."""
    return dataclasses.replace(train, **changes)


def examples() -> Examples:
    """Examples of `LENGTHS` tokens."""
    return Examples(examples_of(LENGTHS), "text", "all")


def base_of_blocks(family: str = "qwen3") -> Base:
    """A small model of `BLOCKS` blocks."""
    settings = {k: v for k, v in SMALL_FAMILIES[family].items() if k != "n_layer"}
    blocks = "n_layer" if family.startswith("gpt") else "num_hidden_layers"
    return base_of(family, **settings | {blocks: BLOCKS})


class CachedModel:
    """A cache below the adapters on the top blocks of a base; its adapters are not zero.

    Attributes:
        lines: what the user was told, and from which level of detail on.
    """

    def __init__(self, base: Base | None = None, train: TrainConfig = TRAIN, num_layers: int = 1):
        base = base or base_of_blocks()
        length = train.max_seq_length if train.packing else None
        self.attached, self.head = adapted(base, num_layers, train.recomputes, length)
        self.model = base.model
        self.lines: list[tuple[str, int]] = []
        display = Display(QUIET)
        display.line = lambda label, text, level=NORMAL: self.lines.append((text, level))
        self.train, self._examples = train, examples()
        self.cache = open_frozen_activations(
            self.attached, self.head, train, self._examples, None, display
        )

    def batches(self, count: int, start: int = 0) -> list[Batch]:
        """Batches of a run with these settings."""
        t = self.train
        lengths = self._examples.lengths
        sampler = Sampler(lengths, t.batch_size, t.max_seq_length - 1, t.seed, t.packing)
        return list(itertools.islice(training_set(self._examples, sampler).batches(start), count))

    def states(self, batch: Batch) -> np.ndarray:
        """The states [B, T, D] that a step gets of a batch."""
        return np.array(self.cache.prepare(batch).inputs["states"])
