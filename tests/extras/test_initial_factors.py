"""PiSSA, OLoRA and LoftQ: what adapters begin with, and the plain packs of LoRA that come of it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, load_base, train_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.decomposition import EXACT
from mlx_packs.adapters.lora import delta_of
from mlx_packs.adapters.trainable import find_method
from mlx_packs.extras.initial_factors import ResidualLoRA, principal_factors
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.lora import AdapterShape, GroupedLoRA
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_dense
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.steps import moved

TOKENS = mx.array([[5, 9, 3, 77, 12, 40], [1, 2, 3, 4, 5, 6]])


def attached(method: str, base):
    train = TrainConfig(method=method)
    return find_method(method).attach(base, LoRAConfig(rank=4), train, "quantized")


def test_small_changes_of_large_factors_survive_half_precision():
    """B A - B0 A0 in bfloat16, where A has changed by less than its own last bit there."""
    lora = GroupedLoRA.fresh(64, [AdapterShape(32, 4, 1.0)], 0.0, [mx.random.key(0)])
    a, b = mx.random.normal((64, 4)), mx.random.normal((4, 32))
    lora.lora_a, lora.lora_b = [a], [b]
    residual = ResidualLoRA(lora)
    residual.lora_a[0] = a * (1 + 2.0**-12)
    wide = [m.astype(mx.bfloat16).astype(mx.float32) for (m,) in residual.multiplied()]
    wanted = (residual.lora_a[0] - a) @ b
    left = mx.linalg.norm(wide[0] @ wide[1] - wanted).item()
    assert left < 0.01 * mx.linalg.norm(wanted).item()


@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_a_pack_of_twice_the_rank_is_the_change_since_the_beginning(method):
    base = base_of("qwen3")
    trainable = moved(attached(method, base), 0.05)
    trained, tensors = base.model(TOKENS), trainable.tensors()
    assert all(spec.rank == 8 for spec in trainable.specs.values())
    trainable.detach()
    plain = attach(base, specs=trainable.specs)
    plain.load(tensors, "test")
    assert mx.allclose(base.model(TOKENS), trained, atol=1e-4).item()


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (EXACT + 40, EXACT + 90)])
def test_principal_factors_are_the_best_of_their_rank(shape):
    u = mx.linalg.qr(mx.random.normal((shape[0], 20)), stream=mx.cpu)[0]
    v = mx.linalg.qr(mx.random.normal((shape[1], 20)), stream=mx.cpu)[0]
    values = mx.array([2.0 ** -(i / 2) for i in range(20)])
    weight, scale = (u * values) @ v.T, 2.0
    a, b = principal_factors(weight, 6, scale)
    left = mx.linalg.norm(weight - scale * (a @ b).T).item()
    assert left == pytest.approx(math.sqrt(sum(2.0**-i for i in range(6, 20))), rel=1e-3)
    assert mx.allclose(a.square().sum(0), b.square().sum(1), rtol=1e-3).item()


@pytest.mark.parametrize("mode", ["nf4", "affine4"])
def test_loftq_begins_nearer_to_the_dense_weights(mode, tmp_path):
    folder = write_dense(tmp_path / "dense")
    dense = dict(load_base(folder).model.named_modules())
    base = load_base(folder, mode)
    trainable = attached("loftq", base)
    for path, spec in trainable.specs.items():
        weight = dense[path].weight.astype(mx.float32)
        lost = weight - frozen_weight(trainable.frozen[path]).dense().astype(mx.float32)
        left = lost - delta_of(spec, trainable.tensors())
        assert mx.linalg.norm(left).item() < 0.97 * mx.linalg.norm(lost).item()


def test_loftq_needs_a_dense_checkpoint_that_is_quantized(shared_tiny, tmp_path):
    rows = write_rows(tmp_path / "rows", train=CHATS, valid=CHATS)
    loftq = TrainConfig(method="loftq", iters=4, batch_size=2, max_seq_length=64)
    with raises("conflict", None, "--method loftq", "stored quantized", "--quantize"):
        train_pack(shared_tiny, rows, train=loftq, out=tmp_path / "p")
    dense = write_dense(tmp_path / "dense", vocab_size=4096)
    with raises("conflict", None, "--method loftq", "is not quantized", "--quantize nf4"):
        train_pack(str(dense), rows, train=loftq, out=tmp_path / "p")
    assert not (tmp_path / "p").exists()


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_loftq_begins_with_the_factors_of_peft():
    pytest.importorskip("torch")
    import torch
    from peft.utils.loftq_utils import _low_rank_decomposition

    lost = mx.random.normal((48, 80), key=mx.random.key(1))
    theirs = _low_rank_decomposition(torch.tensor(np.array(lost)), reduced_rank=4)
    theirs = SimpleNamespace(**theirs)
    a, b = principal_factors(lost, 4, 1.0)
    np.testing.assert_allclose(np.array(a @ b).T, (theirs.L @ theirs.R).numpy(), atol=1e-4)
