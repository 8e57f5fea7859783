"""Estimates: counts by hand and against real geometries, directions, measured peaks."""

from collections import Counter
from dataclasses import replace
from functools import partial

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING

from mlx_packs import LoRAConfig, TrainConfig, runtime
from mlx_packs.adapters.attach import attach
from mlx_packs.bases.families import FAMILIES
from mlx_packs.data.dataset import Tree
from mlx_packs.data.encoding import Example
from mlx_packs.data.shapes import TreeShape
from mlx_packs.data.trees import planted
from mlx_packs.memory.estimate import estimate, remedies
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.matmul_path import dense_bytes
from mlx_packs.memory.plan import ERROR, verdict
from mlx_packs.memory.read import read_headers
from mlx_packs.nn.surgery import ATTENTION, MLP, block_kind
from tests.helpers.errors import raises
from tests.helpers.headers import REAL, dense_headers
from tests.helpers.models import SMALL_FAMILIES, base_of, model_of
from tests.helpers.steps import make_batch
from tests.memory.measured import peak_of_step

DENSE = TrainConfig(matmul_path="dense")


def peak(lora: dict | None = None, matmul_path: str = "quantized", **train) -> float:
    """Estimated GB of the tiny base."""
    defaults = {"batch_size": 4, "max_seq_length": 256, "matmul_path": matmul_path}
    settings = TrainConfig(**{**defaults, **train})
    return estimate(read_headers("tiny"), LoRAConfig(**(lora or {})), settings).peak_gb


@pytest.mark.parametrize("name", REAL)
def test_counts_are_those_of_the_real_geometries(name):
    plan = estimate(dense_headers(name), LoRAConfig(rank=16), DENSE)
    assert plan.base_weights == pytest.approx(REAL[name][1], rel=0.01)
    assert plan.adapter_weights == pytest.approx(REAL[name][2], abs=0.01e6)
    assert plan.adapters == 4 * plan.adapter_weights
    assert plan.optimizer == 8 * plan.adapter_weights


def test_parts_of_a_small_base_are_counted_by_hand():
    plan = estimate(Headers.of(base_of("qwen3")), LoRAConfig(rank=4), DENSE)
    # per block: q 64 -> 128, k and v 64 -> 64, o 128 -> 64, gate and up 64 -> 96, down 96 -> 64
    assert plan.adapter_weights == 2 * 4 * (192 + 2 * 128 + 192 + 3 * 160)
    linears = 2 * (64 * 128 * 2 + 64 * 64 * 2 + 3 * 64 * 96) + 2 * 128 * 64
    norms = 2 * (2 * 64 + 2 * 32) + 64
    assert plan.base_weights == linears and plan.base == 4 * (linears + norms)
    assert plan.peak_bytes == sum(plan.parts().values())


def test_counts_are_those_of_a_loaded_base(tiny):
    plan = estimate(Headers.of(tiny), LoRAConfig(rank=16), TrainConfig())
    assert plan.base == sum(a.nbytes for _, a in tree_flatten(tiny.model.parameters()))
    attached = attach(tiny, LoRAConfig(rank=16))
    assert plan.adapter_weights == attached.parameter_count()
    attached.detach()


@pytest.mark.parametrize("bits, double", [(4.127, True), (4.5, False)])
def test_nf4_takes_its_bits_a_weight(bits, double):
    train = TrainConfig(quantize="nf4", double_quant=double, matmul_path="quantized")
    plan = estimate(dense_headers("qwen3-4b"), LoRAConfig(), train)
    assert plan.base == pytest.approx(4.02e9 * bits / 8, rel=0.002)


@pytest.mark.parametrize("optimizer, each", [("adamw", 8), ("lion", 4), ("adamw_8bit", 2.03)])
def test_optimizer_takes_its_bytes_a_weight(optimizer, each):
    train = TrainConfig(optimizer=optimizer)
    plan = estimate(dense_headers("qwen3-4b"), LoRAConfig(), train)
    assert plan.optimizer == pytest.approx(each * plan.adapter_weights, rel=0.01)


def test_more_work_takes_more_and_recomputing_less():
    assert peak() < peak(batch_size=8)
    assert peak() < peak(max_seq_length=512)
    assert peak() < peak({"rank": 64})
    assert peak({"num_layers": 2}) < peak()
    assert peak({"target_modules": ("q_proj", "v_proj")}) < peak()
    assert (
        peak(grad_checkpoint=True) < peak(recompute="selective") < peak(recompute="none") == peak()
    )
    assert peak() < peak(matmul_path="dense")


def test_a_reward_model_has_a_head_of_its_own_and_no_logits():
    headers, lora = Headers.of(base_of("qwen3")), LoRAConfig(rank=4)
    settings = {"matmul_path": "dense", "batch_size": 2, "max_seq_length": 64}
    dpo, reward = (
        estimate(headers, lora, TrainConfig(task=task, **settings)) for task in ("dpo", "reward")
    )
    assert reward.adapter_weights == dpo.adapter_weights + 64
    assert reward.optimizer == dpo.optimizer + 8 * 64
    # 4 states of 64 numbers in float32, their gradients and copies, and 4 rewards
    assert (
        reward.moments["loss"]["logits"]
        == 4 * (6 * 4 * 64 + 3 * 4)
        < dpo.moments["loss"]["logits"] / 100
    )
    assert reward.base == dpo.base


