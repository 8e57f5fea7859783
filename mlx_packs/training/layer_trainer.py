"""A trainer for graphs of your own: adapters on linears that you register, one optimizer for all.

    trainer = LayerTrainer(LoRAConfig(rank=8), TrainConfig(iters=100, learning_rate=1e-2))
    up, head = trainer.register("up", linear), trainer.register("head", quantized)
    loss = trainer.step_lm(lambda x: head(mx.maximum(up(x), 0)), inputs, targets)

What learns are the adapters of the registered layers that take part in a step, and nothing else:
neither the registered linears nor other weights that the graph reads.
"""

import dataclasses
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_map

from ..adapters.spec import ModuleSpec
from ..adapters.targets import plan_specs
from ..adapters.tensors import (
    Slot,
    load_slots,
    merged_weight,
    slot_tensors,
)
from ..bases.geometry import GeometryError, Group, probe
from ..config.schema import LoRAConfig, TrainConfig
from ..errors import PackError, did_you_mean
from ..files import atomic_write, make_folder, read_tensors, save_tensors, to_json
from ..nn.lora import AdaptedLinear, AdapterShape, GroupedLoRA, adapter_key
from ..nn.quantized import LINEARS
from ..ops.linear_cross_entropy import cross_entropy
from ..optim import make_optimizer
from ..packs.manifest import spec_json
from ..runtime import mx
from .checkpoint import TrainingState, load_checkpoint, save_checkpoint, set_random_state
from .run_folder import latest_checkpoint
from .step import Stepper

IGNORED = -100  # a target that is none, as in other tools
LAYERS = "layers.json"
_OF_OPTIMIZER = "iters learning_rate lr_schedule warmup_steps optimizer optimizer_config".split()
_OF_STEPS = "grad_accumulation_steps max_grad_norm z_loss label_smoothing seed".split()
_OF_LORA = "rank alpha dropout".split()
_MOST_GRAPHS = 8  # that are kept compiled
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


