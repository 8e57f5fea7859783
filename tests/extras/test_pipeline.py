"""A base that is split over the ranks of a pipeline is the base; runs by one are those of one rank."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.bases.families import SPLITTABLE
from mlx_packs.distributed.group import Group
from mlx_packs.extras.pipeline.adapters import (
    PipelinedAdapters,
    check_in_blocks,
    check_splittable,
)
from mlx_packs.extras.pipeline.stage import Stages, stage_output
from mlx_packs.objectives.causal_lm import forward, split_head
from mlx_packs.runtime import mx
from tests.distributed import runs
from tests.distributed.test_ranks import curve, difference, line_of_first, train
from tests.helpers.errors import raises
from tests.helpers.families import family_base, randomized
from tests.helpers.models import base_of
from tests.helpers.ranks import Ranks

TOKENS = mx.array([[1, 2, 3, 4, 5], [7, 8, 9, 1, 2]])
LORA = LoRAConfig(rank=2)
NAMES = ("pieces", "blocks", "top")  # of `runs.PIPELINES`


def stage(rank: int, size: int = 2) -> Stages:
    """A rank of a pipeline that nothing is exchanged with."""
    return Stages(Group(SimpleNamespace(rank=lambda: rank, size=lambda: size)))


@pytest.mark.parametrize("family", [f for f in SPLITTABLE if f != "mistral"])  # a name of llama
def test_the_stages_of_a_base_compute_what_it_computes(family):
    base = family_base(family)
    attached = attach(base, LORA)
    adapters = randomized(attached)
    expected = base.model(TOKENS)
    mx.eval(expected)
    attached.detach()

    states = TOKENS
    for rank in range(2):
        attached = attach(base, LORA)
        attached.load(adapters, "here")
        PipelinedAdapters(attached, stage(rank))

        if rank == 0:
            states = stage_output(lambda: forward(base.model, base.model, TOKENS))
        else:
            states = forward(base.model, base.model, states)
        mx.eval(states)
        attached.detach()

    assert mx.array_equal(states, expected)


def test_the_last_stage_alone_has_a_head_and_one_in_the_middle_no_table():
    base = base_of("qwen3", num_hidden_layers=3, tie_word_embeddings=True)
    attached = attach(base, LORA)
    PipelinedAdapters(attached, stage(1, 3))
    names = [name for name, _ in tree_flatten(base.model.parameters())]
    assert not any("embed_tokens" in name for name in names)
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"1"}
    entering = mx.random.normal((2, 5, 64))
    assert stage_output(lambda: forward(base.model, base.model, entering)).shape == (2, 5, 64)
    attached.detach()
    assert mx.isfinite(base.model(TOKENS)).all()

    attached = attach(base, LORA)
    PipelinedAdapters(attached, stage(2, 3))  # the last one
    head = split_head(base.model, mx.random.normal((1, 4, 64)))
    assert head is not None and head.frozen is not None


def test_a_rank_reads_its_own_blocks_alone():
    base = load_base("tiny", lazy=True)
    attached = attach(base, LORA, matmul_path="dense")
    mx.synchronize()
    before = mx.get_active_memory()
    PipelinedAdapters(attached, stage(1, 6))
    own = sum(a.nbytes for _, a in tree_flatten(base.model.parameters()))
    # dense copies of one block and the tied table; while they are made, what they are made of
    assert mx.get_active_memory() - before < 1.5 * own
    whole = load_base("tiny")
    attached = attach(whole, LORA, matmul_path="dense")
    assert own < sum(a.nbytes for _, a in tree_flatten(whole.model.parameters())) / 6


def test_a_base_that_cannot_be_split_is_refused():
    with raises("conflict", "pipeline", "2 blocks", "3 ranks"):
        check_splittable(base_of("qwen3"), 3)
    with raises("unsupported", "pipeline", "gpt2", "qwen3"):
        check_splittable(base_of("gpt2"), 2)
    with raises("unsupported", "target_modules", "lm_head"):
        check_in_blocks(base_of("qwen3"), LoRAConfig(target_modules=("lm_head", "q_proj")))


def test_settings_that_need_the_whole_base_are_refused():
    settings = {"method": "dora", "task": "dpo", "packing": True, "cache_frozen": "on"}
    settings |= {"quantize": "nf4", "metric": "exact", "neftune_noise_alpha": 5.0}
    for name, value in settings.items():
        with raises("conflict", name, "--pipeline"):
            TrainConfig(pipeline=True, **{name: value})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    runs.write_data(folder)
    return folder


@pytest.fixture(scope="module")
def by_stages(place):
    @cache
    def trained(size: int, name: str) -> Path:
        ended = train(place, size, name)
        assert ended.codes == [0] * size, ended.text
        return place / f"by-{size}" / name

    return trained


@pytest.mark.nightly(seconds=20)
@pytest.mark.parametrize(("size", "name"), [(2, n) for n in NAMES] + [(3, "pieces")])
def test_a_pipeline_trains_what_one_rank_trains(by_stages, size, name):
    alone, split = by_stages(1, name), by_stages(size, name)
    assert difference(alone, split) < 1e-5
    ours, theirs = curve(alone), curve(split)
    assert [line["batch"] for line in ours] == [line["batch"] for line in theirs]
    for key in ("loss", "valid_loss", "grad_norm"):
        values = [[line[key] for line in lines if key in line] for lines in (ours, theirs)]
        assert values[0] and np.allclose(*values, rtol=1e-5, atol=1e-5)
    evals = [json.loads((p / "pack.json").read_text())["eval"] for p in (alone, split)]
    for key in ("ppl_before", "ppl_after"):
        assert evals[0][key] == pytest.approx(evals[1][key], rel=1e-5)


@pytest.mark.nightly(seconds=30)  # four runs one after another, by two ranks, three, one and one
def test_a_pipeline_goes_on_with_other_ranks(place):
    for size, changes in ((2, "iters=4"), (3, "iters=6,resume=1"), (1, "iters=8,resume=1")):
        ended = train(place, size, f"pieces,{changes}", out="on")
        assert not any(ended.codes), ended.text
    ended = train(place, 1, "pieces,iters=8", out="whole-8")
    assert not any(ended.codes), ended.text
    assert difference(place / "on" / "pieces", place / "whole-8" / "pieces") < 1e-5


@pytest.mark.slow
def test_a_pipeline_that_is_not_possible_is_one_line(tmp_path):
    command = ["mlx_packs", "train", "--pipeline", "--iters", "2", "--out", "p"]
    ranks = Ranks(tmp_path, 2, [*command, "--target-modules", "embed_tokens"])
    assert "embed_tokens" in line_of_first(ranks.wait())
    assert not (tmp_path / "p").exists()
