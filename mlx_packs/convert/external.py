"""What adapter formats share: an external adapter in memory, folded scales, and verification."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from ..adapters.lora import delta_of
from ..adapters.spec import ModuleSpec, SliceSpec, Specs, by_number
from ..bases.geometry import linears
from ..bases.model import BaseModel
from ..errors import PackError
from ..files import to_json
from ..nn.lora import is_switch_linear
from ..nn.quantized import EMBEDDINGS
from ..runtime import mx
from ..tensors import write_tensors

Tensors = dict[str, mx.array]
Delta = Callable[[np.ndarray], np.ndarray]  # x [n, in], or token ids [n], -> [n, out] in float64
CONFIG = "adapter_config.json"
SIDECAR = "mlx_packs.json"  # the manifest of an exported pack, beside what the other tool reads
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_TOLERANCE = 1e-5  # of the largest number; factors are products of float32


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter as the folder of another tool stores it, under that tool's names."""

    tensors: Tensors
    config: dict  # adapter_config.json
    file: Path  # where the tensors are
    notes: tuple[str, ...] = ()  # what a reader of the folder should know


@dataclass
class ExternalAdapter:
    """An adapter of another tool under a pack's names and shapes, which are mlx-lm's."""

    # lora_a, lora_b, m by path, as on disk in a pack
    tensors: Tensors = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)  # by path
    full_tensors: Tensors = field(default_factory=dict)  # of the base
    head: bool = True  # whether adapters of embeddings act on a tied head too


def unsupported(where: object, fault: str) -> PackError:
    """Return the error of an adapter or pack that cannot be converted."""
    return PackError(fault, "unsupported", where=where)


def unreadable(where: object, fault: str) -> PackError:
    """Return the error of a damaged or malformed file."""
    return PackError(fault, "unreadable", where=where)


def check_choice(flag: str, value: str, choices: Iterable[str]) -> None:
    """Check that a setting has one of its values."""
    if value not in choices:
        raise PackError(f"--{flag} {value}: must be one of {', '.join(choices)}.", "unknown")


def check_no_pickle(path: Path) -> None:
    """Raise a PackError where there is no adapter besides pickles, which are never opened."""
    files = [path] if path.is_file() else sorted(path.glob("*"))
    pickles = [file for file in files if file.suffix in _PICKLES]

    if pickles and not any(file.suffix == ".safetensors" for file in files):
        raise unsupported(
            pickles[0],
            "is a pickle, which can run any code when it is read. It was not opened. Save the "
            "adapter as safetensors with the tool that made it.",
        )


def plain_file(folder: Path, name: str) -> Path:
    """Return a regular file of a folder: no symbolic link, nothing outside; else a PackError."""
    file = folder / name
    if Path(name).name != name:
        raise unreadable(folder, f"names a file outside: {name!r}.")
    if file.is_symlink():
        raise unreadable(file, "is a symbolic link. Copy the file itself here.")
    if not file.is_file():
        raise PackError(f"{folder}: has no {name}.", "not-found")
    return file


def is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value is not True and 0 < value < 2**53


def check_complete(adapter: ExternalAdapter, is_dora: bool, where: Path) -> None:
    """Raise a PackError unless all modules have both factors, and magnitudes if it is DoRA."""
    if not adapter.scales:
        raise unreadable(where, "has no adapter (no lora_a).")

    needed = {"lora_a": "lora_a", "lora_b": "lora_b"}
    if is_dora or any(name.endswith(".m") for name in adapter.tensors):
        needed["m"] = f"magnitudes, though it is DoRA by {CONFIG}"

    for path in {name.rpartition(".")[0]: None for name in adapter.tensors}:
        for part, described in needed.items():
            if f"{path}.{part}" not in adapter.tensors:
                raise unreadable(
                    where,
                    f"{path}: has no {described}. Save the adapter again with the tool "
                    "that made it.",
                )


