"""A quantizer that MLX lacks, written as CONTRIBUTING says, is known everywhere by two entries."""

import math
from dataclasses import dataclass, field, replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_packs.bases.loading import load_base_model
from mlx_packs.bases.quantization import QuantizeOptions
from mlx_packs.bases.weight_formats import CustomFormat, format_of, named_format
from mlx_packs.bases.writer import quantize
from mlx_packs.config import choices
from mlx_packs.config.choices import WeightModeFacts
from mlx_packs.config.lora import LoRAConfig
from mlx_packs.config.schema import TrainConfig
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.read import read_headers
from mlx_packs.memory.step_time import _precision
from mlx_packs.nn.frozen_weight import (
    FROZEN,
    CustomEmbedding,
    CustomLinear,
    CustomWeight,
    FrozenWeight,
    frozen_weight,
)
from mlx_packs.nn.quantized import apply_matmul_path, multiplied_modules, quantized_modules
from tests.helpers.checkpoints import write_dense
from tests.helpers.errors import raises


@dataclass(frozen=True)
class RowFormat(CustomFormat):
    mode: str = field(default="rows", init=False)
    bits: int = field(default=8, init=False)
    group_size: int = field(default=1, init=False)

    def faults(self):
        return []

    def nbytes(self, shape, scale_itemsize):
        return math.prod(shape) + 4 * shape[0]

    def arrays(self, w):
        step = mx.maximum(mx.abs(w.astype(mx.float32)).max(axis=-1) / 127, 1e-12)
        return {"weight": mx.round(w / step[:, None]).astype(mx.int8), "step": step}

    def dequantize(self, tensors, dtype):
        codes, step = tensors.values()
        return (codes * step[:, None]).astype(dtype)

    @classmethod
    def of_arrays(cls, arrays):
        return cls()

    def module_of(self, dense, arrays, dtype):
        if arrays["step"].shape != arrays["weight"].shape[:1]:
            raise ValueError("a row has no step.")
        kind = RowEmbedding if isinstance(dense, nn.Embedding) else RowLinear
        return kind(arrays, dense.get("bias"), dtype)


class _Rows(CustomWeight):
    bits, group_size, mode = 8, 1, "rows"

    def __init__(self, arrays, bias, dtype):
        super().__init__()
        self.weight, self.step, self.dtype = arrays["weight"], arrays["step"], dtype
        if bias is not None:
            self.bias = bias
        self.freeze()


class RowLinear(_Rows, CustomLinear):
    pass


class RowEmbedding(_Rows, CustomEmbedding):
    pass


class FrozenRows(FrozenWeight):
    bits, group_size, mode = 8, 1, "rows"

    @property
    def shape(self):
        return self.module.weight.shape

    @property
    def dtype(self):
        return self.module.dtype

    def check(self):
        pass

    def dense(self):
        return (self.module.weight * self.module.step[:, None]).astype(self.dtype)

    def rows(self, at):
        return (self.module.weight[at] * self.module.step[at][..., None]).astype(self.dtype)


def with_choice(train, **values):
    """Settings with values that are no choice yet where the settings are defined."""
    train = replace(train)
    for name, value in values.items():
        object.__setattr__(train, name, value)
    return train


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    facts = WeightModeFacts(f"{__name__}:RowFormat", ("step",), numbers=1)
    monkeypatch.setitem(choices.WEIGHT_MODES, "rows", facts)
    monkeypatch.setitem(choices.WEIGHT_FORMATS, "rows", ("rows", {}))
    monkeypatch.setitem(FROZEN, _Rows, FrozenRows)


@pytest.fixture
def dense_checkpoint(tmp_path):
    return write_dense(tmp_path / "dense")


@pytest.fixture
def checkpoint(dense_checkpoint, tmp_path):
    quantize(dense_checkpoint, tmp_path / "rows", QuantizeOptions(RowFormat()))
    return tmp_path / "rows"


def test_a_stored_base_is_the_one_that_is_quantized_on_loading(checkpoint, dense_checkpoint):
    stored = load_base_model(checkpoint)
    loaded = load_base_model(dense_checkpoint, quantize="rows")
    assert stored.quantization["mode"] == loaded.quantization["mode"] == "rows"
    again = dict(tree_flatten(loaded.model.parameters()))
    for name, array in tree_flatten(stored.model.parameters()):
        assert mx.array_equal(array, again[name]), name
    modules = [module for _, module in quantized_modules(stored.model)]
    assert {type(module) for module in modules} == {RowLinear, RowEmbedding}
    assert {format_of(module) for module in modules} == {named_format("rows")}


def test_matmul_paths_compute_the_same(checkpoint):
    model = load_base_model(checkpoint).model
    tokens = mx.array([[1, 2, 3]])
    expected = model(tokens)
    apply_matmul_path(model, "transient")
    assert mx.array_equal(model(tokens), expected)
    apply_matmul_path(model, "dense")
    assert not multiplied_modules(model) and mx.allclose(model(tokens), expected, atol=1e-4)


def test_a_part_of_a_weight_has_its_rows():
    dense = nn.Linear(8, 6)
    module = RowFormat().module_of(dense, RowFormat().arrays(dense.weight), mx.float32)
    part = frozen_weight(module).first_rows(4)
    assert part.weight.shape == (4, 8) and part.step.shape == part.bias.shape == (4,)
    x = mx.random.normal((2, 8))
    assert mx.allclose(part(x), dense(x)[:, :4], atol=0.02)


def test_a_plan_counts_its_tensors(checkpoint, dense_checkpoint):
    headers, lora = read_headers(checkpoint), LoRAConfig()
    train = TrainConfig(matmul_path="transient", compute_dtype="float32")
    loaded = load_base_model(checkpoint)
    nbytes = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    assert estimate(headers, lora, train).base == nbytes
    on_loading = estimate(read_headers(dense_checkpoint), lora, with_choice(train, quantize="rows"))
    assert on_loading.base == nbytes
    assert estimate(headers, lora, replace(train, matmul_path="dense")).base > 4 * nbytes
    assert _precision(headers, train)[0] == (8, 1, "rows")
    with raises("conflict", "quantize", "quantized already"):
        headers.check_quantize(with_choice(train, quantize="rows"))


def test_a_plan_of_a_format_that_is_not_registered_is_rejected(checkpoint, monkeypatch):
    headers = read_headers(checkpoint)
    monkeypatch.delitem(choices.WEIGHT_MODES, "rows")
    with raises("unsupported", "model", "I8"):
        estimate(headers, LoRAConfig(), TrainConfig())


@pytest.mark.parametrize(("fault", "shown"), [("missing", "missing"), ("short", "no step")])
def test_damaged_tensors_are_named(checkpoint, fault, shown):
    name = "model.layers.0.mlp.up_proj.step"
    tensors = mx.load(str(checkpoint / "model.safetensors"))
    step = tensors.pop(name)
    if fault == "short":
        tensors[name] = step[:-1]
    mx.save_safetensors(str(checkpoint / "model.safetensors"), tensors)
    (checkpoint / "quantization.json").unlink()
    with raises("unreadable", None, "up_proj", shown):
        load_base_model(checkpoint)