def test_one_rule_says_what_fits():
    plan = estimate(read_headers("tiny"), LoRAConfig(), DENSE)
    assert verdict(plan, int(plan.peak_bytes * (1 + ERROR)) + 1) == "fits"
    assert verdict(plan, int(plan.peak_bytes * (1 + ERROR)) - 1) == "tight"
    assert verdict(plan, plan.peak_bytes) == "tight" and verdict(plan, plan.peak_bytes - 1) == "no"


def test_of_several_shapes_the_plan_is_that_of_the_largest():
    headers, shapes = read_headers("tiny"), [(64, 200), (128, 500), (128, 90)]
    plans = [estimate(headers, LoRAConfig(), DENSE, [shape]).peak_bytes for shape in shapes]
    assert estimate(headers, LoRAConfig(), DENSE, shapes).peak_bytes == max(plans) == plans[1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_beside_a_head_has_no_dense_copy(tied):
    base = base_of("qwen3", tie_word_embeddings=tied)
    nn.quantize(base.model, group_size=32, bits=4)
    headers, quantized = Headers.of(base), TrainConfig(matmul_path="quantized")
    before, after = (estimate(headers, LoRAConfig(), train) for train in (quantized, DENSE))
    assert after.base - before.base == dense_bytes(base.model)


SMALLEST = {"batch_size": 1, "max_seq_length": 256, "grad_checkpoint": True}


@pytest.mark.parametrize(
    ("name", "rank", "changes", "expected"),
    [
        ("qwen3-0.6b", 4, SMALLEST, "--quantize nf4"),
        ("tiny", 4, SMALLEST, "--matmul-path transient"),
        ("tiny", 4, {**SMALLEST, "matmul_path": "transient"}, ""),
        ("tiny", 128, SMALLEST, "--matmul-path transient, a smaller --rank"),
        (
            *("tiny", 16, {"matmul_path": "transient"}),
            "a smaller --batch-size, --recompute block, a smaller --max-seq-length",
        ),
    ],
)
def test_remedies_name_only_what_is_not_so_already_and_helps(name, rank, changes, expected):
    headers = read_headers("tiny") if name == "tiny" else dense_headers(name)
    train = TrainConfig(**{"matmul_path": "dense", **changes})
    ways = remedies(headers, LoRAConfig(rank=rank), train, partial(estimate, headers))
    assert ways == [*filter(None, expected.split(", ")), "--offload-base on", "a smaller base"]


def test_an_unknown_family_has_no_plan():
    with raises("unsupported", None, "gpt2"):
        estimate(Headers("g", {"model_type": "gpt2"}, {}), LoRAConfig(), TrainConfig())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_plan_of_a_tree_is_within_its_error_of_the_measured_peak(recompute):
    """Of eight rows three quarters are common."""
    rows, length, prefix = 8, 256, 192
    base = base_of(
        "llama", hidden_size=128, intermediate_size=384, num_hidden_layers=4, vocab_size=4096
    )

    lora = LoRAConfig(rank=16)
    train = replace(DENSE, batch_size=rows, max_seq_length=length + 1, recompute=recompute)

    tokens = np.random.default_rng(0).integers(0, 4096, (rows, length + 1)).astype(np.int32)
    tokens[:, :prefix] = tokens[0, :prefix]
    examples = [Example(row, np.arange(length + 1) > prefix, "x") for row in tokens]
    batch = planted(make_batch(examples, range(rows), rows, length), Tree(1, prefix))

    shape = TreeShape(length, len(batch.inputs["positions"]), prefix)
    planned = estimate(Headers.of(base), lora, train, [shape]).peak_bytes
    assert planned == pytest.approx(peak_of_step(base, lora, train, batch, steps=6), rel=ERROR)


def test_probabilities_are_kept_on_cpus_alone():
    def activations(length):
        train = replace(DENSE, batch_size=1, recompute="none")
        plan = estimate(dense_headers("qwen3-0.6b"), LoRAConfig(), train, [(length, 1)])
        return plan.moments["mlp"]["activations"]

    assert activations(128) > 2.05 * activations(64)
    with runtime.assumed_device("gpu"):
        assert activations(128) == pytest.approx(2 * activations(64))


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.plan == "dense"])
def test_blocks_of_a_family_with_a_plan_are_grouped(name):
    family = MODEL_REMAPPING.get(name, name)
    model, _ = model_of(family, **SMALL_FAMILIES.get(family, {}))
    kinds = Counter(map(block_kind, model.modules()))
    assert kinds[ATTENTION] == kinds[MLP] == len(model.layers)
