"""The projector of a base: its last linears, which are part of the model if they have adapters.

Features that are stored are then what enters these linears, and a step computes the linears.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_map

from .. import runtime
from ..bases.families import PROJECTOR, has_vision_tower, projector_paths
from ..bases.files import weight_files
from ..bases.geometry import is_named
from ..bases.model import BaseModel
from ..bases.turns import images_of
from ..errors import PackError
from ..reading import read_header
from ..runtime import mx
from .tower import in_float32, load_tower


class Projector(nn.Module):
    """Linears ``linear_1``, ``linear_2`` ... with GELU between them.

    Args:
        linears: as the tower has them; the first one maps C to its width, the last one to D.
    """

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self._names = [f"linear_{number}" for number in range(1, len(linears) + 1)]
        for name, linear in zip(self._names, linears, strict=True):
            self[name] = linear

    def __call__(self, inputs: mx.array) -> mx.array:
        """Map what enters the projector [N, C] to features [N, D]."""
        first, *others = self._names
        features = self[first](inputs)
        for name in others:
            features = self[name](nn.gelu(features))
        return features


def open_projector(base: BaseModel) -> None:
    """Make the projector a part of a base, whose features are then what enters it.

    Raises: PackError if the base has no projector with linears.
    """
    if PROJECTOR in base.model:
        return
    if not has_vision_tower(base.config):
        raise PackError(
            f"--target-modules {PROJECTOR}: {base.name} takes no images, and has no projector.",
            "unknown",
            "target_modules",
        )

    family = base.config["model_type"]
    paths = projector_paths(family)
    if not paths:
        raise PackError(
            f"--target-modules {PROJECTOR}: the projector of {family} has no linear layer, and "
            "cannot have an adapter. Leave it out.",
            "unsupported",
            "target_modules",
        )

    tower = dict(load_tower(base.path).named_modules())
    projector = Projector([tower[path] for path in paths.values()])
    if runtime.on_cpu():
        projector.update(tree_map(in_float32, projector.parameters()))
    if not base.is_lazy:
        mx.eval(projector.parameters())
    projector.freeze()
    projector.train(base.model.training)
    base.model[PROJECTOR] = projector
    base.weight_map.update(_sources(base.path, paths))

    images = images_of(base.tokenizer)
    if images is not None:
        images.stop_before_projector()


def _sources(folder: Path, paths: Mapping[str, str]) -> dict[str, str]:
    """Return the tensors of a checkpoint that are weights of linears, by their names here."""
    names = [name for file in weight_files(folder) for name in read_header(file)[0]]
    sources = {}
    for here, there in paths.items():
        weight = f"{there.removeprefix('vision_tower.')}.weight"
        sources |= {f"{here}.weight": name for name in names if is_named(name, weight)}
    return sources
