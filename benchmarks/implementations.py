"""The implementations of the training benchmarks: mlx-lm's real trainer, as it is or patched, and ours.

Both get the same rows, the same start of A and B, the same optimizer and learning rate, and no
gradient clipping (mlx-lm has none). Each loads its own copy of the base, so that its memory is
measured separately.
"""

import contextlib
import gc
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_map
from mlx_lm.tuner.trainer import TrainingArgs, TrainingCallback, iterate_batches, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_packs.adapters.lora import attach
from mlx_packs.config.schema import LoRAConfig
from mlx_packs.data.batches import Batch, make_batch
from mlx_packs.data.encoding import Example
from mlx_packs.objectives.causal_lm import CausalLM, as_arrays, split_head
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper

from . import patched

STOCK = "mlx-lm stock"
SAME_BLAS = "mlx-lm with our BLAS"
PATCHED = "mlx-lm patched"
LEARNING_RATE = 1e-4
_NEVER = 10**9


@dataclass(frozen=True)
class Rows:
    """Rows [B, T + 1] of random tokens; the second half of each row is supervised."""

    tokens: np.ndarray

    @classmethod
    def random(cls, count: int, length: int, vocab_size: int, seed: int) -> "Rows":
        shape = (count, length + 1)
        return cls(np.random.default_rng(seed).integers(1, vocab_size, shape, dtype=np.int32))

    def first(self, count: int) -> "Rows":
        return Rows(self.tokens[:count])

    @property
    def offset(self) -> int:
        """Index of the first supervised token of each row."""
        return self.tokens.shape[1] // 2 + 1

    @property
    def targets(self) -> int:
        """Supervised tokens in all rows."""
        return self.tokens.shape[0] * (self.tokens.shape[1] - self.offset)

    def for_mlx_lm(self) -> tuple[mx.array, mx.array]:
        """The batch that mlx-lm makes of these rows: tokens [B, T + 1], (offset, length) [B, 2].

        No row is padded, so its mask, which takes in one pad after the end of a row, errs nowhere.
        """
        rows = [(row.tolist(), self.offset) for row in self.tokens]
        return next(iterate_batches(rows, len(rows), self.tokens.shape[1]))

    def for_ours(self) -> Batch:
        target = np.arange(self.tokens.shape[1]) >= self.offset
        examples = [Example(row, target, "benchmark") for row in self.tokens]
        return make_batch(examples, range(len(examples)), len(examples), self.tokens.shape[1] - 1)


@dataclass(frozen=True)
class Adapters:
    """Initial A and B of both implementations; B is not zero, so that losses depend on all of it."""

    rank: int
    scale: float
    tensors: dict[str, mx.array]

    @classmethod
    def random(cls, base: Base, rank: int, scale: float, seed: int) -> "Adapters":
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


def ours_name(matmul_path: str, recompute: str) -> str:
    """What records call an implementation of ours."""
    suffix = "" if recompute == "none" else f", recompute {recompute}"
    return f"mlx_packs {matmul_path}{suffix}"


class MlxLm(TrainingCallback):
    """mlx-lm's ``train()``, timed by its own clock: it reports after every step.

    It learns from batches stock, and from those that are `patched.with_targets`; ``patch``
    switches the rest. ``reset`` takes adapters and optimizer back to where they started.
    """

    def __init__(self, load: Callable[[], Base], adapters: Adapters):
        start = _active_memory()
        self.model = load().model
        config = {"rank": adapters.rank, "scale": adapters.scale, "dropout": 0.0}
        linear_to_lora_layers(self.model, -1, config)
        self.model.load_weights(list(adapters.tensors.items()), strict=False)
        self.optimizer = optimizers.Adam(learning_rate=LEARNING_RATE)
        self.optimizer.init(self.model.trainable_parameters())
        mx.eval(self.model.parameters(), self.optimizer.state)
        self.resident_bytes = _active_memory() - start
        self.args = TrainingArgs(iters=_NEVER, steps_per_report=1, steps_per_save=_NEVER)
        self.step_ms = self.loss = 0.0
        self.trained_tokens = 0

    def on_train_loss_report(self, train_info: dict) -> None:
        self.step_ms = 1e3 / train_info["iterations_per_second"]
        self.loss = train_info["train_loss"]
        self.trained_tokens = train_info["trained_tokens"]

    def patch(self, is_patched: bool) -> None:
        """Keep MLX's buffer cache between steps, or empty it as stock."""
        self.args.clear_cache_threshold = patched.KEEP_CACHE if is_patched else 0

    def reset(self, adapters: Adapters) -> None:
        """Adapters as given and an optimizer that has seen nothing, in the arrays' own places."""
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
                loss=patched.loss,
                iterate_batches=lambda **_: batches,
                training_callback=self,
            )


class Ours:
    """The step that `mlx_packs.train` takes, on one matmul path, with a policy of recomputation."""

    def __init__(
        self,
        load: Callable[[], Base],
        adapters: Adapters,
        matmul_path: str,
        recompute: str = "none",
    ):
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
        """Learn from a batch as the training loop does; milliseconds and loss."""
        start = time.perf_counter()
        loss, _ = self.stepper(as_arrays(batch), batch.count, last=True, alone=True)
        return (time.perf_counter() - start) * 1e3, loss


@dataclass(eq=False)
class Entry:
    """One implementation in the race and what it has shown so far.

    transient_bytes: the most that a step took on top of what its implementation keeps.
    """

    name: str
    implementation: MlxLm | Ours
    rows: Rows
    stock_blas: bool = False
    patched: bool = False
    step_ms: list[float] = field(default_factory=list)
    transient_bytes: int = 0

    @property
    def peak_mb(self) -> float:
        """MLX memory that this implementation needs on its own, in 10^6 bytes."""
        return (self.implementation.resident_bytes + self.transient_bytes) / 1e6

    @property
    def tokens_per_s(self) -> list[float]:
        """Supervised tokens a second, step by step."""
        return [1e3 * self.rows.targets / ms for ms in self.step_ms]

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Count what is allocated inside as this implementation's."""
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        yield
        self.transient_bytes = max(self.transient_bytes, mx.get_peak_memory() - before)


def _active_memory() -> int:
    gc.collect()
    return mx.get_active_memory()
