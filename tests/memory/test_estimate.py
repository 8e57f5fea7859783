"""Estimates: counts by hand and against real geometries, directions, measured peaks."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, runtime
from mlx_packs.adapters.attach import attach
from mlx_packs.data.dataset import Tree
from mlx_packs.data.encoding import Example
from mlx_packs.data.shapes import TreeShape
from mlx_packs.data.trees import planted
from mlx_packs.memory.decoder import resized
from mlx_packs.memory.estimate import estimate, remedies
from mlx_packs.memory.headers import Headers, tensor_bytes
from mlx_packs.memory.plan import ERROR, verdict
from mlx_packs.memory.read import read_headers
from tests.helpers.errors import raises
from tests.helpers.headers import REAL, dense_headers
from tests.helpers.models import base_of
from tests.helpers.steps import make_batch
from tests.helpers.variants import slow_except
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


def renamed(headers: Headers, dtype: str, part: str = "weight") -> Headers:
    """The headers of a checkpoint whose q_proj is stored in another way."""
    tail = "q_proj.weight"
    tensors = {
        name.removesuffix("weight") + part if name.endswith(tail) else name: (
            {**tensor, "dtype": dtype} if name.endswith(tail) else tensor
        )
        for name, tensor in headers.tensors.items()
    }
    return Headers("q/w", headers.config, tensors)


@pytest.mark.parametrize(
    ("dtype", "part"), [("I8", "weight"), ("F8_E4M3", "weight"), ("I32", "qweight")]
)
def test_weights_in_a_format_that_is_not_known_have_no_plan(dtype, part):
    headers = renamed(dense_headers("qwen3-4b"), dtype, part)
    with raises("unsupported", "model", dtype, f"q_proj.{part}", "q/w", "--quantize"):
        estimate(headers, LoRAConfig(), TrainConfig())


@pytest.mark.parametrize(
    ("dtype", "each"), [("I8", 1), ("U16", 2), ("I16", 2), ("C64", 8), ("F4", 0.5), ("NEW", 8)]
)
def test_a_number_has_the_bytes_of_its_dtype(dtype, each):
    assert tensor_bytes({"dtype": dtype, "shape": [6, 4]}, widen=True) == 24 * each
    assert tensor_bytes({"dtype": "BF16", "shape": [6, 4]}, widen=True) == 24 * 4


def test_dense_copies_of_nf4_are_not_dequantized_again():
    headers = dense_headers("qwen3-4b")
    stored_dense = TrainConfig(recompute="none", matmul_path="dense")

    def working(path: str) -> int:
        train = TrainConfig(quantize="nf4", recompute="none", matmul_path=path)
        return estimate(headers, LoRAConfig(), train).largest_parts()["working"]

    dense = estimate(headers, LoRAConfig(), stored_dense).largest_parts()["working"]
    assert working("dense") == dense != working("quantized")


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


def test_parts_add_up_to_the_peak_and_each_is_largest_somewhere():
    plan = estimate(read_headers("tiny"), LoRAConfig(), DENSE)
    assert sum(plan.parts().values()) == plan.peak_bytes
    largest = plan.largest_parts()
    assert largest["gradients"] == 4 * plan.adapter_weights
    assert all(largest[name] >= size for name, size in plan.parts().items())
    assert largest["logits"] > 0 and largest["working"] > 0


def test_one_rule_says_what_fits():
    plan = estimate(read_headers("tiny"), LoRAConfig(), DENSE)
    assert verdict(plan, int(plan.peak_bytes * (1 + ERROR)) + 1) == "fits"
    assert verdict(plan, int(plan.peak_bytes * (1 + ERROR)) - 1) == "tight"
    assert verdict(plan, plan.peak_bytes) == "tight" and verdict(plan, plan.peak_bytes - 1) == "no"


def test_of_several_shapes_the_plan_is_that_of_the_largest():
    headers, shapes = read_headers("tiny"), [(64, 200), (128, 500), (128, 90)]
    plans = [estimate(headers, LoRAConfig(), DENSE, [shape]).peak_bytes for shape in shapes]
    assert estimate(headers, LoRAConfig(), DENSE, shapes).peak_bytes == max(plans) == plans[1]


@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
def test_a_tree_is_counted_by_what_it_computes_and_by_the_keys_that_it_repeats(recompute):
    """Two groups of three rows, as a row of as many inputs; keys have 64 numbers, in half precision."""
    base, rows, prefix = base_of("qwen3"), 6, 48
    train = TrainConfig(matmul_path="dense", batch_size=rows, recompute=recompute)

    def activations(train: TrainConfig, shape: tuple) -> int:
        plan = estimate(Headers.of(base), LoRAConfig(rank=4), train, [shape])
        return plan.moments["loss"]["activations"]

    tree = TreeShape(64, 40, prefix, together=3)
    inputs = 2 * prefix + rows * (64 - prefix)
    repeated = {"none": rows, "selective": 0, "block": 0}[recompute] * prefix * 2 * 64
    with runtime.assumed_device("gpu"):
        one_row = activations(replace(train, batch_size=1), (inputs, 40))
        assert activations(train, tree) == one_row + 2 * 2 * repeated


def test_a_smaller_batch_is_a_smaller_tree():
    before, less = TrainConfig(batch_size=8), TrainConfig(batch_size=4)
    tree = TreeShape(512, 800, 256, together=2)
    assert resized(tree, before, less) == tree._replace(targets=400)
    short = TrainConfig(batch_size=8, max_seq_length=257)
    assert resized(tree, before, short) == (256, 400)


def test_remedies_name_only_what_is_not_so_already_and_helps():
    small, tiny = dense_headers("qwen3-0.6b"), read_headers("tiny")

    def ways(headers: Headers, lora: dict, **train) -> list[str]:
        settings = TrainConfig(**{"matmul_path": "dense", **train})
        return remedies(headers, LoRAConfig(**lora), settings, partial(estimate, headers))

    smallest = {"batch_size": 1, "max_seq_length": 256, "grad_checkpoint": True}
    assert ways(small, {"rank": 4}, **smallest) == [
        "--quantize nf4",
        "--offload-base on",
        "a smaller base",
    ]
    assert ways(tiny, {"rank": 4}, **smallest) == [
        "--matmul-path transient",
        "--offload-base on",
        "a smaller base",
    ]
    assert ways(tiny, {"rank": 4}, **smallest, matmul_path="transient") == [
        "--offload-base on",
        "a smaller base",
    ]
    assert ways(tiny, {}, matmul_path="transient") == [
        "a smaller --batch-size",
        "--recompute block",
        "a smaller --max-seq-length",
        "--offload-base on",
        "a smaller base",
    ]
    assert "a smaller --rank" in ways(tiny, {"rank": 128}, **smallest)


def test_an_unknown_family_has_no_plan():
    with raises("unsupported", None, "gpt2"):
        estimate(Headers("g", {"model_type": "gpt2"}, {}), LoRAConfig(), TrainConfig())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "recompute"),
    [("gate_proj up_proj down_proj", "none"), ("q_proj o_proj", "selective")],
)
def test_blocks_keep_no_scores_whichever_projections_are_adapted(
    targets, recompute, tiny, nothing_ahead
):
    """A step of one long row, whose T x T probabilities would be most of its memory."""
    length = 768
    lora = LoRAConfig(rank=8, target_modules=tuple(targets.split()))
    train = replace(DENSE, batch_size=1, max_seq_length=length + 1, recompute=recompute)
    planned = estimate(Headers.of(tiny), lora, train, [(length, 256)])
    row = Example(np.arange(length + 1, dtype=np.int32) % 1000, np.arange(length + 1) > 512, "x")
    peak = peak_of_step(tiny, lora, train, make_batch([row], [0], 1, length))
    assert peak < (1 + ERROR) * planned.peak_bytes


@pytest.mark.parametrize("recompute", slow_except(["none", "block"], "none"))
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
