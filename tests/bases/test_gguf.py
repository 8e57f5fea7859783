"""GGUF files as base models: weights, K-quants, config, tokenizer, names, and what is rejected."""

import json
import os
import struct

import gguf
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, load_base, merge_pack
from mlx_packs.bases.files import public_name, resolve_checkpoint
from mlx_packs.bases.gguf.blocks import FORMATS, read_affine, read_dense
from mlx_packs.bases.gguf.formats import choose_formats
from mlx_packs.bases.gguf.header import read_gguf
from mlx_packs.bases.loading import lazy_base
from mlx_packs.bases.precision import with_rounded_scales
from mlx_packs.bases.readers import local_model
from mlx_packs.errors import PackError
from mlx_packs.memory.read import estimator_of, read_headers
from mlx_packs.runtime import mx
from tests.bases.changes import overwrite
from tests.helpers.gguf_file import HEADS, KV_HEADS, WIDTH, write_tiny
from tests.helpers.packs import random_pack

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
LINEAR, YARN = gguf.RopeScalingType.LINEAR, gguf.RopeScalingType.YARN
TOKENS = mx.array([[5, 70, 80, 100]])
MIXED = {"token_embd": "Q6_K", "blk.0.attn_v": "Q6_K", "blk.1.ffn_up": "Q5_K"}
HALF = {"blk.1.attn_k": "Q8_0", "blk.0.ffn_gate": "MXFP4"}
DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MLX_PACKS_CACHE", str(folder))
    return folder


