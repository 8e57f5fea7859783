"""Tiny random checkpoints of vision-language families, in the form in which they are published.

Tensor names, the fields of config.json, the special tokens, the chat template and the files of the
processor are a published checkpoint's; sizes are small. Both transformers and mlx-vlm open them.
Writing one needs torch and transformers, which know the tensors of each class.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mlx_packs.bases.files import tiny_checkpoint

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
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SHARE_OF_NOISE = 0.05  # of a weight around 0, and of a norm around its neutral value


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


SMOLVLM_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
)

# As published: text that is no list of parts is left out without a word.
SMOLVLM_TEMPLATE = """\
<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}\
{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}\
{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}\
{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}\
{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


SMOLVLM_PICTURES = HALVES | {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "resample": 1,
    "rescale_factor": 1 / 255,
}
SMOLVLM_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def _smolvlm_config(ids: dict[str, int]) -> dict:
    """A 128 x 128 tile is 8 x 8 patches, of which 4 x 4 are one token."""
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": ids["<image>"],
        "pad_token_id": ids["<|im_end|>"],
        "scale_factor": 4,
        "tie_word_embeddings": False,
        "vocab_size": len(ids),
        "text_config": TEXT
        | {
            "model_type": "llama",
            "architectures": ["VLlama3ForCausalLM"],
            "head_dim": 16,
            "rope_theta": 100000,
            "tie_word_embeddings": False,
            "vocab_size": len(ids),
            "bos_token_id": ids["<|im_start|>"],
            "eos_token_id": ids["<end_of_utterance>"],
            "pad_token_id": ids["<|im_end|>"],
        },
        "vision_config": SMOLVLM_VISION
        | {"model_type": "smolvlm_vision", "image_size": 128, "patch_size": 16},
    }


SMOLVLM = Family(
    tokens=SMOLVLM_TOKENS,
    config=_smolvlm_config,
    tokenizer={
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|im_start|>",
        "eos_token": "<end_of_utterance>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "processor_class": "SmolVLMProcessor",
        "extra_special_tokens": {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    },
    files={
        "preprocessor_config.json": SMOLVLM_PICTURES
        | {
            "image_processor_type": "SmolVLMImageProcessor",
            "processor_class": "SmolVLMProcessor",
            "max_image_size": {"longest_edge": 128},
            "size": {"longest_edge": 256},
        },
        "processor_config.json": {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
    },
    template=SMOLVLM_TEMPLATE,
)


def _idefics3_config(ids: dict[str, int]) -> dict:
    """A 56 x 56 tile is 4 x 4 patches, of which 2 x 2 are one token."""
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": ids["<image>"],
        "pad_token_id": ids["<|end_of_text|>"],
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": TEXT
        | {
            "model_type": "llama",
            "architectures": ["VLlama3ForCausalLM"],
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "vocab_size": len(ids),
            "bos_token_id": ids["<|begin_of_text|>"],
            "eos_token_id": ids["<|end_of_text|>"],
            "pad_token_id": ids["<|end_of_text|>"],
        },
        "vision_config": SMOLVLM_VISION
        | {"model_type": "idefics3_vision", "image_size": 56, "patch_size": 14},
    }


# Rows, columns and the whole picture are named in plain text, unlike in SmolVLM2.
IDEFICS3 = Family(
    tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<fake_token_around_image>",
        "<image>",
        "<end_of_utterance>",
    ),
    config=_idefics3_config,
    tokenizer={
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "pad_token": "<|end_of_text|>",
        "processor_class": "Idefics3Processor",
        "additional_special_tokens": [
            "<fake_token_around_image>",
            "<image>",
            "<end_of_utterance>",
        ],
    },
    files={
        "preprocessor_config.json": SMOLVLM_PICTURES
        | {
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "max_image_size": {"longest_edge": 56},
            "size": {"longest_edge": 112},
        },
        "processor_config.json": {"image_seq_len": 4, "processor_class": "Idefics3Processor"},
    },
    template=SMOLVLM_TEMPLATE.replace("<|im_start|>", "<|begin_of_text|>"),
    begins="<|begin_of_text|>",
)


QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
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
    return {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _qwen2_5_config(ids: dict[str, int]) -> dict:
    """The settings of the text are at the root, as published; a window is 2 x 2 image tokens."""
    return (
        TEXT
        | _qwen_ids(ids)
        | {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "vision_token_id": ids["<|vision_pad|>"],
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "sliding_window": 512,
            "max_window_layers": 3,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "vocab_size": len(ids),
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
    )


QWEN2_5_VL = Family(
    tokens=QWEN_TOKENS,
    config=_qwen2_5_config,
    tokenizer=QWEN_TOKENIZER,
    files={
        "preprocessor_config.json": CLIP
        | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": 12544,
            "max_pixels": 50176,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    },
    template=QWEN2_TEMPLATE,
    renamed={"model.language_model.": "model.", "model.visual.": "visual."},
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
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
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
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
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
    tokens=(
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
    ),
    config=_gemma3_config,
    tokenizer=GEMMA_TOKENIZER
    | GEMMA3_SPECIAL
    | {"processor_class": "Gemma3Processor", "extra_special_tokens": GEMMA3_SPECIAL},
    files={
        "preprocessor_config.json": HALVES
        | {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            "image_seq_length": 4,
            "resample": 2,
            "rescale_factor": 1 / 255,
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


GEMMA4_TOKENS = (
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
    "<|image>",
    "<|audio>",
    "<|image|>",
    "<|audio|>",
    "<image|>",
    "<audio|>",
    "<|video|>",
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
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<eos>"],
        "pad_token_id": ids["<pad>"],
    }
    del text["hidden_act"]
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "boa_token_id": ids["<|audio>"],
        "eoa_token_id": ids["<audio|>"],
        "eoa_token_index": ids["<audio|>"],
        "audio_token_id": ids["<|audio|>"],
        "video_token_id": ids["<|video|>"],
        "eos_token_id": [ids["<eos>"], ids["<turn|>"]],
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "vision_soft_tokens_per_image": 70,
        "vocab_size": len(ids),
        "text_config": text,
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
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
GEMMA4_PATCHES = {
    "do_convert_rgb": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 70,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
    "rescale_factor": 1 / 255,
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
                "do_normalize": True,
                "num_frames": 32,
            },
        },
    },
    template=GEMMA4_TEMPLATE,
    begins="<bos>",
)

_FAMILIES = {
    "smolvlm": SMOLVLM,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "idefics3": IDEFICS3,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
}
FAMILIES: tuple[str, ...] = tuple(_FAMILIES)


def write_vision_base(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint of `family` into `folder`, and return the folder.

    Args:
        family: one of `FAMILIES`, the `model_type` of its config.json.
        folder: made if it does not exist.
        seed: of the weights, which are float32.
    """
    facts = _FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)

    ids = _write_tokenizer(folder, facts)
    _write_json(folder / "config.json", facts.config(ids))
    for name, content in facts.files.items():
        _write_json(folder / name, content)

    (folder / "chat_template.jinja").write_text(facts.template)
    weights = _random_weights(folder, facts, np.random.default_rng(seed))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_tokenizer(folder: Path, facts: Family) -> dict[str, int]:
    """A token for each byte, without merges, and the special tokens after them; returns all ids."""
    tokenizer = json.loads((tiny_checkpoint() / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    letters = sorted(vocabulary, key=vocabulary.get)[:256]
    special = [*facts.first_tokens, *facts.tokens]
    ids = {
        token: number for number, token in enumerate([*facts.first_tokens, *letters, *facts.tokens])
    }

    tokenizer["model"] |= {"vocab": {letter: ids[letter] for letter in letters}, "merges": []}
    tokenizer["added_tokens"] = [
        {
            "id": ids[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in special
    ]
    if facts.begins:
        _begin_texts(tokenizer["post_processor"], facts.begins, ids[facts.begins])

    _write_json(folder / "tokenizer.json", tokenizer)
    settings = {"model_max_length": 4096, "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", settings | facts.tokenizer)
    return ids


def _begin_texts(template: dict, token: str, number: int) -> None:
    for kind in ("single", "pair"):
        template[kind].insert(0, {"SpecialToken": {"id": token, "type_id": 0}})
    template["special_tokens"] = {token: {"id": token, "ids": [number], "tokens": [token]}}


def _random_weights(folder: Path, facts: Family, numbers) -> dict[str, np.ndarray]:
    """Weights for the tensors of transformers' class, under their published names."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)

    tied = set(model.all_tied_weights_keys)
    return {
        _published(name, facts.renamed): _random(name, tuple(tensor.shape), facts, numbers)
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def _published(name: str, renamed: dict[str, str]) -> str:
    for beginning, published in renamed.items():
        if name.startswith(beginning):
            return published + name.removeprefix(beginning)
    return name


def _random(name: str, shape: tuple[int, ...], facts: Family, numbers) -> np.ndarray:
    """Small numbers; a norm's weight and a factor are near 1, or near 0 if 1 is added to them."""
    if name.endswith(("_min", "_max")):  # the bounds of a clipped linear: some numbers are clipped
        return np.array(-3 if name.endswith("_min") else 3, np.float32)

    noise = SHARE_OF_NOISE * numbers.standard_normal(shape)
    is_factor = len(shape) == 1 and name.endswith(("weight", "scalar", "scale"))
    if is_factor and not facts.norms_from_zero(name):
        noise += 1
    return noise.astype(np.float32)
