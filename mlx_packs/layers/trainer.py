"""A trainer for graphs that you write: adapters on linears that you register, one optimizer.

    trainer = LayerTrainer(LoRAConfig(rank=8), TrainConfig(iters=100, learning_rate=1e-2))
    up, head = trainer.register("up", linear), trainer.register("head", quantized)
    loss = trainer.step_lm(lambda x: head(mx.maximum(up(x), 0)), inputs, targets)

Trainable are the adapters of the registered layers that take part in a step, and nothing else:
neither the registered linears nor other weights that the graph reads.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_map

from .. import signals
from ..adapters.lora import AdapterPlace, delta_of, load_places, place_tensors
from ..config.arguments import checked_arguments
from ..config.fields import fields_where
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import Interrupted, PackError, did_you_mean, file_errors
from ..files import atomic_write, make_folder, replace_file, to_json, write_errors
from ..filesystem import temporary
from ..nn.frozen_weight import frozen_weight
from ..optim import make_optimizer
from ..packs.manifest import spec_json
from ..reading import read_json
from ..runtime import mx, set_random_state
from ..tensors import read_tensors, save_tensors
from ..training.checkpoint import load_checkpoint, save_checkpoint
from ..training.run_folder import RunFolder, check_unchanged
from ..training.state import TrainingState
from ..training.step import not_finite
from .graphs import (
    Forward,
    GraphCache,
    LMLoss,
    LossGraph,
    batch_of,
    lm_batch,
    sequence_forward,
    user_loss,
)
from .registered import LAYER_NAME, RegisteredLayer, adapt, adapters_module, stored_alphas, wrong

LAYERS = "layers.json"
_OF_OPTIMIZER = fields_where(TrainConfig, own_layers="optimizer")
_OF_STEPS = fields_where(TrainConfig, own_layers="step")
_OF_LORA = fields_where(LoRAConfig, own_layers="adapter")

Layers = Sequence[str | nn.Module]


class LayerTrainer:
    """Trains adapters on the linear layers that you register, with one optimizer.

    Each adapter adds a low-rank delta: y = W0 x + (alpha / r) B A x (arXiv:2106.09685).

    Args:
        lora: Default rank and alpha of a registered layer, and the dropout of all.
        train: Learning rate, schedule (over ``iters`` calls of a step), optimizer, accumulation,
            clipping, z-loss, label smoothing and seed; all other settings must have their defaults.
        optimizer: An optimizer of MLX, in place of the one that ``train`` describes.

    Attributes:
        updates: Number of updates of each layer, by name.

    Raises:
        PackError: If a setting would have no effect.
    """

    @checked_arguments
    def __init__(
        self,
        lora: LoRAConfig | Mapping[str, Any] | None = None,
        train: TrainConfig | Mapping[str, Any] | None = None,
        optimizer: optimizers.Optimizer | None = None,
    ) -> None:
        self.lora = lora or LoRAConfig()
        self.train = train or TrainConfig()
        _check_defaults(self.lora, _OF_LORA, "it applies to base models. Name layers with register")
        _check_defaults(
            self.train, [*_OF_OPTIMIZER, *_OF_STEPS], "a LayerTrainer has no use for it"
        )

        self._has_own_optimizer = optimizer is None
        if optimizer is None:
            optimizer = make_optimizer(self.train)
        else:
            _check_defaults(self.train, _OF_STEPS, "the optimizer that was passed has its own")
            is_multi = isinstance(optimizer, optimizers.MultiOptimizer)
            if is_multi or not isinstance(optimizer, optimizers.Optimizer):
                kind = type(optimizer).__name__
                raise wrong("optimizer", f"must be one of mlx.optimizers, but is a {kind}.")
        self.optimizer = optimizer

        self.updates: dict[str, int] = {}
        self._layers: dict[str, RegisteredLayer] = {}
        self._called: set[str] = set()
        self._graphs = GraphCache(
            self._layers, self._called, self.optimizer, self.train.max_grad_norm
        )
        self._waiting: LossGraph | None = None  # whose gradients wait for their update
        self._state = TrainingState()
        self._on_signal: tuple[list[int], Path] | None = None  # `saving_on_signals`

    @checked_arguments
    def register(
        self, name: str, linear: nn.Module, rank: int | None = None, alpha: float | None = None
    ) -> RegisteredLayer:
        """Freeze a linear layer, add a fresh adapter (B = 0) to it, and return the layer to call.

        Args:
            name: A name that no other layer has: letters, digits, ``_`` and ``-``, with dots
                between.
            linear: An `nn.Linear`, `nn.QuantizedLinear` or `NF4Linear`.
            rank: Rank of the adapter; by default the rank of ``lora``.
            alpha: LoRA alpha of the adapter; by default the alpha of ``lora``.

        Raises:
            PackError: If the name is in use or malformed, or the module is not a linear layer.
        """
        if not isinstance(name, str) or not LAYER_NAME.fullmatch(name):
            raise wrong(
                "name",
                f"must consist of letters, digits, _, - and dots between them, but got {name!r}.",
            )
        if name in self._layers:
            raise PackError(
                f"{name}: is registered already. Choose another name.", "conflict", "name"
            )
        if other := next((n for n, o in self._layers.items() if o.linear is linear), None):
            raise PackError(f"{name}: is the same linear as '{other}'.", "conflict", "linear")
        self._check_nothing_waits(f"registering {name}")

        sizes = {"rank": rank, "alpha": alpha}
        lora = dataclasses.replace(self.lora, **{k: v for k, v in sizes.items() if v is not None})

        self._layers[name] = adapt(name, linear, lora, self.train.seed, self._called)
        self.updates[name] = 0
        self.optimizer.init(adapters_module([self._layers[name]]).trainable_parameters())
        self._graphs.clear()
        return self._layers[name]

    @checked_arguments
    def layer(self, name: str) -> RegisteredLayer:
        """Return the registered layer of a name; the error for another suggests the nearest."""
        if name not in self._layers:
            hint = did_you_mean(str(name), list(self._layers)) if self._layers else ""
            raise PackError(f"'{name}' is not registered. {hint}".rstrip(), "unknown", "layers")
        return self._layers[name]

    @property
    def names(self) -> list[str]:
        """The names of the registered layers, in the order of their registration."""
        return list(self._layers)

    @property
    def parameter_count(self) -> int:
        """The number of trainable parameters."""
        return sum(tensor.size for tensor in self.tensors().values())

    @checked_arguments
    def merged_weight(self, name: str) -> mx.array:
        """Return the dense weight [out, in] of a layer with its adapter added, in float32."""
        layer = self.layer(name)
        frozen = frozen_weight(layer.linear).dense().astype(mx.float32)
        return frozen + delta_of(layer.spec, self.tensors())

    def step_lm(
        self,
        layers: Layers | Forward,
        inputs: mx.array,
        targets: mx.array,
        mask: mx.array | None = None,
        weights: mx.array | None = None,
    ) -> float:
        """Train on a batch by cross-entropy, in float32; return its mean loss before the update.

        Semantics: ``logits = layers[-1](… layers[0](inputs))`` or ``layers(inputs)``;
        ``loss = sum(weights * -log softmax(logits)[targets]) / sum(weights)``

        With ``grad_accumulation_steps`` of N, every N-th call makes an update. Batches count by
        their weights, so that N small batches equal one large batch.

        Args:
            layers: Names or registered layers, which are applied one after the other; or a function
                of the inputs that calls registered layers in any way. The function is compiled
                where MLX compiles: pass the same one each time, and let it read no arrays that
                change, except arrays of the layers. A registered layer that it does not call is not
                updated, and one warning says so.
            inputs: An array; for a sequence of layers it is [..., in] of the first one.
            targets: Token ids, in the shape of the logits without their last axis; -100 is no
                target.
            mask: An array of that shape, which is nonzero where there is a target.
            weights: An array of that shape, with weights of 0 or more.

        Raises:
            PackError: If an argument does not fit, or if the loss or a gradient is not finite.
                Adapters, optimizer and random state are then unchanged, and accumulated gradients
                are dropped.
        """
        loss = self._lm_loss(layers)
        batch = lm_batch(inputs, targets, mask, weights)
        graph = self._graphs.graph(layers, loss, batch)
        graph.loss.check_targets(batch[1])
        return self._step(graph, batch, float(batch[2].sum()))

    def step(self, loss: Callable[..., mx.array], *arrays: mx.array) -> float:
        """Train on a batch with a loss of your own, and return the loss before the update.

        Accumulated batches have equal weight. Everything else is as in `step_lm`.

        Args:
            loss: A function of arrays that calls registered layers and returns a scalar, the mean
                over its batch.
            *arrays: The arrays of the batch.
        """
        if not callable(loss):
            kind = type(loss).__name__
            raise wrong(
                "loss", f"must be a function of the arrays that follow it, but is a {kind}."
            )
        if not arrays:
            raise wrong("arrays", "there are none. Pass the arrays of a batch.")

        batch = tuple(mx.array(a) for a in arrays)
        return self._step(self._graphs.graph(loss, user_loss(loss), batch), batch, 1.0)

    def loss_lm(
        self,
        layers: Layers | Forward,
        inputs: mx.array,
        targets: mx.array,
        mask: mx.array | None = None,
        weights: mx.array | None = None,
    ) -> float:
        """Return the loss of a batch as `step_lm` does, without dropout and without an update."""
        loss = self._lm_loss(layers)
        batch = lm_batch(inputs, targets, mask, weights)
        total, count = loss(*batch)
        loss.check_targets(batch[1])
        return (total / count).item()

    def flush(self) -> bool:
        """Update with the gradients that are still accumulated; return whether there were any."""
        if self._waiting is None:
            return False
        graph = self._waiting
        with self._unchanged_on_error():
            self._check_finite(0.0, graph.stepper.flush())
        self._count_update(graph)
        return True

    def _lm_loss(self, layers: Layers | Forward) -> LMLoss:
        if isinstance(layers, (list, tuple)) and layers:
            registered = [self._registered(i, layer) for i, layer in enumerate(layers)]
            forward = sequence_forward(registered)
        elif callable(layers):
            forward = layers
        else:
            raise wrong(
                "layers",
                "must be a list of registered layers or a function of the inputs, but got "
                f"{layers!r}.",
            )
        return LMLoss(forward, self.train.z_loss, self.train.label_smoothing)

    def _registered(self, i: int, layer: object) -> RegisteredLayer:
        """Layer ``i`` of a sequence, given by its name, as itself or as its linear."""
        if isinstance(layer, str):
            return self.layer(layer)
        for registered in self._layers.values():
            if layer is registered or layer is registered.linear:
                return registered

        name = f"a {type(layer).__name__}"
        if isinstance(layer, RegisteredLayer):
            name = f"'{layer.name}'"
        raise PackError(
            f"layers[{i}] ({name}) is not registered with this trainer.", "unknown", "layers"
        )

    def _step(self, graph: LossGraph, arrays: Sequence[mx.array], count: float) -> float:
        """Take one batch and return its loss; the update comes with the last of an accumulation."""
        if self._waiting not in (None, graph):
            raise PackError(
                "gradients of another loss wait for their update. Call flush before this one.",
                "conflict",
            )

        several = self.train.grad_accumulation_steps
        batch = batch_of(arrays, count)
        last = graph.stepper.waiting + 1 == several
        started = time.perf_counter()

        with self._unchanged_on_error():
            for name in graph.names:
                self._layers[name].train()
            try:
                loss, norm = graph.stepper(batch, last, several == 1)
            finally:
                for name in graph.names:
                    self._layers[name].eval()
            self._check_finite(loss, norm)

        counted = dataclasses.replace(batch, denominator=round(count))
        seconds = time.perf_counter() - started
        self._state.count(loss, counted, None, seconds, mx.get_peak_memory())
        self._waiting = graph

        if last:
            self._count_update(graph)
        return loss

    def _count_update(self, graph: LossGraph) -> None:
        self._waiting = None
        self._state.updates += 1
        for name in graph.names:
            self.updates[name] += 1
        self._save_after_signal()

    @checked_arguments
    @contextmanager
    def saving_on_signals(self, folder: str | Path) -> Iterator[None]:
        """Save a checkpoint to a folder when SIGINT, SIGTERM or SIGHUP arrives in a ``with`` block.

        The current update is completed first; then the steps end with an error.

        Raises:
            Interrupted: From the step that made the update; the message names the checkpoint.
        """
        with signals.deferred() as waiting:
            self._on_signal = waiting, Path(folder)
            try:
                yield
                if self._waiting is None:
                    self._save_after_signal()
            finally:
                self._on_signal = None

    def _save_after_signal(self) -> None:
        if self._on_signal and self._on_signal[0]:
            (number, *_), folder = self._on_signal
            saved = self.save(folder)
            raise Interrupted(
                f"interrupted. Checkpoint saved to {saved}. Continue with resume({str(folder)!r}).",
                number,
            )

    @contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """Restore adapters, optimizer and random state after an exception."""
        module = adapters_module(self._layers.values())
        before = tree_map(lambda a: a, (module.trainable_parameters(), self.optimizer.state))
        key = mx.random.state[0]

        try:
            yield
        except BaseException:
            module.update(before[0])
            self.optimizer.state = before[1]
            set_random_state(key)
            self._forget_graphs()
            raise

    def _forget_graphs(self) -> None:
        """Drop compiled graphs, which reference the optimizer's earlier state, and pending work."""
        self._graphs.clear()
        self._waiting = None

    def _check_finite(self, loss: float, norm: float) -> None:
        if fault := not_finite(loss, norm):
            raise PackError(
                f"step {self._state.batches + 1}: {fault}. Nothing was updated. Check inputs and "
                "weights, or use a lower learning_rate.",
                "diverged",
            )

    def _check_nothing_waits(self, before: str) -> None:
        if self._waiting is not None:
            raise PackError(
                f"gradients wait for their update. Call flush before {before}.", "conflict"
            )

    def tensors(self) -> dict[str, mx.array]:
        """Return the adapters in mlx-lm's names: ``lora_a`` [in, r] and ``lora_b`` [r, out]."""
        return place_tensors(self._places())

    @checked_arguments
    def load(self, tensors: Mapping[str, mx.array], where: str) -> None:
        """Set all adapters to tensors named as by `tensors`; errors name ``where`` as their source.

        Raises:
            PackError: If tensors do not fit; the adapters are then unchanged.
        """
        load_places(self._places(), tensors, where)

    def _places(self) -> dict[str, AdapterPlace]:
        return {n: AdapterPlace(o.lora, 0, o.spec) for n, o in self._layers.items()}

    @checked_arguments
    def save_adapters(self, file: str | Path) -> None:
        """Write the adapters to a safetensors file; its metadata has their alphas."""
        file = Path(file).expanduser()
        make_folder(file.parent)
        alphas = {name: layer.alpha for name, layer in self._layers.items()}

        with write_errors(file), temporary(file, Path.touch, ".safetensors") as partial:
            save_tensors(partial, self.tensors(), {"alpha": json.dumps(alphas)})
            replace_file(partial, file)

    @checked_arguments
    def load_adapters(self, file: str | Path) -> None:
        """Load all adapters from a file; the optimizer is unchanged.

        Raises:
            PackError: If names, shapes or alphas differ from the registered layers.
        """
        file = Path(file).expanduser()
        if not file.is_file():
            raise PackError(f"{file}: no such file.", "not-found")
        tensors = read_tensors(file)

        for name, alpha in stored_alphas(file).items():
            if name in self._layers and self._layers[name].alpha != alpha:
                raise PackError(
                    f"{file}: {name} has alpha {alpha:g}, but was registered with "
                    f"{self._layers[name].alpha:g}.",
                    "mismatch",
                )

        self.load(tensors, str(file))

    @checked_arguments
    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint (adapters, optimizer, random state) to a folder and return its path.

        Raises:
            PackError: If accumulated gradients wait for their update; call `flush` first.
        """
        self._check_nothing_waits("saving")
        run = Path(folder).expanduser()
        make_folder(run)
        atomic_write(run / LAYERS, to_json(self._identity()))
        return save_checkpoint(run, self, self.optimizer, self._state)

    @checked_arguments
    def resume(self, folder: str | Path) -> None:
        """Continue from the newest undamaged checkpoint of a folder, bit-identically.

        Raises:
            PackError: If the checkpoint has other layers, settings or another optimizer.
        """
        run = Path(folder).expanduser()
        checkpoint = RunFolder(run).resume_point().folder

        with file_errors(run / LAYERS):
            then = read_json(run / LAYERS)

        now = json.loads(to_json(self._identity()))
        check_unchanged(str(run), then, now)
        self._state = load_checkpoint(checkpoint, self, self.optimizer)
        self._forget_graphs()

    def _identity(self) -> dict:
        """Return the facts that must not change when a run continues."""
        settings = [*_OF_STEPS]
        if self._has_own_optimizer:
            settings += _OF_OPTIMIZER

        return {
            "optimizer": type(self.optimizer).__name__,
            "dropout": self.lora.dropout,
            "layers": [spec_json(layer.spec) for layer in self._layers.values()],
            **{f"train.{name}": getattr(self.train, name) for name in settings},
        }


def _check_defaults(config: LoRAConfig | TrainConfig, used: Sequence[str], why: str) -> None:
    """Check that all settings but those used have their defaults."""
    defaults = type(config)()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in used and value != getattr(defaults, field.name):
            raise wrong(field.name, f"is {value!r}, but {why}.", "conflict")
