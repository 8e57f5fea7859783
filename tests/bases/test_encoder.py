"""Folders of sentence-transformers: tensors, tokens, settings and what is rejected.

tests/convert/test_encoder_interop.py compares the embeddings with those of sentence-transformers.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import load_base
from mlx_packs.bases.loading import lazy_base
from mlx_packs.runtime import mx
from tests.bases.changes import set_keys
from tests.helpers.encoders import MODERN, VOCABULARY, write_encoder
from tests.helpers.errors import raises

TEXTS = ["how do i fix a car?", "", "the STORE", "please " * 80, "a"]


@pytest.fixture
def small_encoder(tmp_path) -> Path:
    return write_encoder(tmp_path / "mini")


def test_embedding_depends_on_neither_batch_nor_order(small_encoder):
    base = load_base(small_encoder)
    together = base.encode(TEXTS, batch_size=len(TEXTS))
    alone = np.concatenate([base.encode([text]) for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-6
    assert np.array_equal(base.encode(TEXTS[::-1], batch_size=5)[::-1], together)
    assert base.encode([]).shape == (0, 32)


def test_tensors_load_with_a_prefix(tmp_path, small_encoder):
    other = write_encoder(tmp_path / "other", prefix="bert.")
    assert np.array_equal(load_base(other).encode(TEXTS), load_base(small_encoder).encode(TEXTS))


def test_norms_of_tensorflow_and_half_precision_are_read(tmp_path, small_encoder):
    tensors = mx.load(str(small_encoder / "model.safetensors"))
    spelled = {"weight": "gamma", "bias": "beta"}
    renamed = {}
    for name, tensor in tensors.items():
        head, _, last = name.rpartition(".")
        norm = head.endswith("LayerNorm")
        renamed[f"{head}.{spelled[last]}" if norm else name] = tensor

    other = write_encoder(tmp_path / "other")
    mx.save_safetensors(str(other / "model.safetensors"), renamed)
    assert np.array_equal(load_base(other).encode(TEXTS), load_base(small_encoder).encode(TEXTS))

    half = load_base(write_encoder(tmp_path / "half", dtype=mx.float16))
    assert {a.dtype for _, a in tree_flatten(half.model.parameters())} == {mx.float32}
    lazy = lazy_base(tmp_path / "half")
    assert lazy.model.encoder.layer[0].output.dense.weight.dtype == mx.float16


def test_the_tokenizer_comes_from_vocab_txt_or_tokenizer_json(small_encoder):
    base = load_base(small_encoder)
    from_words = [base.tokenizer.encode(text) for text in TEXTS]
    words = base.tokenizer.convert_ids_to_tokens(from_words[0])
    assert words[:6] == "[CLS] how do i fix a".split()
    base.tokenizer.save_pretrained(small_encoder)
    (small_encoder / "vocab.txt").unlink()
    assert (small_encoder / "tokenizer.json").is_file()
    assert [load_base(small_encoder).tokenizer.encode(text) for text in TEXTS] == from_words
    (small_encoder / "tokenizer.json").unlink()
    with raises("not-found", None, "tokenizer.json", "vocab.txt"):
        load_base(small_encoder)


def test_texts_are_cut_where_the_folder_says(small_encoder):
    settings = small_encoder / "sentence_bert_config.json"
    assert load_base(small_encoder).model.longest == 48
    set_keys(settings, max_seq_length=8)
    base = load_base(small_encoder)
    assert base.model.longest == 8
    words = "please " * 6  # with [CLS] and [SEP] that is all
    assert np.array_equal(base.encode([words]), base.encode([words * 5]))
    set_keys(settings, max_seq_length=None)  # as the tokenizer says
    set_keys(small_encoder / "tokenizer_config.json", model_max_length=16)
    assert load_base(small_encoder).model.longest == 16
    set_keys(settings, max_seq_length=512)  # more than there are positions
    assert load_base(small_encoder).model.longest == 64


def test_do_lower_case_is_respected(small_encoder):
    set_keys(small_encoder / "tokenizer_config.json", do_lower_case=False)
    vectors = load_base(small_encoder).encode(["FIX", "fix"])
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3  # [UNK] and a word
    set_keys(small_encoder / "sentence_bert_config.json", do_lower_case=True)
    vectors = load_base(small_encoder).encode(["FIX", "fix"])
    assert np.allclose(vectors[0], vectors[1], atol=1e-5)


def test_a_folder_without_modules_is_pooled_by_the_mean(small_encoder):
    with_modules = load_base(small_encoder).encode(TEXTS)
    (small_encoder / "modules.json").unlink()
    plain = load_base(small_encoder).encode(TEXTS)
    assert np.abs(plain / np.linalg.norm(plain, axis=1, keepdims=True) - with_modules).max() < 1e-6


def module(kind: str, path: str = "") -> dict:
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


TRANSFORMER, POOLING = module("Transformer"), module("Pooling", "1_Pooling")
CONFIG, POOLING_CONFIG = "config.json", "1_Pooling/config.json"
PROMPTS, LENGTH = "config_sentence_transformers.json", "sentence_bert_config.json"
FAULTS = [  # file, its keys or content, code, what the message names
    (
        "modules.json",
        [TRANSFORMER, POOLING, module("Dense", "2_Dense")],
        "unsupported",
        "Pooling, Dense",
    ),
    ("modules.json", [TRANSFORMER, module("Normalize"), POOLING], "unsupported", "Normalize, Pool"),
    ("modules.json", [{"path": ""}], "unreadable", "[0].type"),
    ("modules.json", [module("Transformer", "0_A"), POOLING], "unsupported", "'0_A'"),
    ("modules.json", "[}", "unreadable", "modules.json"),
    ("modules.json", [{"type": "a.Pooling", "path": "../1_Pooling"}], "unreadable", "../1_P"),
    (POOLING_CONFIG, {"pooling_mode": 5}, "unreadable", "pooling_mode"),
    (LENGTH, {"max_seq_length": "x"}, "unreadable", "max_seq_length"),
    (POOLING_CONFIG, {"pooling_mode_cls_token": True}, "unsupported", "mean and cls"),
    (PROMPTS, {"default_prompt_name": "query"}, "unsupported", "'query'"),
    (CONFIG, {"position_embedding_type": "relative_key"}, "unsupported", "'relative_key'"),
    (CONFIG, {"hidden_act": "quick"}, "unsupported", "'quick'"),
    (CONFIG, {"is_decoder": True}, "unsupported", "is_decoder"),
    (CONFIG, {"num_attention_heads": 5}, "unreadable", "hidden_size"),
    (CONFIG, {"hidden_size": None}, "unreadable", "hidden_size"),
    (CONFIG, {"num_hidden_layers": 3}, "unreadable", "encoder.layer.2."),
    (CONFIG, {"quantization": {"bits": 4, "group_size": 64}}, "unsupported", "float32"),
    (CONFIG, {"model_type": "roberta"}, "unsupported", "'roberta'"),
    ("vocab.txt", "\n".join([*VOCABULARY, "one", "more"]), "mismatch", ""),
    ("model.safetensors", None, "not-found", "model*.safetensors"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]} {fault[3]}")
def test_what_is_not_supported_is_named(small_encoder, fault):
    name, content, code, part = fault
    file = small_encoder / name
    if content is None:
        file.unlink()
    elif isinstance(content, dict):
        set_keys(file, **content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    with raises(code, None, str(small_encoder), part) as error:
        load_base(small_encoder)
    assert "\n" not in error.value.message


def test_an_encoder_stays_in_float32(small_encoder):
    for setting, value in {"quantize": "nf4", "compute_dtype": "float16"}.items():
        with raises("unsupported", setting, value, str(small_encoder)):
            load_base(small_encoder, **{setting: value})


def test_encode_rejects_what_is_no_text(small_encoder):
    base = load_base(small_encoder)
    for texts, name in (("one text", "texts"), (["a", 3], "list of texts")):
        with raises("invalid", "texts", name):
            base.encode(texts)
    with raises("invalid", "batch_size", "0"):
        base.encode(["a"], batch_size=0)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_modern_bert_reads_both_names_and_no_padding(tmp_path, prefix):
    base = load_base(write_encoder(tmp_path / "modern", prefix=prefix, **MODERN))
    texts = ["how do i fix a car?", "a", "steps to repair the vehicle " * 4]
    together = base.encode(texts)
    alone = np.concatenate([base.encode([text]) for text in texts])
    assert np.abs(together - alone).max() < 1e-5
    assert np.abs(together - together[:1]).max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "code", "name"),
    [
        ({"layer_types": ["full_attention"]}, "unreadable", "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "unsupported", "rotary"),
        ({"hidden_activation": "tanh"}, "unsupported", "hidden_activation 'tanh'"),
    ],
)
def test_modern_bert_of_another_kind_is_named(tmp_path, changes, code, name):
    folder = write_encoder(tmp_path / "modern", **MODERN)
    set_keys(folder / "config.json", **changes)
    with raises(code, None, name):
        load_base(folder)
