"""mlx-lm's adapter folders: ``adapter_config.json`` and ``adapters.safetensors``.

Names and shapes are a pack's own. mlx-lm has one rank and one scale for all modules: others are
padded with zeros to the largest rank, and scales that differ go into lora_b.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..adapters.spec import ModuleSpec, Specs
from ..errors import PackError
from ..packs.manifest import adapter_config, is_of_encoder, replaced_of
from ..packs.pack import Pack
from ..runtime import mx
from .external import Foreign, Tensors, folded, hold_magnitudes, is_positive

TENSORS = "adapters.safetensors"
_LEAVES = ("lora_a", "lora_b", "m")


def check_config(config: dict, where: Path) -> None:
    """Raises: PackError naming what a pack cannot carry."""
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise PackError(
            f"{where}: fine_tune_type is 'full': these are weights of the base itself, "
            "no adapter; mlx_lm.fuse makes a checkpoint of them."
        )
    if kind not in ("lora", "dora"):
        raise PackError(f"{where}: fine_tune_type {kind!r} is not known; it must be lora or dora.")
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if not is_positive(scale):
        raise PackError(
            f"{where}: lora_parameters.scale must be a number above 0, but is {scale!r}."
        )


def read(
    tensors: Tensors, config: dict, where: Path, ranks: Mapping[str, int] | None = None
) -> Foreign:
    """An adapter as it is; ranks that were padded with zeros are cut back.

    Args:
        ranks: by path, where they are known; else what is zero at the end goes.
    Raises: PackError naming a tensor that is no part of an adapter.
    """
    found = Foreign()
    for name in tensors:
        path, _, leaf = name.rpartition(".")
        if leaf not in _LEAVES:
            raise PackError(
                f"{where}: {name}: is of a kind that cannot be converted; mlx-lm's "
                "adapters have lora_a, lora_b and m."
            )
        if leaf == "m":
            found.tensors[name] = tensors[name]
            continue
        other = tensors.get(f"{path}.{'lora_b' if leaf == 'lora_a' else 'lora_a'}")
        if other is None:
            raise PackError(f"{where}: {path}: has only one of its two factors.")
        found.scales[path] = float(config["lora_parameters"]["scale"])
    for path in found.scales:
        a, b = tensors[f"{path}.lora_a"], tensors[f"{path}.lora_b"]
        rank = (ranks or {}).get(path) or _used_rank(a, b)
        found.tensors |= _cut(path, a, b, rank)
    if not found.scales:
        raise PackError(f"{where}: holds no adapter (no lora_a).")
    if config.get("fine_tune_type") == "dora":
        hold_magnitudes(found, where)
    return found


def _used_rank(a: mx.array, b: mx.array) -> int:
    """Rank without what is zero in both factors at its end; 1 at least."""
    if a.ndim not in (2, 3) or a.ndim != b.ndim:
        return a.shape[1] if a.ndim > 1 else 1
    experts = a.ndim == 3
    used = mx.any(a != 0, axis=(0, 2)) if experts else mx.any(a != 0, axis=0)
    used_b = mx.any(b != 0, axis=(0, 1)) if experts else mx.any(b != 0, axis=1)
    if used.shape != used_b.shape:
        return a.shape[1]
    last = np.flatnonzero(np.array(used | used_b))
    return int(last[-1]) + 1 if len(last) else 1


def _cut(path: str, a: mx.array, b: mx.array, rank: int) -> Tensors:
    if a.ndim == 2:
        return {f"{path}.lora_a": mx.contiguous(a[:, :rank]), f"{path}.lora_b": b[:rank]}
    return {f"{path}.lora_a": a[:, :rank], f"{path}.lora_b": mx.contiguous(b[..., :rank])}


def formulas(tensors: Tensors, config: dict) -> dict:
    """What mlx-lm adds at each module: scale * (x lora_a) lora_b, from its own tensors."""
    if config["fine_tune_type"] == "full":
        return {}
    scale = config["lora_parameters"]["scale"]

    def formula(path: str):
        a, b = (
            np.array(tensors[f"{path}.{part}"].astype(mx.float32), dtype=np.float64)
            for part in ("lora_a", "lora_b")
        )
        return lambda x: scale * ((a[x] if x.ndim == 1 else x @ a) @ b)

    return {
        name.rpartition(".")[0]: formula(name.rpartition(".")[0])
        for name in tensors
        if name.endswith(".lora_a") and tensors[name].ndim == 2
    }


def write(pack: Pack) -> tuple[Tensors, dict, list[str]]:
    """mlx-lm's tensors and config of a pack, and what its reader should know.

    Raises: PackError naming what stock mlx-lm cannot load.
    """
    specs, where = pack.specs, pack.path or "this pack"
    if is_of_encoder(pack.manifest):
        raise PackError(
            f"{where}: is of an encoder, and mlx-lm has none; export it to peft, or merge it."
        )
    if not specs and (config := adapter_config(pack.manifest)):
        return dict(pack.load_tensors()), config, []
    if whole := list(replaced_of(pack.manifest))[:3]:
        other = "export it to peft, or merge it" if specs else "merge it"
        raise PackError(
            f"{where}: brings {', '.join(whole)} whole, and mlx-lm loads adapters "
            f"alone, or dense weights over a dense base; {other}."
        )
    for path, spec in specs.items():
        if spec.head is False:
            raise PackError(
                f"{where}: {path}: leaves the tied head alone, and mlx-lm's adapter of "
                "an embedding acts there too; export it to peft."
            )
    dora = {spec.kind == "dora" for spec in specs.values()}
    if len(dora) > 1:
        raise PackError(
            f"{where}: is DoRA on some modules and LoRA on others; mlx-lm has one "
            "fine_tune_type for all."
        )
    rank, scale = max(spec.rank for spec in specs.values()), _scale(specs)
    ours, tensors = pack.load_tensors(), {}
    for path, spec in specs.items():
        a, b = ours[f"{path}.lora_a"], folded(spec, ours[f"{path}.lora_b"], scale)
        tensors |= _padded(spec, a, b, rank)
        if spec.kind == "dora":
            tensors[f"{path}.m"] = ours[f"{path}.m"]
    config = {
        "fine_tune_type": "dora" if dora.pop() else "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(specs)},
    }
    padded = sum(spec.rank < rank for spec in specs.values())
    notes = [f"{padded} of {len(specs)} modules padded with zeros to rank {rank}"] if padded else []
    return tensors, config, notes


def _scale(specs: Specs) -> float:
    scales = {s.scale for spec in specs.values() for s in spec.slices if s.rank}
    return scales.pop() if len(scales) == 1 else 1.0


def _padded(spec: ModuleSpec, a: mx.array, b: mx.array, rank: int) -> Tensors:
    more = (0, rank - spec.rank)
    if spec.experts is None:
        a, b = mx.pad(a, ((0, 0), more)), mx.pad(b, (more, (0, 0)))
    else:
        a, b = mx.pad(a, ((0, 0), more, (0, 0))), mx.pad(b, ((0, 0), (0, 0), more))
    return {f"{spec.path}.lora_a": a, f"{spec.path}.lora_b": b}
