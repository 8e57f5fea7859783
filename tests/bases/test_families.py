"""Every architecture of mlx-lm trains: finite, with the gradients of plain LoRA, and detaches.

`families.py` builds them small. Those that cannot be trained are in mlx_packs/bases/families.py, with the
reason; docs/families.md has all of them.
"""

import importlib
from importlib import metadata

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_packs.adapters import attach as attaching
from mlx_packs.adapters.attach import attach
from mlx_packs.bases.families import UNTRAINABLE
from mlx_packs.bases.supported import check_trainable
from mlx_packs.config.schema import LoRAConfig
from mlx_packs.errors import PackError
from mlx_packs.nn.surgery import replace_modules
from mlx_packs.runtime import mx, on_cpu
from tests.helpers.errors import raises
from tests.helpers.families import (
    DOCS,
    architectures,
    facts,
    family_base,
    page,
    randomized,
    targets_of,
)
from tests.helpers.family_sweep import (
    DOCUMENTED,
    FAMILIES,
    GROUPED,
    IS_DOCUMENTED,
    QUICK,
    REPRESENTATIVE,
    sweep,
)
from tests.helpers.variants import slow_except

RANK = 2
TOKENS = mx.array([[(5 * i + 3) % 127 for i in range(37)]])
LEVEL = 1e-4


class PlainLoRA(nn.Module):
    """y + (scale * (x A)) B, with A and B as they lie on disk; nothing of mlx_packs in it."""

    def __init__(self, linear: nn.Module, a: mx.array, b: mx.array, scale: mx.array):
        super().__init__()
        self.linear = linear
        self.a, self.b = a, b
        self._scale = scale

    def __call__(self, x, *indices, sorted_indices=False):
        if indices:  # one expert for each row
            a, b = self.a[indices[0]], self.b[indices[0]]
            delta = self._scale * (x @ a.swapaxes(-1, -2)) @ b.swapaxes(-1, -2)
            return self.linear(x, *indices, sorted_indices=sorted_indices) + delta
        y, delta = self.linear(x), ((x @ self.a) * self._scale) @ self.b
        if isinstance(y, list):
            ends = [sum(part.shape[-1] for part in y[: i + 1]) for i in range(len(y) - 1)]
            return [part + d for part, d in zip(y, mx.split(delta, ends, axis=-1), strict=True)]
        return y + delta


def step(model: nn.Module) -> tuple[float, dict[str, mx.array]]:
    """Loss and gradients of one step in training mode."""
    model.train()
    value, gradients = _value_and_grad(model)(TOKENS)
    mx.eval(value, gradients)
    model.eval()
    return value.item(), gradients


def trace(model: nn.Module) -> None:
    """Trace a compiled step, as GPUs have it; it is not run. On CPUs steps are not compiled."""
    model.train()
    mx.enable_compile()
    parameters, state = model.parameters(), [model.state]
    try:
        mx.compile(_value_and_grad(model), inputs=state, outputs=state)(TOKENS)
    finally:
        if on_cpu():
            mx.disable_compile()
        model.update(parameters)  # the trace has put its own in their place
        model.eval()


def _value_and_grad(model: nn.Module):
    def loss(tokens):
        logits = model(tokens[:, :-1]).astype(mx.float32)
        return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")

    return nn.value_and_grad(model, loss)


def check_step(family: str, bits: int | None) -> None:
    """Attach, hold one step against plain LoRA on every projection and expert, detach."""
    base = family_base(family, bits)
    before = base.model(TOKENS)
    attached = attach(base, LoRAConfig(rank=RANK, target_modules=targets_of(base, RANK)))
    specs = attached.specs
    assert mx.array_equal(base.model(TOKENS), before).item()

    tensors = randomized(attached)
    trace(base.model)
    loss, gradients = step(base.model)
    base.model.update(gradients)  # so that tensors() lays gradients out by their names on disk
    ours = attached.tensors()

    attached.detach()
    assert mx.array_equal(base.model(TOKENS), before).item()

    modules = dict(base.model.named_modules())
    plain = []
    for path, spec in specs.items():
        scale = mx.concatenate([mx.full((s.rank,), s.scale) for s in spec.slices])
        adapters = (tensors[f"{path}.lora_a"], tensors[f"{path}.lora_b"])
        plain.append((path, PlainLoRA(modules[path], *adapters, scale)))

    replace_modules(base.model, plain)
    expected_loss, expected = step(base.model)
    expected = dict(tree_flatten(expected))

    assert abs(loss - expected_loss) < LEVEL * abs(expected_loss)
    assert set(expected) == {f"{path}.{name}" for path in specs for name in "ab"}

    for path in specs:
        for name, on_disk in (("a", "lora_a"), ("b", "lora_b")):
            result, wanted = ours[f"{path}.{on_disk}"], expected[f"{path}.{name}"]
            if name == "b" and len(specs[path].slices) > 1:  # block-diagonal
                wanted = wanted * (tensors[f"{path}.lora_b"] != 0)
            assert mx.isfinite(result).all().item(), path
            largest = mx.abs(wanted).max().item()
            assert largest > 0, f"{path}.{on_disk}: no gradient reaches it"
            assert mx.abs(result - wanted).max().item() <= LEVEL * largest, f"{path}.{on_disk}"


