"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose pictures keep their shape."""

from tests.helpers.vision_families.family import CLIP, HALVES, TEXT, Family, ids_of

QWEN_TOKENS = tuple(
    (
        "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> "
        "<|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> "
        "<|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
    ).split()
)
QWEN_TOKENIZER = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "additional_special_tokens": list(QWEN_TOKENS[1:]),
}
QWEN_TURN = """\
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}\
{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}\
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}\
{% elif part['type'] == 'video' or 'video' in part %}\
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}\
{% elif 'text' in part %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
"""
QWEN_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Until Qwen3 the template writes a system message of its own.
QWEN2_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + QWEN_TURN
    + "{% endfor %}"
    + QWEN_END
)
QWEN3_TEMPLATE = "{% for message in messages %}" + QWEN_TURN + "{% endfor %}" + QWEN_END


def _qwen_ids(ids: dict[str, int]) -> dict:
    marks = ids_of(ids, vision_start="<|vision_start|>", vision_end="<|vision_end|>")
    return marks | ids_of(ids, image="<|image_pad|>", video="<|video_pad|>")


def _qwen2_text(ids: dict[str, int]) -> dict:
    """The settings of the text, which published ones have at the root of config.json."""
    return (
        TEXT
        | _qwen_ids(ids)
        | {
            **ids_of(ids, vision="<|vision_pad|>", bos="<|endoftext|>", eos="<|im_end|>"),
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "sliding_window": 512,
            "max_window_layers": 3,
            "use_sliding_window": False,
            "vocab_size": len(ids),
        }
    )


def _qwen2_config(ids: dict[str, int]) -> dict:
    """As 2B: head and word table are one."""
    return _qwen2_text(ids) | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "tie_word_embeddings": True,
        "vision_config": {
            "depth": 2,
            "embed_dim": 48,
            "mlp_ratio": 2,
            "num_heads": 4,
            "in_chans": 3,
            "hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
    }


def _qwen2_5_config(ids: dict[str, int]) -> dict:
    """A window of the image tower is 2 x 2 image tokens, except in its last layer."""
    return _qwen2_text(ids) | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 2,
            "hidden_act": "silu",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_heads": 4,
            "in_chans": 3,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    }


QWEN2_PICTURES = CLIP | {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 12544,
    "max_pixels": 50176,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
QWEN2_NAMES = {"model.language_model.": "model.", "model.visual.": "visual."}
QWEN2_VL = Family(
    tokens=QWEN_TOKENS,
    config=_qwen2_config,
    tokenizer=QWEN_TOKENIZER,
    files={
        "preprocessor_config.json": QWEN2_PICTURES | {"processor_class": "Qwen2VLProcessor"},
    },
    template=QWEN2_TEMPLATE,
    renamed=QWEN2_NAMES,
)
QWEN2_5_VL = Family(
    tokens=QWEN_TOKENS,
    config=_qwen2_5_config,
    tokenizer=QWEN_TOKENIZER,
    files={
        "preprocessor_config.json": QWEN2_PICTURES | {"processor_class": "Qwen2_5_VLProcessor"},
    },
    template=QWEN2_TEMPLATE,
    renamed=QWEN2_NAMES,
)


def _qwen3_config(ids: dict[str, int]) -> dict:
    """The first two of three vision layers give deepstack features; head and word table are one."""
    return _qwen_ids(ids) | {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": TEXT
        | {
            "model_type": "qwen3_vl_text",
            "attention_bias": False,
            "head_dim": 16,
            "rope_theta": 5000000,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            **ids_of(ids, bos="<|endoftext|>", eos="<|im_end|>"),
            "vocab_size": len(ids),
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [0, 1],
            "depth": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 48,
            "in_channels": 3,
            "intermediate_size": 80,
            "num_heads": 4,
            "num_position_embeddings": 36,
            "out_hidden_size": 64,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


QWEN3_PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
QWEN3_VL = Family(
    tokens=QWEN_TOKENS,
    config=_qwen3_config,
    tokenizer=QWEN_TOKENIZER,
    files={
        "preprocessor_config.json": HALVES
        | QWEN3_PATCHES
        | {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "size": {"shortest_edge": 16384, "longest_edge": 65536},
        },
        "video_preprocessor_config.json": HALVES
        | QWEN3_PATCHES
        | {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
            "size": {"shortest_edge": 4096, "longest_edge": 65536},
        },
    },
    template=QWEN3_TEMPLATE,
)
