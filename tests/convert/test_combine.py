"""packs combine: what the methods make of deltas, and that bringing them to a rank is measured."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mlx_packs import Pack, load_base
from mlx_packs.adapters.lora import delta_of
from mlx_packs.cli.convert import combine
from mlx_packs.convert.combine import METHODS, combine_packs, dare, linear, ties
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint, write_quantized
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack

LOOSE = {"rows": 2, "max_drift": 100.0}


@pytest.fixture(scope="module")
def two_packs(tmp_path_factory):
    """A dense base and two packs on it, on modules that overlap."""
    folder = tmp_path_factory.mktemp("combine")
    base = write_checkpoint(folder / "base")
    loaded = load_base(base)
    a = random_pack(loaded, targets=("q_proj", "down_proj")).save(folder / "a")
    b = random_pack(loaded, size=0.15, targets=("q_proj", "o_proj"), seed=2).save(folder / "b")
    return base, a, b


def delta(pack: Pack, path: str) -> np.ndarray:
    spec = pack.specs.get(path)
    return np.array(delta_of(spec, pack.load_tensors())) if spec else 0.0


def test_linear_keeps_all_ranks_and_is_the_weighted_sum(two_packs, tmp_path):
    base, a, b = two_packs
    report = combine_packs([(a, 0.7), (b, -0.3)], tmp_path / "c", base=base, **LOOSE)

    made_one = Pack.open(report["out"])
    for path, spec in made_one.specs.items():
        expected = 0.7 * delta(a, path) - 0.3 * delta(b, path)
        assert np.abs(delta(made_one, path) - expected).max() < 1e-6
        assert spec.rank == 2 * ((path in a.specs) + (path in b.specs))

    assert report["kl_mean"] < 1e-6 and report["kl_of_pack"] > 1e-3
    assert set(made_one.specs) == set(a.specs) | set(b.specs)
    sources = made_one.manifest["combined"]["packs"]
    assert [(part["name"], part["weight"]) for part in sources] == [("a", 0.7), ("b", -0.3)]


def test_the_base_is_loaded_or_named_or_the_packs_own(two_packs, tmp_path, monkeypatch):
    folder, a, b = two_packs
    monkeypatch.chdir(folder.parent)  # where the packs find it by its name
    weighted = [(a, 0.5), (b, 0.5)]
    named = combine_packs(weighted, tmp_path / "named", base=folder, **LOOSE)
    own = combine_packs(weighted, tmp_path / "own", **LOOSE)
    loaded = load_base(folder)
    of_loaded = combine_packs(weighted, tmp_path / "loaded", base=loaded, **LOOSE)
    assert {**own, "out": ""} == {**of_loaded, "out": ""} == {**named, "out": ""}

    with loaded.applied(a), raises("conflict", None, "active pack"):
        combine_packs(weighted, tmp_path / "x", base=loaded, **LOOSE)


@pytest.mark.slow
def test_packs_of_another_task_are_compared_on_texts(two_packs, tmp_path):
    base, *packs = two_packs
    pairs = [{"anchor": "a", "positive": "b"}] * 4
    objective = {"objective": {"task": "embedding"}}
    packs = [replace(p, manifest={**p.manifest, **objective}, examples=pairs) for p in packs]
    weighted = [(pack, 0.5) for pack in packs]
    report = combine_packs(weighted, tmp_path / "c", base=base, max_drift=99.0)
    assert report["passed"]
    assert Pack.open(tmp_path / "c").manifest["objective"] == {"task": "embedding"}


def test_svd_is_the_nearest_of_its_rank(two_packs, tmp_path):
    base, a, b = two_packs
    report = combine_packs([(a, 1.0), (b, 1.0)], tmp_path / "c", "svd", 3, base=base, **LOOSE)
    made_one = Pack.open(report["out"])
    path = "model.layers.0.self_attn.q_proj"
    whole = delta(a, path) + delta(b, path)
    u, s, vt = np.linalg.svd(whole)
    assert np.abs(delta(made_one, path) - (u[:, :3] * s[:3]) @ vt[:3]).max() < 1e-5
    assert {spec.rank for spec in made_one.specs.values()} == {
        2,
        3,
    }  # 2 where one pack has adapters
    exact = combine_packs([(a, 1.0), (b, 1.0)], tmp_path / "d", "svd", 4, base=base, **LOOSE)
    assert exact["kl_mean"] < 1e-6 and exact["kl_mean"] < 0.01 * report["kl_mean"]


def test_ties_trims_elects_and_merges_by_hand():
    a, b = mx.array([[4.0, -3.0, 0.1, 2.0]]), mx.array([[2.0, 5.0, 0.2, 0.3]])
    # half of each is kept: [4, -3, 0, 0] and [2, 5, 0, 0]; the signs elected are + and +
    assert ties([(a, 1.0), (b, 1.0)], 0.5).tolist() == [[3.0, 5.0, 0.0, 0.0]]
    weighted = np.array(ties([(a, 3.0), (b, 1.0)], 0.5))
    assert np.allclose(weighted, [[(3 * 4 + 2) / 4, -3.0, 0.0, 0.0]])


def test_dare_drops_by_seed_and_keeps_the_mean():
    ones = mx.ones((200, 200))
    keys = [mx.random.key(1), mx.random.key(2)]
    result = np.array(dare([(ones, 0.5), (ones, 0.5)], 0.25, keys))
    assert abs(result.mean() - 1) < 0.05 and set(np.unique(result)) == {0.0, 2.0, 4.0}
    assert np.array_equal(result, np.array(dare([(ones, 0.5), (ones, 0.5)], 0.25, keys)))
    assert linear([(ones, 2.0), (ones, -0.5)]).max().item() == 1.5


def test_experts_are_combined(tmp_path):
    base = write_checkpoint(tmp_path / "base", "qwen3_moe")
    loaded = load_base(base)
    a = random_pack(loaded, targets=("switch_mlp.down_proj",)).save(tmp_path / "a")
    b = random_pack(loaded, size=0.2, targets=("switch_mlp.down_proj",), seed=2)
    weighted = [(a, 0.5), (b.save(tmp_path / "b"), 0.5)]
    path = next(iter(a.specs))
    expected = 0.5 * (delta(a, path) + delta(b, path))
    for method, rank in (("linear", None), ("svd", 4)):
        out = tmp_path / method
        report = combine_packs(weighted, out, method, rank, base=base, **LOOSE)
        assert np.abs(delta(Pack.open(out), path) - expected).max() < 1e-4
        assert report["kl_mean"] < 1e-5


@pytest.mark.parametrize("method", ["ties", pytest.param("dare", marks=pytest.mark.slow)])
def test_combine_gate_names_a_rank_that_passes(method, two_packs, tmp_path, run):
    base, a, b = two_packs
    how = ("--model", base, "--method", method, "--rows", 2, "--out", tmp_path / "c")
    args = ("combine", f"{a.path}=0.7", f"{b.path}=0.3", *how)
    code, out, err = run(*args, "--rank", 1, "--json")
    report = json.loads(out)
    assert code == 1 and "--max-drift" in err and not (tmp_path / "c").exists()
    assert report["passes"] and f"--rank {report['passes']}" in err
    code, out, _ = run(*args, "--rank", report["passes"], "--json")
    assert code == 0 and json.loads(out)["passed"]
    assert Pack.open(tmp_path / "c").manifest["combined"]["method"] == method


def test_combine_rejects_packs_that_do_not_add_up(two_packs, tmp_path):
    base, a, _ = two_packs
    other = write_quantized(tmp_path / "q", base)
    c = random_pack(load_base(other)).save(tmp_path / "c")
    for code, second in (("mismatch", c), ("conflict", Pack.open(a.path))):
        with raises(code, None, str(a.path), str(second.path)):
            combine_packs([(a, 1.0), (second, 0.2)], tmp_path / "x", base=base)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("weights", "options", "code", "flag"),
    [
        ([1.0, 0.0], {}, "invalid", "weighted_packs"),
        ([1.0, 1.0], {"method": "svd"}, "conflict", "rank"),
        ([1.0, 1.0], {"rank": 3}, "conflict", "rank"),
        ([1.0, 1.0], {"density": 0.5}, "conflict", "density"),
        ([1.0, 1.0], {"method": "slerp"}, "unknown", "method"),
        ([1.0, 1.0], {"method": "ties", "rank": 2, "density": 2.0}, "invalid", "density"),
    ],
)
def test_combine_rejects_bad_requests(two_packs, tmp_path, weights, options, code, flag):
    base, *packs = two_packs
    weighted = list(zip(packs, weights, strict=True))
    with raises(code, flag):
        combine_packs(weighted, tmp_path / "x", base=base, **options)
    assert not (tmp_path / "x").exists()


def test_help_names_every_method():
    (option,) = (each for each in combine.params if each.name == "method")
    assert option.metavar == f"{{{','.join(METHODS)}}}"
