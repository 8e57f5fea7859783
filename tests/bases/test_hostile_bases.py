"""Checkpoints of a stranger: whatever their files say, one line that names the file."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mlx_packs.bases.files import check_files, read_config, read_record, tiny_checkpoint
from mlx_packs.bases.tokenizer import load_encoder_tokenizer, load_tokenizer
from mlx_packs.errors import PackError
from tests.helpers.bases import copy_tiny
from tests.helpers.errors import check, raises
from tests.helpers.rows import write_rows

TINY = json.loads((tiny_checkpoint() / "config.json").read_text())
TEMPLATE = "chat_template.jinja"


@pytest.fixture
def base(here) -> Path:
    """A copy of the tiny base, as ``b``; its weights are a link."""
    return copy_tiny(here / "b")


def set_config(base: Path, **values) -> Path:
    (base / "config.json").write_text(json.dumps({**TINY, **values}))
    return base


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("hidden_size", bad) for bad in (0, -1, "9", 2**40, [1], {}, True)],
        *[("num_hidden_layers", bad) for bad in (0, -1, 2**40, 10_001, "6", 6.5, [6])],
        *[("num_attention_heads", bad) for bad in (0, "4", 2**31, [0])],
        *[("max_position_embeddings", bad) for bad in ("many", -1, [1], 1.5)],
        *[("rope_scaling", bad) for bad in ("x", [1], 1)],
        *[("rope_theta", bad) for bad in (0, -1.0, "x", float("nan"), float("inf"))],
        *[("quantization", bad) for bad in ("x", [4], {"bits": 0}, {"group_size": -64})],
        *[("quantization_config", bad) for bad in ("x", 4, {"quant_method": 4})],
        *[("text_config", bad) for bad in ("x", [1], {"num_hidden_layers": "x"})],
        *[("model_type", bad) for bad in (None, 3, ["qwen3"], {})],
        *[("torch_dtype", bad) for bad in (16, ["bfloat16"], {})],
        *[("eos_token_id", bad) for bad in ("x", ["x"], {}, [[1]])],
        *[("hidden_act", bad) for bad in (["silu"], 1)],
        *[("rms_norm_eps", bad) for bad in ("x", float("nan"))],
        ("rope_scaling", {"factor": "x"}),
        ("tie_word_embeddings", "no"),
    ],
)
def test_a_value_of_another_type_or_range_names_key_and_file(base, key, value):
    set_config(base, **{key: value})
    with raises("unreadable", None, str(base / "config.json"), key.split(".")[0]):
        check_files(base)


@pytest.mark.parametrize(
    "config",
    [
        {"intermediate_size": [8, 9], "num_key_value_heads": [1, 2], "head_dim": None},
        {"rope_theta": [1e4, 1e6], "rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"num_experts": 0, "eos_token_id": [1, 2], "text_config": None, "rope_scaling": None},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}},
        {"quantization": {"bits": 4, "group_size": 64, "lm_head": False, "a.b": {"bits": 8}}},
        {"max_position_embeddings": None, "torch_dtype": None, "tie_word_embeddings": None},
    ],
)
def test_what_real_families_have_is_accepted(tmp_path, config):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "any", "num_hidden_layers": 2, **config}))
    assert read_config(file)["num_hidden_layers"] == 2


def test_more_blocks_than_tensors_are_not_counted_through(base):
    with raises("unreadable", None, "config.json", "num_hidden_layers is 9000", "tensors"):
        check_files(set_config(base, num_hidden_layers=9000))
    with raises("unreadable", None, "config.json", "num_experts"):
        check_files(set_config(base, text_config={"num_experts": 2**30}))


def test_plan_of_a_config_alone_is_bounded(here, rejected):
    (here / "c").mkdir()
    for values in ({"num_hidden_layers": 2**40}, {"hidden_size": 2**62}, {"hidden_size": "x"}):
        config = {k: v for k, v in TINY.items() if k != "quantization"} | values
        (here / "c" / "config.json").write_text(json.dumps(config))
        check(rejected("plan", "--model", "c"), "unreadable", None, *values)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", TEMPLATE])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_file_of_a_base_that_is_no_file_is_not_opened(base, name, kind):
    (base / name).unlink()
    if kind == "pipe":
        os.mkfifo(base / name)
    elif kind == "device":
        (base / name).symlink_to("/dev/zero")
    else:
        (base / name).mkdir()
    with raises("unreadable", None, name):
        check_files(base)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_of_another_shape_names_the_index(base, index):
    (base / "model.safetensors.index.json").write_text(index)
    with raises("unreadable", None, "model.safetensors.index.json"):
        check_files(base)


@pytest.mark.parametrize("record", ["[]", '{"files": {"../a": {"bytes": 1, "sha256": "0"}}}'])
def test_a_record_of_somebody_else_is_not_taken_for_ours(base, record):
    (base / "quantization.json").write_text(record)
    assert read_record(base) is None
    assert check_files(base)["model_type"] == "qwen3"


TOKENIZERS = {
    "tokenizer.json": [
        "",
        "{}",
        "[" * 99_999,
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        '{"version": "1.0", "model": {"type": "WordPiece", "vocab": {}, "unk_token": "?"}}',
        '{"version": "1.0", "added_tokens": [{}], "model": {"type": "BPE", "vocab": {}, "merges": []}}',
    ],
    "tokenizer_config.json": [
        "[]",
        "[" * 99_999,
        '{"tokenizer_class": 1}',
        '{"eos_token": {"a": 1}}',
        '{"chat_template": {"a": {}}}',
        '{"added_tokens_decoder": {"x": 1}}',
        '{"model_max_length": "x"}',
    ],
    "special_tokens_map.json": ["[]", "[" * 99_999, '{"bos_token": []}'],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in TOKENIZERS.items() for text in texts]
)
def test_a_tokenizer_that_no_library_reads_is_one_line(base, name, text):
    if name != "tokenizer.json":
        (base / TEMPLATE).unlink()
    (base / name).write_text(text)
    try:  # transformers takes some of them
        load_tokenizer(base, TINY, False)
    except PackError as error:
        check(error, "unreadable", None, str(base))
        assert "\n" not in error.message and len(error.message) < 700
    else:
        assert name != "tokenizer.json"


def test_a_tokenizer_that_fails_on_a_text_names_its_folder(base, rejected):
    letters = [chr(code) for code in range(33, 127)]
    vocab = {word: i for i, word in enumerate([*letters, *(f"##{letter}" for letter in letters)])}
    model = {"type": "WordPiece", "unk_token": "?u", "continuing_subword_prefix": "##"}
    model |= {"max_input_chars_per_word": 99, "vocab": vocab}
    parts = {"added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (base / "tokenizer.json").write_text(json.dumps({"version": "1.0", **parts}))
    load_tokenizer(base, TINY, False)
    chat = rejected("generate", "--model", "b", "--prompt", "\u00e9")
    check(chat, "data", None, "b/chat_template.jinja", "UNK")
    write_rows(base.parent / "d", train=[{"text": "\u00e9"}] * 4)
    train = rejected("train", "--model", "b", "--data", "d", "--show-mask")
    check(train, "unreadable", None, "b: the tokenizer", "UNK")


def test_a_generation_config_with_another_end_is_one_line(base, rejected):
    options = ("--model", "b", "--data", "tiny", "--show-mask")
    for text in ('{"eos_token_id": {"a": 1}}', "[1]", "[" * 99_999):
        (base / "generation_config.json").write_text(text)
        check(rejected("train", *options), "unreadable", None, "b: ")


def test_a_tokenizer_of_an_encoder_that_is_damaged_is_one_line(encoder, here):
    folder = shutil.copytree(encoder, here / "e")
    config = json.loads((folder / "config.json").read_text())
    for text in ("{}", "[" * 99_999, '{"model": {"type": "WordPiece"}}'):
        (folder / "tokenizer.json").write_text(text)
        with raises("unreadable", None, "tokenizer"):
            load_encoder_tokenizer(folder, config, False, False)
