"""What the converters share: a foreign adapter in memory, how scales are folded, and the proof.

Names and shapes inside are those of a pack (mlx-lm's); each format's module has its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import mlx.nn as nn
import numpy as np

from ..adapters.spec import ModuleSpec, SliceSpec, Specs
from ..adapters.tensors import delta_of
from ..bases.geometry import linears
from ..bases.loading import BaseModel
from ..errors import PackError
from ..nn.experts import is_switch_linear
from ..nn.quantized import EMBEDDINGS
from ..packs.manifest import MANIFEST
from ..runtime import mx

Tensors = dict[str, mx.array]
CONFIG = "adapter_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_PROOF = 1e-5  # of the largest number; factors are products of float32


@dataclass
class Foreign:
    """An adapter of another tool under our names.

    tensors: lora_a, lora_b, m by path, as on disk in a pack.   scales: by path.
    whole: tensors of the base that it brings whole.   head: of embeddings, whether they act there.
    """

    tensors: Tensors = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    whole: Tensors = field(default_factory=dict)
    head: bool = True

    @property
    def paths(self) -> list[str]:
        return list(self.scales)


def refuse_pickle(given: Path) -> None:
    """Raises: PackError for a pickle, or a folder with no other adapter; it is never opened."""
    if given.is_file() and given.suffix in _PICKLES:
        found = [given]
    elif given.is_dir() and not any(f.suffix == ".safetensors" for f in given.iterdir()):
        found = sorted(f for f in given.iterdir() if f.suffix in _PICKLES)
    else:
        return
    if found:
        raise PackError(
            f"{found[0]}: is a pickle, which can run any code when it is read; it was not opened. "
            "Save the adapter as safetensors with the tool that made it."
        )


def plain_file(folder: Path, name: str) -> Path:
    """A file of a folder that is really there: no symlink, nothing outside.

    Raises: PackError.
    """
    file = folder / name
    if Path(name).name != name:
        raise PackError(f"{folder}: names a file outside: {name!r}.")
    if file.is_symlink():
        raise PackError(f"{file}: is a symbolic link; copy the file itself here.")
    if not file.is_file():
        raise PackError(f"{folder}: has no {name}.")
    return file


def is_positive(value) -> bool:
    """Whether a value of a config is a finite number above 0."""
    return isinstance(value, (int, float)) and value is not True and 0 < value < 2**53


def hold_magnitudes(found: Foreign, where: Path) -> None:
    """Raises: PackError naming a module that is DoRA by its config but has no magnitudes."""
    if path := next((p for p in found.paths if f"{p}.m" not in found.tensors), None):
        raise PackError(
            f"{where}: {path}: is DoRA by {CONFIG}, but has no magnitudes; save the "
            "adapter again with the tool that made it."
        )


def specs_for(base: BaseModel, found: Foreign, where: Path) -> Specs:
    """What a foreign adapter is on a base: its modules with their sizes, ranks and alphas.

    Raises: PackError naming the first module that the base does not have, or its faulty tensors.
    """
    modules = dict(base.model.named_modules())
    adaptable = {path for path, _ in linears(base.model)}
    tied = "lm_head" not in modules
    specs: Specs = {}
    for path in sorted(found.paths, key=_by_number):
        a, b = (found.tensors.get(f"{path}.{part}") for part in ("lora_a", "lora_b"))
        if a is None or b is None:
            raise PackError(f"{where}: {path}: has only one of its two factors.")
        module = modules.get(path)
        kind, experts, head = "lora", None, None
        if f"{path}.m" in found.tensors:
            kind = "dora"
        if isinstance(module, (nn.Embedding, *EMBEDDINGS)):
            if kind == "dora":
                raise PackError(
                    f"{where}: {path}: is DoRA on an embedding, whose norm PEFT takes over another "
                    "axis than mlx-lm; it cannot be converted."
                )
            kind, head = "embedding", found.head if tied else None
        elif module is None or path not in adaptable:
            has = "no such module" if module is None else f"a {type(module).__name__} there"
            raise PackError(f"{where}: {path}: {base.name} has {has}, so its adapter has no place.")
        if is_switch_linear(module):
            experts = module.weight.shape[0]
            axes = (2, 1)
        else:
            axes = (0, 1)
        if a.ndim != b.ndim or a.ndim != (3 if experts else 2):
            raise PackError(f"{where}: {path}: factors are {list(a.shape)} and {list(b.shape)}.")
        in_features, width = a.shape[axes[0]], b.shape[axes[1]]
        rank = a.shape[1]
        if rank != b.shape[0 if experts is None else 2] or not rank:
            raise PackError(
                f"{where}: {path}: lora_a {list(a.shape)} and lora_b {list(b.shape)} "
                "do not have one rank."
            )
        part = SliceSpec(path.rpartition(".")[2], width, rank, found.scales[path] * rank)
        specs[path] = ModuleSpec(path, in_features, (part,), experts, kind, head)
    return specs


def _by_number(path: str) -> list:
    """Blocks in the order of their numbers."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in path.split(".")]


def scale_of(spec: ModuleSpec) -> float:
    """The one scale of a module's slices, or 1 where they have several."""
    scales = {s.scale for s in spec.slices if s.rank}
    return scales.pop() if len(scales) == 1 else 1.0


def factors(spec: ModuleSpec, scale: float) -> mx.array | None:
    """What each row of lora_b is multiplied by so that ``scale`` is right for all; None if by 1."""
    found = [s.scale / scale for s in spec.slices for _ in range(s.rank)]
    return None if all(f == 1 for f in found) else mx.array(found, dtype=mx.float32)


def folded(spec: ModuleSpec, b: mx.array, scale: float) -> mx.array:
    """lora_b for a format in which this module has that scale."""
    by = factors(spec, scale)
    if by is None:
        return b
    return b.astype(mx.float32) * (by[:, None] if spec.experts is None else by)


def unfolded(spec: ModuleSpec, b: mx.array, scale: float) -> mx.array:
    """The way back; exact where the factors are powers of two."""
    by = factors(spec, scale)
    if by is None:
        return b
    return b / (by[:, None] if spec.experts is None else by)


def prove(specs: Specs, tensors: Mapping[str, mx.array], theirs: Mapping, where: Path) -> None:
    """Hold what the pack adds against what the other tool computes, on random inputs.

    A square projection converts the wrong way round without any fault of shape; numbers tell.
    Args:
        theirs: by path, a function of x [n, in] (or token ids [n]) that gives the other tool's
            delta [n, out] in float64, from the other tool's own tensors.
    Raises: PackError naming the module.
    """
    random = np.random.default_rng(0)
    for path, spec in specs.items():
        if spec.experts is not None:
            continue  # mlx-lm's own layout, taken over as it is
        delta = np.array(delta_of(spec, tensors).astype(mx.float32), dtype=np.float64)
        if spec.kind == "embedding":
            x = random.integers(0, spec.in_features, 4)
            ours = delta[x]
        else:
            x = random.standard_normal((4, spec.in_features))
            ours = x @ delta.T
        wanted = theirs[path](x)
        largest = max(np.abs(wanted).max(), np.abs(ours).max())
        if not np.abs(ours - wanted).max() <= _PROOF * largest:  # NaN proves nothing
            raise PackError(
                f"{where}: {path}: converted, it computes other numbers than before; this is a "
                "defect of the conversion, please report it."
            )


def refuse_pack(folder: Path) -> None:
    if (folder / MANIFEST).is_file():
        raise PackError(f"{folder}: is a pack already; there is nothing to import.")
