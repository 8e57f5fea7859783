"""What a published checkpoint of a vision-language family has, and sizes that are small."""

from collections.abc import Callable
from dataclasses import dataclass, field

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SCALED = {  # of an image processor
    **dict.fromkeys("do_convert_rgb do_normalize do_rescale do_resize".split(), True),
    "rescale_factor": 1 / 255,
}
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def ids_of(ids: dict[str, int], **tokens: str) -> dict[str, int]:
    """The fields of config.json that have the ids of tokens."""
    return {f"{name}_token_id": ids[token] for name, token in tokens.items()}


@dataclass(frozen=True)
class Family:
    """What a published checkpoint of the family has, apart from its weights.

    Attributes:
        tokens: the special tokens, which follow the 256 bytes in the vocabulary.
        first_tokens: special tokens that come before the bytes.
        config: config.json from the ids of the special tokens.
        tokenizer: tokenizer_config.json, without its class.
        files: other JSON files by name.
        template: chat_template.jinja.
        renamed: the beginnings of tensor names in transformers' class, and what is published.
        begins: the token that the tokenizer puts before every text, if any.
        norms_from_zero: tells by a norm's name whether its weight is added to 1.
    """

    tokens: tuple[str, ...]
    config: Callable[[dict[str, int]], dict]
    tokenizer: dict
    files: dict[str, dict]
    template: str
    first_tokens: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    begins: str | None = None
    norms_from_zero: Callable[[str], bool] = lambda name: False
