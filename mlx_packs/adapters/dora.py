"""DoRA: low-rank adapters, and a magnitude for every output of the adapted weight."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import mlx.nn as nn

from ..nn.dora import GroupedDoRA
from ..nn.lora import AdaptedLinear
from ..nn.quantized import TransientLinear
from ..offload.blocks import weights_readable
from ..runtime import mx, on_cpu
from .attach import LoRA, check_linears, install, weight_of
from .lora import Attached, load_places, place_tensors
from .spec import ModuleSpec, Specs

Shape = tuple[int, ...]


class DoRAAttached(Attached):
    """Adapters with magnitudes; tensors are mlx-lm's, with ``<path>.m`` [out]."""

    method = "dora"

    def __init__(self, attached: Attached) -> None:
        super().__init__(attached.base, attached.specs, attached.groups, attached.notes)
        vars(self).update(vars(attached))
        self.specs = {path: replace(spec, kind="dora") for path, spec in attached.specs.items()}
        self._install()

    def _install(self) -> None:
        """Put a group with magnitudes in the place of every group of adapters."""
        modules = dict(self.model.named_modules())
        frozen: dict[int, list[tuple[nn.Module, mx.array]]] = {}
        for path, place in sorted(self.places.items(), key=lambda item: item[1].first):
            with weights_readable(self.model, path):
                weight = weight_of(path, self.frozen[path], self.base.is_lazy)
                norms = mx.linalg.norm(weight, axis=1)
                if not self.base.is_lazy:
                    mx.eval(norms)
            frozen.setdefault(id(place.lora), []).append((_projection(modules[path]), norms))

        install(self, lambda lora: GroupedDoRA(lora, *zip(*frozen[id(lora)], strict=True)))
        self.places = {p: replace(place, spec=self.specs[p]) for p, place in self.places.items()}

    def fix(self) -> None:
        """Compute what the adapters are used by, which are not trained from now on."""
        loras = {id(place.lora): place.lora for place in self.places.values()}
        ratios = [lora.fix() for lora in loras.values()]
        if not self.base.is_lazy:
            mx.eval(ratios)

    def tensors(self) -> dict[str, mx.array]:
        magnitudes = {
            f"{path}.m": place.lora.magnitude[place.first] for path, place in self.places.items()
        }
        return place_tensors(self.places) | magnitudes

    def load(self, tensors: Mapping[str, mx.array], where: str) -> None:
        load_places(self.places, tensors, where)
        for path, place in self.places.items():
            place.lora.magnitude[place.first] = tensors[f"{path}.m"].astype(mx.float32)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        trained = self.tensors()
        bare = {name: mx.zeros_like(tensor) for name, tensor in trained.items()}
        for path, place in self.places.items():
            bare[f"{path}.m"] = place.lora.norms[place.first]

        try:
            self.load(bare, "base")
            yield
        finally:
            self.load(trained, "trained")


class DoRA(LoRA):
    """Low-rank adapters with magnitudes: y = m / ||W + s B A|| (W x + s B A x).

    DoRA: https://arxiv.org/abs/2402.09353
    """

    is_whole = True  # as in PEFT

    def initialize(self, attached: Attached) -> Attached:
        check_linears(attached, "dora")
        return DoRAAttached(attached)

    def adapter_shapes(self, specs: Specs) -> list[Shape]:
        shapes: list[Shape] = []
        for spec in specs.values():
            shapes += [
                (spec.in_features, spec.rank),
                (spec.rank, spec.out_features),
                (spec.out_features,),
            ]
        return shapes

    def kept_numbers(self, spec: ModuleSpec) -> int:
        """Return the rank, and on a CPU the outputs, of which the magnitudes' gradient is made.

        On a GPU they are kept anyway.
        """
        if on_cpu():
            return spec.rank + spec.out_features
        return spec.rank


def _projection(module: nn.Module) -> nn.Module:
    """Return what multiplies by the weight of a module on the model.

    A few rows are multiplied by a quantized weight as it is, where many would dequantize it.
    """
    linear = module
    if isinstance(linear, AdaptedLinear):
        linear = linear.linear
    if isinstance(linear, TransientLinear):
        linear = linear.linear
    return linear
