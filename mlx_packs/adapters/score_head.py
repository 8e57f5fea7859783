"""A head of a reward model or classifier: it maps the state of a token to one or several numbers.

It is beside the model's own modules, and belongs to no base: a pack stores it as `SCORE_WEIGHT`,
[outputs, hidden], which is transformers' and PEFT's name. A reward model has one output.
"""

import copy
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..bases.geometry import Heads
from ..errors import PackError
from ..nn.lora import adapter_key
from ..runtime import mx
from .spec import SCORE, SCORE_WEIGHT

if TYPE_CHECKING:
    from ..bases.model import BaseModel

_DEFAULT_STD = 0.02  # transformers' initializer_range, where a config has none


def fresh_score_head(base: "BaseModel", seed: int, outputs: int = 1) -> nn.Linear:
    """Return an untrained head as transformers makes it: normal, of the config's deviation."""
    text = base.config.get("text_config") or base.config
    std = text.get("initializer_range") or _DEFAULT_STD
    shape = outputs, Heads.of(base.config).hidden
    return score_head(std * mx.random.normal(shape, key=adapter_key(seed, SCORE)))


def score_head(weight: mx.array) -> nn.Linear:
    """Return a frozen head in float32 with a weight [outputs, hidden]."""
    head = nn.Linear(1, 1, bias=False)
    head.weight = weight.astype(mx.float32)
    head.freeze()
    return head


def with_score_head(model: nn.Module, head: nn.Linear) -> nn.Module:
    """Return a model with a head besides, which has all of its modules in common with ``model``."""
    scored = copy.copy(model)
    scored._no_grad = set(model._no_grad)  # a shallow copy shares it
    scored[SCORE] = head
    return scored


def stored_score_head(base: "BaseModel", weight: mx.array, where: str) -> nn.Linear:
    """Return the head of a pack for a base; a PackError if it is not [outputs, hidden]."""
    expected = [weight.shape[0], Heads.of(base.config).hidden]
    if list(weight.shape) != expected:
        raise PackError(
            f"{where}: {SCORE_WEIGHT} is {list(weight.shape)}, but a head of {base.name} is "
            f"{expected}.",
            "mismatch",
        )
    return score_head(weight)
