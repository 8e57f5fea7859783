"""Memory of the language model of a vision-language base, whose tower is gone in training."""

from collections.abc import Mapping
from dataclasses import replace

from ..bases.files import text_config
from ..bases.precision import activation_bytes
from ..bases.shapes import is_named
from ..bases.vision_families import PROJECTOR, is_of_projector, projector_paths
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from . import decoder
from .decoder import largest_shape, resized, run_settings, smallest_shape, why_not_quantized
from .decoder_sizes import TEXT_FAMILIES, sizes_of
from .headers import Headers, Tensors, dense_tensors
from .plan import MemoryPlan, Shape

ASSUMED = "Every token is taken as a target, and as one of an image."
KEPT_BYTES = 512 << 20  # of the features that were read last, as vision/store.py keeps them
__all__ = ["ASSUMED", "resized", "run_settings", "smallest_shape", "why_not_quantized"]

# How names of its tensors begin, in files and in memory, and in a base without images.
_NAMES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "text_model.": "model.",
    "lm_head.": "lm_head.",
    "model.embed_tokens.": "model.embed_tokens.",
    "model.layers.": "model.layers.",
    "model.norm.": "model.norm.",
    f"{PROJECTOR}.": f"{PROJECTOR}.",
}
_OTHER_TEXTS = ("mistral4",)  # of a mistral3: language models that are not of the Llama family


def describe(config: Mapping) -> Tensors:
    """Return the headers of the language model that a config describes."""
    text = _config_of_text(config)
    sizes_of(text, {})  # none is missing
    return dense_tensors(text)


def estimate(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, shape: Shape | None = None
) -> MemoryPlan:
    """Return the peak memory of training; images count by their tokens and features."""
    tensors = _of_projector(headers) if any(map(is_of_projector, lora.target_modules)) else {}
    for name, tensor in headers.tensors.items():
        stored = next((prefix for prefix in _NAMES if name.startswith(prefix)), None)
        if stored is not None:
            tensors[_NAMES[stored] + name.removeprefix(stored)] = tensor

    text = replace(headers, config=_config_of_text(headers.config), tensors=tensors)
    plan = decoder.estimate(text, lora, train, shape)

    features = _feature_bytes(text, headers, train, shape)
    moments = {
        name: {**parts, "activations": parts["activations"] + features}
        for name, parts in plan.moments.items()
    }
    return replace(plan, moments=moments)


def _feature_bytes(text: Headers, headers: Headers, train: TrainConfig, shape: Shape | None) -> int:
    """Return the bytes of the features of a batch, and of those that were read before.

    Where rows are not known, each token of a batch is one of an image, and there are no others.
    What enters a projector with adapters is stored in place of features; a batch has both, and what
    is between its linears.
    """
    in_batch = train.sequences * (shape or largest_shape(train))[0]
    tokens = headers.image_tokens
    if tokens is None:
        tokens = in_batch

    vision = headers.config.get("vision_config") or {}
    levels = len(vision.get("deepstack_visual_indexes") or ())
    width = text.config["hidden_size"]
    stored = width
    computed = 0
    for name, tensor in text.tensors.items():
        if not is_of_projector(name) or len(tensor["shape"]) < 2:
            continue
        if not computed:
            stored = tensor["shape"][1]
        computed += 2 * tensor["shape"][0]

    of_float = activation_bytes(headers.config, "auto")
    of_batch = of_float * (stored + computed + levels * width)
    of_store = of_float * (stored + levels * width)
    return of_batch * min(tokens, in_batch) + min(of_store * tokens, KEPT_BYTES)


def _of_projector(headers: Headers) -> Tensors:
    """Return the tensors of the linears of a projector, by the names of a base."""
    tensors = {}
    for here, there in projector_paths(headers.config["model_type"]).items():
        of_linear = there.removeprefix("vision_tower.")
        for part in ("weight", "bias"):
            stored = [name for name in headers.tensors if is_named(name, f"{of_linear}.{part}")]
            tensors |= {f"{here}.{part}": headers.tensors[name] for name in stored}
    return tensors


def _config_of_text(config: Mapping) -> dict:
    text = text_config(dict(config))
    family = TEXT_FAMILIES[config["model_type"]]
    if text.get("model_type") in _OTHER_TEXTS:
        family = text["model_type"]

    return {"dtype": config.get("dtype"), **config, **text, "model_type": family}
