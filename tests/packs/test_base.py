"""A base with packs: applied, swapped and removed without touching the base; sums of packs."""

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import Pack, weighted_sum
from mlx_packs.adapters.lora import delta_of
from mlx_packs.data.batches import evaluation_batches
from mlx_packs.data.encoding import Examples
from mlx_packs.evaluation import perplexity
from mlx_packs.evaluation.perplexity import Scorer
from mlx_packs.nn.dora import GroupedDoRA
from mlx_packs.packs.base import Base
from mlx_packs.packs.making import attach_pack
from mlx_packs.packs.weighted_sum import open_weighted
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.models import SMALL_FAMILIES, base_of, model_of
from tests.helpers.packs import merged_weights, random_pack
from tests.helpers.steps import examples_of

PROBE = [[1, 2, 3, 4, 5, 6, 7, 8]]


def with_full_norm(base, pack: Pack) -> Pack:
    """Return the pack with the last norm, halved, stored in full."""
    norm = base.model.model.norm.weight / 2
    replaced = [{"name": "model.norm.weight", "shape": list(norm.shape)}]
    adapters = {**pack.manifest["adapters"], "replaced": replaced}
    tensors = {**pack.load_tensors(), "model.norm.weight": norm}
    return Pack({**pack.manifest, "adapters": adapters}, tensors)


def probe_logits(base) -> mx.array:
    values = base.model(mx.array(PROBE))
    mx.eval(values)
    return values


def same(a, b) -> bool:
    return mx.array_equal(a, b).item()


@pytest.fixture(scope="module")
def base() -> Base:
    """A small base in 4 bits; tests leave it as it was."""
    base = base_of("qwen3")
    nn.quantize(base.model, group_size=32, bits=4)
    base.model.freeze()
    return base


@pytest.fixture(scope="module")
def packs(base) -> dict[str, Pack]:
    """``a`` and ``b`` have one shape, ``c`` another."""
    other = ("k_proj", "o_proj", "gate_proj")
    return {
        "a": random_pack(base, 0),
        "b": random_pack(base, 1),
        "c": random_pack(base, 2, 3, other),
    }


def test_applied_contexts_nest_and_restore_logits(base, packs):
    plain = probe_logits(base)
    alone = {}
    for name, pack in packs.items():
        with base.applied(pack):
            alone[name] = probe_logits(base)
        assert not same(alone[name], plain)

    with base.applied(packs["a"]):
        for inner in "bc":
            with base.applied(packs[inner]):
                assert same(probe_logits(base), alone[inner])
                with base.applied(packs["a"]):
                    assert same(probe_logits(base), alone["a"])
                assert same(probe_logits(base), alone[inner])
            assert same(probe_logits(base), alone["a"])

    assert same(probe_logits(base), plain) and base.active is None


def test_applied_restores_after_an_error_inside(base, packs):
    plain = probe_logits(base)
    with (
        pytest.raises(ZeroDivisionError),
        base.applied(packs["a"]),
        base.applied(packs["c"]),
    ):
        raise ZeroDivisionError
    assert same(probe_logits(base), plain) and base.active is None


def test_attaching_by_turns_equals_a_fresh_attach_and_touches_no_weight(base, packs):
    def objects() -> list:
        arrays = tree_flatten(base.model.parameters())
        return [(name, id(each)) for name, each in (*arrays, *base.model.named_modules())]

    before = objects()
    for name in "abcacb":
        base.attach(packs[name])
        swapped = probe_logits(base)
        base.detach()
        attached = attach_pack(base, packs[name])
        assert same(swapped, probe_logits(base))
        attached.detach()
    assert objects() == before


def test_a_pack_of_one_shape_replaces_only_arrays(base, packs):
    base.attach(packs["a"])
    first = base.active.attached
    base.attach(packs["b"])
    assert base.active.attached is first
    base.attach(packs["c"])
    assert base.active.attached is not first
    base.attach(packs["a"])
    assert base.active.attached is first
    base.detach()


def test_attach_rejects_another_base_and_keeps_the_active_pack(base, packs):
    stranger = random_pack(Base(**{**vars_of(base), "fingerprint": "f" * 64}), 3)
    with base.applied(packs["a"]):
        active = probe_logits(base)
        with raises("mismatch", None, "qwen3 (fingerprint ffffffffffff)", "is another base"):
            base.attach(stranger)
        wrong = Pack({**packs["c"].manifest}, dict(list(packs["c"].tensors.items())[:-1]))
        with raises("mismatch", None, "missing"):
            base.attach(wrong)
        assert same(probe_logits(base), active)
        with raises("conflict", None, base.name):
            attach_pack(base, packs["b"])


