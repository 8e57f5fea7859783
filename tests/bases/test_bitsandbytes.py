"""bitsandbytes: its bits when we quantize, and its checkpoints as they are."""

import hashlib
import json

import numpy as np
import pytest

from mlx_packs.bases import loading
from mlx_packs.bases.bitsandbytes import from_bitsandbytes
from mlx_packs.ops import nf4
from mlx_packs.runtime import mx
from tests.helpers.bitsandbytes import to_bitsandbytes
from tests.helpers.errors import raises

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
    "no_shape": (state_with(shape=None), "shape", "None"),
    "odd_width": (state_with(shape=[512, 41]), "shape", "[512, 41]"),
    "block": (state_with(blocksize=512), "blocksize", "(32, 64, 128, 256)", "512"),
    "other_block": (state_with(blocksize=128), "'absmax'", "[160]", "[320]"),
    "type": (state_with(quant_type="nf5"), "quant_type", "'nf4'", "'nf5'"),
    "nested": (state_with(nested_blocksize=64), "nested_blocksize", "256", "64"),
    "offset": (state_with(nested_offset=None), "nested_offset", "None"),
    "nan_offset": (state_with(nested_offset=float("nan")), "nested_offset", "nan"),
    "no_json": (tensor_with(STATE_PART, lambda t: t[:20]), "quant_state"),
    "dtype": (state_with(dtype="int8"), "dtype", "bfloat16", "'int8'"),
    "nested_dtype": (state_with(nested_dtype="float16"), "nested_dtype", "float16"),
    "map": (tensor_with(".quant_map", lambda t: t * 0.5), "quant_map"),
    "no_absmax": (renamed(".absmax", ".gone"), "'absmax'", "[320]", "None"),
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


@pytest.fixture(params=["qwen3", "llama"])
def transformers_model(bnb, request, tmp_path):
    """A tiny model made by transformers; (folder, how to load a folder, logits of a model)."""
    import torch
    import transformers

    config, model = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[request.param]
    torch.manual_seed(0)
    small = config(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=request.param == "qwen3",
    )
    model(small).to(torch.float32).save_pretrained(tmp_path / "dense")

    def load(folder, **options):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **options
        ).eval()

    def logits(loaded) -> np.ndarray:
        return loaded(torch.arange(1, 33)[None]).logits.detach().numpy()

    return tmp_path / "dense", load, logits


def logits_here(folder, monkeypatch) -> np.ndarray:
    monkeypatch.setattr(loading, "load_tokenizer", lambda *_: None)
    return np.array(loading.load_base_model(folder).model(mx.arange(1, 33)[None]))


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("double_quant", [True, False])
def test_a_checkpoint_of_transformers_has_the_same_logits_here(
    transformers_model, tmp_path, monkeypatch, double_quant
):
    from transformers import BitsAndBytesConfig

    dense, load, logits = transformers_model
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double_quant
    )
    theirs = load(dense, quantization_config=config)
    theirs.save_pretrained(tmp_path / "theirs")
    here = logits_here(tmp_path / "theirs", monkeypatch)
    assert np.abs(here - logits(theirs)).max() < 1e-3
