"""Gemma 3 and Gemma 4, whose layers differ in what they see."""

from tests.helpers.vision_families.family import HALVES, SCALED, TEXT, VISION, Family, ids_of

GEMMA_FIRST_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
GEMMA_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",  # GemmaTokenizer has no pieces of bytes
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
GEMMA_TEXT = TEXT | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 16,
}
# The text of a system message is put before the user's first.
GEMMA3_TEMPLATE = """\
{{ bos_token }}{% set system = namespace(text='') %}\
{% for message in messages %}{% if message['role'] == 'system' %}\
{% set parts = message['content'] %}\
{% set system.text = (parts if parts is string else parts[0]['text']) + '\\n\\n' %}\
{% else %}\
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) }}
{{ system.text }}{% set system.text = '' %}\
{% if message['content'] is string %}{{ message['content'] | trim }}\
{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '<start_of_image>' }}\
{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}\
{% endfor %}{% endif %}<end_of_turn>
{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


def _gemma3_config(ids: dict[str, int]) -> dict:
    """Every second layer is global; 8 x 8 patches are pooled 4 x 4 to four image tokens.

    Published ones leave out the pattern (6) and the number of image tokens in `text_config` (256).
    """
    text = GEMMA_TEXT | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 2,
        "mm_tokens_per_image": 4,
        "vocab_size": len(ids),
    }
    del text["hidden_act"]
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "initializer_range": 0.02,
        "mm_tokens_per_image": 4,
        "vocab_size": len(ids),
        "text_config": text,
        "vision_config": VISION
        | {
            "model_type": "siglip_vision_model",
            "image_size": 112,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


GEMMA3_SPECIAL = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
GEMMA3 = Family(
    first_tokens=GEMMA_FIRST_TOKENS,
    tokens=tuple(
        "<start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <image_soft_token>".split()
    ),
    config=_gemma3_config,
    tokenizer=GEMMA_TOKENIZER
    | GEMMA3_SPECIAL
    | {"processor_class": "Gemma3Processor", "extra_special_tokens": GEMMA3_SPECIAL},
    files={
        "preprocessor_config.json": HALVES
        | SCALED
        | {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "do_convert_rgb": None,
            "do_pan_and_scan": None,
            "image_seq_length": 4,
            "resample": 2,
            "size": {"height": 112, "width": 112},
        },
        "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
    },
    template=GEMMA3_TEMPLATE,
    renamed={
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
    begins="<bos>",
    norms_from_zero=lambda name: "vision_tower" not in name,
)


GEMMA4_TOKENS = tuple(
    (
        "<|turn> <turn|> <|channel> <channel|> <|think|> <|image> <|audio> <|image|> "
        "<|audio|> <image|> <audio|> <|video|>"
    ).split()
)
GEMMA4_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}\
{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) }}
{% if message['content'] is string %}{{ message['content'] | trim }}\
{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] | trim }}\
{% elif part['type'] == 'image' %}{{ '<|image|>' }}\
{% elif part['type'] == 'audio' %}{{ '<|audio|>' }}\
{% elif part['type'] == 'video' %}{{ '<|video|>' }}{% endif %}\
{% endfor %}{% endif %}<turn|>
{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"""


def _gemma4_config(ids: dict[str, int]) -> dict:
    """As E2B: inputs of each layer, and the last layers have no keys and values of their own."""
    text = GEMMA_TEXT | {
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size": len(ids),
        "vocab_size_per_layer_input": len(ids),
        **ids_of(ids, bos="<bos>", eos="<eos>", pad="<pad>"),
    }
    del text["hidden_act"]
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        **ids_of(ids, boi="<|image>", eoi="<image|>", image="<|image|>", video="<|video|>"),
        **ids_of(ids, boa="<|audio>", eoa="<audio|>", audio="<|audio|>"),
        "eoa_token_index": ids["<audio|>"],
        "eos_token_id": [ids["<eos>"], ids["<turn|>"]],
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "vision_soft_tokens_per_image": 70,
        "vocab_size": len(ids),
        "text_config": text,
        "vision_config": VISION
        | {
            "model_type": "gemma4_vision",
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "global_head_dim": 16,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
            "default_output_length": 70,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 256,
            "standardize": False,
            "use_clipped_linears": True,
        },
        "audio_config": {
            "model_type": "gemma4_audio",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "output_proj_dims": 48,
            "subsampling_conv_channels": [128, 4],
            "use_clipped_linears": True,
        },
    }


GEMMA4_SPECIAL = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "sot_token": "<|turn>",
    "eot_token": "<turn|>",
    "soc_token": "<|channel>",
    "eoc_token": "<channel|>",
    "think_token": "<|think|>",
}
GEMMA4_PATCHES = SCALED | {
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 70,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
}
GEMMA4 = Family(
    first_tokens=GEMMA_FIRST_TOKENS,
    tokens=GEMMA4_TOKENS,
    config=_gemma4_config,
    tokenizer=GEMMA_TOKENIZER
    | GEMMA4_SPECIAL
    | {
        "processor_class": "Gemma4Processor",
        "extra_special_tokens": ["<|video|>"],
        "model_specific_special_tokens": GEMMA4_SPECIAL,
    },
    files={
        "processor_config.json": {
            "processor_class": "Gemma4Processor",
            "audio_ms_per_token": 40,
            "audio_seq_length": 750,
            "image_seq_length": 70,
            "feature_extractor": {
                "feature_extractor_type": "Gemma4AudioFeatureExtractor",
                "feature_size": 128,
                "sampling_rate": 16000,
            },
            "image_processor": GEMMA4_PATCHES
            | {
                "image_processor_type": "Gemma4ImageProcessor",
                "do_normalize": False,
                "image_seq_length": 70,
            },
            "video_processor": GEMMA4_PATCHES
            | {
                "video_processor_type": "Gemma4VideoProcessor",
                "num_frames": 32,
            },
        },
    },
    template=GEMMA4_TEMPLATE,
    begins="<bos>",
)
