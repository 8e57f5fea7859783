"""Hot-swap: what `Base.applied` and `Base.swap_pack` do, in milliseconds.

Adapters of the same targets, ranks and scales are replaced in place, arrays alone. For others the
modules around them are swapped; the last few such frames are kept, without their adapters, so
that going back and forth builds nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.nn as nn

from .adapters import Attached
from .loading import Base
from .nn.quantized import apply_base_path, replace_modules
from .pack import Pack
from .runtime import mx

_FRAMES = 4


@dataclass
class Carried:
    """What a base carries: a pack, and the modules that hold its adapters."""

    pack: Pack
    attached: Attached
    base_path: str


@dataclass
class Frame:
    """Modules of a pack's shape that were taken off, and where they stood."""

    kind: str
    attached: Attached
    modules: list[tuple[str, nn.Module]]


def swap_in(base: Base, pack: Pack | None, base_path: str = "quantized") -> None:
    """Make a base carry this pack, or none. Raises: PackError, and then nothing has changed."""
    before = base.carried
    if pack is not None:
        pack.check_base(base.name, base.fingerprint, base.config, base.quantization)
        tensors = pack.load_tensors()
        if before and before.base_path == base_path and _fits(before, pack):
            before.attached.load(tensors, pack.name)
            base.carried = Carried(pack, before.attached, base_path)
            return
    _take_off(base)
    if pack is None:
        return
    try:
        _put_on(base, pack, base_path)
    except BaseException:
        if before:
            _put_on(base, before.pack, before.base_path)
        raise


@contextmanager
def carrying(base: Base, pack: Pack | None, base_path: str = "quantized") -> Iterator[None]:
    """The base with a pack, or alone, its frozen weights multiplied by ``base_path``."""
    if pack is not None:
        with base.applied(pack, base_path):
            yield
        return
    originals = apply_base_path(base.model, base_path)
    try:
        yield
    finally:
        replace_modules(base.model, originals)


def _fits(held: Carried | Frame, pack: Pack) -> bool:
    """Whether these modules are made for adapters of the pack's kind, targets, ranks and scales."""
    kind = held.kind if isinstance(held, Frame) else _kind(held.pack)
    return kind == _kind(pack) and held.attached.specs == pack.specs


def _kind(pack: Pack) -> str:
    return pack.manifest.get("kind", "lora")


def _put_on(base: Base, pack: Pack, base_path: str) -> None:
    frame = next((f for f in base.frames if _fits(f, pack)), None)
    if frame is None or base_path != "quantized":
        base.carried = Carried(pack, pack.attach(base, base_path), base_path)
        return
    frame.attached.load(pack.load_tensors(), pack.name)
    base.frames.remove(frame)
    frame.attached.swap(frame.modules)
    base.model.eval()
    base.carried = Carried(pack, frame.attached, base_path)


def _take_off(base: Base) -> None:
    """Put the base's own modules back; keep those taken off, unless they hold weights."""
    carried, base.carried = base.carried, None
    if carried is None:
        return
    modules = carried.attached.take_off()
    if carried.base_path == "quantized" and not carried.attached.notes:
        _let_go(carried.attached)
        base.frames.insert(0, Frame(_kind(carried.pack), carried.attached, modules))
        del base.frames[_FRAMES:]


def _let_go(attached: Attached) -> None:
    """Drop the adapters of modules that are kept; `Attached.load` sets them all."""
    nothing = mx.zeros(())
    for slot in attached.slots.values():
        slot.lora.lora_a[:] = [nothing] * len(slot.lora.lora_a)
        slot.lora.lora_b[:] = [nothing] * len(slot.lora.lora_b)
