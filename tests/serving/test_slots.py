"""Several packs on one base: every sequence of a batch is computed with its own."""

import numpy as np
import pytest

from mlx_packs import Pack
from mlx_packs.nn.served_lora import BASE
from mlx_packs.ops import _backend, dispatch
from mlx_packs.runtime import assumed_device, mx
from mlx_packs.serving.slots import PackSlots
from tests.helpers.emulation import emulation
from tests.helpers.errors import raises
from tests.helpers.models import SMALL_FAMILIES, base_of
from tests.helpers.packs import random_pack
from tests.serving.conftest import NAMES

TOKENS = mx.array([[5, 6, 7, 8, 9, 10, 11, 12]])
LAST_TOKENS = mx.array([[5], [9], [300]])


@pytest.fixture
def slots(small_tiny):
    slots = PackSlots(small_tiny)
    yield slots
    slots.close()


def alone(base, pack=None) -> np.ndarray:
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


def test_packs_may_add_projections_before_those_of_others(small_tiny, slots):
    targets = (("v_proj", "up_proj"), ("k_proj", "v_proj", "gate_proj", "up_proj"))
    packs = [random_pack(small_tiny, seed, 2 + seed, names) for seed, names in enumerate(targets)]
    expected = [alone(small_tiny, pack) for pack in packs]
    numbers = [slots.add(pack) for pack in packs]
    np.testing.assert_allclose(logits(slots, *numbers), expected, atol=1e-4)


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


@pytest.mark.parametrize("change", [{"kind": "dora"}, {"experts": 4}])
def test_adapters_that_cannot_be_mixed_are_rejected(shelf, slots, change):
    pack = Pack.open(shelf / "notes")
    modules = pack.manifest["adapters"]["modules"]
    modules[0] = {**modules[0], **change}
    with raises("unsupported", None, modules[0]["path"]):
        slots.add(pack)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode"])
def test_families_are_served_with_all_their_projections(family):
    base = base_of(family, **SMALL_FAMILIES[family])
    packs = [random_pack(base, seed, rank, ()) for seed, rank in ((1, 2), (2, 3))]
    expected = [alone(base), *(alone(base, pack) for pack in packs)]
    slots = PackSlots(base)
    for pack in packs:
        slots.add(pack)
    np.testing.assert_allclose(logits(slots, BASE, 0, 1), expected, atol=2e-4)


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
    tensors, modules = dict(pack.load_tensors()), []
    for module in pack.manifest["adapters"]["modules"]:
        spec = pack.specs[module["path"]]
        scales = mx.concatenate([mx.full((s.rank,), s.scale) for s in spec.slices if s.rank])
        name = f"{spec.path}.lora_b"
        tensors[name] = tensors[name] * scales[:, None]
        whole = {"name": "whole", "width": spec.out_features, "rank": spec.rank}
        modules.append({**module, "slices": [{**whole, "alpha": float(spec.rank)}]})
    adapters = {**pack.manifest["adapters"], "modules": modules}
    return Pack({**pack.manifest, "adapters": adapters}, tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "kernels"), [((0, 0, 0), {"lora_qmv"}), ((0, BASE, 1), {"multi_lora"})]
)
def test_kernels_of_a_gpu_give_the_logits_of_plain_mlx(tiny, chosen, kernels):
    tiny.model.model.layers = tiny.model.layers[:1]
    packs = [random_pack(tiny, 1, 4, ()), random_pack(tiny, 2, 8, ("q_proj", "down_proj"))]
    expected = [tiny.model(LAST_TOKENS)]
    for pack in packs:
        with tiny.applied(pack):
            expected.append(tiny.model(LAST_TOKENS))

    slots = PackSlots(tiny)
    with assumed_device("gpu"), emulation("metal", ("forward",)), dispatch.backend("metal"):
        for pack in packs:
            slots.add(pack)
        slots.selection.set(chosen)
        logits = slots.base.model(LAST_TOKENS)
        calls = _backend.record()["kernels"]

    assert {call.partition(" ")[0] for call in calls} == kernels
    for row, slot in enumerate(chosen):
        assert mx.allclose(logits[row], expected[slot + 1][row], atol=1e-4).item()