def vars_of(base) -> dict:
    names = "name path model tokenizer config fingerprint quantization".split()
    return {name: getattr(base, name) for name in names}


def test_modules_removed_in_training_are_back_for_generation(base, packs):
    with base.applied(packs["a"]):
        wanted = probe_logits(base)
        base.model.train()
    assert not any(module.training for module in base.model.modules())
    with base.applied(packs["a"]):
        assert not any(module.training for module in base.model.modules())
        assert same(probe_logits(base), wanted)


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_swaps(base, packs):
    def swap(count):
        for i in range(count):
            base.attach(packs["ab"[i % 2]])
            if i % 10 == 0:
                base.attach(packs["c"])
                mx.eval(base.model(mx.array(PROBE)))
        base.detach()
        mx.clear_cache()
        return mx.get_active_memory()

    swap(20)
    assert swap(1000) == swap(20)


def test_dense_path_is_kept_while_packs_of_one_shape_are_swapped(base, packs):
    plain = probe_logits(base)
    with base.applied(packs["a"], "dense"):
        first = base.active.attached
        with base.applied(packs["b"], "dense"):
            assert base.active.attached is first
            assert isinstance(base.model.layers[0].self_attn.k_proj, nn.Linear)
    assert same(probe_logits(base), plain)
    assert all(attached is not first for attached in base._suspended)


@pytest.mark.slow
def test_packs_of_one_shape_share_the_traces_that_score_them(monkeypatch):
    traced, probed, target_loss = [], [], perplexity.target_loss
    counted = lambda *args, **options: traced.append(1) or target_loss(*args, **options)  # noqa: E731
    monkeypatch.setattr(perplexity, "target_loss", counted)
    base = base_of("qwen3", num_hidden_layers=1)
    packs = [random_pack(base, seed) for seed in range(3)]
    batches = evaluation_batches(Examples(examples_of(range(8, 12)), "text", "all"), 4, 64)

    def scores(scorer, pack):
        base.attach(pack)
        return (scorer or Scorer(base.model, None)).examples(batches).nll

    mx.enable_compile()
    try:
        probe = mx.compile(lambda x: probed.append(1) or x + 1)
        mx.eval(probe(mx.ones(1)), probe(mx.ones(1)))
        base.attach(packs[0])
        scorer = Scorer(base.model, None)
        shared = [scores(scorer, pack) for pack in packs]
        count = len(traced)
        alone = [scores(None, pack) for pack in packs]
    finally:
        mx.disable_compile()
    assert count == (1 if len(probed) == 1 else 3)  # without g++ MLX traces each call on a CPU
    assert np.array_equal(shared, alone) and not np.array_equal(shared[0], shared[1])


def deltas(base, pack: Pack) -> dict[str, mx.array]:
    """What a pack adds to each weight."""
    attached = attach_pack(base, pack)
    merged = merged_weights(attached)
    zero = {n: mx.zeros_like(t) for n, t in attached.tensors().items()}
    attached.load(zero, "zero")
    plain = merged_weights(attached)
    attached.detach()
    return {path: merged[path] - plain[path] for path in merged}


def some_base(family: str):
    if family == "qwen3":
        return base_of("qwen3"), ("q_proj", "down_proj"), ("q_proj", "o_proj")
    if family == "gpt2":
        return base_of("gpt2"), ("c_attn",), ("c_attn", "c_fc")
    return (
        base_of("qwen3_moe", **SMALL_FAMILIES["qwen3_moe"]),
        ("gate_proj", "q_proj"),
        ("gate_proj",),
    )


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe"])
def test_weighted_sum_is_the_sum_of_the_deltas(family):
    base, first, second = some_base(family)
    a, b = random_pack(base, 0, 2, first, alpha=3.0), random_pack(base, 1, 4, second)
    result = deltas(base, weighted_sum([(a, 0.7), (b, -0.3)]))
    parts = deltas(base, a), deltas(base, b)
    assert set(result) == set(parts[0]) | set(parts[1])
    for path, delta in result.items():
        wanted = sum(w * p[path] for w, p in zip((0.7, -0.3), parts, strict=True) if path in p)
        assert mx.abs(wanted).max().item() > 1e-3
        assert mx.abs(delta - wanted).max().item() < 1e-6


def test_weighted_sum_keeps_the_ranks_of_a_fused_projection_apart():
    base, *_ = some_base("gpt2")
    a = random_pack(base, 0, 2, ("c_attn",), rank_pattern={"c_attn.q": 3})
    total = weighted_sum([(a, 1.0), (random_pack(base, 1, 4, ("c_attn",)), 0.5)])
    assert [s.rank for s in next(iter(total.specs.values())).slices] == [7, 6, 6]