class OwnLayer(nn.Module):
    """A registered linear with its adapter: call it where your graph has the linear."""

    def __init__(self, spec: ModuleSpec, adapted: AdaptedLinear, called: set[str]):
        super().__init__()
        self.adapted = adapted
        self._spec = spec
        self._called = called

    @property
    def name(self) -> str:
        return self._spec.path

    @property
    def in_features(self) -> int:
        return self._spec.in_features

    @property
    def out_features(self) -> int:
        return self._spec.widths[0]

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., in] to [..., out]. Raises: PackError if x is of another width."""
        if not isinstance(x, mx.array) or x.ndim < 1 or x.shape[-1] != self.in_features:
            shown = list(x.shape) if isinstance(x, mx.array) else type(x).__name__
            raise PackError(
                f"{self.name}: reads {self.in_features} numbers, but its input is {shown}."
            )
        self._called.add(self.name)
        return self.adapted(x)


Layers = Sequence[str | nn.Module]
Forward = Callable[[mx.array], mx.array]


@dataclasses.dataclass(frozen=True)
class _Graph:
    """A loss that was stepped: of which layers it is, and how many tokens its last axis stands for.

    source: what it was made from, held so that its id stays its own.
    """

    stepper: Stepper
    names: frozenset[str]
    vocab_size: int | None
    source: object


class LayerTrainer:
    """Adapters on registered linears, trained by one optimizer.

    Args:
        lora: rank, alpha and dropout of layers that are registered without their own.
        train: learning rate, schedule (over ``iters`` calls of step), optimizer, accumulation,
            clipping, z-loss, label smoothing and seed; the rest of it must be left alone.
        optimizer: one of mlx's, in the place of the one that ``train`` describes.
    Raises: PackError for a setting that would do nothing here.
    """

    def __init__(
        self,
        lora: LoRAConfig | None = None,
        train: TrainConfig | None = None,
        optimizer: optimizers.Optimizer | None = None,
    ):
        self.lora, self.train = lora or LoRAConfig(), train or TrainConfig()
        _hold_defaults(self.lora, _OF_LORA, "it is for bases; name layers with register")
        _hold_defaults(self.train, [*_OF_OPTIMIZER, *_OF_STEPS], "it has no meaning for own layers")
        if optimizer is not None:
            _hold_defaults(self.train, _OF_STEPS, "an optimizer was passed, which has its own")
            if not isinstance(optimizer, optimizers.Optimizer) or isinstance(
                optimizer, optimizers.MultiOptimizer
            ):
                raise PackError(
                    "[LayerTrainer] optimizer must be one of mlx.optimizers, but is a "
                    f"{type(optimizer).__name__}."
                )
        self.optimizer = make_optimizer(self.train) if optimizer is None else optimizer
        self.updates: dict[str, int] = {}  # made since this trainer was, by name of the layer
        self._made_here = optimizer is None
        self._layers: dict[str, OwnLayer] = {}
        self._called: set[str] = set()
        self._graphs: dict[object, _Graph] = {}
        self._pending: object | None = None  # the key of the graph whose gradients wait
        self._waiting = 0
        self._warned: set[str] = set()
        self._cursor = TrainingState()

    def register(
        self, name: str, linear: nn.Module, rank: int | None = None, alpha: float | None = None
    ) -> OwnLayer:
        """Freeze a linear and put a fresh adapter (B = 0) beside it; returns what to call.

        Args:
            name: its own among the layers; letters, digits, ``_``, ``-`` and dots between them.
            linear: `nn.Linear`, `nn.QuantizedLinear` or `NF4Linear`.
            rank, alpha: by default those of the trainer's LoRAConfig.
        Raises: PackError for a name that is taken or none, or what is no linear.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PackError(
                f"[LayerTrainer] a layer's name is made of letters, digits, _, - and "
                f"dots between them, but got {name!r}."
            )
        if name in self._layers:
            raise PackError(f"[LayerTrainer] {name}: is registered already; names are distinct.")
        if isinstance(linear, (OwnLayer, AdaptedLinear)):
            raise PackError(f"[LayerTrainer] {name}: carries an adapter already.")
        if type(linear) not in (nn.Linear, *LINEARS):
            raise PackError(
                f"[LayerTrainer] {name}: must be an nn.Linear, nn.QuantizedLinear or "
                f"NF4Linear, but is a {type(linear).__name__}."
            )
        if other := next((n for n, o in self._layers.items() if _linear(o) is linear), None):
            raise PackError(f"[LayerTrainer] {name}: is the same linear as '{other}'.")
        if self._waiting:
            raise PackError(
                f"[LayerTrainer] {name}: gradients wait for their update; call flush "
                "before registering."
            )
        spec = self._spec_of(name, linear, rank, alpha)
        (part,) = spec.slices
        lora = GroupedLoRA(
            spec.in_features,
            [AdapterShape(part.width, part.rank, part.scale)],
            self.lora.dropout,
            [adapter_key(self.train.seed, f"{name}.{part.name}")],
        )
        linear.freeze()
        layer = OwnLayer(spec, AdaptedLinear(linear, lora, spec.widths), self._called)
        layer.eval()
        self._layers[name] = layer
        self.updates[name] = 0
        self.optimizer.init(self._part([name]).trainable_parameters())
        self._graphs.clear()
        return layer

    def _spec_of(
        self, name: str, linear: nn.Module, rank: int | None, alpha: float | None
    ) -> ModuleSpec:
        """The adapter of a linear, held against the linear's own tensors."""
        try:
            geometry = probe(name, linear, {})
        except GeometryError as error:
            raise PackError(f"[LayerTrainer] {name}: {error.fault}") from None
        leaf = name.rpartition(".")[2]
        geometry = dataclasses.replace(geometry, slices=((leaf, geometry.out_features),))
        own = {"rank": rank, "alpha": alpha}
        lora = dataclasses.replace(self.lora, **{k: v for k, v in own.items() if v is not None})
        return plan_specs([Group(None, (geometry,))], lora)[name]

    def layer(self, name: str) -> OwnLayer:
        """A registered layer. Raises: PackError naming the nearest."""
        if name not in self._layers:
            hint = did_you_mean(str(name), list(self._layers)) if self._layers else ""
            raise PackError(f"[LayerTrainer] '{name}' is not registered. {hint}".rstrip())
        return self._layers[name]

    @property
    def names(self) -> list[str]:
        """The registered layers, in the order in which they were."""
        return list(self._layers)

    @property
    def parameter_count(self) -> int:
        """Trainable weights."""
        return sum(tensor.size for tensor in self.tensors().values())

    def merged_weight(self, name: str) -> mx.array:
        """The dense weight [out, in] of a layer with its adapter added, in float32."""
        layer = self.layer(name)
        return merged_weight(layer._spec, self.tensors(), _linear(layer))

    def step_lm(
        self,
        layers: Layers | Forward,
        inputs: mx.array,
        targets: mx.array,
        mask: mx.array | None = None,
        weights: mx.array | None = None,
    ) -> float:
        """Learn from a batch by cross-entropy, in float32; its mean loss before the update.

        Semantics: logits = layers[-1](… layers[0](inputs)) or layers(inputs);
        loss = sum(weights * -log softmax(logits)[targets]) / sum(weights)

        With ``grad_accumulation_steps`` the update comes with the last of them, and batches count
        by their weights: N small ones equal a large one.

        Args:
            layers: names or registered layers, applied one after the other; or a function of the
                inputs that calls registered layers in any way. It is compiled where MLX compiles:
                pass the same function each time, and let it read no array that changes but those
                of the layers. A registered layer that it does not call gets no update (and a
                warning, once).
            inputs: an array; [..., in] of the first layer in a sequence.
            targets: token ids of the shape of the logits but for their last axis; -100 is none.
            mask: of that shape, where there is a target.   weights: of that shape, 0 or more.
        Raises: PackError naming what does not fit. After a loss or gradient that is not finite all
            is as it was before the update, and gradients that waited are gone.
        """
        forward, sequence = self._forward(layers, inputs)
        batch = _lm_batch(inputs, targets, mask, weights)

        def loss(inputs, targets, weights):
            return self._lm_loss(forward, inputs, targets, weights)[:2]

        def vocab_size() -> int:
            return self._lm_loss(forward, *batch)[2]

        graph = self._graph(("lm", _key(layers)), layers, loss, batch, vocab_size, sequence)
        _hold_tokens(batch, graph.vocab_size)
        return self._step(("lm", _key(layers)), graph, batch, float(batch[2].sum()))

    def step(self, loss: Callable[..., mx.array], *arrays: mx.array) -> float:
        """Learn from a batch by a loss of your own: a function of arrays that calls registered
        layers and gives one number, the mean over its batch.

        Batches that are accumulated count alike. All else is as in `step_lm`.
        """
        if not callable(loss):
            raise PackError(
                "[LayerTrainer] step takes a function of the arrays that follow it, "
                f"but got a {type(loss).__name__}."
            )
        batch = tuple(mx.array(a) for a in arrays)
        if not batch:
            raise PackError("[LayerTrainer] step needs the arrays of a batch after the loss.")

        def counted(*batch):
            return _scalar(loss(*batch)), mx.array(1.0)

        graph = self._graph(("own", _key(loss)), loss, counted, batch, lambda: None, False)
        return self._step(("own", _key(loss)), graph, batch, 1.0)

    def loss_lm(
        self,
        layers: Layers | Forward,
        inputs: mx.array,
        targets: mx.array,
        mask: mx.array | None = None,
        weights: mx.array | None = None,
    ) -> float:
        """The loss that `step_lm` would give, without dropout and without learning."""
        forward, _ = self._forward(layers, inputs)
        batch = _lm_batch(inputs, targets, mask, weights)
        total, count, vocab_size = self._lm_loss(forward, *batch)
        _hold_tokens(batch, vocab_size)
        return (total / count).item()

    def flush(self) -> bool:
        """Make the update of gradients that wait for the rest of their accumulation, if any do."""
        if not self._waiting:
            return False
        graph = self._graphs[self._pending]
        with self._safe():
            norm = graph.stepper.flush()
            self._hold_finite(0.0, norm)
        self._updated(graph)
        return True

    def _forward(self, layers: Layers | Forward, inputs: mx.array) -> tuple[Forward, bool]:
        """What makes the logits, and whether it is a sequence of layers."""
        if callable(layers) and not isinstance(layers, (list, tuple)):
            return layers, False
        if isinstance(layers, str) or not isinstance(layers, (list, tuple)) or not layers:
            raise PackError(
                "[LayerTrainer] layers must be a list of registered layers or a "
                f"function of the inputs, but got {layers!r}."
            )
        found = [self._registered(i, layer) for i, layer in enumerate(layers)]
        if not isinstance(inputs, mx.array | np.ndarray) or inputs.shape[-1:] != (
            found[0].in_features,
        ):
            raise PackError(
                f"[LayerTrainer] inputs: '{found[0].name}' reads "
                f"{found[0].in_features} numbers, but they are "
                f"{list(getattr(inputs, 'shape', []))}."
            )
        for before, after in zip(found, found[1:], strict=False):
            if before.out_features != after.in_features:
                raise PackError(
                    f"[LayerTrainer] '{after.name}' reads {after.in_features} numbers, but "
                    f"'{before.name}' before it gives {before.out_features}."
                )

        def forward(x: mx.array) -> mx.array:
            for layer in found:
                x = layer(x)
            return x

        return forward, True

    def _registered(self, at: int, layer: object) -> OwnLayer:
        """A layer of a sequence, by its name or itself."""
        if isinstance(layer, str):
            return self.layer(layer)
        for own in self._layers.values():
            if layer is own or layer is own.adapted or layer is _linear(own):
                return own
        name = f"'{layer.name}'" if isinstance(layer, OwnLayer) else f"a {type(layer).__name__}"
        raise PackError(
            f"[LayerTrainer] layers[{at}] ({name}) is not registered with this trainer."
        )

    def _lm_loss(
        self, forward: Forward, inputs: mx.array, targets: mx.array, weights: mx.array
    ) -> tuple[mx.array, mx.array, int]:
        """The weighted sum of the losses, the sum of the weights, and how many tokens there are."""
        logits = forward(inputs)
        if not isinstance(logits, mx.array) or logits.shape[:-1] != targets.shape:
            shown = list(logits.shape) if isinstance(logits, mx.array) else type(logits).__name__
            raise PackError(
                f"[LayerTrainer] targets {list(targets.shape)} ask for logits of "
                f"{[*targets.shape, 'V']}, but the layers give {shown}."
            )
        vocab_size = logits.shape[-1]
        loss = cross_entropy(
            logits.reshape(-1, vocab_size),
            targets.reshape(-1),
            self.train.z_loss,
            self.train.label_smoothing,
        )
        return (loss * weights.reshape(-1)).sum(), weights.sum(), vocab_size

    def _graph(
        self,
        key: object,
        source: object,
        loss: Callable[..., tuple[mx.array, mx.array]],
        batch: tuple[mx.array, ...],
        vocab_size: Callable[[], int | None],
        sequence: bool,
    ) -> _Graph:
        """The stepper of a loss, made when it is first seen: who takes part is found by calling it,
        without computing anything."""
        if key in self._graphs:
            self._graphs[key] = self._graphs.pop(key)  # the newest is last
            return self._graphs[key]
        if not self._layers:
            raise PackError("[LayerTrainer] no layer is registered.")
        self._called.clear()
        loss(*batch)
        names = frozenset(self._called)
        if not names:
            raise PackError(
                "[LayerTrainer] no registered layer takes part in this loss; call what "
                "register gave back, not the linear itself."
            )
        idle = [n for n in self._layers if n not in names and n not in self._warned]
        if idle and not sequence:
            self._warned |= set(idle)
            warnings.warn(
                f"LayerTrainer: {', '.join(idle)}: takes no part in this step and gets no update.",
                stacklevel=4,
            )

        def held(*batch):
            self._called.clear()
            found = loss(*batch)
            if self._called != names:
                other = ", ".join(sorted(self._called ^ names))
                raise PackError(
                    f"[LayerTrainer] {other}: took part in one step of this function "
                    "and not in another; make it two functions."
                )
            return found

        stepper = Stepper(
            self._part([n for n in self._layers if n in names]),
            None,
            self.optimizer,
            self.train.max_grad_norm,
            loss=held,
        )
        if len(self._graphs) == _MOST_GRAPHS:
            oldest = next(k for k in self._graphs if k != self._pending)
            del self._graphs[oldest]
        self._graphs[key] = _Graph(stepper, names, vocab_size(), source)
        return self._graphs[key]

    def _step(self, key: object, graph: _Graph, batch: tuple, count: float) -> float:
        """One batch: its loss; the update with the last of an accumulation."""
        if self._waiting and self._pending != key:
            raise PackError(
                "[LayerTrainer] gradients of another loss wait for their update; call "
                "flush before this one."
            )
        several = self.train.grad_accumulation_steps
        last = self._waiting + 1 == several
        started = time.perf_counter()
        with self._safe():
            for name in graph.names:
                self._layers[name].train()
            try:
                loss, norm = graph.stepper(batch, count, last, several == 1)
            finally:
                for name in graph.names:
                    self._layers[name].eval()
            self._hold_finite(loss, norm)
        self._cursor.count(loss, round(count), None, time.perf_counter() - started)
        self._waiting, self._pending = self._waiting + 1, key
        if last:
            self._updated(graph)
        return loss

    def _updated(self, graph: _Graph) -> None:
        self._waiting, self._pending = 0, None
        self._cursor.updates += 1
        for name in graph.names:
            self.updates[name] += 1

    @contextmanager
    def _safe(self) -> Iterator[None]:
        """What fails inside changes no adapter and no state of the optimizer."""
        whole = self._part(self._layers)
        kept = tree_map(lambda a: a, (whole.trainable_parameters(), self.optimizer.state))
        key = mx.random.state[0]
        try:
            yield
        except BaseException:
            whole.update(kept[0])
            self.optimizer.state = kept[1]
            set_random_state(key)
            self._graphs.clear()  # they hold the state that was
            self._waiting, self._pending = 0, None
            raise

    def _hold_finite(self, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = "the gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        raise PackError(
            f"[LayerTrainer] step {self._cursor.batches + 1}: {what}; nothing was learned. Look at "
            "inputs and weights, or take a lower learning_rate."
        )

    def _part(self, names: Sequence[str] | Mapping[str, OwnLayer]) -> nn.Module:
        """Registered layers as a module: its trainable parameters are their adapters.

        Keys have no dot, since the names of an optimizer's state are split at them.
        """
        part = nn.Module()
        for name in names:
            part["/" + name.replace(".", "/")] = self._layers[name].adapted
        return part

    def tensors(self) -> dict[str, mx.array]:
        """Adapters in mlx-lm's names: ``<name>.lora_a`` [in, r], ``<name>.lora_b`` [r, out]."""
        return slot_tensors(self._slots())

    def load(self, tensors: Mapping[str, mx.array], where: str) -> None:
        """Set all adapters from tensors named so. Raises: PackError, and then none is changed."""
        load_slots(self._slots(), tensors, where)

    def _slots(self) -> dict[str, Slot]:
        return {n: Slot(o.adapted.lora, 0, o._spec) for n, o in self._layers.items()}

    def save_adapters(self, file: str | Path) -> None:
        """Write the adapters as one safetensors file; alphas are in its metadata."""
        file = Path(file).expanduser()
        make_folder(file.parent)
        partial = file.with_name(f".{file.name}.partial-{os.getpid()}.safetensors")
        try:
            save_tensors(partial, self.tensors(), {"alpha": json.dumps(self._alphas())})
            os.replace(partial, file)
        except OSError as error:
            raise PackError(f"{file}: cannot be written ({error.strerror or error}).") from None
        finally:
            partial.unlink(missing_ok=True)

    def load_adapters(self, file: str | Path) -> None:
        """Set all adapters from a file; the optimizer stays as it is.

        Raises: PackError if names, shapes or alphas are not those of the registered layers.
        """
        file = Path(file).expanduser()
        if not file.is_file():
            raise PackError(f"{file}: no such file.")
        tensors = read_tensors(file)
        told = mx.load(str(file), return_metadata=True)[1].get("alpha")
        alphas = self._alphas()
        for name, alpha in (json.loads(told) if told else {}).items():
            if alphas.get(name, alpha) != alpha:
                raise PackError(
                    f"{file}: {name} has alpha {alpha:g}, but was registered with {alphas[name]:g}."
                )
        self.load(tensors, str(file))

    def _alphas(self) -> dict[str, float]:
        return {name: layer._spec.slices[0].alpha for name, layer in self._layers.items()}

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint into a folder: adapters, optimizer, random state. Returns its own.

        Raises: PackError while gradients wait for their update.
        """
        if self._waiting:
            raise PackError(
                "[LayerTrainer] gradients wait for their update; call flush before saving."
            )
        run = Path(folder).expanduser()
        make_folder(run)
        atomic_write(run / LAYERS, to_json(self._identity()))
        return save_checkpoint(run, self, self.optimizer, self._cursor)

    def resume(self, folder: str | Path) -> None:
        """Go on from the last checkpoint of a folder, to the bit.

        Raises: PackError if it is of other layers, settings or another optimizer.
        """
        run = Path(folder).expanduser()
        if (checkpoint := latest_checkpoint(run)) is None:
            raise PackError(f"{run}: has no checkpoint to continue from.")
        try:
            then = json.loads((run / LAYERS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise PackError(f"{run / LAYERS}: cannot be read as JSON.") from None
        now = json.loads(to_json(self._identity()))
        for key, value in now.items():
            if not isinstance(then, dict) or then.get(key) != value:
                raise PackError(
                    f"{run}: {key} was {then.get(key)!r} and is {value!r} now; a "
                    "resumed run must go on as it began."
                )
        self._cursor = load_checkpoint(checkpoint, self, self.optimizer)
        self._graphs.clear()
        self._waiting, self._pending = 0, None

    def _identity(self) -> dict:
        """What must be the same when a run goes on."""
        used = [*_OF_STEPS, *(_OF_OPTIMIZER if self._made_here else ())]
        return {
            "optimizer": type(self.optimizer).__name__,
            "dropout": self.lora.dropout,
            "layers": [spec_json(layer._spec) for layer in self._layers.values()],
            **{f"train.{name}": getattr(self.train, name) for name in used},
        }


def _linear(layer: OwnLayer) -> nn.Module:
    return layer.adapted.linear


def _hold_defaults(config: LoRAConfig | TrainConfig, used: Sequence[str], why: str) -> None:
    """Raises: PackError for a setting that is said and not among those used."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        plain = type(config)()
        if field.name not in used and value != getattr(plain, field.name):
            raise PackError(
                f"[LayerTrainer] {type(config).__name__}.{field.name} is {value!r}, but {why}."
            )


