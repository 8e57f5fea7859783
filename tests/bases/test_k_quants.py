"""K-quants of GGUF files stay quantized: exactly, or in 8 bits within 1 %."""

import gguf
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, load_base, merge_pack
from mlx_packs.bases.files import public_name
from mlx_packs.bases.gguf.formats import choose_formats
from mlx_packs.bases.gguf.header import read_gguf
from mlx_packs.bases.loading import lazy_base
from mlx_packs.bases.precision import with_rounded_scales
from mlx_packs.errors import PackError
from mlx_packs.memory.read import estimator_of, read_headers
from mlx_packs.runtime import mx
from tests.bases.test_gguf import weights_of
from tests.helpers.gguf_file import write_tiny
from tests.helpers.packs import random_pack

TOKENS = mx.array([[5, 70, 80, 100]])
MIXED = {"token_embd": "Q6_K", "blk.0.attn_v": "Q6_K", "blk.1.ffn_up": "Q5_K"}
HALF = {"blk.1.attn_k": "Q8_0", "blk.0.ffn_gate": "MXFP4"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    content = bytearray(file.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name) + 4 + 16
    content[at : at + 4] = int(gguf.GGMLQuantizationType.Q1_0).to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(PackError, match=r"Q1_0.*cannot dequantize.*Q4_K_M") as raised:
        load_base(file)
    assert raised.value.code == "unsupported" and not list((cache / "gguf").glob("*"))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_scales_that_are_no_numbers(tmp_path, kind):
    file = tmp_path / "m.gguf"
    write_tiny(file, kind=kind, times=8)
    info = read_gguf(file).tensors["blk.1.ffn_down.weight"]
    content = bytearray(file.read_bytes())
    content[info.offset : info.offset + info.nbytes] = b"\xff" * info.nbytes
    file.write_bytes(content)
    with pytest.raises(PackError, match=r"blk\.1\.ffn_down\.weight has NaN or infinite"):
        load_base(file)
