"""SmolVLM2 and Idefics3, which cut a picture into tiles."""

from tests.helpers.vision_families.family import HALVES, SCALED, TEXT, VISION, Family, ids_of

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


SMOLVLM_PICTURES = HALVES | SCALED | {"do_image_splitting": True, "do_pad": True, "resample": 1}
SMOLVLM_VISION = VISION | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}


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
            **ids_of(ids, bos="<|im_start|>", eos="<end_of_utterance>", pad="<|im_end|>"),
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
            **ids_of(ids, bos="<|begin_of_text|>", eos="<|end_of_text|>", pad="<|end_of_text|>"),
        },
        "vision_config": SMOLVLM_VISION
        | {"model_type": "idefics3_vision", "image_size": 56, "patch_size": 14},
    }


# Rows, columns and the whole picture are named in plain text, unlike in SmolVLM2.
IDEFICS3 = Family(
    tokens=("<|begin_of_text|>", "<|end_of_text|>", *SMOLVLM_TOKENS[-3:]),
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