def specs_for(base: BaseModel, adapter: ExternalAdapter, where: Path) -> Specs:
    """Return an adapter's modules on a base; a PackError if it lacks one or a tensor is faulty."""
    modules = dict(base.model.named_modules())
    linear_paths = {path for path, _ in linears(base.model)}
    tied = "lm_head" not in modules
    specs: Specs = {}

    for path in sorted(adapter.scales, key=by_number):
        module = modules.get(path)
        kind = "dora" if f"{path}.m" in adapter.tensors else "lora"
        head = None
        experts = None

        if isinstance(module, (nn.Embedding, *EMBEDDINGS)):
            if kind == "dora":
                raise unsupported(
                    where,
                    f"{path}: is DoRA on an embedding, whose norm PEFT takes over another "
                    "axis than mlx-lm. It cannot be converted.",
                )
            kind = "embedding"
            if tied:
                head = adapter.head
        elif module is None or path not in linear_paths:
            has = f"a {type(module).__name__} there" if module is not None else "no such module"
            raise PackError(
                f"{where}: {path}: {base.name} has {has}, so its adapter has no place.", "mismatch"
            )

        if is_switch_linear(module):
            if kind == "dora":
                raise unsupported(
                    where, f"{path}: is DoRA on a stack of experts, which is not supported."
                )
            experts = module.weight.shape[0]
        in_features, width, rank = _sizes_of(path, adapter, experts, where)
        part = SliceSpec(path.rpartition(".")[2], width, rank, adapter.scales[path] * rank)
        specs[path] = ModuleSpec(path, in_features, (part,), experts, kind, head)

    return specs


def _sizes_of(
    path: str, adapter: ExternalAdapter, experts: int | None, where: Path
) -> tuple[int, int, int]:
    a, b = (adapter.tensors[f"{path}.{part}"].shape for part in ("lora_a", "lora_b"))
    inputs, ranks, axes = (0, 0, 2) if experts is None else (2, 2, 3)
    if len(a) != axes or len(b) != axes or a[1] != b[ranks] or a[1] == 0:
        raise PackError(
            f"{where}: {path}: lora_a {list(a)} and lora_b {list(b)} are no factors of one rank.",
            "mismatch",
        )

    return a[inputs], b[1], a[1]


def common_scale(specs: Iterable[ModuleSpec]) -> float:
    """Return the one scale of all slices, or 1 where they have several."""
    scales = {s.scale for spec in specs for s in spec.slices if s.rank}
    return scales.pop() if len(scales) == 1 else 1.0


def low_rank_delta(a: mx.array, b: mx.array, scale: float) -> Delta:
    """Return the delta of a module: scale * (x a) b of a [in, r], b [r, out]; of token ids a[x]."""
    a, b = (np.array(factor.astype(mx.float32), dtype=np.float64) for factor in (a, b))

    def delta(x: np.ndarray) -> np.ndarray:
        inner = a[x] if x.ndim == 1 else x @ a
        return scale * (inner @ b)

    return delta


def folded(spec: ModuleSpec, b: mx.array, scale: float) -> mx.array:
    """Return lora_b for a format in which this module has that scale."""
    ratios = [s.scale / scale for s in spec.slices for _ in range(s.rank)]
    if all(ratio == 1 for ratio in ratios):
        return b

    factors = mx.array(ratios, dtype=mx.float32)
    if spec.experts is None:
        factors = factors[:, None]
    return b.astype(mx.float32) * factors


def verify_numerically(
    specs: Specs, tensors: Mapping[str, mx.array], deltas: Mapping[str, Delta], where: Path
) -> dict[str, Any]:
    """Compare what a pack adds with what the other tool computes, on random inputs.

    A square projection transposed by mistake has the right shape; only numbers tell. Returns how
    many modules were compared, and their largest difference as a share of the largest number.
    """
    random = np.random.default_rng(0)
    compared = 0
    largest_difference = 0.0
    for path, spec in specs.items():
        if spec.experts is not None:
            continue  # mlx-lm's own layout, taken over unchanged

        delta = np.array(delta_of(spec, tensors).astype(mx.float32), dtype=np.float64)
        if spec.kind == "embedding":
            x = random.integers(0, spec.in_features, 4)
            ours = delta[x]
        else:
            x = random.standard_normal((4, spec.in_features))
            ours = x @ delta.T

        theirs = deltas[path](x)
        largest = max(np.abs(theirs).max(), np.abs(ours).max())
        difference = np.abs(ours - theirs).max()
        if not difference <= _TOLERANCE * largest:  # NaN must fail
            raise PackError(
                f"{where}: {path}: converted, it computes other numbers than before. This is a "
                "defect of the conversion. Please report it.",
                "mismatch",
            )
        compared += 1
        if largest:
            largest_difference = max(largest_difference, float(difference / largest))

    return {"modules": compared, "largest_difference": largest_difference, "against": "the pack"}


def save_folder(stored: StoredAdapter, folder: Path, convention: str) -> None:
    """Write tensors in a convention (``mlx``, ``pt``) and the config."""
    file = folder / stored.file.name
    write_tensors(file, stored.tensors, stored.tensors.items(), convention)
    (folder / CONFIG).write_text(to_json(stored.config), encoding="utf-8")
