"""Linears with adapters for graphs that a user writes: the layers of a `LayerTrainer`."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import mlx.nn as nn

from ..adapters.attach import plan_specs
from ..adapters.spec import ModuleSpec
from ..bases.geometry import GeometryError, Group, probe
from ..config.lora import LoRAConfig
from ..errors import Code, PackError, file_errors
from ..kinds import check_keys, check_kind
from ..nn.lora import AdaptedLinear, AdapterShape, GroupedLoRA, adapter_key
from ..nn.quantized import is_plain_linear
from ..reading import parse_json
from ..runtime import mx

LAYER_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


class RegisteredLayer(AdaptedLinear):
    """A registered linear with its adapter: call it where your graph has the linear.

    ``called`` receives the layer's name at each call.
    """

    def __init__(
        self, linear: nn.Module, lora: GroupedLoRA, spec: ModuleSpec, called: set[str]
    ) -> None:
        super().__init__(linear, lora, spec.widths)
        self.spec = spec
        self._called = called

    @property
    def name(self) -> str:
        """The name that the layer is registered under."""
        return self.spec.path

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.spec.in_features

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.spec.widths[0]

    @property
    def alpha(self) -> float:
        """Scale of the adapter times its rank."""
        return self.spec.slices[0].alpha

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [..., in] to [..., out].

        Raises:
            PackError: if x has another width.
        """
        if not isinstance(x, mx.array) or x.ndim < 1 or x.shape[-1] != self.in_features:
            raise PackError(
                f"{self.name}: expects inputs of width {self.in_features}, but got {shown(x)}."
            )

        self._called.add(self.name)
        return super().__call__(x)


def adapt(
    name: str, linear: nn.Module, lora: LoRAConfig, seed: int, called: set[str]
) -> RegisteredLayer:
    """Freeze a linear and put a fresh adapter (B = 0) beside it; seed and name decide A."""
    if isinstance(linear, AdaptedLinear):
        raise PackError(f"{name}: has an adapter already.", "conflict", "linear")
    if not is_plain_linear(linear):
        raise PackError(
            f"{name}: must be an nn.Linear, nn.QuantizedLinear or NF4Linear, but is a "
            f"{type(linear).__name__}.",
            flag="linear",
        )

    try:
        geometry = probe(name, linear, {})
    except GeometryError as error:
        raise PackError(f"{name}: {error.fault}", "unsupported", "linear") from None

    leaf = name.rpartition(".")[2]
    geometry = dataclasses.replace(geometry, slices=((leaf, geometry.out_features),))
    spec = plan_specs([Group(None, (geometry,))], lora)[name]
    (part,) = spec.slices

    adapter = GroupedLoRA.fresh(
        spec.in_features,
        [AdapterShape(part.width, part.rank, part.scale)],
        lora.dropout,
        [adapter_key(seed, f"{name}.{part.name}")],
    )

    linear.freeze()
    layer = RegisteredLayer(linear, adapter, spec, called)
    layer.eval()
    return layer


def adapters_module(layers: Iterable[RegisteredLayer]) -> nn.Module:
    """Return layers as one module, whose trainable parameters are their adapters.

    Keys have no dot, since the names of an optimizer's state are split at them.
    """
    module = nn.Module()
    for layer in layers:
        module["/" + layer.name.replace(".", "/")] = layer
    return module


def wrong(argument: str, text: str, code: Code = "invalid") -> PackError:
    """Return the error of an argument of Python."""
    return PackError(f"{argument}: {text}", code, argument)


def shown(value: object) -> str:
    """Return the shape of an array for a message, or the type of anything else."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return type(value).__name__
    return f"shape {list(shape)}"


def stored_alphas(file: Path) -> dict[str, float]:
    """Return the alpha of each layer that a file of adapters names in its metadata."""
    text = mx.load(str(file), return_metadata=True)[1].get("alpha") or "{}"
    with file_errors(f"{file}: its metadata"):
        alphas = parse_json(text)
        check_kind("alpha", alphas, "a mapping")
        check_keys(alphas, {"*": "a number"}, "alpha")
    return alphas
