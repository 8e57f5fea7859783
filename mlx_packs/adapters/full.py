"""Full fine-tuning: the base's own weights are trained, in float32, without adapters.

The base's arrays are kept, and `detach` puts them back.
"""

import copy
from typing import TYPE_CHECKING

from mlx.utils import tree_flatten

from ..bases.files import quantization_name
from ..bases.geometry import check_num_layers
from ..bases.supported import check_trainable
from ..config.choices import MATMUL_PATHS, MatmulPathFacts
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError
from ..nn.quantized import QUANTIZED, dense_module, quantized_modules
from ..nn.surgery import block_prefixes
from ..ops.profile import profile
from ..runtime import mx
from .attach import attach
from .saved_modules import TrainedWeight, WithSavedModules
from .spec import ModuleSpec, Specs
from .trainable import Shape, Trainable

if TYPE_CHECKING:
    from ..bases.model import BaseModel


class Unfrozen(WithSavedModules):
    """A base whose weights are trainable; tensors have the names of its parameters."""

    method = "full"

    @property
    def details(self) -> str:
        return f"float32 · {len(self._weights)} tensors"

    def detach(self) -> None:
        """Put the base's own arrays and modules back, frozen."""
        for each in self._weights.values():
            each.module[each.key] = each.original[each.key]
        self.model.freeze()
        self.adapters.detach()


class FullFineTuning:
    """The base's own weights, in float32."""

    def check(self, base: "BaseModel", matmul_path: str) -> None:
        check_dense(base, matmul_path)

    def attach(
        self, base: "BaseModel", lora: LoRAConfig, train: TrainConfig, matmul_path: str
    ) -> Trainable:
        """Make the weights of the last ``lora.num_layers`` blocks trainable, or all."""
        return unfreeze(base, lora.num_layers, matmul_path)

    def adapter_shapes(self, specs: Specs) -> list[Shape]:
        return []

    def kept_numbers(self, spec: ModuleSpec) -> int:
        return 0


def unfreeze(base: "BaseModel", num_layers: int = -1, matmul_path: str = "auto") -> Unfrozen:
    """Make the weights of a base trainable, as float32 copies.

    Trained are the last ``num_layers`` blocks, as in mlx-lm, or with -1 all floating weights,
    embedding and head too. With ``matmul_path`` dense a quantized base is dequantized first.
    """
    check_trainable(base.name, base.model)
    check_dense(base, matmul_path)

    prefixes: list[str] = []
    trained = None
    if num_layers > 0:
        prefixes = block_prefixes(base.model)
        trained = prefixes[-num_layers:]
    check_num_layers(num_layers, len(prefixes))

    blocks = attach(base, specs={}, matmul_path="dense")
    try:
        tables = quantized_modules(base.model)  # that are looked up, beside a head
        blocks.swap([(path, dense_module(module, profile().dtype)) for path, module in tables])
        weights = _weights(base, trained)
    except BaseException:
        blocks.detach()
        raise

    for each in weights.values():
        each.module[each.key] = each.own()
        each.module.unfreeze(recurse=False, keys=each.key)
    return Unfrozen(blocks, weights)


def check_dense(base: "BaseModel", matmul_path: str) -> None:
    quantized = any(isinstance(m, QUANTIZED) for m in base.model.modules())
    if quantized and not MATMUL_PATHS.get(matmul_path, MatmulPathFacts()).keeps_dense:
        raise PackError(
            f"--method full: {base.name} is {quantization_name(base.quantization)}, and quantized "
            "weights cannot be trained. Pass --matmul-path dense to train dense copies of them, or "
            "take --method lora, or a dense checkpoint.",
            "conflict",
        )


def _weights(base: "BaseModel", prefixes: list[str] | None) -> dict[str, TrainedWeight]:
    """Return every floating weight, or those in the blocks at ``prefixes``; shared ones once."""
    weights: dict[str, TrainedWeight] = {}
    visited: set[int] = set()
    trained = tuple(f"{prefix}." for prefix in prefixes) if prefixes is not None else None

    for path, module in reversed(base.model.named_modules()):
        if id(module) in visited or (trained is not None and not f"{path}.".startswith(trained)):
            continue
        visited.add(id(module))

        weight = module.get("weight")
        if "scales" in module and not mx.issubdtype(weight.dtype, mx.floating):
            raise _unsupported(f"{path} is quantized, and quantized weights cannot be trained")

        for key, value in module.items():
            is_weight = isinstance(value, mx.array) and not key.startswith("_")
            if not is_weight or not mx.issubdtype(value.dtype, mx.floating):
                continue
            if not path:
                raise _unsupported(f"{key} is a weight of no module, which a pack cannot store")
            weights[f"{path}.{key}"] = TrainedWeight(module, key, copy.copy(module))

    reached = {id(each.value) for each in weights.values()}
    for name, weight in tree_flatten(base.model.parameters()):
        inside = trained is None or name.startswith(trained)
        if inside and mx.issubdtype(weight.dtype, mx.floating) and id(weight) not in reached:
            raise _unsupported(f"{name} is in a list, which a pack cannot store")
    return weights


def _unsupported(fault: str) -> PackError:
    return PackError(
        f"--method full: {fault}. Use --method lora, or a dense checkpoint.", "unsupported"
    )
