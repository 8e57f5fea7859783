"""A base in NF4: modules, loading, matmul paths, its packs; quantizing while loading."""

import shutil
from pathlib import Path

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.bases.geometry import probe
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.nf4 import NF4Embedding, NF4Linear
from mlx_packs.nn.quantized import dense_module, quantized_modules
from mlx_packs.nn.surgery import replace_modules
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.ops import nf4
from mlx_packs.packs.base import load_base_for
from mlx_packs.packs.making import attach_pack
from mlx_packs.reading import read_json
from mlx_packs.runtime import mx
from tests.bases.changes import change_tensors
from tests.helpers.bitsandbytes import CONFIG, to_bitsandbytes
from tests.helpers.checkpoints import write_dense, write_files, write_quantized
from tests.helpers.errors import raises
from tests.helpers.models import nf4_embedding
from tests.helpers.packs import random_pack
from tests.helpers.steps import fill_b

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
    modules = dict(result.model.named_modules())
    tensors = {}
    for name, tensor in tree_flatten(result.model.parameters()):
        path, _, part = name.rpartition(".")
        if not isinstance(modules[path], NF4Linear):
            tensors[name] = tensor.astype(mx.bfloat16)
        elif part == "weight":
            tensors |= to_bitsandbytes(name, modules[path].nf4_weight, "bfloat16")

    config = {"quantization_config": CONFIG}
    folder = write_files(tmp_path / "bnb", tensors, read_json(dense / "config.json") | config)
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


def loss_and_gradients(base, matmul_path: str) -> tuple[float, dict]:
    """Of random adapters on a base in training mode."""
    attached = attach(base, LoRAConfig(rank=4), matmul_path=matmul_path)
    mx.random.seed(1)
    fill_b(attached)
    base.model.train()

    def loss():
        return nn.losses.cross_entropy(base.model(TOKENS[:, :-1]), TOKENS[:, 1:]).mean()

    value, gradients = nn.value_and_grad(base.model, loss)()
    attached.detach()
    return value.item(), dict(tree_flatten(gradients))


@pytest.mark.parametrize("matmul_path", ["quantized", "transient", "dense"])
def test_gradients_on_nf4_are_those_on_the_dequantized_base(dense, matmul_path):
    base, plain = load_base(dense, "nf4"), load_base(dense)
    packed = quantized_modules(base.model)
    replace_modules(plain.model, [(path, dense_module(m)) for path, m in packed])
    value, result = loss_and_gradients(base, matmul_path)
    wanted_value, wanted = loss_and_gradients(plain, "quantized")
    assert value == pytest.approx(wanted_value, rel=1e-5)
    assert set(result) == set(wanted) and len(result) == 2 * 2 * 7
    for name, gradient in wanted.items():
        largest = mx.abs(gradient).max().item()
        assert mx.abs(result[name] - gradient).max().item() <= 1e-4 * largest, name


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
    "weight of another size": ("weight", lambda t: t[:-8], "q_proj"),
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