def test_weighted_sum_of_slices_and_a_whole_projection_has_one_slice():
    base, *_ = some_base("gpt2")
    sliced, whole = random_pack(base, 0, 2, ("c_attn",)), random_pack(base, 1, 4, ("c_attn",))
    for module in whole.manifest["adapters"]["modules"]:
        width = sum(part["width"] for part in module["slices"])
        module["slices"] = [{"name": "c_attn", "width": width, "rank": 12, "alpha": 12.0}]
    total = weighted_sum([(sliced, 0.7), (whole, -0.3)])
    for path, spec in total.specs.items():
        assert [s.rank for s in spec.slices] == [6 + 12]
        parts = [delta_of(p.specs[path], p.load_tensors()) for p in (sliced, whole)]
        wanted = 0.7 * parts[0] - 0.3 * parts[1]
        assert mx.allclose(delta_of(spec, total.load_tensors()), wanted, atol=1e-6).item()
    with base.applied(total):
        probe_logits(base)


def test_applied_takes_packs_with_weights(base, packs, tmp_path):
    plain = probe_logits(base)
    for name in "ac":
        packs[name].save(tmp_path / name)
    with base.applied({tmp_path / "a": 0.7, tmp_path / "c": 0.3}):
        both = probe_logits(base)
    with base.applied([(packs["a"], 0.7), (packs["c"], 0.3)]):
        assert same(probe_logits(base), both)
    assert not same(both, plain) and same(probe_logits(base), plain)
    summed = weighted_sum([(packs["a"], 0.7), (packs["c"], 0.3)]).save(tmp_path / "sum")
    with base.applied(Pack.open(summed.path)):
        assert same(probe_logits(base), both)


def test_what_a_pack_brings_whole_goes_with_it(base, packs):
    plain, whole = packs["a"], with_full_norm(base, packs["a"])
    alone = probe_logits(base)
    with base.applied(plain):
        expected = probe_logits(base)
    for _ in range(2):
        with base.applied(whole):
            assert not mx.allclose(probe_logits(base), expected).item()
            base.attach(plain)
            assert mx.array_equal(probe_logits(base), expected).item()
        with base.applied(plain):
            assert mx.array_equal(probe_logits(base), expected).item()
    assert mx.array_equal(probe_logits(base), alone).item()


def test_a_swap_leaves_nothing_of_dora_to_the_first_forward(base, packs):
    lora = packs["a"]
    modules = []
    tensors = dict(lora.load_tensors())
    for module in lora.manifest["adapters"]["modules"]:
        modules.append({**module, "kind": "dora"})
        tensors[f"{module['path']}.m"] = mx.ones((module["slices"][0]["width"],))

    adapters = {**lora.manifest["adapters"], "modules": modules}
    base.attach(Pack({**lora.manifest, "adapters": adapters}, tensors))

    try:
        result = [m._ratios for m in base.model.modules() if isinstance(m, GroupedDoRA)]
        before = mx.get_active_memory()
        mx.eval(result)
        assert result and mx.get_active_memory() == before
    finally:
        base.detach()


def test_weighted_sum_refuses_what_cannot_be_added(base, packs, tmp_path):
    a = packs["a"].save(tmp_path / "a")
    model, config = model_of("qwen3")
    other = Base("elsewhere", tmp_path, model, None, config, "9" * 64)
    stranger = random_pack(other, 0).save(tmp_path / "b")
    with raises("mismatch", None, str(stranger.path), "9" * 12, f"{a.path} on qwen3"):
        weighted_sum([(a, 0.5), (stranger, 0.5)])
    with raises("conflict", "pack", str(a.path)):
        weighted_sum([(a, 0.5), (Pack.open(tmp_path / "a"), 0.5)])
    with raises("invalid", "pack"):
        weighted_sum([])
    with raises("unsupported", None, "model.norm.weight"):
        weighted_sum([(a, 0.5), (with_full_norm(base, a), 0.5)])


@pytest.mark.parametrize("weight", ["x", "", "nan", "0", "1e999"])
def test_open_weighted_refuses_what_is_no_weight(packs, tmp_path, weight):
    packs["a"].save(tmp_path / "a")
    with raises("invalid", "pack", str(tmp_path / "a")):
        open_weighted(f"{tmp_path / 'a'}={weight}")


def test_open_weighted_reads_folder_and_weight(packs, tmp_path):
    packs["a"].save(tmp_path / "a=1")
    pack, weight = open_weighted(f"{tmp_path / 'a=1'}=-0.25")
    assert (pack.path, weight) == (tmp_path / "a=1", -0.25)
    assert open_weighted(str(tmp_path / "a=1"))[1] == 1
