"""A base with packs: applied, swapped and removed without touching the base; sums of packs."""

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_packs import Pack, weighted_sum
from mlx_packs.adapters.lora import delta_of
from mlx_packs.packs.base import Base
from mlx_packs.packs.making import attach_pack
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.models import SMALL_FAMILIES, base_of, model_of
from tests.helpers.packs import random_pack

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


def objects_of(base) -> list:
    arrays = tree_flatten(base.model.parameters())
    return [(name, id(each)) for name, each in (*arrays, *base.model.named_modules())]


def test_packs_applied_and_swapped_are_as_freshly_attached_and_touch_no_weight(base, packs):
    plain, before = probe_logits(base), objects_of(base)
    alone = {}
    for name, pack in packs.items():
        attached = attach_pack(base, pack)
        alone[name] = probe_logits(base)
        attached.detach()
        assert not same(alone[name], plain)

    for name in "abcacb":
        base.attach(packs[name])
        assert same(probe_logits(base), alone[name])
        base.detach()

    with base.applied(packs["a"]):
        for inner in "bc":
            with base.applied(packs[inner]):
                assert same(probe_logits(base), alone[inner])
                with base.applied(packs["a"]):
                    assert same(probe_logits(base), alone["a"])
                assert same(probe_logits(base), alone[inner])
            assert same(probe_logits(base), alone["a"])

    with pytest.raises(ZeroDivisionError), base.applied(packs["a"]), base.applied(packs["c"]):
        raise ZeroDivisionError
    assert same(probe_logits(base), plain) and base.active is None
    assert objects_of(base) == before


@pytest.mark.parametrize("path", ["quantized", "dense"])
def test_a_pack_of_one_shape_replaces_only_arrays(base, packs, path):
    plain = probe_logits(base)
    assert base.attach(packs["a"], path) is base
    first = base.active.attached
    base.attach(packs["b"], path)
    assert base.active.attached is first
    base.attach(packs["c"], path)
    assert base.active.attached is not first
    base.attach(packs["a"], path)
    assert (base.active.attached is first) == (path == "quantized")
    base.detach()
    assert same(probe_logits(base), plain)


def test_attach_rejects_another_base_and_keeps_the_active_pack(base, packs):
    stranger = random_pack(base, 3)
    stranger.manifest["base"] = {**stranger.manifest["base"], "fingerprint": "f" * 64}
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


def deltas(pack: Pack) -> dict[str, mx.array]:
    tensors = pack.load_tensors()
    return {path: delta_of(spec, tensors) for path, spec in pack.specs.items()}


FAMILIES = {  # the targets of two packs
    "qwen3": (("q_proj", "down_proj"), ("q_proj", "o_proj")),
    "gpt2": (("c_attn",), ("c_attn", "c_fc")),
    "qwen3_moe": (("gate_proj", "q_proj"), ("gate_proj",)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_weighted_sum_is_the_sum_of_the_deltas(family):
    base = base_of(family, **SMALL_FAMILIES[family])
    first, second = FAMILIES[family]
    a, b = random_pack(base, 0, 2, first, alpha=3.0), random_pack(base, 1, 4, second)
    result = deltas(weighted_sum([(a, 0.7), (b, -0.3)]))
    parts = deltas(a), deltas(b)
    assert set(result) == set(parts[0]) | set(parts[1])
    for path, delta in result.items():
        wanted = sum(w * p[path] for w, p in zip((0.7, -0.3), parts, strict=True) if path in p)
        assert mx.abs(wanted).max().item() > 1e-3
        assert mx.abs(delta - wanted).max().item() < 1e-6


def test_weighted_sum_of_a_fused_projection_keeps_its_slices_where_both_have_them():
    base = base_of("gpt2")
    more = random_pack(base, 0, 2, ("c_attn",), rank_pattern={"c_attn.q": 3})
    sliced, whole = random_pack(base, 0, 2, ("c_attn",)), random_pack(base, 1, 4, ("c_attn",))
    total = weighted_sum([(more, 1.0), (whole, 0.5)])
    assert [s.rank for s in next(iter(total.specs.values())).slices] == [7, 6, 6]
    for module in whole.manifest["adapters"]["modules"]:
        width = sum(part["width"] for part in module["slices"])
        module["slices"] = [{"name": "c_attn", "width": width, "rank": 12, "alpha": 12.0}]
    total = weighted_sum([(sliced, 0.7), (whole, -0.3)])
    assert all([s.rank for s in spec.slices] == [6 + 12] for spec in total.specs.values())
    parts = deltas(sliced), deltas(whole)
    for path, delta in deltas(total).items():
        wanted = 0.7 * parts[0][path] - 0.3 * parts[1][path]
        assert mx.allclose(delta, wanted, atol=1e-6).item()
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
            assert same(probe_logits(base), expected)
        with base.applied(plain):
            assert same(probe_logits(base), expected)
    assert same(probe_logits(base), alone)


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
