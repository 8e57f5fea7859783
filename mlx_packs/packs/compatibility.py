"""Whether a base is the one that a pack was trained on."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..bases.files import check_files, quantization_name, resolve_checkpoint
from ..bases.fingerprint import (
    changed_texts,
    fingerprint,
    is_fingerprint_of,
    is_sampled,
    sampled_fingerprint,
    say_changed,
    short_fingerprint,
)
from ..bases.weight_formats import format_name
from ..errors import PackError
from .manifest import check_quantization
from .pack import Pack

if TYPE_CHECKING:
    from ..bases.model import BaseModel


def check_base(pack: Pack, base: "BaseModel") -> None:
    current = base.path, base.fingerprint
    _check_base(pack, base.name, current, base.config, base.quantization)

    settings = {}
    if pooling := getattr(base.model, "sentence_config", None):  # which decoders lack
        settings = pooling.to_json()

    trained = pack._part("objective")
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
    if not is_fingerprint_of(path, ours["fingerprint"], value, where):
        if is_sampled(ours["fingerprint"]):
            value = sampled_fingerprint(path)
        raise PackError(
            f"{where}: was trained on {ours['id']} (fingerprint "
            f"{short_fingerprint(ours['fingerprint'])}), but {name} is another base "
            f"(fingerprint {short_fingerprint(value)}).",
            "mismatch",
        )

    was, now = (quantization_name(q) for q in (ours["quantization"], quantization))
    if was != now:
        mode = format_name(ours["quantization"])
        how = "without quantize"
        if mode != "none":
            how = f"with load_base(…, quantize='{mode}')"
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
    text = config.get("text_config")
    configs = (config, text if isinstance(text, dict) else {})
    return not config.get("quantization") and any(c.get("quantization_config") for c in configs)


def check_generates(pack: Pack) -> None:
    """No text can be generated with a reward model."""
    if pack.is_reward_model:
        raise PackError(
            f"{pack.name}: is a reward model (--task reward), which scores completions and "
            "generates no text. Evaluate it with packs eval, or score with base.rewards().",
            "unsupported",
        )
