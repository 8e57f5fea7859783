"""Ways to train a base, by the names that `config.choices.METHODS` has.

A new method is one class here below and its entry there, which names the class.
"""

from typing import TYPE_CHECKING, Protocol

from ..config.choices import METHODS
from .spec import ModuleSpec, Specs
from .trainable import Shape, Trainable

if TYPE_CHECKING:
    from ..bases.model import BaseModel
    from ..config.lora import LoRAConfig
    from ..config.schema import TrainConfig


class Method(Protocol):
    """A way to train a base; `config.choices.METHODS` has what is known of it without MLX."""

    def check(self, base: "BaseModel", matmul_path: str) -> None:
        """Raise a PackError if this method cannot train a base."""

    def attach(
        self, base: "BaseModel", lora: "LoRAConfig", train: "TrainConfig", matmul_path: str
    ) -> Trainable:
        """Make parameters of a base trainable; ``matmul_path`` is what frozen weights use."""

    def adapter_shapes(self, specs: Specs) -> list[Shape]:
        """Return the shapes of the trainable parameters of adapters, for an estimate of memory."""

    def kept_numbers(self, spec: ModuleSpec) -> int:
        """Return how many numbers per token an adapter keeps from the forward to the backward."""


def find_method(name: str) -> Method:
    """Return the method of a name; its module is imported now."""
    return METHODS.load(name, Method)()
