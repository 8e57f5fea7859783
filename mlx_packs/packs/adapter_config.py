"""``adapter_config.json`` of a pack, by which stock mlx-lm, mlx-swift-lm and mlx-vlm open it.

All have one rank and one scale for all modules. The first two name modules relative to the block,
and count blocks from the last one; what has no tensor in the file keeps B = 0, and changes nothing.
mlx-vlm names modules by their paths.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..adapters.spec import ModuleSpec, Specs, factor_names
from ..config.choices import package_of
from .manifest import architecture_facts, replaced_of, shapes_of, specs_of

if TYPE_CHECKING:
    from ..runtime import mx

_OTHER_NAMES = ("afm7",)  # mlx-lm has an adapter of its own for its fused projection


def adapter_config(manifest: dict) -> dict | None:
    """``adapter_config.json`` of a pack, or None where stock mlx-lm cannot load it.

    mlx-lm loads tensors stored in full like the result of full fine-tuning, over dense ones.
    """
    if not architecture_facts(manifest).in_mlx_lm:
        return None

    base = manifest["base"]
    if not replaced_of(manifest):
        return adapter_config_of(specs_of(manifest), base["model_type"], base["num_layers"])
    if manifest["adapters"]["modules"] or base["quantization"]:
        return None
    return {"fine_tune_type": "full", "num_layers": base["num_layers"]}


def adapter_config_of(specs: Specs, model_type: str, blocks: int) -> dict | None:
    """``adapter_config.json`` of adapters, or None where mlx-lm cannot express them.

    It has one rank (see `one_rank`) and one scale, LoRA or DoRA, and adapters of embeddings act on
    a tied head. ``blocks`` is how many the base has.
    """
    if model_type in _OTHER_NAMES or len({spec.kind == "dora" for spec in specs.values()}) != 1:
        return None
    if any(spec.head is False for spec in specs.values()):
        return None

    scales = {s.scale for spec in specs.values() for s in spec.slices if s.rank}
    rank = one_rank(specs.values())
    if rank is None or len(scales) != 1:
        return None
    return config_with(specs, model_type, blocks, rank, scales.pop())


def config_with(specs: Specs, model_type: str, blocks: int, rank: int, scale: float) -> dict:
    """The adapters are stored with a rank and a scale."""
    places = {path: _in_block(path) for path in specs}
    lengths: dict[str, int] = {}  # of each list of blocks, as far as is known
    for block_list, number, _ in filter(None, places.values()):
        lengths[block_list] = max(number + 1, lengths.get(block_list, 0))

    keys = list(specs)  # absolute ones, which mlx-swift-lm does not know
    first = 0
    if sum(lengths.values()) <= blocks and package_of(model_type) == "mlx-lm":
        keys = [place[2] if place else path for path, place in places.items()]
        if len(lengths) == 1:
            first = min(place[1] for place in places.values() if place)

    kind = "dora" if any(spec.kind == "dora" for spec in specs.values()) else "lora"

    return {
        "fine_tune_type": kind,
        "num_layers": blocks - first,
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": 0.0,
            "keys": list(dict.fromkeys(keys)),
        },
    }


def _in_block(path: str) -> tuple[str, int, str] | None:
    """The list of blocks that a path is in, the number there, and the rest; None outside."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if number is None or number + 1 == len(parts):
        return None
    return ".".join(parts[:number]), int(parts[number]), ".".join(parts[number + 1 :])


def one_rank(specs: Iterable[ModuleSpec]) -> int | None:
    """The rank that all modules have on disk, or None where each keeps its own.

    A fused projection has the ranks of all its slices. If every slice of every module has the same,
    the other modules are padded with zeros to that.
    """
    specs = list(specs)
    ranks = {spec.rank for spec in specs}
    of_slices = {part.rank for spec in specs for part in spec.slices if part.rank}
    if len(ranks) == 1 or len(of_slices) == 1:
        return max(ranks)
    return None


def padded_rank(manifest: dict) -> int | None:
    """The rank that factors are padded to on disk; None if none is padded."""
    if not adapter_config(manifest) or replaced_of(manifest):
        return None
    specs = specs_of(manifest).values()
    rank = one_rank(specs)
    if all(spec.rank == rank for spec in specs):
        return None
    return rank


def stored_shapes(manifest: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor that the manifest promises, and its shape on disk."""
    shapes = shapes_of(manifest)
    if rank := manifest["adapters"].get("padded_rank"):
        for spec in specs_of(manifest).values():
            for name, axis in zip(factor_names(spec.path), _axes(spec), strict=True):
                shape = shapes[name]
                shapes[name] = (*shape[:axis], max(rank, spec.rank), *shape[axis + 1 :])
    return shapes


def _axes(spec: ModuleSpec) -> tuple[int, int]:
    return (1, 0) if spec.experts is None else (1, 2)


def padded(specs: Specs, tensors: Mapping[str, "mx.array"], rank: int) -> dict[str, "mx.array"]:
    """Factors of all modules get zeros up to a rank."""
    from ..runtime import mx

    result = dict(tensors)
    for spec in specs.values():
        for name, axis in zip(factor_names(spec.path), _axes(spec), strict=True):
            widths = [(0, 0)] * result[name].ndim
            widths[axis] = (0, rank - spec.rank)
            result[name] = mx.pad(result[name], widths)
    return result


def cut(specs: Specs, tensors: Mapping[str, "mx.array"]) -> dict[str, "mx.array"]:
    """Factors of each module are cut back to its own rank."""
    from ..runtime import mx

    result = dict(tensors)
    for spec in specs.values():
        for name, axis in zip(factor_names(spec.path), _axes(spec), strict=True):
            if result[name].shape[axis] > spec.rank:
                result[name] = mx.take(result[name], mx.arange(spec.rank), axis=axis)
    return result
