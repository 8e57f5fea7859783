"""mlx-lm's adapter folders: ``adapter_config.json`` and ``adapters.safetensors``.

Names and shapes are a pack's own. mlx-lm has one rank and one scale for all modules: others are
padded with zeros to the largest rank, and scales that differ go into lora_b.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..bases.families import VISION_FAMILIES, path_from, path_in
from ..bases.model import BaseModel
from ..packs.adapter_config import adapter_config, config_with, padded
from ..packs.manifest import architecture_facts, replaced_of
from ..packs.pack import Pack
from .external import (
    Delta,
    ExternalAdapter,
    StoredAdapter,
    check_complete,
    common_scale,
    folded,
    is_positive,
    low_rank_delta,
    unreadable,
    unsupported,
)

_LEAVES = ("lora_a", "lora_b", "m")


class MlxLm:
    tensor_file = "adapters.safetensors"
    convention = "mlx"

    def recognises(self, config: dict) -> bool:
        return "lora_parameters" in config or "fine_tune_type" in config

    def check_config(self, config: dict, where: Path) -> None:
        kind = config.get("fine_tune_type", "lora")
        if kind == "full":
            raise unsupported(
                where,
                "fine_tune_type is 'full': these are weights of the base itself, "
                "not an adapter. mlx_lm.fuse makes a checkpoint of them.",
            )
        if kind not in ("lora", "dora"):
            raise unsupported(where, f"fine_tune_type must be lora or dora, but is {kind!r}.")

        parameters = config.get("lora_parameters")
        scale = parameters.get("scale") if isinstance(parameters, dict) else None
        if not is_positive(scale):
            raise unreadable(
                where, f"lora_parameters.scale must be a number above 0, but is {scale!r}."
            )

    def read(self, stored: StoredAdapter, model_type: str) -> ExternalAdapter:
        stored = _renamed(stored, model_type, path_from)
        adapter = ExternalAdapter(dict(stored.tensors))
        for name in stored.tensors:
            path, _, leaf = name.rpartition(".")
            if leaf not in _LEAVES:
                raise unsupported(
                    stored.file,
                    f"{name}: is of a kind that cannot be converted. mlx-lm's "
                    "adapters have lora_a, lora_b and m.",
                )
            adapter.scales[path] = float(stored.config["lora_parameters"]["scale"])

        check_complete(adapter, stored.config.get("fine_tune_type") == "dora", stored.file)
        return adapter

    def drop_copies(self, adapter: ExternalAdapter, base: BaseModel, where: Path) -> None:
        """Leave the adapter as it is: mlx-lm stores nothing twice."""

    def convert(self, pack: Pack, file: Path) -> StoredAdapter:
        specs = pack.specs
        if not (facts := architecture_facts(pack.manifest)).in_mlx_lm:
            raise unsupported(
                pack.name,
                f"is of {facts.described}, and mlx-lm has none. Export it to peft, or merge it.",
            )

        if not specs and (config := adapter_config(pack.manifest)):
            return StoredAdapter(dict(pack.load_tensors()), config, file)
        _check_pack(pack)

        rank = max(spec.rank for spec in specs.values())
        scale = common_scale(specs.values())
        tensors = dict(pack.load_tensors())
        for path, spec in specs.items():
            tensors[f"{path}.lora_b"] = folded(spec, tensors[f"{path}.lora_b"], scale)

        base = pack.manifest["base"]
        config = config_with(specs, base["model_type"], base["num_layers"], rank, scale)
        if base["model_type"] in VISION_FAMILIES:  # mlx-vlm reads absolute ones alone, mlx-lm both
            config["lora_parameters"]["keys"] = list(specs)
        notes: tuple[str, ...] = ()
        if lower := sum(spec.rank < rank for spec in specs.values()):
            notes = (f"{lower} of {len(specs)} modules padded with zeros to rank {rank}",)
        converted = StoredAdapter(padded(specs, tensors, rank), config, file, notes)
        return _renamed(converted, base["model_type"], path_in)

    def deltas(self, stored: StoredAdapter, model_type: str) -> dict[str, Delta]:
        """Return scale * (x lora_a) lora_b of each module."""
        deltas = {}
        stored = _renamed(stored, model_type, path_from)
        for name, a in stored.tensors.items():
            if name.endswith(".lora_a") and a.ndim == 2:
                path = name.removesuffix(".lora_a")
                scale = stored.config["lora_parameters"]["scale"]
                deltas[path] = low_rank_delta(a, stored.tensors[f"{path}.lora_b"], scale)
        return deltas


def _renamed(
    stored: StoredAdapter, model_type: str, renamed: Callable[[str, str, str], str]
) -> StoredAdapter:
    """Rename modules where mlx-vlm has other names, and mlx-lm none."""
    if model_type not in VISION_FAMILIES:
        return stored

    renamed = partial(renamed, model_type=model_type, program="mlx-vlm")
    tensors = {renamed(name): array for name, array in stored.tensors.items()}
    parameters = dict(stored.config["lora_parameters"])
    if "keys" in parameters:
        parameters["keys"] = [renamed(key) for key in parameters["keys"]]
    config = {**stored.config, "lora_parameters": parameters}
    return dataclasses.replace(stored, tensors=tensors, config=config)


def _check_pack(pack: Pack) -> None:
    """Raise a PackError for what stock mlx-lm cannot load."""
    specs = pack.specs
    where = pack.name
    if names := list(replaced_of(pack.manifest))[:3]:
        other = "Export it to peft, or merge it" if specs else "Merge it"
        raise unsupported(
            where,
            f"stores {', '.join(names)} in full, and mlx-lm loads only "
            f"adapters, or dense weights over a dense base. {other}.",
        )

    for path, spec in specs.items():
        if spec.head is False:
            raise unsupported(
                where,
                f"{path}: does not act on the tied head, and mlx-lm's adapter of "
                "an embedding does. Export it to peft.",
            )
