"""The check that a pack fits a base, from headers alone: the output of `packs apply --dry-run`."""

from pathlib import Path

from ..adapters.spec import SCORE_WEIGHT, ModuleSpec, check_shapes
from ..bases.files import weight_files
from ..bases.shapes import Heads
from ..config.choices import WEIGHT_MODES, weight_modes_of
from ..errors import PackError
from ..reading import read_header
from .adapter_config import stored_shapes
from .compatibility import check_checkpoint, is_converted_on_loading
from .manifest import ADAPTERS, architecture_facts, replaced_of
from .pack import Pack


def check_fit(pack: Pack, model: str) -> dict:
    """The report of `packs apply` on a saved pack; no weights of it or of the base are loaded."""
    pack.verify()
    path, config = check_checkpoint(pack, model)
    header, _ = read_header(pack.path / ADAPTERS)
    stored = {name: tuple(tensor["shape"]) for name, tensor in header.items()}
    check_shapes(stored_shapes(pack.manifest), stored, str(pack.path / ADAPTERS))

    checked = _check_geometry(pack, str(model), path, config)
    return {
        "pack": str(pack.path),
        "model": str(model),
        "fits": True,
        "geometry": "checked" if checked else "not in the headers",
        "fingerprint": pack.manifest["base"]["fingerprint"],
        "projections": len(pack.specs),
        "full_tensors": len(replaced_of(pack.manifest)),
        "dtype": sorted({t["dtype"] for t in header.values()}),
        "pack_mb": round(pack.size_mb, 3),
    }


def _check_geometry(pack: Pack, model: str, path: Path, config: dict) -> bool:
    """Compare the adapters with the shapes in a checkpoint's headers.

    False if they cannot tell, since mlx-lm renames or converts these tensors.
    """
    stored: dict[str, dict] = {}
    for file in weight_files(path):
        stored |= read_header(file)[0]

    prefix = architecture_facts(pack.manifest).prefix
    stored = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}

    if is_converted_on_loading(config):
        return False

    _check_full_tensors(pack, model, stored, Heads.of(config).hidden)

    specs = pack.specs.values()
    if not specs:
        return any(name in stored for name in replaced_of(pack.manifest))
    if not any(f"{s.path}.weight" in stored for s in specs):
        return False

    for spec in specs:
        if f"{spec.path}.weight" not in stored:
            if spec.experts is not None:  # mlx-lm stacks experts that are stored one by one
                continue
            raise PackError(f"{pack.path}: {spec.path}: {model} has no such module.", "mismatch")

        shape = _dense_shape(spec, stored, config.get("quantization") or {})
        if shape is None:
            return False

        expected = [spec.out_features, spec.in_features]
        if spec.experts is not None:
            expected.insert(0, spec.experts)
        if spec.kind == "embedding":
            expected.reverse()

        if shape != expected:
            raise PackError(
                f"{pack.path}: {spec.path}: the adapter is for a weight of {expected}, but that of "
                f"{model} is {shape}.",
                "mismatch",
            )

    return True


def _check_full_tensors(
    pack: Pack, model: str, stored: dict[str, dict], hidden: int | None
) -> None:
    quantized = weight_modes_of(stored)
    for name, shape in replaced_of(pack.manifest).items():
        if name == SCORE_WEIGHT and shape != (1, hidden):
            raise PackError(
                f"{pack.path}: {name} is {list(shape)}, but a reward head of {model} is "
                f"{[1, hidden]}.",
                "mismatch",
            )

        dense = name in stored and name.rpartition(".")[0] not in quantized
        if dense and stored[name]["shape"] != list(shape):
            raise PackError(
                f"{pack.path}: {name} is {list(shape)}, but that of {model} is "
                f"{stored[name]['shape']}.",
                "mismatch",
            )


def _dense_shape(spec: ModuleSpec, stored: dict[str, dict], quantization: dict) -> list[int] | None:
    """None if it is not known."""
    shape = list(stored[f"{spec.path}.weight"]["shape"])
    if f"{spec.path}.scales" in stored:
        settings = quantization.get(spec.path)
        if not isinstance(settings, dict):
            settings = quantization
        bits = settings.get("bits")
        if not isinstance(bits, int) or bits < 1:
            return None

        shape[-1] = shape[-1] * 32 // bits
        return shape

    for facts in WEIGHT_MODES.values():
        if facts.numbers and f"{spec.path}.{facts.parts[0]}" in stored:
            shape[-1] *= facts.numbers
    return shape
