"""Every architecture of mlx-lm trains: finite, with the gradients of plain LoRA, and detaches.

`families.py` builds them small. Those that cannot be trained are in mlx_packs/families.py, with the
reason; docs/families.md has all of them.
"""

from pathlib import Path

import mlx.nn as nn
import pytest
from families import architectures, build
from mlx.utils import tree_flatten

from mlx_packs.adapters import attach
from mlx_packs.config import LoRAConfig
from mlx_packs.errors import PackError
from mlx_packs.families import UNTRAINABLE, why_untrainable
from mlx_packs.geometry import linears
from mlx_packs.loading import Base
from mlx_packs.nn.experts import is_switch_linear
from mlx_packs.nn.quantized import replace_modules
from mlx_packs.runtime import mx

RANK = 2
TOKENS = mx.array([[(5 * i + 3) % 127 for i in range(37)]])
LEVEL = 1e-4


def base_of(family: str, bits: int | None = 4) -> Base:
    """A small model of a family, its weights packed where their width allows it."""
    model, config = build(family)
    if bits:
        nn.quantize(model, 32, bits, class_predicate=_can_be_packed)
        model.freeze()
    return Base(family, Path("nowhere"), model, None, config, "0" * 64)


def _can_be_packed(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


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
    """Loss and gradients of one compiled step in training mode."""
    model.train()

    def loss(tokens):
        logits = model(tokens[:, :-1]).astype(mx.float32)
        return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")

    compiled = mx.compile(nn.value_and_grad(model, loss), inputs=[model.state])
    value, gradients = compiled(TOKENS)
    mx.eval(value, gradients)
    model.eval()
    return value.item(), gradients


def randomized(attached) -> dict[str, mx.array]:
    """Give every adapter values that matter, B included; as they lie on disk."""
    for slot in attached.slots.values():
        for arrays in (slot.lora.lora_a, slot.lora.lora_b):
            arrays[:] = [mx.random.normal(t.shape) * 0.1 for t in arrays]
    return attached.tensors()


def targets_of(base: Base) -> tuple[str, ...]:
    """The default projections and the experts."""
    attached = attach(base, LoRAConfig(rank=RANK))
    paths = [*attached.specs, *(p for p, m in linears_of(base) if is_switch_linear(m))]
    attached.detach()
    return tuple(paths)


def linears_of(base):
    return linears(base.model)


def check(family: str, bits: int | None) -> None:
    base = base_of(family, bits)
    before = base.model(TOKENS)
    attached = attach(base, LoRAConfig(rank=RANK, target_modules=targets_of(base)))
    specs = attached.specs
    assert mx.array_equal(base.model(TOKENS), before).item()
    tensors = randomized(attached)
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
            found, wanted = ours[f"{path}.{on_disk}"], expected[f"{path}.{name}"]
            if name == "b" and len(specs[path].slices) > 1:  # block-diagonal
                wanted = wanted * (tensors[f"{path}.lora_b"] != 0)
            assert mx.isfinite(found).all().item(), path
            largest = mx.abs(wanted).max().item()
            if largest == 0:
                print("ZERO", family, path, name)
            assert mx.abs(found - wanted).max().item() <= LEVEL * largest, f"{path}.{on_disk}"
