"""Operations that newer versions of MLX compute in one kernel, and the note of a run without them.

Each is detected, not deduced from a version; without it the op computes the same by plain MLX.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import mlx.core as mx

from . import dispatch, gated_delta
from .attention import has_fused_gradient


@dataclass(frozen=True)
class Feature:
    """A kernel of MLX.

    Attributes:
        name: What users may read of it.
        since: The version of MLX that introduced it.
        is_present: Whether this MLX has it, on this device.
        backends: Where it is used.
    """

    name: str
    since: str
    is_present: Callable[[], bool]
    backends: tuple[str, ...] = ("metal",)


ATTENTION = Feature(
    "attention with a fused gradient",
    "0.32.4",
    lambda: has_fused_gradient(mx.bfloat16, 128, "causal"),
)
CROSS_ENTROPY = Feature(
    "mx.fast.cross_entropy",
    "0.32.4",
    lambda: hasattr(mx.fast, "cross_entropy"),
    ("metal", "cuda"),
)
GATED_DELTA = Feature(
    "mx.fast.gated_delta_update",
    gated_delta.MLX_SINCE,
    lambda: hasattr(mx.fast, "gated_delta_update"),
)


def missing(features: tuple[Feature, ...]) -> str | None:
    """Return one line that says which of these this MLX lacks; None if none, and on CPUs."""
    here = dispatch.detect()
    absent = [f for f in features if here in f.backends and not f.is_present()]
    if not absent:
        return None
    names = " and ".join(feature.name for feature in absent)
    since = max((f.since for f in absent), key=lambda version: [*map(int, version.split("."))])
    return (
        f"MLX {metadata.version('mlx')} lacks {names}: computed by more operations, in more time "
        f"and memory. MLX {since} has it: pip install -U mlx"
    )
