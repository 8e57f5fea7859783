"""One training step by mlx-lm's own trainer and by ours, from the same start.

Both get the same rows, the same start of A and B, the same optimizer and learning rate, and no
gradient clipping (mlx-lm has none).
"""

import contextlib
import gc
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_map
from mlx_lm.tuner.trainer import (
    TrainingArgs,
    TrainingCallback,
    default_loss,
    iterate_batches,
    train,
)
from mlx_lm.tuner.utils import linear_to_lora_layers

from ..adapters.attach import attach
from ..config.lora import LoRAConfig
from ..data.batches import TokenCollate
from ..data.dataset import Batch
from ..data.encoding import Example
from ..objectives.causal_lm import CausalLM, split_head
from ..packs.base import Base
from ..runtime import mx
from ..training.step import Stepper

LEARNING_RATE = 1e-4
SCALE = 2.0  # alpha / rank
_NEVER = 10**9


@dataclass(frozen=True)
class TokenRows:
    """Rows [B, T + 1] of tokens, supervised from index ``offset`` on."""

    tokens: np.ndarray
    offset: int

    @classmethod
    def random(
        cls, count: int, length: int, vocab_size: int, seed: int, offset: int | None = None
    ) -> "TokenRows":
        """Return random rows of ``length`` inputs; by default their second half is supervised."""
        shape = (count, length + 1)
        tokens = np.random.default_rng(seed).integers(1, vocab_size, shape, dtype=np.int32)
        if offset is None:
            offset = (length + 1) // 2 + 1
        return cls(tokens, offset)

    @property
    def targets(self) -> int:
        """Supervised tokens in all rows."""
        return self.tokens.shape[0] * (self.tokens.shape[1] - self.offset)

    def for_mlx_lm(self) -> tuple[mx.array, mx.array]:
        """Return mlx-lm's batch of these rows: tokens [B, T + 1], (offset, length) [B, 2].

        No row is padded, so its mask, which takes in one pad after the end of a row, errs nowhere.
        """
        rows = [(row.tolist(), self.offset) for row in self.tokens]
        return next(iterate_batches(rows, len(rows), self.tokens.shape[1]))

    def for_ours(self) -> Batch:
        target = np.arange(self.tokens.shape[1]) >= self.offset
        examples = [Example(row, target, "benchmark") for row in self.tokens]
        collate = TokenCollate(len(examples), self.tokens.shape[1] - 1)
        return collate(examples, range(len(examples)))


@dataclass(frozen=True)
class Adapters:
    """The same initial A and B for both; B is not zero, so that losses depend on all of them."""

    rank: int
    scale: float
    tensors: dict[str, mx.array]

    @classmethod
    def random(cls, base: Base, rank: int, scale: float, seed: int) -> "Adapters":
        """Return random adapters on every projection that ours adapts by default."""
        attached = attach(base, LoRAConfig(rank=rank, alpha=scale * rank))
        shapes = {name: tensor.shape for name, tensor in attached.tensors().items()}
        attached.detach()

        keys = mx.random.split(mx.random.key(seed), len(shapes))
        tensors = {
            name: mx.random.normal(shape, key=key) * (shape[0] ** -0.5 / 4)
            for (name, shape), key in zip(shapes.items(), keys, strict=True)
        }

        mx.eval(tensors)
        return cls(rank, scale, tensors)

    @property
    def paths(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self.tensors}


class MlxLmTrainer(TrainingCallback):
    """mlx-lm's ``train()``, timed by its own clock: it reports after every step.

    Args:
        load: returns the base; adapters stay on it.
        adapters: that it starts from, on the same projections.
        loss: of mlx-lm's batches, its own by default.
    """

    def __init__(
        self, load: Callable[[], Base], adapters: Adapters, loss: Callable = default_loss
    ) -> None:
        start = _active_memory()
        self.model = load().model

        config = {"rank": adapters.rank, "scale": adapters.scale, "dropout": 0.0}
        linear_to_lora_layers(self.model, -1, config | {"keys": adapters.paths})
        self.model.load_weights(list(adapters.tensors.items()), strict=False)

        self.optimizer = optimizers.Adam(learning_rate=LEARNING_RATE)
        self.optimizer.init(self.model.trainable_parameters())
        mx.eval(self.model.parameters(), self.optimizer.state)
        self.resident_bytes = _active_memory() - start

        self.args = TrainingArgs(iters=_NEVER, steps_per_report=1, steps_per_save=_NEVER)
        self._loss = loss
        self.step_ms = self.loss = 0.0
        self.trained_tokens = 0

    def on_train_loss_report(self, train_info: dict) -> None:
        self.step_ms = 1e3 / train_info["iterations_per_second"]
        self.loss = train_info["train_loss"]
        self.trained_tokens = train_info["trained_tokens"]

    def reset(self, adapters: Adapters) -> None:
        """Set the adapters, in the arrays' own places, and an optimizer that has seen nothing."""
        self.model.load_weights(list(adapters.tensors.items()), strict=False)
        self.optimizer.state.update(tree_map(mx.zeros_like, self.optimizer.state))
        self.optimizer.learning_rate = LEARNING_RATE
        mx.eval(self.model.parameters(), self.optimizer.state)

    def train(self, batches: Iterator[tuple[mx.array, ...]]) -> None:
        """Run mlx-lm's trainer over ``batches``; what it prints is dropped."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            self.args.adapter_file = str(Path(folder) / "adapters.safetensors")
            train(
                self.model,
                self.optimizer,
                train_dataset=[],
                args=self.args,
                loss=self._loss,
                iterate_batches=lambda **_: batches,
                training_callback=self,
            )


class Ours:
    """The step that `packs train` takes, on one matmul path, with a policy of recomputation."""

    def __init__(
        self,
        load: Callable[[], Base],
        adapters: Adapters,
        matmul_path: str,
        recompute: str = "none",
    ) -> None:
        start = _active_memory()
        base = load()

        lora = LoRAConfig(rank=adapters.rank, alpha=adapters.scale * adapters.rank)
        attached = attach(base, lora, matmul_path=matmul_path)
        self.attached = attached
        attached.load(adapters.tensors, "benchmark")
        attached.recompute(recompute)

        optimizer = optimizers.Adam(learning_rate=LEARNING_RATE)
        optimizer.init(base.model.trainable_parameters())
        self.stepper = Stepper(
            base.model,
            CausalLM(base.model, split_head(base.model)).loss,
            optimizer,
            max_grad_norm=None,
        )

        base.model.train()
        mx.eval(base.model.parameters(), optimizer.state)
        self.resident_bytes = _active_memory() - start

    def step(self, batch: Batch) -> tuple[float, float]:
        """Train on a batch as the training loop does; return milliseconds and loss."""
        start = time.perf_counter()
        loss, _ = self.stepper(batch, last=True, alone=True)
        return (time.perf_counter() - start) * 1e3, loss

    def steps(self, batch: Batch, count: int) -> list[float]:
        """Return the milliseconds of several steps; where they run ahead, one number, their mean.

        A GPU gets a step before the last is read. The time between two readings is no step's then:
        where Python is slower than the GPU, the first one has two steps and the last one none.
        """
        if not self.stepper.ahead:
            return [self.step(batch)[0] for _ in range(count)]

        start = time.perf_counter()
        last = self.stepper.start(batch, last=True, alone=True)
        for _ in range(count - 1):
            following = self.stepper.start(batch, last=True, alone=True)
            last.read()
            last = following
        last.read()
        return [1e3 * (time.perf_counter() - start) / count]


def _active_memory() -> int:
    gc.collect()
    return mx.get_active_memory()
