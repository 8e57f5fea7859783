"""What methods that put a variant of LoRA in its place have in common."""

from collections.abc import Callable
from dataclasses import replace

import mlx.nn as nn

from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import GroupedLoRA
from ..runtime import mx
from .lora import Attached


def check_linears(attached: Attached, method: str) -> None:
    """Raise a PackError if an adapter is for an embedding or for a stack of experts."""
    for path, spec in attached.specs.items():
        if spec.kind == "embedding":
            raise PackError(
                f"--method {method}: {path} is an embedding, which has LoRA alone. Leave it out of "
                "--target-modules, name it in --modules-to-save, or take --method lora.",
                "unsupported",
            )
        if spec.experts is not None:
            raise PackError(
                f"--method {method}: {path} is a stack of experts, which it cannot adapt. Leave it "
                "out of --target-modules, or take --method lora.",
                "unsupported",
            )


def install(attached: Attached, make: Callable[[GroupedLoRA], GroupedLoRA]) -> None:
    """Put another kind of group in the place of every group of adapters."""
    modules = attached.model.named_modules()
    loras = [(path, module) for path, module in modules if type(module) is GroupedLoRA]
    others = {id(lora): make(lora) for _, lora in loras}
    attached.swap([(path, others[id(lora)]) for path, lora in loras])
    attached.slots = {
        path: replace(slot, lora=others[id(slot.lora)]) for path, slot in attached.slots.items()
    }


def weight_of(path: str, module: nn.Module) -> mx.array:
    """Return the dense weight [O, D] of a frozen module in float32; PackError if it has none."""
    try:
        weight = frozen_weight(module).dense().astype(mx.float32)
        mx.eval(weight)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise PackError(
            f"{path}: cannot be dequantized: {reason}. Take --method lora, which needs no "
            "dense weights.",
            "unsupported",
        ) from None
    return weight
