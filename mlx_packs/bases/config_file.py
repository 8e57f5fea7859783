"""config.json of a base: every number that is used, here or in mlx-lm, is checked first."""

from collections.abc import Mapping
from pathlib import Path

from ..errors import PackError
from ..kinds import check_keys
from ..reading import read_json

CONFIG = "config.json"
_REMEDY = "Copy or download it again."
_SIZE = "an integer from 1 to 2147483647"  # MLX counts the rows of an array in 32 bits
_SIZES = f"{_SIZE} or a list of such?"  # some families have one for each block
_BLOCKS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MLX_QUANTIZATION = {
    "bits": "an integer above 0?",
    "group_size": "an integer above 0?",
    "mode": "text?",
}
# Keys of the language model, which is in ``text_config`` if there are other models.
_TEXT_KEYS = {
    **dict.fromkeys(_BLOCKS, "an integer from 1 to 10000?"),
    **dict.fromkeys(("hidden_size", "n_embd", "vocab_size", "type_vocab_size"), f"{_SIZE}?"),
    **dict.fromkeys(("num_attention_heads", "n_head", "intermediate_size", "n_inner"), _SIZES),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), _SIZES),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), "an integer of 0 or more?"),
    **dict.fromkeys(_EXPERTS, "an integer of 0 or more or a list of such?"),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), "a finite number above 0?"
    ),
    "rope_theta": "a finite number above 0 or a list of such?",
    **dict.fromkeys(("rope_scaling", "rope_parameters"), "a mapping?"),
    "rope_scaling.factor": "a finite number above 0?",
    **dict.fromkeys(("rope_scaling.type", "rope_scaling.rope_type"), "text?"),
    **dict.fromkeys(("hidden_act", "torch_dtype", "dtype", "position_embedding_type"), "text?"),
    "tie_word_embeddings": "true or false?",
    **dict.fromkeys(("bos_token_id", "eos_token_id"), "an integer or a list of such?"),
    **dict.fromkeys(("quantization", "quantization_config"), "a mapping?"),
    **{f"quantization.{key}": kind for key, kind in _MLX_QUANTIZATION.items()},
    "quantization.keep": "a list of texts?",
    "quantization_config.quant_method": "text?",
}
_KEYS = {"model_type": "text", "model_file": "text?", "text_config": "a mapping?", **_TEXT_KEYS}


def read_config(file: Path, tensors: Mapping[str, Mapping] | None = None) -> dict:
    """Return the config.json of a base.

    ``tensors`` are the headers of its tensors; counts of blocks and experts must not exceed them.
    Raises PackError if a value that a model is made of has another type, or is out of range.
    """
    config = read_json(file)
    try:
        check_keys(config, _KEYS)
        check_keys(config.get("text_config") or {}, _TEXT_KEYS, "text_config")
        for module_path, settings in (config.get("quantization") or {}).items():
            if isinstance(settings, Mapping):
                check_keys(settings, _MLX_QUANTIZATION, f"quantization.{module_path}")
    except ValueError as error:
        raise PackError(f"{file}: {error}. {_REMEDY}", "unreadable") from None

    if tensors is not None:
        for part in (config, config.get("text_config") or {}):
            _check_counts(file, part, tensors)
    return config


def _check_counts(file: Path, part: Mapping, tensors: Mapping[str, Mapping]) -> None:
    """Check that a config asks for no more blocks or experts than the tensors can have."""
    widest = max((size for tensor in tensors.values() for size in tensor["shape"]), default=0)
    limits = dict.fromkeys(_BLOCKS, len(tensors))  # each block has a tensor at least
    limits |= dict.fromkeys(_EXPERTS, max(len(tensors), widest))  # experts may be one stack

    for key, limit in limits.items():
        count = part.get(key) or 0
        if isinstance(count, int) and count > limit:
            raise PackError(
                f"{file}: {key} is {count}, but its files have {len(tensors)} tensors in all. "
                f"{_REMEDY}",
                "unreadable",
            )
