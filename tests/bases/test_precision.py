"""The dtype that a base computes in: by device and chip, as specified, as stored; and casting to it."""

import json

import pytest

from mlx_packs import chips, load_base, runtime
from mlx_packs.bases.precision import activation_bytes, choose_compute_dtype
from mlx_packs.chips import CHIPS
from mlx_packs.runtime import mx
from tests.bases.changes import change_tensors
from tests.helpers.checkpoints import write_checkpoint, write_quantized
from tests.helpers.errors import raises

BFLOAT16 = {"model_type": "qwen3", "torch_dtype": "bfloat16"}


@pytest.fixture
def gpu(monkeypatch):
    """A machine with the GPU of a name; without kernels of its own."""

    def named(name: str) -> None:
        monkeypatch.setattr(mx, "device_info", lambda: {"device_name": name})

    with runtime.assumed_device("gpu"):
        yield named


@pytest.mark.parametrize("name", CHIPS)
def test_auto_is_float16_on_chips_without_bfloat16(gpu, name):
    gpu(name)
    dtype = choose_compute_dtype(BFLOAT16)
    if name.startswith(("Apple M1", "Apple M2")):
        assert (dtype.name, dtype.cast) == ("float16", "float16") and name in dtype.why
    else:
        assert (dtype.name, dtype.cast, dtype.why) == ("bfloat16", "auto", "as stored")


@pytest.mark.parametrize("stored", ["float16", "float32"])
def test_auto_keeps_other_stored_dtypes(gpu, stored):
    gpu("Apple M1 Max")
    for key in ("torch_dtype", "dtype"):
        dtype = choose_compute_dtype({"model_type": "qwen3", key: stored})
        assert (dtype.name, dtype.cast) == (stored, "auto")


def test_a_dtype_that_is_asked_for_is_taken(gpu):
    gpu("Apple M1")
    for asked in ("bfloat16", "float16", "float32"):
        dtype = choose_compute_dtype(BFLOAT16, asked)
        assert (dtype.name, dtype.cast, dtype.why) == (asked, asked, "as specified")
        assert activation_bytes(BFLOAT16, asked) == (4 if asked == "float32" else 2)


@pytest.mark.parametrize("asked", ["auto", "float16", "bfloat16"])
def test_cpus_and_encoders_compute_in_float32(gpu, asked):
    gpu("Apple M1")
    assert choose_compute_dtype({"model_type": "bert"}, asked).name == "float32"
    with runtime.assumed_device("cpu"):
        assert choose_compute_dtype(BFLOAT16, asked).name == "float32"


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_that_the_table_does_not_know_is_measured(gpu, monkeypatch, native):
    gpu("Apple M9")
    measured = chips.Chip("Apple M9", None, 100, 1, 1, native)
    monkeypatch.setattr(chips, "chip_here", lambda: measured)
    assert choose_compute_dtype(BFLOAT16).name == "bfloat16"  # no GPU is there to be measured
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert choose_compute_dtype(BFLOAT16).name == ("bfloat16" if native else "float16")


def test_a_plan_names_dtype_and_reason(gpu, tmp_path, run):
    gpu("Apple M1 Max")
    base = write_checkpoint(tmp_path / "base", dtype=mx.bfloat16, torch_dtype="bfloat16")
    plan = ["plan", "--model", base, "--budget", 8]
    options = json.loads(run(*plan, "--json")[1])["options"]
    dtypes = {o["method"]: o["compute_dtype"] for o in options}
    assert dtypes["lora"] == {"name": "float16", "why": "Apple M1 Max has no native bfloat16"}
    assert dtypes["lora-fp32"]["name"] == dtypes["full"]["name"] == "float32"
    lines = run(*plan, "--compute-dtype", "bfloat16", "-v")[1].splitlines()
    assert "dtype   bfloat16: as specified" in lines


def test_no_tensor_is_left_that_would_widen_float16(gpu, tmp_path):
    """MLX multiplies float16 by weights with bfloat16 scales in float32."""
    dense = write_checkpoint(tmp_path / "dense", dtype=mx.bfloat16)
    base = load_base(write_quantized(tmp_path / "q", dense), compute_dtype="float16")
    assert base.compute_dtype == "float16"
    assert base.model(mx.array([[1, 2, 3]])).dtype == mx.float16


def test_tensors_that_a_model_keeps_apart_are_not_cast(gpu, tmp_path, monkeypatch):
    from mlx_lm.models import qwen3

    folder = write_checkpoint(tmp_path / "base")
    kept = "model.norm.weight"
    predicate = property(lambda _: lambda name: name != kept)
    monkeypatch.setattr(qwen3.Model, "cast_predicate", predicate, raising=False)
    model = load_base(folder, compute_dtype="float16").model
    assert (model.model.norm.weight.dtype, model.lm_head.weight.dtype) == (mx.float32, mx.float16)


def test_a_weight_beyond_float16_is_an_error(gpu, tmp_path):
    folder = write_checkpoint(tmp_path / "base", dtype=mx.bfloat16)
    name = "model.norm.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: 1e5 * tensors[name]}))
    with raises("diverged", "compute_dtype", "model.norm.weight"):
        load_base(folder, compute_dtype="float16")
    assert load_base(folder, compute_dtype="bfloat16").compute_dtype == "bfloat16"