def _key(source: object) -> object:
    """What tells a graph from another: the layers of a sequence, or the function itself."""
    if isinstance(source, (list, tuple)):
        return tuple(part if isinstance(part, str) else id(part) for part in source)
    try:
        hash(source)
    except TypeError:
        return id(source)
    return source


def _scalar(loss: object) -> mx.array:
    if not isinstance(loss, mx.array) or loss.ndim:
        shown = list(loss.shape) if isinstance(loss, mx.array) else type(loss).__name__
        raise PackError(
            f"[LayerTrainer] the loss must be one number (an array of no axes), but is {shown}."
        )
    return loss


def _lm_batch(
    inputs: mx.array, targets: mx.array, mask: mx.array | None, weights: mx.array | None
) -> tuple[mx.array, mx.array, mx.array]:
    """Inputs, targets and weights; where there is no target, 0 stands for it with weight 0."""
    tokens = np.array(targets)
    if tokens.dtype.kind not in "iu":
        raise PackError(f"[LayerTrainer] targets must be token ids, but are {tokens.dtype}.")
    scale = (tokens != IGNORED).astype(np.float32)
    for name, given in (("mask", mask), ("weights", weights)):
        if given is None:
            continue
        given = np.array(mx.array(given).astype(mx.float32))
        if given.shape != tokens.shape:
            raise PackError(
                f"[LayerTrainer] {name} is {list(given.shape)}, but targets are "
                f"{list(tokens.shape)}."
            )
        if name == "mask":
            given = (given != 0).astype(np.float32)
        if not np.isfinite(given).all() or (given < 0).any():
            raise PackError("[LayerTrainer] weights must be finite and 0 or more.")
        scale = scale * given
    if not scale.any():
        raise PackError("[LayerTrainer] there is no target: all are -100, masked or of weight 0.")
    tokens = np.where(scale > 0, tokens, 0)
    return mx.array(inputs), mx.array(tokens.astype(np.int64)), mx.array(scale)


def _hold_tokens(batch: tuple[mx.array, ...], vocab_size: int) -> None:
    lowest, highest = batch[1].min().item(), batch[1].max().item()
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise PackError(
            f"[LayerTrainer] targets: token {bad} is outside the {vocab_size} of the logits."
        )
