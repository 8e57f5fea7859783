"""InternVL 3.5 as converted for transformers, with the text of Qwen3."""

from tests.helpers.vision_families.family import TEXT, Family
from tests.helpers.vision_families.qwen import QWEN_END, QWEN_TOKENIZER, QWEN_TOKENS

TEMPLATE = (
    """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}\
{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}\
{% elif part['type'] == 'video' %}{{ '<video>\n' }}\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}"""
    + QWEN_END
)


def _config(ids: dict[str, int]) -> dict:
    """A 56 x 56 tile is 4 x 4 patches, of which 2 x 2 are one token.

    Published ones leave out the number of tiles, which is 1 to 12.
    """
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
        "image_token_id": ids["<IMG_CONTEXT>"],
        "min_dynamic_patch": 2,
        "max_dynamic_patch": 4,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "text_config": TEXT
        | {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 16,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "vocab_size": len(ids),
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
        },
        "vision_config": {
            "model_type": "internvl_vision",
            "architectures": ["InternVisionModel"],
            "attention_bias": True,
            "hidden_act": "gelu",
            "hidden_size": 48,
            "image_size": [56, 56],
            "intermediate_size": 80,
            "layer_norm_eps": 1e-6,
            "layer_scale_init_value": 0.1,
            "norm_type": "layer_norm",
            "num_attention_heads": 4,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": [14, 14],
            "use_absolute_position_embeddings": True,
            "use_mask_token": False,
            "use_mean_pooling": True,
            "use_qk_norm": False,
        },
    }


SPECIAL = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}
INTERNVL = Family(
    tokens=(*QWEN_TOKENS, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    config=_config,
    tokenizer=QWEN_TOKENIZER | {"processor_class": "InternVLProcessor"} | SPECIAL,
    files={
        "preprocessor_config.json": {
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "processor_class": "InternVLProcessor",
            "crop_to_patches": False,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "min_patches": 2,
            "max_patches": 4,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": 56, "width": 56},
        },
        "processor_config.json": {"image_seq_length": 4, "processor_class": "InternVLProcessor"},
    },
    template=TEMPLATE,
    renamed={
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
)
