"""Several packs on one base: every sequence of a batch is computed with its own."""

import numpy as np
import pytest

from mlx_packs import Pack
from mlx_packs.nn.served_lora import BASE
from mlx_packs.runtime import mx
from mlx_packs.serving.slots import PackSlots
from tests.helpers.errors import raises
from tests.helpers.models import SMALL_FAMILIES, base_of
from tests.helpers.packs import random_pack
from tests.serving.conftest import NAMES

TOKENS = mx.array([[5, 6, 7, 8, 9, 10, 11, 12]])


@pytest.fixture
def slots(small_tiny):
    slots = PackSlots(small_tiny)
    yield slots
    slots.close()


def alone(base, pack=None) -> np.ndarray:
    """Logits of the base with one pack, as everywhere else."""
    if pack is None:
        return np.array(base.model(TOKENS)[0])
    with base.applied(pack):
        return np.array(base.model(TOKENS)[0])


def logits(slots: PackSlots, *chosen: int) -> np.ndarray:
    slots.selection.set(chosen)
    return np.array(slots.base.model(mx.repeat(TOKENS, len(chosen), axis=0)))


def test_each_sequence_has_its_own_pack(small_tiny, shelf, slots):
    expected = [alone(small_tiny), *(alone(small_tiny, shelf / name) for name in NAMES)]
    numbers = [BASE, *(slots.add(Pack.open(shelf / name)) for name in NAMES)]
    assert numbers == [BASE, 0, 1, 2] and slots.nbytes > 0
    for order in (numbers, [2, 2, BASE, 0], [1, 1, 1], [BASE, BASE], [0]):
        for row, slot in zip(logits(slots, *order), order, strict=True):
            np.testing.assert_allclose(row, expected[slot + 1], atol=1e-4)
    for a in range(4):
        for b in range(a):
            assert np.abs(expected[a] - expected[b]).max() > 0.01


@pytest.mark.parametrize(
    "targets", [(("v_proj",), ("k_proj", "v_proj")), (("up_proj",), ("gate_proj", "up_proj"))]
)
def test_packs_may_add_projections_before_those_of_others(small_tiny, slots, targets):
    packs = [random_pack(small_tiny, seed, 2 + seed, names) for seed, names in enumerate(targets)]
    expected = [alone(small_tiny, pack) for pack in packs]
    numbers = [slots.add(pack) for pack in packs]
    for row, logits_alone in zip(logits(slots, *numbers), expected, strict=True):
        np.testing.assert_allclose(row, logits_alone, atol=1e-4)


def test_slots_are_used_again_and_others_stay(small_tiny, shelf, slots):
    expected = alone(small_tiny, shelf / NAMES[1])
    first, second, third = (slots.add(Pack.open(shelf / name)) for name in NAMES)
    before = logits(slots, third)
    slots.remove(first)
    slots.remove(second)
    # sums may depend on where arrays lie in memory: 9e-6 on one CPU, 0 on others
    np.testing.assert_allclose(logits(slots, third), before, atol=2e-5)
    assert slots.add(Pack.open(shelf / NAMES[1])) == first
    after = logits(slots, third, first)
    np.testing.assert_allclose(after[0], before[0], atol=1e-4)
    np.testing.assert_allclose(after[1], expected, atol=1e-4)


def test_closing_leaves_the_base_as_it_was(small_tiny, shelf):
    before = alone(small_tiny)
    modules = {path: id(module) for path, module in small_tiny.model.named_modules()}
    slots = PackSlots(small_tiny)
    slots.add(Pack.open(shelf / "notes"))
    slots.close()
    assert {path: id(module) for path, module in small_tiny.model.named_modules()} == modules
    np.testing.assert_array_equal(alone(small_tiny), before)


def test_a_pack_of_another_base_changes_nothing(shelf, slots):
    slots.add(Pack.open(shelf / "notes"))
    before = logits(slots, 0)
    other = Pack.open(shelf / "law")
    other.manifest["base"]["fingerprint"] = "f" * 64
    with raises("mismatch"):
        slots.add(other)
    np.testing.assert_array_equal(logits(slots, 0), before)


@pytest.mark.parametrize("change", [{"kind": "dora"}, {"experts": 4}])
def test_adapters_that_cannot_be_mixed_are_rejected(shelf, slots, change):
    pack = Pack.open(shelf / "notes")
    modules = pack.manifest["adapters"]["modules"]
    modules[0] = {**modules[0], **change}
    with raises("unsupported", None, modules[0]["path"]):
        slots.add(pack)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode"])
def test_families_are_served_with_all_their_projections(family):
    """Fused projections too."""
    base = base_of(family, **SMALL_FAMILIES[family])
    packs = [random_pack(base, seed, rank, ()) for seed, rank in ((1, 2), (2, 3))]
    expected = [alone(base), *(alone(base, pack) for pack in packs)]
    slots = PackSlots(base)
    for pack in packs:
        slots.add(pack)
    for row, logits_alone in zip(logits(slots, BASE, 0, 1), expected, strict=True):
        np.testing.assert_allclose(row, logits_alone, atol=2e-4)


def test_packs_that_divide_a_projection_otherwise_are_rejected():
    base = base_of("gpt2", **SMALL_FAMILIES["gpt2"])
    pack = random_pack(base, 1, 2, ())
    whole = uncut(pack)
    slots = PackSlots(base)
    first = slots.add(pack)
    before = logits(slots, first)
    with raises("unsupported", None, "into other parts than a pack that is served"):
        slots.add(whole)
    np.testing.assert_array_equal(logits(slots, first), before)
    slots.remove(first)

    expected = alone(base, whole)
    np.testing.assert_allclose(logits(slots, slots.add(whole))[0], expected, atol=2e-4)


def uncut(pack: Pack) -> Pack:
    """The same deltas, with one adapter over all slices of a fused projection, as imported ones."""
    specs, tensors = pack.specs, dict(pack.load_tensors())
    modules = []
    for module in pack.manifest["adapters"]["modules"]:
        spec = specs[module["path"]]
        slices = spec.slices
        name = f"{spec.path}.lora_b"
        scales = mx.concatenate([mx.full((s.rank,), s.scale) for s in slices if s.rank])
        tensors[name] = tensors[name] * scales[:, None]
        whole = {"name": "whole", "width": spec.out_features, "rank": spec.rank}
        modules.append({**module, "slices": [{**whole, "alpha": float(spec.rank)}]})
    adapters = {**pack.manifest["adapters"], "modules": modules}
    return Pack({**pack.manifest, "adapters": adapters}, tensors)
