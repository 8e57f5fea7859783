"""On a GPU: a batch of one pack decodes by its kernels, a mixed one by those of several packs."""

import pytest

from mlx_packs.nn.served_lora import BASE
from mlx_packs.ops import _backend, dispatch
from mlx_packs.runtime import assumed_device, mx
from mlx_packs.serving.slots import PackSlots
from tests.helpers.emulation import emulation
from tests.helpers.packs import random_pack

TOKENS = mx.array([[5], [9], [300]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "kernels"), [((0, 0, 0), {"lora_qmv"}), ((0, BASE, 1), {"multi_lora"})]
)
def test_kernels_give_the_logits_of_plain_mlx(tiny, chosen, kernels):
    tiny.model.model.layers = tiny.model.layers[:1]
    packs = [random_pack(tiny, 1, 4, ()), random_pack(tiny, 2, 8, ("q_proj", "down_proj"))]
    expected = [tiny.model(TOKENS)]
    for pack in packs:
        with tiny.applied(pack):
            expected.append(tiny.model(TOKENS))

    slots = PackSlots(tiny)
    with assumed_device("gpu"), emulation("metal", ("forward",)), dispatch.backend("metal"):
        for pack in packs:
            slots.add(pack)
        slots.selection.set(chosen)
        logits = slots.base.model(TOKENS)
        calls = _backend.record()["kernels"]

    assert {call.partition(" ")[0] for call in calls} == kernels
    for row, slot in enumerate(chosen):
        assert mx.allclose(logits[row], expected[slot + 1][row], atol=1e-4).item()
