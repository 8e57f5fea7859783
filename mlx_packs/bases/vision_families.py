"""Vision-language models that take images, and what is particular to each.

A family is an entry. Its tower, projector and image processor are mlx-vlm's; its language model is
one of mlx-lm (`bases/model_classes.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class VisionFamily:
    """What is particular to a family.

    widths: the family whose formula of the memory plan its language model has; None: no plan.
    placeholder: what its chat template writes for an image.
    before, after: what its chat template writes around the placeholder, without which mlx-vlm's
        processor does not count or place the tokens of an image.
    scaled: whether the language model scales what it embeds, and so features, too.
    divided: whether mlx-vlm divides features by that scale, of the hidden_size beside text_config.
    interleaved: whether three axes of positions take turns in the pairs of a head.
    sees: in which blocks the tokens of an image see each other: ``none``, ``all``, or ``config``,
        those with a window if ``use_bidirectional_attention`` is ``vision``.
    projector: the linears, with GELU between them, that are the last part of the tower, as mlx-vlm
        names them; none if the projector has other weights.
    """

    placeholder: str
    widths: str | None = field(kw_only=True)
    before: str = ""
    after: str = ""
    scaled: bool = False
    divided: bool = False
    interleaved: bool = False
    sees: str = "none"
    projector: tuple[str, ...] = ()


_QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN2_PROJECTOR = ("vision_tower.merger.mlp.0", "vision_tower.merger.mlp.2")
_QWEN3_PROJECTOR = ("vision_tower.merger.linear_fc1", "vision_tower.merger.linear_fc2")
_ONE_LINEAR = ("connector.modality_projection.proj",)
_TWO_LINEARS = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")

VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(*_QWEN, projector=_QWEN2_PROJECTOR, widths="qwen2"),
    "qwen2_5_vl": VisionFamily(*_QWEN, projector=_QWEN2_PROJECTOR, widths="qwen2"),
    "qwen3_vl": VisionFamily(*_QWEN, interleaved=True, projector=_QWEN3_PROJECTOR, widths="qwen3"),
    "idefics3": VisionFamily("<image>", projector=_ONE_LINEAR, widths="llama"),
    "smolvlm": VisionFamily("<image>", projector=_ONE_LINEAR, widths="llama"),
    "gemma3": VisionFamily("<start_of_image>", widths=None, scaled=True, divided=True, sees="all"),
    "llava": VisionFamily("<image>", projector=_TWO_LINEARS, widths="llama"),
    "mistral3": VisionFamily("[IMG]", projector=_TWO_LINEARS, widths="mistral"),
    "gemma4": VisionFamily(
        "<|image|>",
        widths=None,
        scaled=True,
        sees="config",
        projector=("embed_vision.embedding_projection",),
    ),
}

# The language model of mlx-lm for a family that mlx-lm lacks, and where the weights of it are.
TEXT_MODELS = {"idefics3": "llama", "smolvlm": "llama"}

# How names of tensors of a language model begin, in files and in memory, and in one of mlx-lm.
_TEXT_NAMES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "text_model.": "model.",
    **{name: name for name in ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")},
}

# Where the last linears of a tower are in a base, if adapters on them are asked for.
PROJECTOR = "projector"

# How paths in a language model begin here, and in transformers and mlx-vlm.
_IN_TRANSFORMERS = {"language_model.model.": "model.language_model.", "language_model.": ""}
_LLAMA_IN_TRANSFORMERS = {"model.": "model.text_model."}
_LLAMA_IN_MLX_VLM = {"model.": "language_model.", "lm_head": "language_model.lm_head"}


def is_of_projector(path: str) -> bool:
    """Return whether a path names the projector, or a linear of it."""
    return path.partition(".")[0] == PROJECTOR


def projector_paths(model_type: str) -> dict[str, str]:
    """Return the linears of a projector, as they are named here and in mlx-vlm."""
    paths = VISION_FAMILIES[model_type].projector
    return {f"{PROJECTOR}.linear_{i}": path for i, path in enumerate(paths, 1)}


def name_in_text_model(stored: str) -> str | None:
    """Return the name of a tensor in a language model without images; None for other tensors."""
    if is_of_projector(stored):
        return stored
    begin = next((begin for begin in _TEXT_NAMES if stored.startswith(begin)), None)
    return begin and _TEXT_NAMES[begin] + stored.removeprefix(begin)


def path_in_transformers(path: str, model_type: str) -> str:
    """Return the path of a module of a base as transformers names it."""
    return _renamed(path, _of_transformers(model_type))


def path_of_transformers(path: str, model_type: str) -> str:
    """Return the path here of a module that transformers names."""
    names = {there: here for here, there in _of_transformers(model_type).items() if there}
    if path.startswith("lm_head") and model_type not in TEXT_MODELS:
        return f"language_model.{path}"
    return _renamed(path, names)


def _of_transformers(model_type: str) -> Mapping[str, str]:
    projector = {}
    for here, there in projector_paths(model_type).items():
        projector[here] = "model." + there.replace("vision_tower.", "visual.")
    of_text = _LLAMA_IN_TRANSFORMERS if model_type in TEXT_MODELS else _IN_TRANSFORMERS
    return {**projector, **of_text}


def path_in_mlx_vlm(path: str, model_type: str) -> str:
    """Return the path of a module of a base as mlx-vlm names it."""
    return _renamed(path, _of_mlx_vlm(model_type))


def path_of_mlx_vlm(path: str, model_type: str) -> str:
    """Return the path here of a module that mlx-vlm names."""
    names = {there: here for here, there in reversed(_of_mlx_vlm(model_type).items())}
    return _renamed(path, names)


def _of_mlx_vlm(model_type: str) -> dict[str, str]:
    projector = projector_paths(model_type)
    return projector | (_LLAMA_IN_MLX_VLM if model_type in TEXT_MODELS else {})


def _renamed(path: str, names: Mapping[str, str]) -> str:
    """Replace the first of these beginnings that a path has."""
    for begin, other in names.items():
        if path.startswith(begin):
            return other + path.removeprefix(begin)
    return path


def has_vision_tower(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is of one of these families, with its vision tower."""
    is_of_family = config.get("model_type") in VISION_FAMILIES
    return is_of_family and bool(config.get("vision_config")) and image_token_of(config) is not None


def image_token_of(config: Mapping[str, Any]) -> int | None:
    """Return the token that stands for a feature of an image; None if a config names none."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(token := config.get(name), int):
            return token
    return None


def mrope_sections(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return how many pairs of a head turn by each axis of positions; None with one axis."""
    text = config.get("text_config") or config
    for name in ("rope_scaling", "rope_parameters"):
        for part in (text, config):
            if sections := (part.get(name) or {}).get("mrope_section"):
                return tuple(sections)
    return None
