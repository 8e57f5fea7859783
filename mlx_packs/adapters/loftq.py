"""LoftQ: adapters that begin with what quantization has lost.

The base is quantized as it always is, from a dense checkpoint, and adapters begin as the best
approximation of the difference: W is about Q + s B A from the first step.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..bases.config_file import CONFIG, read_config
from ..bases.files import quantized_as
from ..bases.loading import lazy_base
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError
from ..nn.quantized import QUANTIZED
from ..runtime import mx
from .attach import attach
from .initial_factors import principal_factors
from .lora import Attached
from .residual import begin_with, check_linears, weight_of
from .spec import ModuleSpec, Specs, factor_shapes

if TYPE_CHECKING:
    from ..bases.model import BaseModel


class LoftQ:
    """LoRA that begins with the principal factors of W - Q, as PEFT's LoftQ of one iteration.

    Further iterations would quantize another weight than that of the checkpoint, and the pack
    would be of a base of its own.

    LoftQ: https://arxiv.org/abs/2310.08659
    """

    def check(self, base: "BaseModel", matmul_path: str) -> None:
        """Check that a base is quantized, and its checkpoint is not."""
        modules = base.model.modules()
        if not any(isinstance(module, QUANTIZED) for module in modules):
            raise PackError(
                f"--method loftq: {base.name} is not quantized, so nothing is lost that it could "
                "begin with. Pass --quantize nf4 or affine4, or take --method pissa or lora.",
                "conflict",
            )
        if quantized_as(base.path, read_config(base.path / CONFIG)) is not None:
            raise PackError(
                f"--method loftq: {base.name} is stored quantized, and what that has lost is not in "
                "it. Take the dense checkpoint with --quantize, or --method lora.",
                "conflict",
            )

    def attach(
        self, base: "BaseModel", lora: LoRAConfig, train: TrainConfig, matmul_path: str
    ) -> Attached:
        """Attach adapters that begin with what quantization has lost."""
        attached = attach(base, lora, None, matmul_path, train.seed, train.train_fp16_fallback)
        try:
            check_linears(attached, "loftq")
            dense = _dense_weights(base, attached.frozen)

            def lost(path: str, module: nn.Module) -> mx.array:
                # taken out, so that one dense weight at a time is in memory
                return dense.pop(path).astype(mx.float32) - weight_of(path, module)

            begin_with(attached, principal_factors, lost)
        except BaseException:
            attached.detach()
            raise
        attached.method = "loftq"
        return attached

    def adapter_shapes(self, specs: Specs) -> list[tuple[int, ...]]:
        """Return the shapes of A [in, r] and B [r, out] of every slice."""
        return factor_shapes(specs)

    def kept_numbers(self, spec: ModuleSpec) -> int:
        """Return the rank: x A is kept."""
        return spec.rank


def _dense_weights(base: "BaseModel", paths: Iterable[str]) -> dict[str, mx.array]:
    """Return the weights at some paths as the checkpoint has them; none is read yet."""
    # its code, if it has any, was run with the user's consent when it was loaded before
    modules = dict(lazy_base(base.path, trust_remote_code=True).model.named_modules())
    return {path: modules[path].weight for path in paths}