HALF_SCALES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def random_blocks(kind: str, rows: int = 8, columns: int = 96) -> np.ndarray:
    """Blocks of random bits whose scales are finite: also subnormal, negative and large ones."""
    rng = np.random.default_rng(3)
    per_block, size = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * columns // per_block, size), dtype=np.uint8)
    scales = rng.normal(0, 1, (len(blocks), 2)) * 10.0 ** rng.integers(-8, 3, (len(blocks), 2))
    count = 2 if kind.endswith(("1", "K")) else 1
    blocks[:, : 2 * count] = scales[:, :count].astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def file_of(tmp_path, data: np.ndarray, kind: str):
    """A file with one tensor ``w`` of this type, as it is read."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(tmp_path / "x.gguf")


def weights_of(base) -> dict[str, np.ndarray]:
    """The weights of a base by path, dense."""
    weights = {}
    for path, module in base.model.named_modules():
        if "scales" in module:
            parts = (module.weight, module.scales, module.biases)
            weights[path] = np.array(mx.dequantize(*parts, module.group_size, module.bits))
        elif "weight" in module:
            weights[path] = np.array(module.weight)
    return weights


@pytest.mark.parametrize("kind", [*HALF_SCALES, "Q4_K", "Q5_K", "F16", "BF16"])
def test_weights_are_the_very_ones_of_the_file(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("mlx_packs.bases.gguf.blocks._ROWS_BYTES", 1000)  # several slices
    quantized_type = gguf.GGMLQuantizationType[kind]
    if kind.endswith("16"):
        numbers = np.random.default_rng(5).normal(size=(4, 64)).astype(np.float32)
        data = gguf.quants.quantize(numbers, quantized_type)
    else:
        data = random_blocks(kind, columns=512 if kind.endswith("K") else 96)
    file = file_of(tmp_path, data.view(np.uint8), kind)
    expected = gguf.quants.dequantize(data, quantized_type).astype(np.float32)
    assert np.array_equal(read_dense(file, file.tensors["w"]), expected)

    if kind in FORMATS:
        (block_format,) = FORMATS[kind]
        weight, *numbers = read_affine(file, file.tensors["w"], block_format)
        parts = [mx.array(values).astype(mx.float32) for values in numbers]
        actual = mx.dequantize(mx.array(weight), *parts, 32, block_format.bits)
        assert np.array_equal(np.array(actual), expected)
        assert numbers[0].dtype == (np.float32 if kind.endswith("K") else np.float16)


def test_a_bias_that_overflows_float16_is_an_error_or_exact(tmp_path):
    blocks = random_blocks("Q8_0")
    scales = np.full(len(blocks.reshape(-1, 34)), 600, np.float16)
    blocks.reshape(-1, 34)[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    file = file_of(tmp_path, blocks, "Q8_0")

    _, scales, biases = read_affine(file, file.tensors["w"], FORMATS["Q8_0"][0])

    assert scales.dtype == biases.dtype == np.float32
    assert (biases == -128 * 600).all()


@pytest.mark.parametrize(
    ("architecture", "kind"), [*((name, "Q4_0") for name in ARCHITECTURES), ("llama", "F16")]
)
def test_every_architecture_loads_with_its_weights(tmp_path, architecture, kind):
    stored = write_tiny(tmp_path / "m.gguf", architecture, kind, {"token_embd": "Q8_0"})

    base = load_base(tmp_path / "m.gguf")
    weights = weights_of(base)
    assert np.array_equal(weights["model.embed_tokens"], stored["token_embd"])
    assert np.array_equal(weights["model.layers.1.mlp.down_proj"], stored["blk.1.ffn_down"])

    shift = 1 if architecture.startswith("gemma") else 0
    norm = weights["model.layers.1.input_layernorm"]
    np.testing.assert_allclose(norm + shift, stored["blk.1.attn_norm"], rtol=2e-3)
    assert ("model.layers.0.self_attn.q_norm" in weights) == (architecture in ("qwen3", "gemma3"))

    attention = "model.layers.1.self_attn"
    if architecture == "phi3":
        assert np.array_equal(weights[f"{attention}.qkv_proj"], stored["blk.1.attn_qkv"])
        return

    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        expected = stored[f"blk.1.attn_{name}"]
        if architecture == "llama":  # the halves of a head instead of pairs
            pairs = expected.reshape(heads, WIDTH // 2, 2, -1)
            expected = pairs.swapaxes(1, 2).reshape(expected.shape)
        assert np.array_equal(weights[f"{attention}.{name}_proj"], expected)

    assert np.isfinite(np.array(base.model(mx.array([[1, 70, 80]])))).all()


@pytest.mark.parametrize("kind", ["F16", "MXFP4"])
def test_dense_and_dequantized_types_are_quantized_on_request(tmp_path, kind):
    write_tiny(tmp_path / "m.gguf", kind=kind)

    base = load_base(tmp_path / "m.gguf", "affine4")

    assert base.model.layers[0].self_attn.q_proj.bits == 4
    assert 0.01 < base.rounding_error < 0.2 and "relative error" in base.summary()


def test_formats_are_mixed_in_a_file(tmp_path):
    kinds = {"token_embd": "Q8_0", "blk.0.attn_v": "F16", "blk.1.ffn_up": "Q5_1"}
    write_tiny(tmp_path / "m.gguf", kinds=kinds)

    base = load_base(tmp_path / "m.gguf")

    bits = {p: m.bits for p, m in base.model.named_modules() if "scales" in m}
    assert bits["model.embed_tokens"] == 8 and bits["model.layers.1.mlp.up_proj"] == 5
    assert bits["model.layers.0.self_attn.q_proj"] == 4
    assert "model.layers.0.self_attn.v_proj" not in bits
    embedding = {"group_size": 32, "bits": 8, "mode": "affine"}
    assert base.quantization["model.embed_tokens"] == embedding
    assert base.generate("hello", max_tokens=3) is not None
    with pytest.raises(PackError, match="quantized already"):
        load_base(tmp_path / "m.gguf", "affine4")


def test_tokenizer_template_and_ends_are_those_of_the_metadata(tmp_path):
    write_tiny(tmp_path / "m.gguf", change=lambda w: w.add_eot_token_id(4))

    tokenizer = load_base(tmp_path / "m.gguf").tokenizer

    assert tokenizer.eos_token_ids == {2, 4}
    assert tokenizer.bos_token == "<s>" and tokenizer.eos_token == "</s>"
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens[0] == 3 and tokens.count(4) == 1 and tokenizer.decode(tokens) == text
    assert tokenizer.encode("he") == [261]


def test_sentence_piece_merges_by_scores_and_falls_back_to_bytes(tmp_path):
    write_tiny(tmp_path / "m.gguf", tokenizer="llama")

    tokenizer = load_base(tmp_path / "m.gguf").tokenizer

    assert tokenizer.encode(" hello")[0] == 1  # BOS, as llama.cpp adds it by default
    tokens = tokenizer.encode(" hello", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(tokens) == ["▁hello"]
    tokens = tokenizer.encode("hé", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(tokens) == ["h", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokens) == "hé"


def test_the_folder_is_written_again_only_if_the_file_changes(tmp_path, cache):
    file = tmp_path / "m.gguf"
    write_tiny(file)
    first = load_base(file)
    folder = first.path
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert load_base(file).path == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before

    write_tiny(file, kind="Q8_0")

    second = load_base(file)
    assert second.quantization["bits"] == 8 and second.fingerprint != first.fingerprint
    assert [p.name for p in (cache / "gguf").iterdir()] == [folder.name]


def rejected(file, cache, *words: str) -> None:
    """Check that a file is rejected in one line with these words, and nothing is left of it."""
    with pytest.raises(PackError) as raised:
        load_base(file)
    text = raised.value.message
    assert "\n" not in text and str(file) in text
    for word in words:
        assert word in text, text
    assert not list((cache / "gguf").glob("*")) and not list((cache / "gguf").glob(".*"))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9999])
def test_a_file_that_is_cut_short(tmp_path, cache, share):
    file = tmp_path / "m.gguf"
    write_tiny(file)
    os.truncate(file, int(file.stat().st_size * share))
    rejected(file, cache, "cut short")


@pytest.mark.parametrize(
    ("at", "data", "word"),
    [
        (4, struct.pack("<I", 4), "version 4"),
        (4, struct.pack(">I", 3), "little-endian"),
        (8, struct.pack("<Q", 5000), ""),  # tensors
        (16, struct.pack("<Q", (1 << 64) - 1), ""),  # keys
    ],
)
def test_a_header_of_another_version_or_with_impossible_counts(tmp_path, cache, at, data, word):
    file = tmp_path / "m.gguf"
    write_tiny(file)
    overwrite(file, at, data)
    rejected(file, cache, word)


def test_a_tensor_of_an_unknown_type_or_place(tmp_path, cache):
    file = tmp_path / "m.gguf"
    write_tiny(file)
    name = b"blk.1.ffn_up.weight"
    at = file.read_bytes().index(name) + len(name) + 4 + 16
    for data in (struct.pack("<IQ", 3, 1 << 60), struct.pack("<IQ", 3, 7), struct.pack("<I", 999)):
        overwrite(file, at, data)
        rejected(file, cache, "blk.1.ffn_up.weight")


def scaled(kind):
    """Return what adds keys of a rope scaling to a writer."""

    def change(writer):
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    return change


def with_key(name: str, value: int):
    number = gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType.UINT32)
    return lambda writer: writer.kv_data[0].update({f"llama.{name}": number})


def with_tensor(name: str):
    twos = np.full(WIDTH // 2, 2, np.float32)
    return lambda writer: writer.add_tensor(f"{name}.weight", twos)


REJECTED = {  # architecture, settings of `write_tiny`, words
    "no tokenizer": ("llama", {"tokenizer": ""}, ["no tokenizer"]),
    "no template": ("llama", {"template": "{% for m in %}"}, ["template", "Jinja"]),
    "a LoRA": ("llama", {"change": lambda w: w.add_type("adapter")}, ["LoRA adapter"]),
    "a projector": ("llama", {"change": lambda w: w.add_type("mmproj")}, ["vision projector"]),
    "unknown": ("qwen35", {}, ["'qwen35'", ", ".join(ARCHITECTURES)]),
    "3 blocks": ("llama", {"change": with_key("block_count", 3)}, []),
    "many blocks": ("llama", {"change": with_key("block_count", 1 << 30)}, []),
    "gemma2 linear": ("gemma2", {"change": scaled(LINEAR)}, ["'linear'", "gemma2"]),
    "phi3 yarn": ("phi3", {"change": scaled(YARN)}, ["'yarn'", "linear, longrope"]),
    "yarn": ("qwen2", {"change": scaled(YARN)}, ["'yarn'", "safetensors"]),
    "qwen3 freqs": ("qwen3", {"change": with_tensor("rope_freqs")}, ["rope_freqs"]),
    "other freqs": ("llama", {"change": with_tensor("rope_freqs")}, ["rope_freqs", "Llama 3"]),
    "long factors": ("llama", {"change": with_tensor("rope_factors_long")}, ["rope_factors_long"]),
    "one of two": ("phi3", {"change": with_tensor("rope_factors_long")}, ["one of two"]),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_is_not_supported_or_contradicts_itself_is_named(tmp_path, cache, name):
    architecture, settings, words = REJECTED[name]
    write_tiny(tmp_path / "m.gguf", architecture, **settings)
    rejected(tmp_path / "m.gguf", cache, *words)


def test_parts_a_pipe_and_a_folder_of_files(tmp_path, cache):
    write_tiny(tmp_path / "m.gguf", change=lambda writer: writer.add_uint16("split.count", 3))
    rejected(tmp_path / "m.gguf", cache, "3 parts", "llama-gguf-split --merge")
    os.mkfifo(tmp_path / "pipe.gguf")
    rejected(tmp_path / "pipe.gguf", cache, "named pipe")
    with pytest.raises(PackError):
        load_base(tmp_path / "gone.gguf")
    (tmp_path / "f").mkdir()
    write_tiny(tmp_path / "f" / "m.gguf")
    with pytest.raises(PackError) as raised:
        load_base(tmp_path / "f")
    assert f"--model {tmp_path / 'f' / 'm.gguf'}" in raised.value.message


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_rope_scaling_reaches_the_model(tmp_path, architecture):
    write_tiny(tmp_path / "plain.gguf", architecture)
    write_tiny(tmp_path / "m.gguf", architecture, change=scaled(LINEAR))
    tokens = mx.array([list(range(5, 45))])

    plain = load_base(tmp_path / "plain.gguf").model(tokens)
    base = load_base(tmp_path / "m.gguf")

    assert not np.allclose(np.array(base.model(tokens)), np.array(plain), atol=1e-4)
    scaling = base.config["rope_scaling"]
    assert scaling["rope_type"] == "linear" and scaling["factor"] == 4


@pytest.mark.parametrize(
    ("key", "factor"),
    [("rope.scaling.factor", 1), ("rope.scaling.factor", 4), ("rope.scale_linear", 4)],
)
def test_a_rope_factor_without_a_type_is_linear_as_in_llama_cpp(tmp_path, key, factor):
    write_tiny(tmp_path / "m.gguf", change=lambda w: w.add_float32(f"llama.{key}", factor))
    scaling = load_base(tmp_path / "m.gguf").config.get("rope_scaling")
    linear = {"type": "linear", "rope_type": "linear", "factor": 4}
    assert scaling == (linear if factor == 4 else None)


def test_the_factors_of_llama_3_are_its_scaling(tmp_path):
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(0, WIDTH, 2) / WIDTH)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    write_tiny(tmp_path / "m.gguf", change=lambda w: w.add_tensor("rope_freqs.weight", factors))
    scaling = load_base(tmp_path / "m.gguf").config["rope_scaling"]
    assert scaling["rope_type"] == "llama3" and scaling["factor"] == 8


def test_vision_tensors_are_left_out_with_a_line(tmp_path, caplog):
    ones = np.ones((32, 32), np.float32)
    write_tiny(tmp_path / "m.gguf", change=lambda w: w.add_tensor("v.patch_embd.weight", ones))

    with caplog.at_level("WARNING", "mlx_packs"):
        load_base(tmp_path / "m.gguf")

    assert "tensors of its vision model are left out (1)" in caplog.text


@pytest.fixture
def file(tmp_path):
    """A model that is mostly Q4_K, as Q4_K_M files are."""
    write_tiny(tmp_path / "m.gguf", "qwen2", "Q4_K", MIXED, times=8)
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_4_and_5_bits_are_exact_and_6_bits_near(tmp_path, architecture):
    file = tmp_path / "m.gguf"
    stored = write_tiny(file, architecture, "Q4_K", MIXED | HALF, times=8)

    base = load_base(file)

    bits = {path: m.bits for path, m in base.model.named_modules() if "scales" in m}
    assert bits["model.layers.0.self_attn.v_proj"] == bits["model.embed_tokens"] == 8
    assert (bits["model.layers.1.mlp.up_proj"], bits["model.layers.1.mlp.down_proj"]) == (5, 4)

    weights = weights_of(base)
    assert np.array_equal(weights["model.layers.1.mlp.up_proj"], stored["blk.1.ffn_up"])
    assert np.array_equal(weights["model.layers.0.mlp.down_proj"], stored["blk.0.ffn_down"])
    embedding = stored["token_embd"]
    error = np.sqrt(np.square(weights["model.embed_tokens"] - embedding).mean()) / embedding.std()
    assert 0.001 < error < 0.01
    q = stored["blk.0.attn_q"]
    assert np.array_equal(weights["model.layers.0.self_attn.q_proj"], q) == (
        architecture != "llama"  # whose rows are in another order
    )

    line = base.summary()
    assert "affine 4-bit g32 (Q4_K and Q5_K and Q8_0 exact, MXFP4 dense, Q6_K 0." in line


@pytest.mark.parametrize(("kind", "least"), [("Q3_K", 0.0042), ("Q2_K", 0.0025)])
def test_fewer_bits_take_the_smallest_format_within_1_percent(tmp_path, monkeypatch, kind, least):
    file = tmp_path / "m.gguf"
    stored = write_tiny(file, kind=kind, times=8)

    base = load_base(file)

    module = base.model.layers[1].mlp.down_proj
    assert (module.bits, module.group_size) == (8, 128)
    expected = stored["blk.1.ffn_down"]
    difference = weights_of(base)["model.layers.1.mlp.down_proj"] - expected
    assert np.sqrt(np.square(difference).mean() / np.square(expected).mean()) < 0.01

    names = {"w.weight": "blk.1.ffn_down.weight"}
    for most, group_size in ((least, 32), (1e-4, None)):
        monkeypatch.setattr("mlx_packs.bases.gguf.formats._MOST_ERROR", most)
        formats, errors = choose_formats(read_gguf(file), names, mx.float16, dense_k=False)
        chosen = formats.get("w.weight")
        assert (chosen and chosen.group_size) == group_size
        assert (errors[kind] is None) == (chosen is None)


def test_a_name_leads_to_the_dense_weights(file):
    exact = file.with_name("exact.gguf")
    write_tiny(exact, "qwen2", "Q4_K", times=8)

    dense = load_base(f"dense:{exact}")
    base = load_base(exact)

    assert not dense.quantization and dense.public_name == "dense:exact.gguf"
    assert dense.fingerprint != base.fingerprint
    # the dense copy is in float16
    np.testing.assert_allclose(base.model(TOKENS), dense.model(TOKENS), rtol=0.02, atol=0.02)

    assert public_name("dense:gone/m.gguf") == "dense:gone/m.gguf"
    assert load_base(f"dense:{file}", "affine4").model.layers[0].mlp.up_proj.group_size == 64
    with pytest.raises(PackError, match=r"dense:FILE\.gguf"):
        load_base(file, "affine4")
    for name in ("dense:tiny", f"dense:{file.parent}"):
        with pytest.raises(PackError, match="not a GGUF file"):
            load_base(name)
    with pytest.raises(PackError, match="cannot be read"):
        load_base("dense:gone.gguf")


def test_scales_are_rounded_where_a_device_computes_in_float16(file):
    loaded = load_base(file)
    scales = loaded.model.layers[0].mlp.down_proj.scales
    assert scales.dtype == mx.float32

    base = lazy_base(file)
    half = base.model.layers[0].mlp.down_proj.scales
    assert half.dtype == mx.float16 and mx.array_equal(half, scales.astype(mx.float16))
    base.compute_dtype = "float16"
    assert "Q4_K 0.0" in base.summary() and "exact" not in base.summary()

    weights = {"w.scales": scales}
    assert with_rounded_scales(weights, {}, mx.float16)["w.scales"].dtype == mx.float32


def test_a_plan_counts_the_weights_as_they_are_loaded(file):
    headers = read_headers(file)
    assert headers.tensors["model.layers.0.mlp.down_proj.scales"]["dtype"] == "F16"

    train = TrainConfig(matmul_path="quantized")
    estimator = estimator_of(headers.config)
    plan = estimator.estimate(headers, LoRAConfig(), train, estimator.smallest_shape(train))

    parameters = load_base(file).model.parameters()
    assert plan.base == sum(tensor.nbytes for _, tensor in tree_flatten(parameters))


@pytest.mark.slow
def test_a_pack_is_merged(file, tmp_path):
    base = load_base(file)
    pack = random_pack(base, size=0.3).save(tmp_path / "p")

    with base.applied(pack):
        expected = np.array(base.model(TOKENS))
    merge_pack(pack, file, tmp_path / "merged", requantize="same", rows=1, max_drift=9.0)
    merged = load_base(tmp_path / "merged")
    assert "exact" not in merged.summary()
    stored = mx.load(str(tmp_path / "merged" / "model.safetensors"))
    assert {tensor.dtype for tensor in stored.values()} <= {mx.float16, mx.uint32}
    assert np.corrcoef(np.array(merged.model(TOKENS)).ravel(), expected.ravel())[0, 1] > 0.99


def test_a_type_without_a_formula(file, cache):
    name = b"blk.0.ffn_down.weight"
    at = file.read_bytes().index(name) + len(name) + 4 + 16
    overwrite(file, at, int(gguf.GGMLQuantizationType.Q1_0).to_bytes(4, "little"))
    with pytest.raises(PackError, match=r"Q1_0.*cannot dequantize.*Q4_K_M") as raised:
        load_base(file)
    assert raised.value.code == "unsupported" and not list((cache / "gguf").glob("*"))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_scales_that_are_no_numbers(tmp_path, kind):
    file = tmp_path / "m.gguf"
    write_tiny(file, kind=kind, times=8)
    info = read_gguf(file).tensors["blk.1.ffn_down.weight"]
    overwrite(file, info.offset, b"\xff" * info.nbytes)
    with pytest.raises(PackError, match=r"blk\.1\.ffn_down\.weight has NaN or infinite"):
        load_base(file)


@pytest.fixture
def ollama(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    manifest = tmp_path / "manifests/registry.ollama.ai/library/qwen3/4b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": DIGEST}
    manifest.write_text(json.dumps({"layers": [layer]}))
    (tmp_path / "blobs").mkdir()
    return tmp_path / "blobs" / DIGEST.replace(":", "-")


def test_a_name_of_ollama_leads_to_its_blob(ollama):
    write_tiny(ollama, "qwen3")
    assert local_model("ollama:qwen3:4b") == ollama
    assert (resolve_checkpoint("ollama:qwen3:4b") / "config.json").is_file()


@pytest.mark.parametrize(
    "name", ["ollama:qwen3:4b", "ollama:none", "ollama:../../x:4b", "lmstudio:a/b"]
)
def test_a_blob_that_is_gone_and_names_of_nothing(ollama, name):
    with pytest.raises(PackError) as raised:
        resolve_checkpoint(name)
    text = raised.value.message
    assert (str(ollama) if "qwen3" in name else f"--model {name}") in text and "\n" not in text