DENSE = [f for f in FAMILIES if f in (*REPRESENTATIVE, *GROUPED, "afm7")]  # afm7: not quantizable
QUANTIZABLE = [f for f in FAMILIES if f != "afm7"]


@pytest.mark.parametrize("family", slow_except(DENSE, *QUICK))
def test_a_step_has_the_gradients_of_plain_lora_and_detaches(family):
    check_step(family, None)


@pytest.mark.parametrize("family", slow_except(QUANTIZABLE, *QUICK))
def test_step_on_quantized_weights_has_the_gradients_of_plain_lora(family):
    check_step(family, 4)


@pytest.mark.parametrize("family", sweep(QUANTIZABLE))
def test_matmul_paths_agree_and_detach(family):
    base = family_base(family, 4)
    before = base.model(TOKENS)
    finite = mx.where(mx.isfinite(before), before, 0)  # some families mask unused tokens
    for matmul_path in ("transient", "dense"):
        attached = attach(base, LoRAConfig(rank=RANK), matmul_path=matmul_path)
        apart = mx.abs(mx.where(mx.isfinite(before), base.model(TOKENS), 0) - finite).max().item()
        assert apart < 1e-3 * mx.abs(finite).max().item()
        attached.detach()
        assert mx.array_equal(base.model(TOKENS), before).item()


@pytest.mark.slow
def test_the_table_says_what_is_true_of_the_installed_mlx_lm():
    if IS_DOCUMENTED:
        text = DOCS.read_text()
        assert text == page(text) and not [fact for fact in facts() if fact not in text]
    of_mlx_lm = set(UNTRAINABLE) & set(architectures())
    assert len(DOCUMENTED) > 100 and of_mlx_lm <= set(DOCUMENTED)
    assert {DOCUMENTED[family] for family in of_mlx_lm} == {"not supported"}


@pytest.mark.parametrize("family", [f for f in UNTRAINABLE if f in architectures()])
def test_untrainable_families_are_rejected_by_name_and_do_not_train(family, monkeypatch):
    if architectures()[family] is None:
        with pytest.raises(SystemExit):
            importlib.import_module(f"mlx_lm.models.{family}")
        return

    if family == "recurrent_gemma":  # cannot be frozen
        with pytest.raises(AttributeError, match="_no_grad"):
            family_base(family)
        return

    base = family_base(family)
    with raises("unsupported", None, family, UNTRAINABLE[family]):
        attach(base)

    monkeypatch.setattr(attaching, "check_trainable", lambda *_: None)
    faults = {
        "bitnet": "No Metal back-end|no gradient|[Nn]ot implemented|no projection",
        "dbrx": "Attempting to eval an array",
        "deepseek_v41": "VJP with respect to indices",
        "muse_spark": "No Metal back-end|no gradient|[Nn]ot implemented",
        "prism_hadamard_qwen35": "no projection gets an adapter",
    }

    with pytest.raises((RuntimeError, ValueError, PackError), match=faults[family]):
        check_step(family, None)


def test_family_without_gradient_on_metal_is_rejected_there_alone(monkeypatch):
    base = family_base("rwkv7")
    check_trainable("base", base.model)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with raises("unsupported", None, "rwkv7", "CPU or CUDA"):
        check_trainable("base", base.model)


def test_mixtures_are_rejected_where_mlx_lm_cannot_train_them(monkeypatch):
    base = family_base("qwen3_moe")
    monkeypatch.setattr(metadata, "version", lambda _: "0.31.3")
    with raises("unsupported", None, "mlx-lm 0.31.3"):
        attach(base, LoRAConfig(rank=RANK))
    attach(family_base("qwen3"), LoRAConfig(rank=RANK)).detach()
