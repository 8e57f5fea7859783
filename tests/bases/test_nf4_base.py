"""A base in NF4: modules, loading, matmul paths, its packs; its bits are those of bitsandbytes."""

import hashlib
import json
import shutil
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import load_base
from mlx_packs.bases import loading
from mlx_packs.bases.bitsandbytes import from_bitsandbytes
from mlx_packs.bases.geometry import probe
from mlx_packs.config.choices import MATMUL_PATHS
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.nf4 import NF4Embedding, NF4Linear
from mlx_packs.nn.quantized import dense_module, quantized_modules
from mlx_packs.nn.surgery import replace_modules
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.ops import nf4
from mlx_packs.packs.base import load_base_for
from mlx_packs.packs.making import attach_pack
from mlx_packs.runtime import mx
from tests.bases.changes import change_tensors
from tests.helpers.bitsandbytes import to_bitsandbytes, write_bitsandbytes
from tests.helpers.checkpoints import write_dense, write_files, write_quantized
from tests.helpers.errors import raises
from tests.helpers.models import nf4_embedding
from tests.helpers.packs import random_pack
from tests.helpers.steps import largest_difference, lora_loss_and_gradients

TOKENS = mx.array([[5, 9, 300, 41, 7, 2, 3, 3900]])
NF4 = {"group_size": 64, "bits": 4, "mode": "nf4", "double_quant": True}


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """A bf16 checkpoint with one table."""
    folder = tmp_path_factory.mktemp("dense") / "base"
    return write_dense(folder, vocab_size=4096, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def stored(dense, tmp_path_factory) -> Path:
    """The same in NF4 on disk, double-quantized."""
    return write_quantized(tmp_path_factory.mktemp("stored") / "base", dense, mode="nf4")


@pytest.mark.parametrize("double_quant", [True, False])
def test_a_dense_checkpoint_is_quantized_as_it_is_loaded(dense, double_quant):
    base, reference = load_base(dense, "nf4", double_quant=double_quant), load_base(dense)
    packed = quantized_modules(base.model)
    assert len(packed) == 2 * 7 + 1
    for path, module in packed:
        weight = dict(reference.model.named_modules())[path].weight
        assert module.double_quant == double_quant and module.dtype == mx.float32
        wanted = nf4.dequantize(nf4.quantize(weight, 64, double_quant), mx.float32)
        assert mx.array_equal(frozen_weight(module).dense(), wanted).item()
    assert isinstance(base.model.model.embed_tokens, NF4Embedding)
    assert split_head(base.model) is not None  # so the loss is on supervised rows alone
    double = " double-quantized" if double_quant else ""
    assert f"nf4 4-bit g64{double}" in base.summary()


def test_bitsandbytes_checkpoint_is_read_without_quantizing_again(dense, tmp_path):
    result = load_base(dense, "nf4", keep=("embed_tokens",))
    folder = write_bitsandbytes(dense, tmp_path / "bnb")
    base = load_base(folder)
    assert base.quantization == NF4
    assert mx.array_equal(base.model(TOKENS), result.model(TOKENS)).item()

    pack = random_pack(base).save(tmp_path / "p")
    attach_pack(load_base_for(pack, folder), pack).detach()


def test_modules_are_left_dense_by_name(dense, tmp_path):
    base = load_base(dense, "nf4", keep=("down_proj", "lm_head", "embed_tokens"))
    modules = dict(base.model.named_modules())
    assert type(modules["model.embed_tokens"]) is nn.Embedding
    assert type(modules["model.layers.1.mlp.down_proj"]) is nn.Linear
    assert type(modules["model.layers.1.mlp.up_proj"]) is NF4Linear
    assert "nf4 4-bit g64 double-quantized without down_proj, lm_head, embed" in base.summary()
    again = load_base_for(random_pack(base).save(tmp_path / "p"), dense)
    assert type(again.model.layers[0].mlp.down_proj) is nn.Linear
    with raises("unknown", "keep", "down_prj", "'down_proj'"):
        load_base(dense, "nf4", keep=("down_prj",))


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize(("width", "block"), [(128, 64), (40, 32)])  # blocks inside, across rows
def test_embedding_rows_are_those_of_the_dense_table(width, block, double_quant):
    packed = nf4_embedding(nn.Embedding(37, width), block, double_quant)
    table, tokens = frozen_weight(packed).dense(), mx.array([[0, 36, 5], [5, 5, 21]])
    assert mx.array_equal(packed(tokens), table[tokens]).item()
    x = mx.random.normal((3, width))
    assert mx.allclose(packed.as_linear(x), x @ table.T, atol=1e-4).item()


def test_a_linear_with_bias_is_its_dequantized_self():
    linear = nn.Linear(96, 40)
    packed = NF4Linear.from_linear(linear)
    x = mx.random.normal((2, 5, 96))
    wanted = x @ frozen_weight(packed).dense().T + linear.bias
    assert mx.allclose(packed(x), wanted, atol=1e-5).item()
    assert not packed.trainable_parameters() and "double-quantized" in repr(packed)


def test_a_probe_describes_the_width_of_nf4(dense):
    base = load_base(dense, "nf4")
    module = base.model.layers[0].self_attn.o_proj
    result = probe("o_proj", module, base.config)
    assert (result.in_features, result.out_features, result.stored_width) == (128, 128, 64)
    assert "nf4 4-bit g64, stored width 64 = 128 x 4 / 8" in result.describe()


def test_gradients_on_nf4_are_those_on_the_dequantized_base(stored, tmp_path):
    base = load_base(stored)
    packed = quantized_modules(base.model)
    replace_modules(base.model, [(path, dense_module(module)) for path, module in packed])
    config = {k: v for k, v in base.config.items() if not k.startswith("quantization")}
    weights = dict(tree_flatten(base.model.parameters()))
    dense = write_files(tmp_path / "dense", weights, config)

    loss, gradients = lora_loss_and_gradients(dense, "quantized")
    largest = max(mx.abs(gradient).max().item() for gradient in gradients.values())
    for path in MATMUL_PATHS:
        result, of_path = lora_loss_and_gradients(stored, path)
        assert result == pytest.approx(loss, rel=1e-5)
        assert largest_difference(of_path, gradients) < 1e-5 * largest, path


def test_a_pack_on_nf4_loads_its_base_as_it_was(dense, stored, tmp_path):
    base = load_base(dense, "nf4", double_quant=False)
    pack = random_pack(base).save(tmp_path / "p")
    assert pack.manifest["base"]["quantization"] == NF4 | {"double_quant": False}
    again = load_base_for(pack, dense)
    assert not again.model.layers[0].self_attn.q_proj.double_quant
    attach_pack(again, pack).detach()

    with raises("mismatch", None, "nf4 4-bit g64,", "nf4 4-bit g64 double-quantized"):
        attach_pack(load_base(dense, "nf4"), pack)
    with raises("mismatch", None, str(stored)):
        load_base_for(pack, stored)


BROKEN = {
    "absmax of another size": ("absmax", lambda t: t[:-3], "q_proj: "),
    "NaN in nested absmax": ("nested_absmax", lambda t: t * float("nan"), "q_proj.nested_absmax"),
    "infinite offset": ("offset", lambda t: t + float("inf"), "q_proj.offset"),
    "no weight": ("weight", None, "q_proj.weight"),
    "no offset": ("offset", None, "'offset'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_quantized_tensors_are_named(stored, tmp_path, name):
    part, change, named = BROKEN[name]
    folder = shutil.copytree(stored, tmp_path / "b")
    (folder / "quantization.json").unlink()
    key = f"model.layers.0.self_attn.q_proj.{part}"

    def damage(tensors):
        tensor = tensors.pop(key)
        if change is not None:
            tensors[key] = change(tensor)

    change_tensors(folder, damage)
    with raises("unreadable", None, "q_proj", named) as error:
        load_base(folder)
    assert error.value.message.startswith(f"{folder}: ")


NAME = "model.layers.0.mlp.up_proj.weight"
PATH = NAME.removesuffix(".weight")
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
DTYPES = ("float32", "bfloat16", "float16")
KINDS = ("random", "constant", "zero", "outlier", "denormal", "ties")
SHAPES = {  # O, D
    "whole_blocks": (40, 512),
    "blocks_across_rows": (7, 72),
    "short_last_block": (5, 90),
    "less_than_a_block": (1, 6),
    "many_blocks": (520, 514),
}


def weight_of(kind: str, shape: tuple[int, int]) -> np.ndarray:
    """float32, by integer arithmetic, so that it is the same with every version of numpy."""
    numbers = np.arange(4 * shape[0] * shape[1], dtype=np.uint64)
    drawn = (numbers * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)) >> 40
    w = (drawn.astype(np.float64) / 2**24 - 0.5).reshape(4, *shape).sum(axis=0)  # nearly normal

    if kind == "constant":
        w[:] = 0.37
    elif kind == "zero":
        w[:] = 0
    elif kind == "outlier":
        w[shape[0] // 2, 1] = 1e4
    elif kind == "denormal":
        w *= 1e-40
    elif kind == "ties":
        levels = np.array(nf4.LEVELS)
        w = ((levels[1:] + levels[:-1]) / 2)[np.int64(40 * np.abs(w)) % 15]
        w[:, ::32] = 1

    return w.astype(np.float32)


def packed_of(kind, shape, dtype, block_size, double_quant) -> nf4.NF4Weight:
    w = mx.array(weight_of(kind, SHAPES[shape])).astype(getattr(mx, dtype))
    return nf4.quantize(w, block_size, double_quant)


def parts(packed: nf4.NF4Weight) -> list[np.ndarray]:
    result = (packed.weight, packed.absmax, packed.nested_absmax, packed.offset)
    return [np.array(part).ravel() for part in result if part is not None]


def digest(arrays: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


CASES = [  # one of each kind, dtype, shape and block size; what bitsandbytes 0.50.2 makes on x86-64
    (("random", "whole_blocks", "float32", 64, True), "e6da77045da4ff88"),
    (("random", "many_blocks", "bfloat16", 64, True), "407848fbe104deb1"),
    (("random", "blocks_across_rows", "float16", 32, False), "cb1c77eb8353edf2"),
    (("constant", "short_last_block", "float32", 64, True), "2981cb649195e061"),
    (("zero", "short_last_block", "bfloat16", 64, False), "52b19d8d3f16d576"),
    (("zero", "whole_blocks", "float32", 256, True), "570ce1145b779de6"),
    (("outlier", "whole_blocks", "bfloat16", 32, True), "3e551a3d8659ac96"),
    (("denormal", "many_blocks", "float32", 128, True), "dcc8cf5ddc2edc99"),
    (("ties", "whole_blocks", "float32", 64, False), "32e3f901d8eb9d55"),
    (("random", "less_than_a_block", "float16", 64, True), "af34886ecd254089"),
]


@pytest.mark.parametrize(("case", "wanted"), CASES)
def test_quantize_gives_the_recorded_bytes_of_bitsandbytes(case, wanted):
    assert digest(parts(packed_of(*case))) == wanted


@pytest.mark.parametrize("double_quant", [True, False])
def test_tensors_of_bitsandbytes_and_back_are_the_same(double_quant):
    packed = packed_of("random", "short_last_block", "bfloat16", 64, double_quant)
    theirs = to_bitsandbytes(NAME, packed, "bfloat16")
    assert theirs[NAME].shape == (5 * 45, 1)
    ours = from_bitsandbytes({**theirs, "other": mx.ones(3)}, "here")
    assert ours.pop("other").shape == (3,)
    names = ["weight", "absmax", *(["nested_absmax", "offset"] if double_quant else [])]
    assert list(ours) == [f"{PATH}.{name}" for name in names]
    for name in names:
        assert mx.array_equal(ours[f"{PATH}.{name}"], getattr(packed, name)).item()


def test_weights_that_are_stored_as_another_dtype_are_read():
    packed = packed_of("random", "whole_blocks", "bfloat16", 64, True)
    theirs = to_bitsandbytes(NAME, packed, "bfloat16")
    stored = {**theirs, NAME: theirs[NAME].flatten().view(mx.bfloat16).reshape(-1, 1)}
    ours = [from_bitsandbytes(weights, "here")[NAME] for weights in (theirs, stored)]
    assert mx.array_equal(*ours).item()


def state_with(**changes):
    def change(theirs):
        state = json.loads(np.array(theirs[STATE]).tobytes())
        theirs[STATE] = mx.array(np.frombuffer(json.dumps(state | changes).encode(), np.uint8))

    return change


def tensor_with(part, make):
    def change(theirs):
        theirs[f"{NAME}{part}"] = make(theirs[f"{NAME}{part}"])

    return change


def renamed(part, other):
    def change(theirs):
        theirs[f"{NAME}{other}"] = theirs.pop(f"{NAME}{part}")

    return change


STATE_PART = ".quant_state.bitsandbytes__nf4"
UNREADABLE = {  # what is wrong -> change, what the message names
    "shape": (state_with(shape=[40, 500]), "shape [40, 500]", "10000"),
    "odd_width": (state_with(shape=[512, 41]), "shape", "[512, 41]"),
    "other_block": (state_with(blocksize=128), "'absmax'", "[160]", "[320]"),
    "type": (state_with(quant_type="nf5"), "quant_type", "'nf4'", "'nf5'"),
    "nan_offset": (state_with(nested_offset=float("nan")), "nested_offset", "nan"),
    "no_json": (tensor_with(STATE_PART, lambda t: t[:20]), "quant_state"),
    "map": (tensor_with(".quant_map", lambda t: t * 0.5), "quant_map"),
}
UNSUPPORTED = {
    "fp4": (renamed(STATE_PART, ".quant_state.bitsandbytes__fp4"), "'fp4'", "NF4"),
    "no_state": (renamed(STATE_PART, ".gone"), "quant_map", "quant_state"),
    "int8": (renamed(".absmax", ".SCB"), "load_in_8bit"),
}


@pytest.mark.parametrize("fault", UNREADABLE | UNSUPPORTED)
def test_tensors_that_contradict_each_other_are_rejected_by_name(fault):
    change, *names = (UNREADABLE | UNSUPPORTED)[fault]
    code = "unreadable" if fault in UNREADABLE else "unsupported"
    weight = packed_of("random", "whole_blocks", "float32", 64, True)
    theirs = to_bitsandbytes(NAME, weight, "float32")
    change(theirs)
    with raises(code, None, f"folder: {NAME}", *names, "`packs quantize`") as error:
        from_bitsandbytes(theirs, "folder")
    assert "\n" not in error.value.message


@pytest.fixture
def bnb():
    torch = pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    import bitsandbytes.functional

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the sum behind the offset depends on how many there are
    yield bitsandbytes.functional
    torch.set_num_threads(threads)


def theirs_of(bnb, kind, shape, dtype, block_size, double_quant):
    import torch

    w = torch.tensor(weight_of(kind, SHAPES[shape])).to(getattr(torch, dtype))
    codes, state = bnb.quantize_4bit(
        w, blocksize=block_size, quant_type="nf4", compress_statistics=double_quant
    )
    result = [codes, state.absmax]
    result += [state.state2.absmax, state.offset] if double_quant else []
    return [part.numpy().ravel() for part in result], codes, state


@pytest.mark.interop
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_and_dequantize_equal_bitsandbytes_bit_for_bit(bnb, kind, shape, dtype):
    import torch

    for block_size in nf4.BLOCK_SIZES:
        for double_quant in (True, False):
            packed = packed_of(kind, shape, dtype, block_size, double_quant)
            result, codes, state = theirs_of(bnb, kind, shape, dtype, block_size, double_quant)
            for ours, theirs in zip(parts(packed), result, strict=True):
                assert ours.tobytes() == theirs.tobytes()
            for out in DTYPES:
                # where the CPU has AVX512-BF16, bitsandbytes gives 0 for bfloat16 denormals
                if kind == "denormal" and out == "bfloat16":
                    continue
                state.dtype = getattr(torch, out)
                dense = bnb.dequantize_4bit(codes, state).float().numpy()
                ours = nf4.dequantize(packed, getattr(mx, out)).astype(mx.float32)
                assert np.array(ours).tobytes() == dense.reshape(SHAPES[shape]).tobytes()


@pytest.mark.interop
@pytest.mark.parametrize(("case", "wanted"), CASES)
def test_the_recorded_bytes_are_those_of_bitsandbytes(bnb, case, wanted):
    assert digest(theirs_of(bnb, *case)[0]) == wanted


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_a_checkpoint_of_transformers_has_the_same_logits_here(
    bnb, tmp_path, monkeypatch, family, double_quant
):
    import torch
    import transformers

    torch.manual_seed(0)
    small = getattr(transformers, f"{family}Config")(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=family == "Qwen3",
    )
    dense = getattr(transformers, f"{family}ForCausalLM")(small).to(torch.float32)
    dense.save_pretrained(tmp_path / "dense")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double_quant
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=torch.float32, quantization_config=config
    ).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    expected = theirs(torch.arange(1, 33)[None]).logits.detach().numpy()

    monkeypatch.setattr(loading, "load_tokenizer", lambda *_: None)
    here = loading.load_base_model(tmp_path / "theirs").model(mx.arange(1, 33)[None])
    assert np.abs(np.array(here) - expected).max() < 1e-3
