"""Full fine-tuning: the base's own weights learn, in float32, and no adapter stands beside them.

`Unfrozen` has the interface of `adapters.Attached`, so that loop, checkpoints and packs know one
thing that learns. The base's arrays are kept, and `detach` puts them back.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..bases.families import check_trainable
from ..bases.files import quantization_name
from ..bases.geometry import Group, block_prefixes
from ..bases.model import BaseModel
from ..errors import PackError
from ..nn.quantized import QUANTIZED
from ..runtime import mx
from .lora import Attached, attach
from .tensors import check_tensors


@dataclass(frozen=True)
class _Place:
    """Where a weight that learns is, and what the base has there."""

    module: nn.Module
    key: str
    own: mx.array


class Unfrozen:
    """A base whose weights learn; `tensors` and `load` speak its parameters' own names."""

    method = "full"

    def __init__(self, blocks: Attached, places: dict[str, _Place]):
        self._blocks = blocks
        self._places = places
        self.specs: dict = {}
        self.groups: list[Group] = []
        self.notes: list[str] = []

    @property
    def base(self) -> BaseModel:
        return self._blocks.base

    @property
    def model(self) -> nn.Module:
        return self._blocks.model

    @property
    def details(self) -> str:
        """Number of tensors, for one line of output."""
        return f"float32 · {len(self._places)} tensors"

    @property
    def replaced(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the base's tensors that a pack brings whole."""
        return {name: tuple(place.own.shape) for name, place in self._places.items()}

    def swap(self, modules: list[tuple[str, nn.Module]]) -> None:
        """Put modules at their paths, remembering what stood there."""
        self._blocks.swap(modules)

    def recompute(self, policy: str) -> None:
        """What the backward computes again, as `Attached.recompute`."""
        self._blocks.recompute(policy)

    def detach(self) -> None:
        """Put the base's own arrays and modules back, frozen; can be called twice."""
        for place in self._places.values():
            place.module[place.key] = place.own
        self.model.freeze()
        self._blocks.detach()

    def tensors(self) -> dict[str, mx.array]:
        """What was learned, in float32, by the name that the parameter has in the base."""
        return {name: place.module[place.key] for name, place in self._places.items()}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the model computes what the base alone does, in float32."""
        trained = self.tensors()
        try:
            self.load({name: place.own for name, place in self._places.items()}, "base")
            yield
        finally:
            self.load(trained, "trained")

    def load(self, tensors: Mapping[str, mx.array], where: str) -> None:
        """Set all weights that learn.

        Raises: PackError listing every missing, unknown or misshaped tensor; nothing is changed.
        """
        check_tensors(self.replaced, tensors, where)
        for name, place in self._places.items():
            place.module[place.key] = tensors[name].astype(mx.float32)

    def parameter_count(self) -> int:
        """Weights that learn; a tied table counts once."""
        return sum(place.own.size for place in self._places.values())


def unfreeze(base: BaseModel, num_layers: int = -1, matmul_path: str = "auto") -> Unfrozen:
    """Let the weights of a base learn, as float32 copies.

    Args:
        num_layers: the last N blocks alone, as in mlx-lm; -1 is every floating weight, the
            embedding and the head too.
        matmul_path: ``dense`` dequantizes a quantized base, and its dense weights learn.
    Raises: PackError for a base that is quantized otherwise, or that cannot be trained.
    """
    check_trainable(base.name, base.model)
    check_dense(base, matmul_path)
    prefixes = block_prefixes(base.model) if num_layers > 0 else []
    if num_layers > len(prefixes):
        raise PackError(f"--num-layers {num_layers}: the base has only {len(prefixes)} blocks.")
    blocks = attach(base, specs={}, matmul_path="dense")
    try:
        places = _places(base, prefixes[-num_layers:] if num_layers > 0 else None)
    except BaseException:
        blocks.detach()
        raise
    for place in places.values():
        place.module[place.key] = place.own.astype(mx.float32)
        place.module.unfreeze(recurse=False, keys=place.key)
    return Unfrozen(blocks, places)


def check_dense(base: BaseModel, matmul_path: str) -> None:
    """Raises: PackError if a base is packed and its weights are not to be dense."""
    packed = any(isinstance(m, QUANTIZED) for m in base.model.modules())
    if packed and matmul_path != "dense":
        raise PackError(
            f"--method full: {base.name} is {quantization_name(base.quantization)}, and quantized "
            "weights cannot be trained. --matmul-path dense trains dense copies of them; or take "
            "--method lora, or a dense checkpoint.",
            "conflict",
        )


def _places(base: BaseModel, prefixes: list[str] | None) -> dict[str, _Place]:
    """Every floating weight, or those in the blocks at ``prefixes``; shared ones under one name."""
    found: dict[str, _Place] = {}
    seen: set[int] = set()
    kept = None if prefixes is None else tuple(f"{prefix}." for prefix in prefixes)
    for path, module in reversed(base.model.named_modules()):
        if id(module) in seen or (kept is not None and not f"{path}.".startswith(kept)):
            continue
        seen.add(id(module))
        weight = module.get("weight")
        if "scales" in module and not mx.issubdtype(weight.dtype, mx.floating):
            raise PackError(
                f"--method full: {path} is packed, and packed weights cannot learn; "
                "take --method lora, or a dense checkpoint."
            )
        for key, value in module.items():
            is_weight = isinstance(value, mx.array) and not key.startswith("_")
            if not is_weight or not mx.issubdtype(value.dtype, mx.floating):
                continue
            if not path:
                raise PackError(
                    f"--method full: {key} is a weight of no module, which a pack "
                    "cannot bring; take --method lora."
                )
            found[f"{path}.{key}"] = _Place(module, key, value)
    reached = {id(place.own) for place in found.values()}
    for name, weight in tree_flatten(base.model.parameters()):
        inside = kept is None or name.startswith(kept)
        if inside and mx.issubdtype(weight.dtype, mx.floating) and id(weight) not in reached:
            raise PackError(
                f"--method full: {name} stands in a list, which a pack cannot bring; "
                "take --method lora."
            )
    return found
