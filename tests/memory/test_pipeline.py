"""`packs plan --machines`: what a rank takes, and which way of sharing a run needs."""

import json

import pytest
from click.testing import CliRunner

from mlx_packs import LoRAConfig, TrainConfig, runtime
from mlx_packs.cli.plan import plan
from mlx_packs.memory import pipeline
from mlx_packs.memory.estimate import check_least, estimate, least
from mlx_packs.memory.pipeline import estimate_stage, of_stages, plan_machines, stage_headers
from mlx_packs.memory.read import describe, read_headers
from tests.helpers.errors import raises

GB = 10**9
CONFIG = {  # as of Qwen3-8B
    **{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128},
    **{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"vocab_size": 151936, "torch_dtype": "bfloat16"},
}
LORA, TRAIN = LoRAConfig(), TrainConfig(batch_size=16, max_seq_length=1024, recompute="block")


@pytest.fixture(scope="module")
def large():
    return describe("large", CONFIG)


def test_the_stages_of_a_base_have_each_of_its_tensors(large):
    first, last = (stage_headers(large, own, 36) for own in (range(18), range(18, 36)))
    assert len(first.tensors) + len(last.tensors) == len(large.tensors) + 1  # the norm is on both
    assert "model.embed_tokens.weight" not in last.tensors and "lm_head.weight" in last.tensors
    assert "lm_head.weight" not in first.tensors


def test_a_rank_takes_less_with_every_stage(large):
    with runtime.assumed_device("gpu"):
        peaks = [estimate_stage(large, LORA, TRAIN, None, n).peak_bytes for n in (1, 2, 3, 4)]
        assert peaks == sorted(peaks, reverse=True)
        whole = estimate(large, LORA, TRAIN)
        halves = estimate_stage(large, LORA, TRAIN, None, 2)
        assert 0.45 < halves.base / whole.base < 0.6


def test_pieces_take_less(large):
    pieces = TrainConfig(**{**vars(TRAIN), "micro_batches": 4})
    with runtime.assumed_device("gpu"):
        whole, split = (estimate_stage(large, LORA, each, None, 2) for each in (TRAIN, pieces))
    assert split.parts()["activations"] < whole.parts()["activations"] / 2


def test_the_simplest_way_that_fits_is_needed(large):
    with runtime.assumed_device("gpu"):
        one = plan_machines(large, 10**12, LORA, TRAIN, 4)
        assert one.needed == "one machine" and list(one.plans) == ["one machine"]
        split = plan_machines(large, 15 * GB, LORA, TRAIN, 4)
        assert split.needed == "pipeline 3" and list(split.plans)[2:] == [
            "pipeline 2",
            "pipeline 3",
        ]
        between = int(1.16 * split.plans["data-parallel"].peak_bytes)
        assert between < split.plans["one machine"].peak_bytes
        assert plan_machines(large, between, LORA, TRAIN, 4).needed == "data-parallel"
        assert "--pipeline" in split.line()
        assert plan_machines(large, 3 * GB, LORA, TRAIN, 2).needed == "none"


def test_a_family_that_cannot_be_split_is_offered_no_pipeline(large, monkeypatch):
    monkeypatch.setattr(pipeline, "SPLITTABLE", ())
    assert list(plan_machines(large, 3 * GB, LORA, TRAIN, 2).plans) == [
        "one machine",
        "data-parallel",
    ]


def test_a_run_that_only_a_pipeline_holds_fits(monkeypatch):
    headers = read_headers("tiny")
    train = TrainConfig(batch_size=1, max_seq_length=64, matmul_path="dense")
    memory = int(0.9 * least(headers, LORA, train).peak_bytes)
    monkeypatch.setattr(runtime, "total_memory", lambda: memory)
    with raises("memory"):
        check_least(headers, LORA, train)
    check_least(headers, LORA, train, of_stages(6))


def test_packs_plan_says_what_machines_are_needed_for():
    arguments = ["--model", "tiny", "--memory", "8GB", "--machines", "2"]
    result = CliRunner().invoke(plan, [*arguments, "--json"])
    assert all(
        each["machines"]["needed"] == "one machine" for each in json.loads(result.stdout)["options"]
    )
    lines = CliRunner().invoke(plan, [*arguments, "-v"]).stdout.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("ranks ")]
    assert lines[at].startswith("ranks   2 machines (--hosts, --pipeline): each takes ")
    assert " ".join(map(str.strip, lines[at : at + 2])).endswith("that fits: one machine")
    assert "gradients 0" in [" ".join(line.split()) for line in lines]
