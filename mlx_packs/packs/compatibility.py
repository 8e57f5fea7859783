"""Whether a base is the one that a pack was trained on, or one that a pack fits, by its headers."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..adapters.spec import SCORE_WEIGHT, ModuleSpec, check_shapes
from ..bases.files import (
    check_files,
    context_of,
    quantization_name,
    resolve_checkpoint,
    stored_quantization,
    weight_files,
)
from ..bases.fingerprint import (
    changed_texts,
    fingerprint,
    say_changed,
    short_fingerprint,
)
from ..bases.shapes import Heads
from ..bases.weight_formats import format_name
from ..config.choices import TASKS, WEIGHT_MODES, weight_modes_of
from ..errors import PackError
from ..reading import read_header
from .adapter_config import stored_shapes
from .manifest import (
    ADAPTERS,
    architecture_facts,
    check_quantization,
    generates,
    pack_facts,
    replaced_of,
    task_code,
    task_of,
)
from .pack import Pack

if TYPE_CHECKING:
    from ..bases.model import BaseModel


def check_base(pack: Pack, base: "BaseModel") -> None:
    current = base.path, base.fingerprint
    _check_base(pack, base.name, current, base.config, base.quantization)

    trained = pack._part("objective")
    settings = {}
    if read := task_code(pack.manifest, "base_settings"):
        settings = read(base.path, base.architecture == "decoder")

    for name, value in settings.items():
        if trained.get(name, value) != value:
            raise PackError(
                f"{pack.name}: was trained with {name} {trained[name]}, but "
                f"{base.name} has {name} {value} (its modules.json).",
                "mismatch",
            )


def _check_base(
    pack: Pack, name: str, current: tuple[Path, str], config: dict, quantization: Mapping | None
) -> None:
    """Compare model type, folder and fingerprint, quantization; without one the base is dense."""
    ours = pack.manifest["base"]
    where = pack.name
    if ours["model_type"] != config["model_type"]:
        raise PackError(
            f"{where}: was trained on a {ours['model_type']} ({ours['id']}), but "
            f"{name} is a {config['model_type']}.",
            "mismatch",
        )

    path, value = current
    if ours["fingerprint"] != value:
        raise PackError(
            f"{where}: was trained on {ours['id']} (fingerprint "
            f"{short_fingerprint(ours['fingerprint'])}), but {name} is another base "
            f"(fingerprint {short_fingerprint(value)}).",
            "mismatch",
        )

    was, now = (quantization_name(q) for q in (ours["quantization"], quantization))
    if was != now:
        mode = format_name(ours["quantization"])
        how = f"with load_base(…, quantize='{mode}')" if mode != "none" else "without quantize"
        raise PackError(
            f"{where}: was trained on {ours['id']} as {was}, but {name} is {now}. Packs of "
            f"different quantization take a command each; from Python, load the base {how}.",
            "mismatch",
            "quantize",
        )

    recorded = ours.get("text_files")
    if recorded and (names := changed_texts(path, recorded)):
        say_changed(where, path, tuple(names))


def check_checkpoint(pack: Pack, model: str | Path) -> tuple[Path, dict]:
    """Check a checkpoint by its headers, as `check_base` does; return its folder and config."""
    path = resolve_checkpoint(model)
    config = check_files(path)

    if quantization := config.get("quantization"):
        try:
            check_quantization("quantization", quantization)
        except ValueError as error:
            raise PackError(f"{path / 'config.json'}: {error}.", "unreadable") from None

    if not quantization and (
        is_converted_on_loading(config) or quantize_for(pack, config) != "none"
    ):
        quantization = pack.manifest["base"]["quantization"]  # as it will be once it is loaded

    _check_base(pack, str(model), (path, fingerprint(path)), config, quantization)
    return path, config


def quantize_for(pack: Pack, config: dict) -> str:
    """The ``quantize`` of `load_base` that makes a checkpoint the pack's base model."""
    if config.get("quantization") or is_converted_on_loading(config):
        return "none"
    return format_name(pack.manifest["base"]["quantization"])


def quantize_options(pack: Pack) -> dict:
    """The other options of `load_base` for `quantize_for`: ``double_quant`` and ``keep``."""
    q = pack.manifest["base"]["quantization"] or {}
    return {"double_quant": bool(q.get("double_quant")), "keep": tuple(q.get("keep") or ())}


def is_converted_on_loading(config: dict) -> bool:
    """Whether a checkpoint is quantized in a format that mlx-lm converts as it loads."""
    return not config.get("quantization") and bool(stored_quantization(config))


def text_limit(manifest: Mapping, config: dict) -> int:
    """The tokens that a pack reads of a text: as in training, within the context of its base.

    ``manifest`` may be empty, for a base without a pack; ``config`` is the base's config.json.
    """
    context = context_of(config)
    return min((manifest.get("recipe") or {}).get("max_seq_length") or context, context)


def check_generates(pack: Pack) -> None:
    """Check that text can be generated with a pack."""
    if generates(pack.manifest):
        return

    facts = pack_facts(pack.manifest)
    raise PackError(
        f"{pack.name}: is {facts.described} (--task {task_of(pack.manifest)}), which generates no "
        f"text. {facts.instead}",
        "unsupported",
    )


def check_activates(pack: Pack) -> None:
    """Check that a base can have a pack until another one: others are for one call each."""
    if not pack_facts(pack.manifest).activates:
        check_generates(pack)


def check_use(pack: Pack, task: str) -> None:
    """Check that a pack is for a task, or for text: then the task is asked of the LM head."""
    if task_of(pack.manifest) != task and pack_facts(pack.manifest).described:
        raise unsuited(pack, task)


def unsuited(pack: Pack, task: str) -> PackError:
    """Return the error of a pack that is needed for a task, and is not for it."""
    own = task_of(pack.manifest)
    wanted = TASKS[task].pack.described

    if own not in TASKS or own == task:
        text = f"{pack.name}: is not {wanted}. Train one with --task {task}."
        return PackError(text, "unsupported")

    facts = TASKS[own].pack
    described = facts.described or "a pack that generates text"
    return PackError(
        f"{pack.name}: is {described} (--task {own}), not {wanted}. {facts.instead}", "unsupported"
    )


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
        if name == SCORE_WEIGHT and shape[1:] != (hidden,):
            raise PackError(
                f"{pack.path}: {name} is {list(shape)}, but a head of {model} is "
                f"{[shape[0], hidden]}.",
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
