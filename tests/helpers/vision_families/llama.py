"""LLaVA 1.5 and Mistral Small 3.1, which have the text of a Llama."""

from tests.helpers.vision_families.family import CLIP, SCALED, TEXT, VISION, Family

NAMES = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}

# As published: images before text, and text that is no list of parts is left out without a word.
LLAVA_TEMPLATE = """\
{% for message in messages %}\
{% if message['role'] != 'system' %}{{ message['role'] | upper + ': ' }}{% endif %}\
{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '<image>\n' }}{% endif %}{% endfor %}\
{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""


def _llava_config(ids: dict[str, int]) -> dict:
    """4 x 4 patches are 16 image tokens, from the last layer of the image tower but one."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "ignore_index": -100,
        "image_token_index": ids["<image>"],
        "pad_token_id": ids["<pad>"],
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "text_config": TEXT
        | {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rope_theta": 10000.0,
            "vocab_size": len(ids),
        },
        "vision_config": VISION
        | {
            "model_type": "clip_vision_model",
            "image_size": 56,
            "patch_size": 14,
            "projection_dim": 32,
            "vocab_size": 32000,
        },
    }


LLAVA = Family(
    first_tokens=("<unk>", "<s>", "</s>"),
    tokens=("<image>", "<pad>"),
    config=_llava_config,
    tokenizer={
        "tokenizer_class": "PreTrainedTokenizerFast",  # LlamaTokenizer has no pieces of bytes
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "processor_class": "LlavaProcessor",
        "extra_special_tokens": {"image_token": "<image>"},
        "image_token": "<image>",
    },
    files={
        "preprocessor_config.json": CLIP
        | SCALED
        | {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True,
            "resample": 3,
            "size": {"shortest_edge": 56},
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
        },
    },
    template=LLAVA_TEMPLATE,
    renamed=NAMES | {"model.vision_tower.": "vision_tower.vision_model."},
    begins="<s>",
)

MISTRAL_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'user' %}{{ '[INST]' }}\
{% elif message['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' }}{% endif %}\
{% if message['content'] is string %}{{ message['content'] }}\
{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}\
{% elif part['type'] in ['image', 'image_url'] %}{{ '[IMG]' }}{% endif %}\
{% endfor %}{% endif %}\
{% if message['role'] == 'user' %}{{ '[/INST]' }}\
{% elif message['role'] == 'system' %}{{ '[/SYSTEM_PROMPT]' }}\
{% else %}{{ eos_token }}{% endif %}{% endfor %}"""


def _mistral3_config(ids: dict[str, int]) -> dict:
    """A token is 2 x 2 patches of 14 x 14, and a picture has as many as fit."""
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": ids["[IMG]"],
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "text_config": TEXT
        | {
            "model_type": "mistral",
            "head_dim": 16,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": len(ids),
        },
        "vision_config": VISION
        | {
            "model_type": "pixtral",
            "head_dim": 12,
            "hidden_act": "silu",
            "image_size": 112,
            "patch_size": 14,
            "num_channels": 3,
            "rope_theta": 10000.0,
        },
    }


MISTRAL_IMAGE_TOKENS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
MISTRAL3 = Family(
    first_tokens=tuple(
        (
            "<unk> <s> </s> [INST] [/INST] [IMG] <pad> [IMG_BREAK] [IMG_END] [SYSTEM_PROMPT] "
            "[/SYSTEM_PROMPT]"
        ).split()
    ),
    tokens=(),
    config=_mistral3_config,
    tokenizer={
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "processor_class": "PixtralProcessor",
        "extra_special_tokens": MISTRAL_IMAGE_TOKENS,
    },
    files={
        "preprocessor_config.json": CLIP
        | SCALED
        | {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "resample": 3,
            "size": {"longest_edge": 112},
        },
        "processor_config.json": MISTRAL_IMAGE_TOKENS
        | {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
    },
    template=MISTRAL_TEMPLATE,
    renamed=NAMES,
    begins="<s>",
)
